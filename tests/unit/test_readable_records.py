"""What is written can be read: whatever a sandbox sends within its limits, our own readers take the line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_api.v1 import sandbox_pb2 as pb

from orchestrator.errors import OutputError, ProtocolError
from orchestrator.proxy import budgets, offers, wire
from orchestrator.proxy.lease import MAX_STEP_CHARS, Lease
from orchestrator.proxy.requests import AgentRequest, Reply
from orchestrator.rules.text import objects_in
from orchestrator.run import lines
from orchestrator.run.excerpts import read_counted, read_episode
from orchestrator.run.line import RecordedAttempt, attempt_line, read_attempt, shorter_line
from orchestrator.run.lines import JsonLines, dumps
from orchestrator.types import (
    Attempt,
    CompletionKind,
    Ended,
    EndedName,
    Message,
    Record,
    RolloutPlan,
    Tools,
    Wishes,
)
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.plans import a_member, a_plan, an_agent, some_limits

TALK = (Message("user", "q"),)
PROGRAM = a_plan(
    agent=an_agent(kind="program", max_steps=1000), limits=some_limits(completions=1000, tool_calls=1000)
)


def written(lease: Lease) -> bytes:
    record = Record(0.0, turns=tuple(lease.turns), tool_calls=tuple(lease.tool_calls), steps=tuple(lease.steps))
    return dumps(attempt_line(Attempt(lease.plan, record, Ended(EndedName.FINISHED))))


def read(text: bytes) -> RecordedAttempt:
    """By all our strict readers."""
    read_counted(text)
    read_episode(text)
    return read_attempt(text)


class Echo:
    """A tool that says what it got."""

    description, inputs, output_type = "Echo.", {"x": {"type": "any", "description": "x"}}, "string"

    async def call(self, arguments: Any) -> str:
        return json.dumps(arguments)


def a_lease(plan: RolloutPlan = PROGRAM, answers: int = 100) -> Lease:
    return Lease(plan, ScriptedCompleter(["yes"] * answers), None, {"echo": Echo()})


def offer(number: int, objects: int) -> Tools:
    function = {"name": f"f{number}", "parameters": {"anyOf": [{} for _ in range(objects)]}}
    return ({"type": "function", "function": function},)


async def asked(lease: Lease, number: int, tools: Tools, talk: Sequence[Message] = TALK) -> Reply:
    request = AgentRequest(number, CompletionKind.ACTION, tuple(talk), wishes=Wishes(tools))
    return await lease.complete(request, b"%d" % number)


async def test_the_tools_of_many_requests_do_not_make_a_line_that_nobody_reads() -> None:
    lease = a_lease()
    replies = [await asked(lease, number, offer(number, 15_000)) for number in range(1, 21)]
    refused = [reply.refused for reply in replies if reply.refused]
    assert len(refused) == 17
    assert all(refusal is not None and refusal.param == "tools" for refusal in refused)
    assert lease.live, "a program is told, and goes on"
    text = written(lease)
    assert objects_in(text) < offers.MAX_OBJECTS + 1000
    assert [turn.tools for turn in read(text).record.turns] == [offer(n, 15_000) for n in (1, 2, 3)]


async def test_tools_are_written_once_however_often_they_change() -> None:
    lease = a_lease()
    for number in range(1, 41):
        await asked(lease, number, offer(number % 2, 100) if number % 4 else ())
    text = written(lease)
    line = json.loads(text)
    assert len(line["tools"]) == 3, "two sets, and none"
    record = read(text).record
    assert record.turns == tuple(lease.turns)
    assert len({id(turn.tools) for turn in record.turns}) == 3


async def test_a_line_of_schema_1_is_read_as_it_was() -> None:
    lease = a_lease()
    for number in range(1, 5):
        await asked(lease, number, offer(number // 3, 1))
    line = json.loads(written(lease))
    line["schema"] = 1
    sets = line.pop("tools")
    for completion in line["completions"]:
        if "tools" in completion:
            completion["tools"] = sets[completion["tools"]]
    assert read(dumps(line)).record.turns == tuple(lease.turns)


def test_a_set_of_tools_that_is_not_there_is_named() -> None:
    line = attempt_line(a_member())
    line["completions"][0]["tools"] = 3
    with pytest.raises(ValueError, match="3 of 0 sets of tools"):
        read_attempt(dumps(line))


@pytest.mark.parametrize("share", [0.1, pytest.param(1.0, marks=pytest.mark.long)])
async def test_arguments_of_many_tool_calls_have_a_limit_together(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = int(share * budgets.MAX_RECORDED_OBJECTS)
    readable = int(share * lines.MAX_CONTAINERS)
    monkeypatch.setattr(budgets, "MAX_RECORDED_OBJECTS", most)
    lease = a_lease()
    for number in range(1, 200):
        reply = await lease.call_tool(number, b"%d" % number, "echo", {"x": [[]] * 9_000})
        if reply.ended:
            break
    assert reply.ended == "budget"
    text = written(lease)
    assert most // 2 < objects_in(text) < readable
    assert len(read(text).record.tool_calls) == len(lease.tool_calls)


async def test_results_of_many_tool_calls_have_a_limit_together() -> None:
    lease = a_lease()
    for number in range(1, 200):
        reply = await lease.call_tool(number, b"%d" % number, "echo", {"x": "\x01" * 200_000})
        if reply.ended:
            break
    assert reply.ended == "budget"
    assert len(written(lease)) < lines.MAX_LINE_BYTES


def test_what_a_lease_lets_pass_is_below_what_a_reader_takes() -> None:
    most_bytes = 6  # of a character in JSON
    texts = budgets.MAX_RECORDED_CHARS + budgets.MAX_TOOL_CHARS + MAX_STEP_CHARS
    assert most_bytes * texts + offers.MAX_BYTES < lines.MAX_LINE_BYTES * 3 // 4
    assert budgets.MAX_RECORDED_OBJECTS + offers.MAX_OBJECTS + 10_000 < lines.MAX_CONTAINERS
    assert budgets.MAX_PROMPTS < lines.MAX_TALK


@pytest.mark.parametrize(("new", "over"), [(2_000, "objects"), (2, "messages of prompts")])
def test_messages_have_a_limit_together(new: int, over: str) -> None:
    """As of a program that asks with two long conversations by turns, or again and again with one."""
    spent = budgets.Budgets(PROGRAM, None)

    def ask(times: int) -> None:
        for _ in range(times):
            spent.text(0, new, 2_000)

    ask(300)
    with pytest.raises(budgets.LimitReached, match=over):
        ask(2_000)


@pytest.mark.parametrize(
    ("chars", "messages"), [(budgets.MAX_RECORDED_CHARS, 0), (0, budgets.MAX_PROMPTS)], ids=["chars", "messages"]
)
def test_all_that_may_be_recorded_may_be_used_up(chars: int, messages: int) -> None:
    spent = budgets.Budgets(PROGRAM, None)
    spent.text(chars, 0, messages)
    with pytest.raises(budgets.LimitReached, match=r"conversation|messages of prompts"):
        spent.text(min(chars, 1), 0, min(messages, 1))


TEXTS = st.text(max_size=8) | st.sampled_from(["\x00", "\u2028", "\x85", "\U0001f600", "<|im_end|>", "[{", '"\\'])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
FUNCTIONS = st.dictionaries(TEXTS, JSON, max_size=3).map(lambda more: {**more, "name": "f"})
TOOLS = st.lists(FUNCTIONS.map(lambda function: {"type": "function", "function": function}), max_size=2)
CALLS = st.builds(
    lambda name, arguments: pb.Call(id="c1", name=name, arguments_json=json.dumps(arguments)),
    TEXTS.map(lambda text: text.encode("utf-8", "replace").decode()),
    st.dictionaries(TEXTS, JSON, max_size=3),
)
STEPS = st.builds(
    lambda number, text, seconds: pb.RecordStepRequest(step_number=number, code=text, error=text),
    st.integers(0, 2**31 - 1),
    TEXTS.map(lambda text: text.encode("utf-8", "replace").decode()),
    st.floats(),
)
CONTENTS = TEXTS.map(lambda text: text.encode("utf-8", "replace").decode())


@st.composite
def requests(draw: st.DrawFn) -> list[bytes]:
    """What a program may send, and more than that."""
    made = []
    for number in range(1, draw(st.integers(1, 4)) + 1):
        messages = [pb.Message(role=pb.ROLE_USER, content=draw(CONTENTS))]
        if draw(st.booleans()):
            messages.append(pb.Message(role=pb.ROLE_ASSISTANT, content=draw(CONTENTS), calls=[draw(CALLS)]))
            messages.append(pb.Message(role=pb.ROLE_TOOL, content=draw(CONTENTS), call_id="c1"))
        request = pb.CompleteRequest(
            sequence=number,
            kind=pb.COMPLETION_KIND_ACTION,
            messages=messages,
            tools_json=json.dumps(draw(TOOLS)),
            steps=draw(st.lists(STEPS, max_size=2)),
        )
        made.append(request.SerializeToString())
    return made


@given(requests(), st.dictionaries(TEXTS, JSON, max_size=3))
async def test_whatever_a_sandbox_sends_its_line_is_read_back(
    sent: list[bytes], arguments: dict[str, Any]
) -> None:
    lease, number = a_lease(), 0
    for request in sent:
        try:
            asked = wire.completion_request(request)
        except ProtocolError:
            continue  # nothing of it is kept
        number += 1
        await lease.complete(replace(asked, sequence=number), request)
    call = pb.CallToolRequest(sequence=1, name="echo", arguments_json=json.dumps(arguments)).SerializeToString()
    with suppress(ProtocolError):
        await lease.call_tool(1, call, *wire.tool_request(call)[1:])
    record = read(written(lease)).record
    assert record.turns == tuple(lease.turns)
    assert len(record.tool_calls) == len(lease.tool_calls)
    assert record.steps == tuple(lease.steps)


async def test_a_line_that_nobody_could_read_is_written_shorter(tmp_path: Path) -> None:
    """As after a scorer that gives evidence without end."""
    line = attempt_line(a_member())
    whole = {**line, "score_evidence": {"x": [[]] * (lines.MAX_CONTAINERS + 1)}}
    file = JsonLines(tmp_path / "rollouts.jsonl")
    await file.append(lambda: [whole], shorter_line)
    with pytest.raises(OutputError, match="could not be read again"):
        await file.append(lambda: [whole])
    file.close()
    (text,) = (tmp_path / "rollouts.jsonl").read_bytes().splitlines()
    told = read(text)
    assert told.record.turns == a_member().attempt.record.turns
    assert "left out" in told.record.notes[-1]
