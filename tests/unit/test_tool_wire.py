"""What a sandbox may say about tools, and what it may not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from rollout_api.v1 import sandbox_pb2 as pb

from orchestrator.errors import ProtocolError
from orchestrator.proxy import wire
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.requests import AgentRequest, CallMessage
from orchestrator.types import AgentSpec, Call, CompletionKind, ManagedAgent, Wishes
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.plans import TALK, a_plan, an_agent

TOOL = {"type": "function", "function": {"name": "weather"}}


def a_request(**changes: object) -> pb.CompleteRequest:
    message = pb.Message(role=pb.ROLE_USER, content="Hi.")
    request = pb.CompleteRequest(sequence=1, kind=pb.COMPLETION_KIND_ACTION, messages=[message])
    for name, value in changes.items():
        setattr(request, name, value)
    return request


def said(role: pb.Role, *calls: pb.Call, call_id: str = "") -> pb.CompleteRequest:
    message = pb.Message(role=role, content="x", calls=calls, call_id=call_id)
    return pb.CompleteRequest(sequence=1, kind=pb.COMPLETION_KIND_ACTION, messages=[message])


HOSTILE: dict[str, Callable[[], pb.CompleteRequest]] = {
    "no list": lambda: a_request(tools_json="{}"),
    "no JSON": lambda: a_request(tools_json="["),
    "no function": lambda: a_request(tools_json='[{"type": "function"}]'),
    "no name": lambda: a_request(tools_json='[{"function": {"name": 7}}]'),
    "too many": lambda: a_request(tools_json=json.dumps([TOOL] * (wire.MAX_TOOLS + 1))),
    "too deep": lambda: a_request(tools_json="[" * 10_000),
    "deeper than can be written": lambda: a_request(
        tools_json='[{"function": {"name": "f", "x": ' + "[" * 300 + "]" * 300 + "}}]"
    ),
    "a name that is no tool's": lambda: a_request(tools_json=json.dumps([TOOL]), tool_name="<|im_end|>"),
    "no number": lambda: a_request(tools_json='[{"function": {"name": "f", "x": NaN}}]'),
    "surrogate": lambda: a_request(tools_json='[{"function": {"name": "\\ud800"}}]'),
    "no choice": lambda: a_request(tool_choice=9),
    "no format": lambda: a_request(response_format_json="[]"),
    "no kind of format": lambda: a_request(response_format_json='{"type": "grammar", "grammar": "root"}'),
    "no schema": lambda: a_request(response_format_json='{"type": "json_schema", "json_schema": [1]}'),
    "deep format": lambda: a_request(
        response_format_json='{"type": "json_schema", "json_schema": {"schema": {"x": '
        + "[" * 300
        + "]" * 300
        + "}}}"
    ),
    "deep arguments": lambda: said(
        pb.ROLE_ASSISTANT, pb.Call(id="1", name="f", arguments_json='{"x": ' + "[" * 300 + "]" * 300 + "}")
    ),
    "calls of a user": lambda: said(pb.ROLE_USER, pb.Call(id="1", name="f", arguments_json="{}")),
    "no object": lambda: said(pb.ROLE_ASSISTANT, pb.Call(id="1", name="f", arguments_json="[]")),
    "no arguments": lambda: said(pb.ROLE_ASSISTANT, pb.Call(id="1", name="f", arguments_json="{")),
    "too many calls": lambda: said(pb.ROLE_ASSISTANT, *[pb.Call(id="1", name="f", arguments_json="{}")] * 3000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_none_is_refused_before_anything_is_made_of_it(name: str) -> None:
    with pytest.raises(ProtocolError):
        wire.completion_request(HOSTILE[name]().SerializeToString())


OVER = {
    "bytes of tools": ("tools", lambda: a_request(tools_json=json.dumps([TOOL]) + " " * wire.MAX_TOOLS_BYTES)),
    "bytes, fewer characters": (
        "tools",
        lambda: a_request(tools_json=json.dumps(["\u00e9" * 140_000], ensure_ascii=False)),
    ),
    "bytes of a format": (
        "response_format",
        lambda: a_request(response_format_json='{"type": "text"}' + " " * wire.MAX_FORMAT_BYTES),
    ),
    "objects of tools": ("tools", lambda: a_request(tools_json=f"[{','.join(['{}'] * 80_000)}]")),
    "nothing but brackets": ("tools", lambda: a_request(tools_json="[" * 100_000)),
    "objects of calls": (
        "messages",
        lambda: said(
            pb.ROLE_ASSISTANT,
            *[pb.Call(id="1", name="f", arguments_json=f'{{"x": [{",".join(["[]"] * 1000)}]}}')] * 20,
        ),
    ),
}


@pytest.mark.parametrize("name", OVER)
async def test_a_program_is_told_that_its_request_is_too_large_and_goes_on(name: str) -> None:
    """Nothing of it is parsed: neither time nor memory goes into it."""
    param, request = OVER[name]
    asked = wire.completion_request(request().SerializeToString())
    assert asked.refusal is not None
    assert (asked.refusal.param, asked.messages, asked.wishes) == (param, (), Wishes())
    lease = Lease(a_plan(agent=an_agent(kind="program")), ScriptedCompleter(["one"]), None, {})
    assert (await lease.complete(asked, b"1")).refused == asked.refusal
    assert (await lease.complete(AgentRequest(2, CompletionKind.ACTION, TALK), b"2")).completion is not None


def test_brackets_in_texts_are_no_objects() -> None:
    text = json.dumps([{"type": "function", "function": {"name": "f", "description": '{["\\"' * 10_000}}])
    assert wire.completion_request(a_request(tools_json=text).SerializeToString()).refusal is None


def test_tools_calls_and_results_arrive_as_they_were_sent() -> None:
    request = a_request(
        tools_json=json.dumps([TOOL]), tool_choice=pb.TOOL_CHOICE_REQUIRED, tool_name="weather", logprobs=True
    )
    call = pb.Call(id="a", name="weather", arguments_json='{"b": 1,  "a": 2}')
    request.messages.append(pb.Message(role=pb.ROLE_ASSISTANT, content="", calls=[call]))
    request.messages.append(pb.Message(role=pb.ROLE_TOOL, content="21", call_id="a"))
    asked = wire.completion_request(request.SerializeToString())
    assert asked.wishes == Wishes((TOOL,), "required", "weather", {}, logprobs=True)
    assert asked.messages[1:] == (
        CallMessage("assistant", "", (Call("a", "weather", '{"b": 1,  "a": 2}'),)),
        CallMessage("tool", "21", call_id="a"),
    )


TOOLS = Wishes(tools=(TOOL,))
CALLING = an_agent(kind="tool_calling", call_format="hermes")
TEAM = an_agent(managed_agents=(ManagedAgent("caller", "Calls.", kind="tool_calling"),), call_format="hermes")


@pytest.mark.parametrize(
    ("agent", "name", "kind", "wishes"),
    [
        (an_agent(), "", "action", TOOLS),
        (an_agent(kind="tool_calling"), "", "action", TOOLS),  # its calls are JSON in the text
        (CALLING, "", "plan", TOOLS),
        (CALLING, "", "action", replace(TOOLS, tool_choice="required")),
        (CALLING, "", "action", replace(TOOLS, logprobs=True)),
        (TEAM, "", "action", TOOLS),
        (TEAM, "caller", "final", TOOLS),
    ],
)
async def test_only_tool_calling_agents_bring_tools_and_nothing_else(
    agent: AgentSpec, name: str, kind: str, wishes: Wishes
) -> None:
    lease = Lease(a_plan(agent=agent), ScriptedCompleter(["one"]), None, {})
    with pytest.raises(ProtocolError, match="only a program"):
        await lease.complete(AgentRequest(1, CompletionKind(kind), TALK, agent=name, wishes=wishes), b"1")


async def test_results_come_with_the_tools_that_gave_them() -> None:
    lease = Lease(a_plan(agent=CALLING), ScriptedCompleter(["one"]), None, {})
    with pytest.raises(ProtocolError, match="without tools"):
        await lease.complete(AgentRequest(1, CompletionKind.ACTION, (*TALK, CallMessage("tool", "x"))), b"1")


@pytest.mark.parametrize(("agent", "name"), [(CALLING, ""), (TEAM, "caller")])
async def test_nothing_stops_a_call_before_its_end(agent: AgentSpec, name: str) -> None:
    completer = ScriptedCompleter(["one", "two"])
    lease = Lease(a_plan(agent=agent), completer, None, {})
    await lease.complete(AgentRequest(1, CompletionKind.ACTION, TALK, agent=name, wishes=TOOLS), b"1")
    await lease.complete(AgentRequest(2, CompletionKind.PLAN, TALK, agent=name), b"2")
    assert [request.stop for request in completer.requests] == [(), ("<end_plan>",)]
