"""What a lease asks an endpoint for, what it refuses, and what it hands on: one rule each."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast

import pytest
from google.protobuf.duration_pb2 import Duration
from rollout_api.v1 import sandbox_pb2 as pb

from orchestrator.completion.base import CompletionRequest, Interrupted, Part, Tokenizer
from orchestrator.completion.versions import Attribution, told_spans
from orchestrator.errors import CompletionError, ProtocolError
from orchestrator.proxy import wire
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.numbered_calls import NumberedCalls
from orchestrator.proxy.requests import AgentRequest
from orchestrator.rules.policy import Policy
from orchestrator.types import AgentSpec, Completion, CompletionKind, Message, PolicySpan, Wishes
from tests.fakes.completers import ScriptedCompleter, text_completion
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
        (PROGRAM, Wishes((tool(),)), "hermes"),  # nobody knows the model's own: any will do
        (an_agent(), Wishes(), None),
    ],
    ids=["tool calling", "program", "program with tools", "program of no format", "code"],
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


async def test_a_request_that_failed_is_sent_again_where_a_control_is_served() -> None:
    script = ["one", CompletionError("gone"), "the control's answer", "two"]
    completer = ScriptedCompleter(script)
    lease = Lease(a_plan(), completer, None, {})
    for number, text in ((1, "one"), (2, "two")):
        reply = await lease.complete(AgentRequest(number, CompletionKind.ACTION, TALK), str(number).encode())
        assert reply.completion is not None
        assert reply.completion.text == text
    _, failed, control, again = completer.requests
    assert again == failed
    assert control.messages != failed.messages


async def test_what_was_sampled_before_a_failure_is_gone_on_with_and_not_sampled_again() -> None:
    parts = (Part((5, 6), (-0.5, -0.5), None, ()),)
    failure = Interrupted(CompletionError("gone"), text_completion("on"), parts)
    completer = ScriptedCompleter(["zero", failure, "the control's answer", "one"])
    lease = Lease(a_plan(), completer, None, {})
    for number in (1, 2):
        reply = await lease.complete(AgentRequest(number, CompletionKind.ACTION, TALK), str(number).encode())
        assert reply.completion is not None
    assert [request.begun for request in completer.requests] == [(), (), (), parts]


class WithoutLogprobs(ScriptedCompleter):
    takes_ids = True

    async def sample(self, request: CompletionRequest) -> Completion:
        text = await super().sample(request)
        return replace(text, tokens_T=(5, 6), logprobs_T=None, completion_tokens=2)


async def test_log_probs_that_do_not_come_are_none_and_the_completion_stands() -> None:
    lease = Lease(a_plan(agent=PROGRAM), WithoutLogprobs(["one"]), made(), {})
    asked = AgentRequest(1, CompletionKind.ACTION, TALK, wishes=Wishes(logprobs=True))
    reply = await lease.complete(asked, b"1")
    assert reply.completion is not None
    assert reply.logprobs == ()


async def test_a_form_that_an_endpoint_cannot_keep_to_is_refused_and_a_demanded_call_is_not() -> None:
    lease = Lease(a_plan(agent=PROGRAM), ScriptedCompleter(["{}"]), None, {})
    asked = AgentRequest(1, CompletionKind.ACTION, TALK, wishes=Wishes(response_format=FORM))
    reply = await lease.complete(asked, b"1")
    assert reply.refused is not None
    assert reply.refused.param == "response_format"
    demanded = Wishes((tool(),), "required", response_format=FORM)
    assert (await lease.complete(replace(asked, sequence=2, wishes=demanded), b"2")).refused is None


async def test_an_answer_may_be_given_up_once_it_is_there() -> None:
    lease = Lease(a_plan(agent=PROGRAM), ScriptedCompleter(["one"]), None, {})
    assert (await lease.complete(AgentRequest(1, CompletionKind.ACTION, TALK), b"1")).completion is not None
    await lease.completions.give_up(1)
    assert lease.completions.given_up == 1


class Asked:
    """A server that says its version when it is asked."""

    async def now(self) -> str:
        return "9"


async def test_a_version_that_came_with_a_sample_is_not_asked_for() -> None:
    attribution = Attribution(Policy(), cast("Any", Asked()))
    before = await attribution.before()
    assert await attribution.spans(before, 3, (), "7") == (PolicySpan(3, "9", "7"),)
    assert await attribution.spans(before, 3, (), None) == (PolicySpan(3, "9", "9"),)


def test_weights_that_sampled_nothing_are_no_reason_to_know_nothing() -> None:
    told = [{"version": "6", "start": 0, "end": 0}, {"version": "7", "start": 0, "end": 3}]
    assert told_spans(told, 3) == (PolicySpan(0, "6", "6"), PolicySpan(3, "7", "7"))
    assert told_spans(told, 4) == told_spans(told[::-1], 3) == ()


@pytest.mark.parametrize(("format", "guided"), [("hermes", True), ("qwen3_coder", False)])
async def test_a_demanded_call_is_held_to_json_where_the_format_writes_json(format: str, guided: bool) -> None:
    completer = Exact(["{}"])
    completer.guides = True
    lease = Lease(a_plan(agent=PROGRAM), completer, made(template=format), {})
    wishes = Wishes((tool(),), "required", "look")
    await lease.complete(AgentRequest(1, CompletionKind.ACTION, TALK[1:], wishes=wishes), b"1")
    assert bool(completer.requests[0].wishes.response_format) is guided


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
