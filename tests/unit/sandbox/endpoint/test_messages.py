"""Anthropic's Messages as requests, answers and events."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox.runner.endpoint import messages
from sandbox.runner.endpoint.checks import TOO_LONG, BadRequest, Served, noting_unused
from sandbox.types import Call, Completion, Message, Request

HI = [{"role": "user", "content": "Hi"}]
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
CALLS = (Call("c1", "add", '{"a": 1}'), Call("c2", "add", "{}"))


def serve(completion: Completion, **fields: Any) -> Served:
    body = {"max_tokens": 100, "messages": HI, **fields}
    return Served(4, body, messages.request(body), completion)


def turn(role: str, *blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": list(blocks)}]


def result(**fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c1", **fields}


def test_turns_become_a_conversation() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    asked = messages.request(
        {
            "system": [{"type": "text", "text": "Be ", **mark}, {"type": "text", "text": "brief."}],
            "messages": [
                *HI,
                *turn(
                    "assistant",
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "I add."},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                    {"type": "tool_use", "id": "c2", "name": "add", "input": {}},
                ),
                *turn(
                    "user",
                    result(content="1"),
                    result(tool_use_id="c2", content=[{"type": "text", "text": "no"}], is_error=True, **mark),
                    {"type": "text", "text": "Go "},
                    {"type": "text", "text": "on."},
                ),
                {"role": "system", "content": "In the middle."},
                {"role": "assistant", "content": "The answer is"},
            ],
        }
    )
    assert asked.messages == (
        Message("system", "Be brief."),
        Message("user", "Hi"),
        Message("assistant", "I add.", CALLS),
        Message("tool", "1", call_id="c1"),
        Message("tool", "Error: no", call_id="c2"),
        Message("user", "Go on."),
        Message("system", "In the middle."),
        Message("assistant", "The answer is"),
    )


def test_no_system_message_is_invented() -> None:
    assert messages.request({"messages": HI, "system": ""}) == Request((Message("user", "Hi"),))


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ("auto", "")),
        ({"type": "none"}, ("none", "")),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", "")),
        ({"type": "tool", "name": "add"}, ("required", "add")),
    ],
)
def test_what_else_a_request_asks_for(choice: dict[str, Any], expected: tuple[str, str]) -> None:
    asked = messages.request(
        {
            "messages": HI,
            "max_tokens": 5,
            "model": "claude-9",
            "tools": [{**ADD, "type": "custom", "eager_input_streaming": True}],
            "tool_choice": choice,
            "stop_sequences": ["END"],
            "thinking": {"type": "disabled"},
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"},
            "metadata": {"user_id": "x"},
            "temperature": 1,
            "top_k": 5,
        }
    )
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert asked.tools == ({"type": "function", "function": function},)
    assert (asked.tool_choice, asked.tool_name, asked.stop) == (*expected, ("END",))
    schema = {"name": "output", "schema": {"type": "object"}}
    assert asked.response_format == {"type": "json_schema", "json_schema": schema}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"messages": []}, "1 to 1000 messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role must be one of"),
        ({"messages": [{"role": "user"}]}, "must be a list"),
        ({"messages": turn("user", {"type": "image", "source": {}})}, "^image is not taken"),
        ({"messages": turn("user", {"type": "document"})}, "^document is not taken"),
        ({"messages": turn("user", {"type": "tool_use"})}, "^tool_use is not taken in a turn of the user"),
        ({"messages": turn("assistant", result())}, "^tool_result is not taken in a turn of the assistant"),
        ({"messages": turn("assistant", {"type": "server_tool_use"})}, "^server_tool_use is not taken"),
        ({"messages": turn("user", result(content=[{"type": "image"}]))}, "^image is not taken"),
        ({"messages": turn("user", result(tool_use_id=""))}, "tool_use_id"),
        ({"messages": turn("user", result(is_error="yes"))}, "true or false"),
        ({"messages": turn("assistant", {"type": "tool_use", "id": "1", "name": "f", "input": "x"})}, "an object"),
        ({"messages": turn("user", *([result()] * 1001))}, "at most 1000"),
        ({"messages": turn("user", *([result()] * 600)) * 2}, "1 to 1000 messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305' is not taken"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124' is not taken"),
        ({"tools": [{"name": "f"}]}, "input_schema must be an object"),
        ({"tools": [{**ADD, "input_examples": [{}]}]}, "input_examples"),
        ({"tools": [{**ADD, "defer_loading": True}]}, "defer_loading"),
        ({"tools": [ADD], "tool_choice": "auto"}, "must be an object"),
        ({"tools": [ADD], "tool_choice": {"type": "function"}}, "one of auto, none, any, tool"),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "not one of the tools"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"stop_sequences": "x"}, "must be a list"),
        ({"stop_sequences": ["x"] * 5}, "at most 4"),
        ({"max_tokens": 0}, "above 0"),
        ({"n": 2}, "send several requests"),
        ({"container": "x"}, "nothing is hosted"),
        ({"output_config": {"format": {"type": "xml"}}}, "'xml' is not taken"),
        ({"output_config": {"task_budget": {"total": 9}}}, "budgets hold"),
        ({"mcp_servers": [{}]}, "nothing is hosted"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(BadRequest, match=told):
        messages.request({"messages": HI, **fields})


def test_fields_without_an_effect_are_passed_over_and_noted() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    with noting_unused() as unused:
        asked = messages.request(
            {
                "system": [{"type": "text", "text": "Be brief.", **mark}],
                "messages": [
                    {"role": "user", "content": "Hi", **mark},
                    *turn(
                        "assistant",
                        {"type": "tool_use", "id": "c1", "name": "add", "input": {}, "caller": {"x": 1}},
                    ),
                    *turn("user", result(content="1", **mark)),
                ],
                "tools": [{**ADD, **mark, "eager_input_streaming": True}],
                "max_tokens": 100,
                "thinking": {"type": "enabled", "budget_tokens": 1024},
                "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
                "output_config": {"effort": "low"},
                "betas": ["x"],
                "service_tier": "auto",
                "wibble": 1,
            }
        )
    assert [message.content for message in asked.messages] == ["Be brief.", "Hi", "", "1"]
    assert unused == {
        *(
            "max_tokens",
            "thinking",
            "context_management",
            "output_config.effort",
            "betas",
            "service_tier",
            "wibble",
        ),
        *("system[].cache_control", "messages[].cache_control", "messages[].content[].cache_control"),
        *("messages[].content[].caller", "tools[].cache_control", "tools[].eager_input_streaming"),
    }


def test_an_answer_can_be_sent_back() -> None:
    told = messages.answer(serve(Completion("I add.", 10, 5, calls=CALLS), tools=[ADD]))
    assert (told["id"], told["type"], told["stop_reason"]) == ("msg_4", "message", "tool_use")
    assert told["usage"] == {"input_tokens": 10, "output_tokens": 5}
    asked = messages.request({"messages": [{"role": told["role"], "content": told["content"]}]})
    assert asked.messages == (Message("assistant", "I add.", CALLS),)


@pytest.mark.parametrize("arguments", ["[1]", "{", "[" * 100_000])
def test_arguments_that_are_no_object_are_kept_as_text(arguments: str) -> None:
    [block] = messages.answer(serve(Completion("", 1, 1, calls=(Call("c", "f", arguments),))))["content"]
    assert block["input"] == {"arguments": arguments}


def test_why_an_answer_ended() -> None:
    assert messages.answer(serve(Completion("x", 1, 1)))["stop_reason"] == "end_turn"
    assert messages.answer(serve(Completion("x", 1, 1, "length")))["stop_reason"] == "max_tokens"
    stopped = messages.answer(serve(Completion("x", 1, 1, stop="END")))
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "END")
    assert messages.answer(serve(Completion("", 1, 1)))["content"] == [{"type": "text", "text": ""}]


def test_a_stream() -> None:
    events = list(messages.events(serve(Completion("I add.", 10, 5, calls=CALLS[:1]))))
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [event.name for event in events] == ["message_start", *block, *block, "message_delta", "message_stop"]
    data = [event.data for event in events if event.data]
    assert [one["type"] for one in data] == [event.name for event in events]
    assert data[0]["message"]["content"] == []
    assert data[2]["delta"] == {"type": "text_delta", "text": "I add."}
    assert data[5]["delta"] == {"type": "input_json_delta", "partial_json": '{"a": 1}'}
    assert data[7]["delta"]["stop_reason"] == "tool_use"
    assert data[7]["usage"]["output_tokens"] == 5


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (BadRequest("no"), "invalid_request_error", "no"),
        (BadRequest("9 tokens", code=TOO_LONG), "invalid_request_error", "prompt is too long: 9 tokens"),
        (BadRequest("over", status=429), "rate_limit_error", "over"),
        (BadRequest("big", status=413), "request_too_large", "big"),
        (BadRequest("gone", status=404), "not_found_error", "gone"),
    ],
)
def test_errors(error: BadRequest, kind: str, told: str) -> None:
    assert messages.error(error) == {"type": "error", "error": {"type": kind, "message": told}}


def test_a_thread_is_refused_in_the_words_by_which_anthropics_tool_runner_does_without() -> None:
    with pytest.raises(BadRequest, match=r"^thread is not taken: .* send all of its messages") as refused:
        messages.request({"messages": HI, "thread": {"type": "create"}})
    error = messages.error(refused.value)["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
