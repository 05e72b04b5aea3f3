"""OpenAI's chat completions as requests, answers and events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sandbox.runner.endpoint import chat
from sandbox.runner.endpoint.checks import MAX_UNUSED, BadRequest, Served, noting_unused, size_bytes
from sandbox.types import Call, Completion, Message, Request, TokenLogprob

HI = [{"role": "user", "content": "Hi"}]
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True},
}
CALLS = (Call("c1", "add", '{"a": 1}'), Call("c2", "add", "{}"))


def serve(completion: Completion, **fields: Any) -> Served:
    body = {"messages": HI, **fields}
    return Served(7, body, chat.request(body), completion)


def refused(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as error:
        chat.request({"messages": HI, **fields})
    assert error.value.status == 400
    return error.value


def test_a_conversation_goes_as_it_is() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    asked = chat.request(
        {
            "messages": [
                {"role": "assistant", "content": "I begin."},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
                {"role": "user", "content": "twice"},
                {"role": "developer", "content": "in the middle"},
                {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
                {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "1"},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                {"role": "assistant", "content": "The answer is", "reasoning_content": "hm"},
            ]
        }
    )
    assert asked == Request(
        (
            Message("assistant", "I begin."),
            Message("user", "ab"),
            Message("user", "twice"),
            Message("system", "in the middle"),
            Message("assistant", "", CALLS[:1]),
            Message("tool", "1", call_id="c1"),
            Message("assistant", "No."),
            Message("assistant", "The answer is"),
        )
    )


def test_what_else_a_request_asks_for() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}}
    asked = chat.request(
        {
            "messages": HI,
            "model": "gpt-9",
            "tools": [ADD],
            "tool_choice": {"type": "function", "function": {"name": "add"}},
            "response_format": schema,
            "logprobs": True,
            "stop": ["END", "\ud800"],
            "n": 1,
            "temperature": 0.1,
            "max_tokens": 5,
            "top_k": 3,
            "metadata": {"a": "b"},
            "store": True,
            "logit_bias": {},
            "functions": None,
            "top_logprobs": 0,
            "modalities": ["text"],
        }
    )
    assert asked == Request(
        (Message("user", "Hi"),),
        stop=("END", "?"),
        tools=(ADD,),
        tool_choice="required",
        tool_name="add",
        response_format=schema,
        logprobs=True,
    )


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_tool_choices(choice: str) -> None:
    assert chat.request({"messages": HI, "tools": [ADD], "tool_choice": choice}).tool_choice == choice


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"messages": []}, "1 to 1000 messages"),
        ({"messages": None}, "must be a list"),
        ({"messages": [{}] * 1001}, "at most 1000"),
        ({"messages": ["Hi"]}, "must be an object"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role must be one of"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "role must be one of"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "use tool"),
        ({"messages": [{"role": "user"}]}, "must be text"),
        ({"messages": [{"role": "assistant", "content": None}]}, "must be text"),
        ({"messages": [{"role": "user", "content": "x", "images": ["x"]}]}, "there is text only"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "calls are the assistant's"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c1"}]}, "have the role tool"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "^image_url is not"),  # noqa: E501
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "^input_audio is not taken"),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "^file is not taken"),
        ({"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]}, "^refusal is not"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "needs a type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "must be a text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": ""}]}, "tool_call_id"),
        ({"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]}, "use tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]}, "'custom' is not taken"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}]}, "arguments"),  # noqa: E501
        ({"messages": [{"role": "user", "content": "x" * (3 << 20)}, *HI]}, "more than 3145728 bytes"),
        ({"stop": ["x" * 65]}, "1 to 64 characters"),
        ({"stop": ["x"] * 5}, "at most 4"),
        ({"stop": 1}, "stop must be"),
        ({"n": 2}, "send several requests"),
        ({"n": True}, "send several requests"),
        ({"stream": "yes"}, "true or false"),
        ({"logprobs": 1}, "true or false"),
        ({"logprobs": True, "top_logprobs": 2}, "sampled tokens' log-probs alone"),
        ({"max_tokens": 0}, "above 0"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio is not taken: there is text only"),
        ({"functions": [{}]}, "use tools"),
        ({"function_call": "auto"}, "use tool_choice"),
        ({"logit_bias": {"1": 2}}, "the run decides"),
        ({"prediction": {"type": "content"}}, "prediction is not taken"),
        ({"web_search_options": {"x": 1}}, "no search is hosted"),
        ({"guided_json": {"x": 1}}, "use response_format"),
        ({"stop_token_ids": [1]}, "the run decides"),
        ({"format": "json"}, "use response_format"),
        ({"system": "Be brief."}, "send a system message"),
        ({"skip_special_tokens": False}, "must be true"),
        ({"tools": [ADD, ADD]}, "same name"),
        ({"tools": {}, "tool_choice": "required"}, "there are no tools"),
        ({"tools": "x"}, "must be a list"),
        ({"tools": [1]}, "must be an object"),
        ({"tools": [ADD] * 129}, "at most 128"),
        ({"tools": [{"type": "web_search"}]}, "'web_search' is not taken"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "characters"),
        ({"tools": [{"type": "function", "function": {"name": "ab\n"}}]}, "characters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "must be an object"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "strict"),
        ({"tools": [{"type": "function", "function": {"name": "f"}, "defer_loading": True}]}, "all tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 262_144}}]}, "262144 bytes"),  # noqa: E501
        ({"tools": [ADD], "tool_choice": "any"}, "must be auto"),
        ({"tools": [ADD], "tool_choice": ["auto"]}, "must be auto"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools"}}, "offer those tools only"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "one of the tools"),
        ({"tools": [ADD], "tool_choice": {"type": "function"}}, "must be an object"),
        ({"response_format": {"type": "grammar"}}, "'grammar' is not taken"),
        ({"response_format": {"type": "json_schema"}}, "must be an object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"x": "y" * 65536}}}}, "65536 bytes"),  # noqa: E501
    ],
)  # fmt: skip
def test_what_is_refused(fields: dict[str, Any], told: str) -> None:
    error = refused(**fields)
    assert error.param
    with pytest.raises(BadRequest, match=told):
        raise error


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"items": value}
    return value


def test_odd_values_are_bounded() -> None:
    def tool(**parameters: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", "parameters": parameters}}

    assert "deep" in str(refused(tools=[tool(x=nested(100))]))
    assert "deep" in str(refused(tools=[tool(x=nested(5000))]))
    [sent] = chat.request({"messages": HI, "tools": [tool(title="\ud800", n=10**4000)]}).tools
    assert sent["function"]["parameters"] == {"title": "?", "n": 10**4000}
    json.dumps(chat.error(refused(messages=[{"role": "\ud800"}])))


def test_a_tools_fields_have_one_order() -> None:
    function = dict(reversed(ADD["function"].items()))  # type: ignore[attr-defined]
    [sent] = chat.request({"messages": HI, "tools": [{"function": function, "type": "function"}]}).tools
    assert json.dumps(sent) == json.dumps(ADD)


def test_an_answer() -> None:
    served = serve(Completion("Hello", 10, 5, "length"))
    assert chat.answer(served) == {
        "id": "chatcmpl-7",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "finish_reason": "length",
                "logprobs": None,
            }
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }


def test_an_answer_with_calls_can_be_sent_back() -> None:
    [choice] = chat.answer(serve(Completion("", 1, 1, calls=CALLS), tools=[ADD]))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert chat.request({"messages": [choice["message"]]}).messages == (Message("assistant", "", CALLS),)


def test_an_answer_that_was_cut_says_so_despite_its_calls() -> None:
    [choice] = chat.answer(serve(Completion("x", 1, 1, "length", CALLS)))["choices"]
    assert choice["finish_reason"] == "length"


def test_log_probs() -> None:
    sampled = (TokenLogprob("hé", -0.5), TokenLogprob("\ufffd", float("-inf")))
    [choice] = chat.answer(serve(Completion("hé", 1, 2, logprobs=sampled), logprobs=True))["choices"]
    assert choice["logprobs"]["content"] == [
        {"token": "hé", "logprob": -0.5, "bytes": [104, 195, 169], "top_logprobs": []},
        {"token": "\ufffd", "logprob": -9999.0, "bytes": [], "top_logprobs": []},
    ]


def deltas(served: Served) -> list[dict[str, Any]]:
    *events, end = [event.data for event in chat.events(served)]
    assert end is None
    return [event["choices"][0]["delta"] for event in events if event and event["choices"]]


def test_a_stream() -> None:
    served = serve(Completion("Hello", 10, 5, calls=CALLS), stream=True, stream_options={"include_usage": True})
    events = [event.data for event in chat.events(served)][:-1]
    assert [event["usage"] for event in events[:-1] if event] == [None] * 7
    assert events[-1]
    assert (events[-1]["choices"], events[-1]["usage"]["total_tokens"]) == ([], 15)
    assert events[-2]
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert "".join(delta.get("content") or "" for delta in deltas(served)) == "Hello"
    assert deltas(serve(Completion("Hello", 1, 1))) == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "Hello"},
        {},
    ]


def test_a_stream_has_one_call_in_each_event_as_openais_has() -> None:
    """LlamaIndex reads the first call of an event."""

    def call(index: int, arguments: str, **head: Any) -> dict[str, Any]:
        name = {"name": "add"} if head else {}
        return {"tool_calls": [{"index": index, **head, "function": {**name, "arguments": arguments}}]}

    assert deltas(serve(Completion("", 1, 1, calls=CALLS), stream=True)) == [
        {"role": "assistant", "content": None, "refusal": None},
        call(0, "", id="c1", type="function"),
        call(0, '{"a": 1}'),
        call(1, "", id="c2", type="function"),
        call(1, "{}"),
        {},
    ]


def test_fields_without_an_effect_are_passed_over_and_noted() -> None:
    call = {"id": "c1", "function": {"name": "add", "arguments": "{}", "parsed_arguments": {"a": 1}}}
    body = {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "x"}}]},
            {"role": "user", "content": "Hi", "name": "Ann", "cache_control": {"type": "ephemeral"}},
            {"role": "user", "content": "Hi", "name": "Bob", "mood": "good"},
            {"role": "assistant", "content": "", "tool_calls": [call], "name": "solver", "reasoning": "Hm."},
            {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "1"},
        ],
        "tools": [{**ADD, "cache_control": {"type": "ephemeral"}}],
        "model": "gpt-9",
        "temperature": 0.5,
        "thinking": {"type": "enabled"},
        "client_metadata": {"a": "b"},
        "user": "u",
        "logit_bias": {},
        "stream": True,
        "stream_options": {"include_obfuscation": True},
        "w" * 1000: 1,
    }
    with noting_unused() as unused:
        asked = chat.request(body)
    assert [message.content for message in asked.messages] == ["Be brief.", "Hi", "Hi", "", "1"]
    assert [message.name for message in asked.messages] == ["", "Ann", "Bob", "", ""]
    assert asked.tools == (ADD,)
    assert unused == {
        *("temperature", "thinking", "client_metadata", "user", "stream_options.include_obfuscation", "w" * 80),
        *("messages[].name", "messages[].cache_control", "messages[].mood", "messages[].reasoning"),
        *("messages[].content[].cache_control", "messages[].tool_calls[].function.parsed_arguments"),
        "tools[].cache_control",
    }


def test_who_speaks_counts_towards_the_size_of_a_conversation() -> None:
    assert size_bytes([Message("user", "Hi", name="Ann")]) == 5


@pytest.mark.parametrize("role", ["system", "developer", "user"])
def test_who_speaks_is_told_as_openai_s_rule_has_it(role: str) -> None:
    for name in ("Ann", "a-1_B", "n" * 64):
        with noting_unused() as unused:
            (message,) = chat.request({"messages": [{"role": role, "content": "Hi", "name": name}]}).messages
        assert (message.name, unused) == (name, set())
    for name in ("n" * 65, "Ann B", "<|im_end|>", "é", "Ann\n", 5, ["Ann"], {"a": "b"}):
        with noting_unused() as unused:
            (message,) = chat.request({"messages": [{"role": role, "content": "Hi", "name": name}]}).messages
        assert (message.name, unused) == ("", {"messages[].name"})


def test_the_names_of_unused_fields_are_bounded() -> None:
    with noting_unused() as unused:
        chat.request({"messages": HI, **{f"{number}{'x' * 1000}": 1 for number in range(1000)}})
    assert len(unused) == MAX_UNUSED
    assert max(map(len, unused)) == 80


@pytest.mark.parametrize(
    "arguments",
    [
        "{",
        "[]",
        "nothing",
        '{"a": NaN}',
        '{"a": 1e400}',
        f'{{"a": {"9" * 400}}}',
        '{"a": ' + "[" * 64 + "]" * 64 + "}",
    ],
)
def test_arguments_that_the_orchestrator_would_not_take_are_refused_here(arguments: str) -> None:
    """Else the rollout would crash instead of a 400."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    error = refused(messages=[*HI, {"role": "assistant", "tool_calls": [call]}])
    assert error.param == "messages[1].tool_calls[0].arguments"


def test_a_lone_surrogate_in_arguments_is_sent_as_a_question_mark() -> None:
    call = {"id": "c1", "function": {"name": "add", "arguments": '{"a":  "\\ud800", "b": 1.0}'}}
    asked = chat.request({"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert asked.messages[0].calls == (Call("c1", "add", '{"a": "?", "b": 1.0}'),)


def test_more_calls_than_the_orchestrator_takes_are_refused_here() -> None:
    calls = [{"id": f"c{n}", "function": {"name": "add", "arguments": "{}"}} for n in range(100)]
    said = {"role": "assistant", "tool_calls": calls}
    assert len(chat.request({"messages": [said] * 20}).messages) == 20
    assert "2000 calls" in str(refused(messages=[said] * 21))
