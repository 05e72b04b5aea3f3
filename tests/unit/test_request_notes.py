"""What people hear of a program's requests: fields without an effect, refusals, counted tokens."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rollout_api.v1 import sandbox_pb2 as pb

from orchestrator.agents.equipment import Equipment
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.engine.health import MAX_KINDS, AgentGate
from orchestrator.errors import ProtocolError
from orchestrator.proxy import wire
from orchestrator.proxy.completions import MAX_COUNTED
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.requests import AgentRequest, Reply
from orchestrator.proxy.turns import Turns
from orchestrator.rules.outcome import Submission
from orchestrator.run.excerpts import Counted, read_counted
from orchestrator.run.line import attempt_line, read_attempt
from orchestrator.run.lines import dumps
from orchestrator.run.tally import Tally
from orchestrator.terminal.closing import closing_table
from orchestrator.types import Attempt, CompletionKind, Ended, EndedName, Message, RequestNotes
from sandbox.runner import wire as sandbox_wire
from sandbox.types import Message as SandboxMessage
from sandbox.types import Notes, Request, Result
from tests.fakes import tokenizers
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.plans import a_plan, a_record, an_agent, some_limits

REFUSED = "POST /v1/chat/completions got HTTP 400: messages[3].content: image_url is not taken"
TALK = (Message("user", "Hi."),)


def a_lease(**limits: int) -> Lease:
    plan = a_plan(agent=an_agent(kind="program", max_steps=100), limits=some_limits(**limits))
    return Lease(plan, ScriptedCompleter(["4"] * 9), None, {})


async def ask(
    lease: Lease, sequence: int, notes: RequestNotes | None = None, *, count_only: bool = False
) -> Reply:
    asked = AgentRequest(
        sequence, CompletionKind.ACTION, TALK, notes=notes or RequestNotes(), count_only=count_only
    )
    return await lease.complete(asked, str(sequence).encode())


def test_notes_travel_with_requests_and_with_the_result() -> None:
    notes = Notes(("messages[].name",), (REFUSED,))
    request = Request((SandboxMessage("user", "Hi"),), count_only=True, notes=notes)
    sent = sandbox_wire.complete_request(1, "action", request)
    asked = wire.completion_request(sent.SerializeToString())
    assert (asked.count_only, asked.notes) == (True, RequestNotes(("messages[].name",), (REFUSED,)))
    result = sandbox_wire.result_request(Result("no_answer", notes=notes), 1.0)
    assert wire.submission(result.SerializeToString()).requests == asked.notes


def test_notes_of_a_sandbox_are_cut_to_what_is_shown() -> None:
    notes = pb.Notes(unused_fields=["x" * 1000] * 100, refusals=["y" * 5000] * 9)
    message = pb.Message(role=pb.ROLE_USER, content="Hi.")
    request = pb.CompleteRequest(sequence=1, kind=pb.COMPLETION_KIND_ACTION, messages=[message], notes=notes)
    told = wire.completion_request(request.SerializeToString()).notes
    assert told == RequestNotes(("x" * 80,) * 64, ("y" * 1024,) * 3)


async def test_refusals_after_the_first_completion_are_kept_and_those_before_it_are_not() -> None:
    lease = a_lease(completions=10)
    await ask(lease, 1, RequestNotes(("user",), ("before the first one",)))
    await ask(lease, 2, RequestNotes(("user", "store"), (REFUSED, "key sk-abcdefgh12345678")))
    await lease.submit(
        Submission("no_answer", None, "", requests=RequestNotes((), (REFUSED, "last", "one too many")))
    )
    assert lease.requests == RequestNotes(("user", "store"), (REFUSED, "key [key]", "last"))


async def test_notes_have_a_limit_however_many_requests_bring_them() -> None:
    lease = a_lease(completions=10)
    for sequence in range(1, 6):
        await ask(lease, sequence, RequestNotes(tuple(f"{sequence}{n}" for n in range(64)), (str(sequence),) * 3))
    assert (len(lease.requests.unused_fields), len(lease.requests.refusals)) == (64, 3)


@pytest.fixture(scope="module")
def qwen() -> HubTokenizer:
    return tokenizers.qwen()


async def test_a_prompt_is_counted_and_nothing_is_sampled_or_spent(qwen: HubTokenizer) -> None:
    completer = ScriptedCompleter(["4"])
    plan = a_plan(agent=an_agent(kind="program", max_steps=1), limits=some_limits(completions=1))
    lease = Lease(plan, completer, qwen, {})
    counted = [(await ask(lease, number, count_only=True)).counted for number in range(1, MAX_COUNTED + 1)]
    told = wire.completion_response(await ask(lease, MAX_COUNTED + 1, count_only=True)).refused
    assert told.message.startswith(f"the tokens of {MAX_COUNTED} prompts were counted")
    assert not lease.turns
    assert not lease.completions.awaited
    await ask(lease, MAX_COUNTED + 2)
    [turn] = lease.turns
    assert set(counted) != {0}
    if turn.prompt_ids is not None:
        assert set(counted) == {len(turn.prompt_ids)}


async def test_without_a_tokenizer_nothing_is_counted() -> None:
    reply = await ask(a_lease(), 1, count_only=True)
    assert reply.refused is not None
    assert "no tokenizer" in reply.refused.text


async def test_tokens_that_cannot_be_counted_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise KeyError("a template's own error")

    lease = a_lease()
    monkeypatch.setattr(Turns, "_told", fails)
    reply = await ask(lease, 1, count_only=True)
    assert reply.refused is not None
    assert "cannot be counted" in reply.refused.text
    assert lease.live


async def test_only_a_program_may_have_tokens_counted() -> None:
    lease = Lease(a_plan(), ScriptedCompleter(["4"]), None, {})
    with pytest.raises(ProtocolError, match="only a program"):
        await ask(lease, 1, count_only=True)


def test_the_sandbox_is_told_how_long_a_conversation_may_be() -> None:
    agent = an_agent(kind="program")
    sent = wire.assignment(a_plan().task, agent, {}, Equipment(), max_token_length=4096)
    got = sandbox_wire.assignment(pb.Assignment.FromString(sent.SerializeToString()))
    assert got.agent.max_token_length == 4096


def an_attempt(*refusals: str, rollout: int = 0) -> Attempt:
    record = a_record(requests=RequestNotes(("user",), refusals))
    return Attempt(a_plan(rollout), record, Ended(EndedName.NO_ANSWER))


def test_notes_are_on_record() -> None:
    line = attempt_line(an_attempt(REFUSED))
    assert (line["unused_fields"], line["refused_requests"]) == (["user"], [REFUSED])
    assert read_attempt(dumps(line)).record.requests == RequestNotes(("user",), (REFUSED,))
    assert read_counted(dumps(line)) == Counted.of(an_attempt(REFUSED))
    for name in ("unused_fields", "refused_requests"):  # written before there were any
        del line[name]
    assert read_attempt(dumps(line)).record.requests == RequestNotes()


def test_the_first_refusal_of_each_kind_is_told_at_once() -> None:
    told: list[str] = []
    gate = AgentGate(told.append)
    for number in range(3):
        gate.attempt(an_attempt(REFUSED.replace("3", str(number))))
        gate.attempt(an_attempt("'x' is not taken" if number else "'y' is not taken"))
    gate.attempt(an_attempt())
    assert [line.partition(": ")[2] for line in told] == [REFUSED.replace("3", "0"), "'y' is not taken"]
    assert {line.partition(": ")[0] for line in told} == {
        "a request was refused after a completion, the rollout is scored"
    }


def test_what_a_sandbox_makes_up_cannot_flood_a_terminal() -> None:
    told: list[str] = []
    gate = AgentGate(told.append)
    for number in range(100):
        gate.attempt(an_attempt("\x1b[31m" + "x" * number + "\nmore"))
    assert len(told) == MAX_KINDS
    assert not any("\x1b" in line or "\n" in line for line in told)


def test_the_closing_table_counts_rollouts_with_refused_requests() -> None:
    tally = Tally()
    for attempt in (an_attempt(REFUSED, "other"), an_attempt(rollout=1), replace(an_attempt("z", rollout=2))):
        tally.attempt(attempt)
    table = io.StringIO()
    closing_table(tally, [], table)
    assert f"refused        requests in 2 rollouts after a completion, the first: {REFUSED}" in table.getvalue()
