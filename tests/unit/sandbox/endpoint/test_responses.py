"""OpenAI's Responses as requests, answers and events, and the conversations that are kept."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox.runner.endpoint.checks import BadRequest, Served, noting_unused
from sandbox.runner.endpoint.responses import MAX_KEPT, Responses
from sandbox.types import Call, Completion, Message, Request, TokenLogprob

ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
CALLS = (Call("c1", "add", '{"a": 1}'), Call("c2", "add", "{}"))


def call(number: int) -> dict[str, Any]:
    one = CALLS[number]
    return {"type": "function_call", "id": "fc_1", "call_id": one.id, "name": one.name, "arguments": one.arguments}


def serve(completion: Completion, **fields: Any) -> Served:
    body = {"input": "Hi", **fields}
    return Served(3, body, Responses().request(body), completion)


def test_items_become_a_conversation() -> None:
    asked = Responses().request(
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "user", "content": "Hi"},
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "More."}]},
                {"type": "reasoning", "id": "rs_1", "summary": []},
                {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "I add.", "annotations": [], "logprobs": []}],
                },
                call(0),
                call(1),
                {"type": "function_call_output", "call_id": "c1", "output": "1"},
                {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
                call(0),
            ],
        }
    )
    assert asked.messages == (
        Message("system", "Be brief."),
        Message("user", "Hi"),
        Message("system", "More."),
        Message("assistant", "I add.", CALLS),
        Message("tool", "1", call_id="c1"),
        Message("tool", "2", call_id="c2"),
        Message("assistant", "", CALLS[:1]),
    )


def test_what_else_a_request_asks_for() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    asked = Responses().request(
        {
            "input": "Hi",
            "tools": [ADD],
            "tool_choice": {"type": "function", "name": "add"},
            "text": {"format": schema, "verbosity": "low"},
            "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
            "store": True,
            "truncation": "disabled",
            "reasoning": {"effort": "low", "summary": "auto"},
            "background": False,
            "max_output_tokens": 9,
            "metadata": {"a": "b"},
        }
    )
    assert asked == Request(
        (Message("user", "Hi"),),
        tools=({"type": "function", "function": {key: ADD[key] for key in ADD if key != "type"}},),
        tool_choice="required",
        tool_name="add",
        response_format={"type": "json_schema", "json_schema": {k: v for k, v in schema.items() if k != "type"}},
        logprobs=True,
    )
    assert Responses().request({"input": "Hi", "text": {"format": {"type": "text"}}}).response_format is None


def test_fields_without_an_effect_are_passed_over_and_noted() -> None:
    """Codex sends some of them."""
    message = {
        "role": "user",
        "content": [{"type": "input_text", "text": "Hi", "prompt_cache_breakpoint": {"x": 1}}],
    }
    returned = {"type": "function_call_output", "call_id": "c1", "output": "1", "name": "add"}
    with noting_unused() as unused:
        asked = Responses().request(
            {
                "input": [{**message, "name": "Ann"}, {**call(0), "namespace": "n"}, returned],
                "tools": [{**ADD, "cache_control": {"type": "ephemeral"}}],
                "client_metadata": {"a": "b"},
                "context_management": [{"type": "compaction", "compact_threshold": 1000}],
                "prompt_cache_key": "k",
                "reasoning": {"effort": "low"},
                "store": False,
                "metadata": {"a": "b"},
                "text": {"verbosity": "low"},
            }
        )
    assert [said.content for said in asked.messages] == ["Hi", "", "1"]
    assert unused == {
        *("client_metadata", "context_management", "prompt_cache_key", "reasoning", "text.verbosity"),
        *("input[].name", "input[].namespace", "input[].content[].prompt_cache_breakpoint"),
        "tools[].cache_control",
    }


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"input": None}, "must be a list"),
        ({"input": []}, "1 to 1000 messages"),
        ({"input": [1]}, "must be an object"),
        ({"input": [{"content": "x"}]}, "None is not taken"),
        ({"input": [{"type": ["message"]}]}, "is not taken"),
        ({"input": [{"role": "tool", "content": "x"}]}, "role must be one of"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "^input_image is not taken"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "^input_file is not taken"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference is not taken"),
        ({"input": [{"type": "computer_call"}]}, "'computer_call' is not taken"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "call_id"),
        ({"input": [call(0), call(0)]}, "two with one id"),
        ({"input": [{**call(0), "call_id": str(number)} for number in range(200)]}, "more than 128 calls"),
        ({"input": [{"role": "user", "content": "x"}] * 1001}, "1 to 1000 messages"),
        ({"tools": [{"type": "web_search"}]}, "'web_search' is not taken"),
        ({"tools": [{**ADD, "defer_loading": True}]}, "defer_loading"),
        ({"tools": [{**ADD, "allowed_callers": ["programmatic"]}]}, "allowed_callers"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools"}}, "offer those tools only"),
        ({"tools": [ADD], "tool_choice": {"type": "function"}}, "not one of the tools"),
        ({"text": {"format": {"type": "grammar"}}}, "'grammar' is not taken"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "schema must be an object"),
        ({"include": ["file_search_call.results"]}, "is not taken"),
        ({"include": [{}]}, "is not taken"),
        ({"truncation": "auto"}, "must be disabled"),
        ({"background": True}, "send the request and wait"),
        ({"conversation": "conv_1"}, "previous_response_id"),
        ({"prompt": {"id": "x"}}, "nothing is stored"),
        ({"top_logprobs": 3}, "sampled tokens"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"store": "yes"}, "true or false"),
        ({"stop": "x"}, "/v1/chat/completions"),
        ({"n": 2}, "send several requests"),
        ({"system": "x"}, "send instructions"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(BadRequest, match=told) as error:
        Responses().request({"input": "Hi", **fields})
    assert error.value.param


def test_an_answer_can_be_sent_back() -> None:
    told = Responses().answer(serve(Completion("I add.", 10, 5, calls=CALLS), tools=[ADD], metadata={"a": "b"}))
    assert (told["id"], told["status"], told["metadata"], told["tools"]) == (
        "resp_3",
        "completed",
        {"a": "b"},
        [ADD],
    )
    assert told["usage"]["total_tokens"] == 15
    assert [item["type"] for item in told["output"]] == ["message", "function_call", "function_call"]
    asked = Responses().request({"input": told["output"]})
    assert asked.messages == (Message("assistant", "I add.", CALLS),)


def test_an_answer_of_calls_alone_has_no_message() -> None:
    told = Responses().answer(serve(Completion("", 1, 1, calls=CALLS)))
    assert [item["type"] for item in told["output"]] == ["function_call", "function_call"]
    [said] = Responses().answer(serve(Completion("", 1, 1)))["output"]
    assert said["content"][0]["text"] == ""


def test_log_probs() -> None:
    completion = Completion("He", 1, 1, logprobs=(TokenLogprob("He", -0.5),))
    told = Responses().answer(serve(completion, include=["message.output_text.logprobs"]))
    [entry] = told["output"][0]["content"][0]["logprobs"]
    assert (entry["token"], entry["logprob"]) == ("He", -0.5)


@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_a_stream(reason: Any, status: str) -> None:
    events = list(Responses().events(serve(Completion("I add.", 10, 5, reason, CALLS[:1]))))
    data = [event.data for event in events if event.data]
    assert [event.name for event in events] == [one["type"] for one in data]
    assert [one["sequence_number"] for one in data] == list(range(len(data)))
    assert [event.name.removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *(
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ),
        status,
    ]
    whole = data[-1]["response"]
    cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
    assert (whole["status"], whole["incomplete_details"]) == (status, cut)
    assert [one["item"] for one in data if one["type"] == "response.output_item.done"] == whole["output"]


def test_a_response_is_continued() -> None:
    api = Responses()
    body: dict[str, Any] = {"input": "Hi", "instructions": "Be brief."}
    api.answer(Served(1, body, api.request(body), Completion("Hello", 1, 1, calls=CALLS[:1])))
    output = {"type": "function_call_output", "call_id": "c1", "output": "1"}
    body = {"input": [output], "previous_response_id": "resp_1", "instructions": "Be long."}
    asked = api.request(body)
    assert asked.messages == (
        Message("system", "Be long."),
        Message("user", "Hi"),
        Message("assistant", "Hello", CALLS[:1]),
        Message("tool", "1", call_id="c1"),
    )
    list(api.events(Served(2, body, asked, Completion("Done", 1, 1))))
    body = {"input": "Thanks", "previous_response_id": "resp_2", "store": False}
    asked = api.request(body)
    assert [message.content for message in asked.messages] == ["Hi", "Hello", "1", "Done", "Thanks"]
    api.answer(Served(3, body, asked, Completion("Bye", 1, 1)))
    with pytest.raises(BadRequest, match="is not kept") as error:
        api.request({"input": "x", "previous_response_id": "resp_3"})
    assert api.error(error.value)["error"]["code"] == "previous_response_not_found"


def test_what_was_continued_is_one_message() -> None:
    api = Responses()
    body = {"input": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}]}
    api.answer(Served(1, body, api.request(body), Completion("lo", 1, 1)))
    asked = api.request({"input": "x", "previous_response_id": "resp_1"})
    assert asked.messages[:2] == (Message("user", "Hi"), Message("assistant", "Hello"))


@pytest.mark.parametrize(("text", "most"), [("x", MAX_KEPT), ("x" * (2 << 20), 7)])
def test_old_responses_are_forgotten(text: str, most: int) -> None:
    api = Responses()
    body = {"input": text}
    asked = api.request(body)
    for number in range(1, MAX_KEPT + 10):
        api.answer(Served(number, body, asked, Completion("y", 1, 1)))
    for kept in (MAX_KEPT + 9, MAX_KEPT + 10 - most):
        api.request({"input": "x", "previous_response_id": f"resp_{kept}"})
    for unknown in (f"resp_{MAX_KEPT + 9 - most}", 5, ["resp_1"], {}):
        with pytest.raises(BadRequest, match="is not kept"):
            api.request({"input": "x", "previous_response_id": unknown})


def test_the_orchestrators_names_of_fields_are_this_apis() -> None:
    told = Responses().error(BadRequest("no", "response_format"))
    assert told["error"]["param"] == "text.format"
