"""What a lease asks an endpoint for, what it refuses, and what it hands on: one rule each."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from rollout_api.v1 import sandbox_pb2 as pb

from orchestrator.completion.base import Tokenizer
from orchestrator.errors import CompletionError, ProtocolError
from orchestrator.proxy import wire
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.numbered_calls import NumberedCalls
from orchestrator.proxy.requests import AgentRequest
from orchestrator.types import AgentSpec, CompletionKind, Message, Wishes
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.plans import TALK, a_plan, an_agent
from tests.fakes.tokenizers import made

PROGRAM = an_agent(kind="program")
CALLING = an_agent(kind="tool_calling", call_format="hermes")


class Exact(ScriptedCompleter):
    takes_ids = True


def tool(key: str = "day", choice: str = "any") -> dict[str, Any]:
    shape = {"type": "object", "properties": {key: {"type": "string", "enum": [choice]}}}
    return {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": shape}}


@pytest.mark.parametrize("format", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize("flawed", [tool(key="|s|"), tool(choice="|s|")], ids=["key", "value"])
async def test_tools_of_which_the_template_makes_a_control_token_are_refused(
    flawed: dict[str, Any], format: str
) -> None:
    """The tokenizer finds none in them: the template prints `<` and `>` around it."""
    tokenizer: Tokenizer = made(template=format)
    completer = Exact(["never"])
    lease = Lease(a_plan(agent=PROGRAM), completer, tokenizer, {})
    asked = AgentRequest(1, CompletionKind.ACTION, TALK[1:], wishes=Wishes((flawed,)))
    reply = await lease.complete(asked, b"1")
    assert reply.refused is not None
    assert (reply.refused.text, reply.refused.param) == ("a tool spells a control token of the model", "tools")
    assert completer.requests == []


@pytest.mark.parametrize(
    ("agent", "wishes", "format"),
    [
        (CALLING, Wishes((tool(),)), "hermes"),
        (replace(PROGRAM, call_format="hermes"), Wishes(), "hermes"),  # its conversation may hold calls
        (replace(PROGRAM, call_format="hermes"), Wishes((tool(),)), "hermes"),
        (an_agent(), Wishes(), None),
    ],
    ids=["tool calling", "program", "program with tools", "code"],
)
async def test_an_endpoint_hears_how_calls_are_written_where_there_may_be_some(
    agent: AgentSpec, wishes: Wishes, format: str | None
) -> None:
    completer = ScriptedCompleter(["an answer"])
    lease = Lease(a_plan(agent=agent), completer, None, {})
    await lease.complete(AgentRequest(1, CompletionKind.ACTION, TALK, wishes=wishes), b"1")
    assert [request.call_format for request in completer.requests] == [format]


FORM = {"type": "json_object"}


@pytest.mark.parametrize(
    ("ids", "wishes"),
    [(False, Wishes((tool(),), "required", response_format=FORM)), (True, Wishes(response_format=FORM))],
    ids=["chat, a call demanded", "ids, a form alone"],
)
async def test_a_form_goes_to_the_endpoint_as_it_was_asked_for(ids: bool, wishes: Wishes) -> None:
    """Only where an endpoint that takes ids is to make a call, the call's own form takes its place."""
    completer = Exact(["{}"]) if ids else ScriptedCompleter(["{}"])
    completer.guides = True
    lease = Lease(a_plan(agent=PROGRAM), completer, None, {})
    await lease.complete(AgentRequest(1, CompletionKind.ACTION, TALK, wishes=wishes), b"1")
    assert [request.wishes for request in completer.requests] == [wishes]


@pytest.mark.parametrize("sampled", [0, 1])
async def test_an_endpoint_that_is_gone_does_not_tell_a_program_to_shorten_its_conversation(sampled: int) -> None:
    completer = ScriptedCompleter([*["one"] * sampled, CompletionError("gone")])
    lease = Lease(a_plan(agent=PROGRAM), completer, None, {})
    for number in range(1, sampled + 2):
        reply = await lease.complete(AgentRequest(number, CompletionKind.ACTION, TALK), str(number).encode())
    assert (reply.ended, reply.refused) == ("llm_error", None)


async def test_a_call_that_is_being_answered_came() -> None:
    calls = NumberedCalls[int]()

    async def made() -> int:
        assert calls.came(1)
        assert not calls.came(2)
        return 1

    assert not calls.came(1)
    assert await calls.answer(1, b"1", made) == 1
    assert calls.came(1)


def sent(**fields: Any) -> bytes:
    return pb.SubmitResultRequest(stop_reason=pb.STOP_REASON_FINAL_ANSWER, **fields).SerializeToString()


def test_an_answer_that_was_not_given_is_not_an_empty_one() -> None:
    assert wire.submission(sent()).answer is None
    assert wire.submission(sent(answer=b"")).answer == b""


@pytest.mark.parametrize(("seconds", "read"), [(-5, 0.0), (3, 3.0), (10**9, 1e6)])
def test_a_steps_time_is_none_that_nobody_can_add_up(seconds: int, read: float) -> None:
    request = pb.RecordStepRequest(duration=Duration(seconds=seconds))
    assert wire.step(request.SerializeToString()).duration_s == read


def test_one_message_is_a_conversation_and_none_is_not() -> None:
    request = pb.CompleteRequest(sequence=1, kind=pb.COMPLETION_KIND_ACTION)
    request.messages.add(role=pb.ROLE_USER, content="hello")
    assert wire.completion_request(request.SerializeToString()).messages == (Message("user", "hello"),)


@pytest.mark.parametrize(
    ("field", "text", "most"),
    [
        ("tools", json.dumps([tool()]), wire.MAX_TOOLS_BYTES),
        ("response_format", json.dumps(FORM), wire.MAX_FORMAT_BYTES),
    ],
)
def test_a_request_may_be_as_large_as_its_limit_and_no_larger(field: str, text: str, most: int) -> None:
    request = pb.CompleteRequest(sequence=1, kind=pb.COMPLETION_KIND_ACTION)
    request.messages.add(role=pb.ROLE_USER, content="hello")
    for size, refused in ((most, False), (most + 1, True)):
        setattr(request, f"{field}_json", text.ljust(size))
        assert (wire.completion_request(request.SerializeToString()).refusal is not None) is refused


def test_a_field_that_the_wire_does_not_have_is_refused_by_its_number() -> None:
    with pytest.raises(ProtocolError, match="CompleteRequest has no field 999"):
        wire.completion_request(pb.CompleteRequest(sequence=1).SerializeToString() + b"\xb8\x3e\x01")
