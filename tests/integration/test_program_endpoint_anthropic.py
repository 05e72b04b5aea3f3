"""The endpoint for agent programs, with Anthropic's own client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import pytest

from sandbox.errors import LeaseEnded, RequestRefused
from sandbox.types import Call, Completion, Message
from tests.integration.test_program_endpoint import Answers, Asked, serving

TALK: list[Any] = [{"role": "user", "content": "Hi"}]
ADD: Any = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
CALLS = (Call("c1", "add", '{"a": 1}'), Call("c2", "add", '{"a": "größer"}'))


@contextmanager
def anthropics(*answers: Answers) -> Iterator[tuple[anthropic.Anthropic, Asked]]:
    with serving(*answers) as (endpoint, asked):
        environment = endpoint.environment
        base_url, key = environment["ANTHROPIC_BASE_URL"], environment["ANTHROPIC_API_KEY"]
        with anthropic.Anthropic(base_url=base_url, api_key=key, timeout=120) as client:
            yield client, asked


def test_messages_with_tools() -> None:
    with anthropics(Completion("I add.", 10, 5, calls=CALLS), Completion("Done", 1, 1, "length")) as (
        client,
        asked,
    ):
        assert [model.id for model in client.models.list()] == ["policy"]
        raw = client.messages.with_raw_response.create(
            model="any",
            max_tokens=100,
            system="Be brief.",
            messages=TALK,
            tools=[ADD],
            tool_choice={"type": "any"},
        )
        assert raw.headers["x-orchestrator-sampling"] == "run"
        said = raw.parse()
        assert (said.stop_reason, said.usage.input_tokens, said.usage.output_tokens) == ("tool_use", 10, 5)
        used = [block for block in said.content if block.type == "tool_use"]
        assert [(block.id, block.name, block.input) for block in used] == [
            ("c1", "add", {"a": 1}),
            ("c2", "add", {"a": "größer"}),
        ]
        results: list[Any] = [{"type": "tool_result", "tool_use_id": block.id, "content": "3"} for block in used]
        talk: list[Any] = [
            *TALK,
            {"role": "assistant", "content": said.content},
            {"role": "user", "content": results},
        ]
        said = client.messages.create(model="any", max_tokens=100, messages=talk, tools=[ADD])
        assert (said.stop_reason, said.content[0].type) == ("max_tokens", "text")
    first, second = asked.requests
    assert first.messages == (Message("system", "Be brief."), Message("user", "Hi"))
    assert first.tool_choice == "required"
    assert second.messages == (
        *(Message("user", "Hi"), Message("assistant", "I add.", CALLS)),
        *(Message("tool", "3", call_id=one.id) for one in CALLS),
    )


def test_a_stream_with_tools() -> None:
    with anthropics(Completion("I add.", 10, 5, calls=CALLS)) as (client, _):
        with client.messages.stream(model="any", max_tokens=100, messages=TALK, tools=[ADD]) as stream:
            kinds = [event.type for event in stream]
            said = stream.get_final_message()
        assert {"text", "input_json", "content_block_stop", "message_stop"} <= set(kinds)
        assert (said.stop_reason, said.usage.input_tokens, said.usage.output_tokens) == ("tool_use", 10, 5)
        assert [getattr(block, "input", None) for block in said.content] == [None, {"a": 1}, {"a": "größer"}]
        assert [getattr(block, "text", None) for block in said.content] == ["I add.", None, None]


def test_who_wants_one_call_gets_the_first_and_an_answer_can_be_begun() -> None:
    with anthropics(Completion("", 1, 1, calls=CALLS), Completion(" 4", 1, 1)) as (client, asked):
        said = client.messages.create(
            model="any",
            max_tokens=100,
            messages=TALK,
            tools=[ADD],
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        )
        assert [block.type for block in said.content] == ["tool_use"]
        begun: list[Any] = [*TALK, {"role": "assistant", "content": "The answer is"}]
        client.messages.create(model="any", max_tokens=100, messages=begun)
    assert asked.requests[1].messages[-1] == Message("assistant", "The answer is")


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused_and_what_is_over(stream: bool) -> None:
    def send(client: anthropic.Anthropic, **more: Any) -> None:
        client.messages.create(model="any", max_tokens=100, messages=TALK, stream=stream, **more)

    too_long = RequestRefused("This model's maximum context length is 4 tokens.", too_long=True)
    with anthropics(too_long, LeaseEnded("budget")) as (client, asked):
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: This model's maximum") as refused:
            send(client)
        assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
        with pytest.raises(anthropic.BadRequestError, match="'web_search_20250305' is not taken"):
            send(client, tools=[{"type": "web_search_20250305", "name": "web_search"}])
        for _ in range(2):
            with pytest.raises(anthropic.RateLimitError, match="the rollout is over"):
                send(client)
        with pytest.raises(anthropic.RateLimitError, match="the rollout is over"):
            client.messages.count_tokens(model="any", messages=TALK)
    assert len(asked.requests) == 2
    assert [str(end) for end in asked.ends] == ["budget"]
