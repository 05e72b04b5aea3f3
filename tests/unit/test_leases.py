"""What one sandbox may ask for, and what is recorded of it."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.completion.base import stop_strings
from orchestrator.completion.tokenizer import load_tokenizer
from orchestrator.errors import CompletionError, ContextLengthError, ProtocolError, ToolError
from orchestrator.proxy.budgets import Budgets, LimitReached
from orchestrator.proxy.lease import MAX_STEP_CHARS, Lease
from orchestrator.proxy.numbered_calls import NumberedCalls, SequenceError
from orchestrator.proxy.requests import AgentRequest
from orchestrator.rules.outcome import Refused, Submission
from orchestrator.types import CompletionKind, Limits, ManagedAgent, Message, Step
from tests.fakes.completers import ScriptedCompleter, text_completion
from tests.fakes.plans import TALK, a_plan, an_agent, some_limits
from tests.fakes.tokenizer import tokenizer_folder

ACTION = CompletionKind.ACTION


def a_lease(script: list[str | Exception], **changes: object) -> tuple[Lease, ScriptedCompleter]:
    completer = ScriptedCompleter(script)
    return Lease(a_plan(**changes), completer, None, {}), completer


async def test_a_retried_call_gets_the_recorded_answer_and_never_a_second_sample() -> None:
    lease, completer = a_lease(["one", "two"])
    first = await lease.complete(AgentRequest(1, ACTION, TALK), b"content")
    again = await lease.complete(AgentRequest(1, ACTION, TALK), b"content")
    assert first.completion is again.completion
    assert len(completer.requests) == 1
    assert len(lease.turns) == 1


async def test_a_client_that_goes_away_finds_its_answer_when_it_asks_again() -> None:
    gate = asyncio.Event()
    completer = ScriptedCompleter(["answer"], gate)
    lease = Lease(a_plan(), completer, None, {})
    call = asyncio.ensure_future(lease.complete(AgentRequest(1, ACTION, TALK), b"x"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    gate.set()
    reply = await lease.complete(AgentRequest(1, ACTION, TALK), b"x")
    assert reply.completion is not None
    assert reply.completion.visible == "answer"
    assert len(completer.requests) == 1


@pytest.mark.parametrize(("sequence", "content"), [(1, b"other"), (3, b"content"), (0, b"content")])
async def test_a_reused_or_skipped_number_is_refused(sequence: int, content: bytes) -> None:
    lease, completer = a_lease(["one"])
    await lease.complete(AgentRequest(1, ACTION, TALK), b"content")
    with pytest.raises(SequenceError):
        await lease.complete(AgentRequest(sequence, ACTION, TALK), content)
    assert len(completer.requests) == 1


async def test_two_calls_at_once_are_refused() -> None:
    gate = asyncio.Event()
    lease = Lease(a_plan(), ScriptedCompleter(["a"], gate), None, {})
    first = asyncio.ensure_future(lease.complete(AgentRequest(1, ACTION, TALK), b"1"))
    await asyncio.sleep(0)
    with pytest.raises(SequenceError):
        await lease.complete(AgentRequest(2, ACTION, TALK), b"2")
    gate.set()
    await first


async def test_an_ended_lease_cancels_what_is_being_sampled() -> None:
    completer = ScriptedCompleter(["never"], asyncio.Event())
    lease = Lease(a_plan(), completer, None, {})
    call = asyncio.ensure_future(lease.complete(AgentRequest(1, ACTION, TALK), b"x"))
    for _ in range(3):
        await asyncio.sleep(0)
    await lease.aclose()
    assert completer.cancelled == 1
    await asyncio.gather(call, return_exceptions=True)
    assert not lease.live


async def test_the_completion_budget_is_reserved_before_it_is_spent() -> None:
    lease, completer = a_lease(["a", "b"], limits=some_limits(completions=1))
    await lease.complete(AgentRequest(1, ACTION, TALK), b"1")
    reply = await lease.complete(AgentRequest(2, ACTION, TALK), b"2")
    assert reply.ended == "budget"
    assert len(completer.requests) == 1
    ending = await lease.ended()
    assert ending.name == "budget"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        (some_limits(prompt_tokens=9), "9 prompt tokens"),
        (some_limits(completion_tokens=1), "1 sampled tokens"),
        (some_limits(completions=1), "1 completions"),
    ],
)
async def test_every_budget_of_completions_is_named_and_nothing_is_sampled_past_it(
    limits: Limits, named: str
) -> None:
    lease, completer = a_lease(["a", "b"], limits=limits)
    first = await lease.complete(AgentRequest(1, ACTION, TALK), b"1")
    assert first.completion is not None  # 10 prompt tokens, 1 sampled
    assert (await lease.complete(AgentRequest(2, ACTION, TALK), b"2")).ended == "budget"
    assert await lease.ended() == Refused("budget", named)
    assert len(completer.requests) == 1


async def test_a_completion_that_was_refused_gives_back_all_that_it_held() -> None:
    budgets = Budgets(
        a_plan(agent=an_agent(max_steps=1), limits=some_limits(completions=1, prompt_tokens=10)), None
    )
    assert await budgets.begin(AgentRequest(1, ACTION, TALK), 10) == 100
    budgets.end(1, given_up=False)
    assert await budgets.begin(AgentRequest(2, ACTION, TALK), 10) == 100


async def test_the_tokens_of_a_prompt_are_spent_once() -> None:
    budgets = Budgets(a_plan(limits=some_limits(prompt_tokens=20)), None)
    for sequence in (1, 2):
        await budgets.begin(AgentRequest(sequence, ACTION, TALK), 10)
        budgets.spend(sequence, text_completion("x"))
    with pytest.raises(LimitReached, match="20 prompt tokens"):
        await budgets.begin(AgentRequest(3, ACTION, TALK), 1)


async def test_no_more_is_sampled_than_the_line_has_room_for() -> None:
    budgets = Budgets(a_plan(limits=some_limits(max_token_length=60)), None)
    assert await budgets.begin(AgentRequest(1, ACTION, TALK), 50) == 10


async def test_of_calls_at_a_time_twice_as_many_answers_are_kept() -> None:
    calls, made = NumberedCalls[int](together=2), iter(range(1, 9))

    async def answer() -> int:
        return next(made)

    for number in range(1, 5):
        assert await calls.answer(number, b"%d" % number, answer) == number
    assert [await calls.answer(number, b"%d" % number, answer) for number in range(1, 5)] == [1, 2, 3, 4]
    assert await calls.answer(5, b"5", answer) == 5
    with pytest.raises(SequenceError):
        await calls.answer(1, b"1", answer)


async def test_steps_are_kept_up_to_so_many_characters_together() -> None:
    lease, _ = a_lease(["a"])
    for size in (MAX_STEP_CHARS - 5, 6, 5, 1):
        lease.record_step(Step(1, "x" * size, "", "", "", "", is_final_answer=False, duration_s=0.0))
    assert [len(step.model_output) for step in lease.steps] == [MAX_STEP_CHARS - 5, 5]


async def test_no_action_is_sampled_past_the_last_step() -> None:
    lease, completer = a_lease(["a", "b"], agent=an_agent(max_steps=1))
    await lease.complete(AgentRequest(1, ACTION, TALK), b"1")
    assert (await lease.complete(AgentRequest(2, ACTION, TALK), b"2")).ended == "max_steps"
    assert len(completer.requests) == 1


@pytest.mark.parametrize(("own", "most"), [(2, 2), (None, 3)])
async def test_a_managed_agent_takes_no_more_steps_in_a_call_than_it_has(own: int | None, most: int) -> None:
    agent = an_agent(max_steps=3, managed_agents=(ManagedAgent("helper", "Helps.", max_steps=own),))
    lease, completer = a_lease(["x"] * 9, agent=agent)
    sequence = 0

    async def ask(talk: tuple[Message, ...]) -> str | None:
        nonlocal sequence
        sequence += 1
        return (
            await lease.complete(AgentRequest(sequence, ACTION, talk, agent="helper"), str(sequence).encode())
        ).ended

    step = (Message("assistant", "x"), Message("user", "Observation:"))
    for _ in range(2):  # two calls
        for taken in range(most):
            assert await ask((*TALK, *step * taken)) is None
    assert await ask((*TALK, *step * most)) == "max_steps"
    assert len(completer.requests) == 2 * most
    assert await lease.ended() == Refused("max_steps", f"{most} steps of helper")


async def test_the_last_answer_is_only_sampled_where_it_was_asked_for() -> None:
    lease, _ = a_lease(["a"])
    assert (await lease.complete(AgentRequest(1, CompletionKind.FINAL, TALK), b"1")).ended == "max_steps"
    lease, _ = a_lease(["a"], agent=an_agent(final_answer_at_max_steps=True))
    assert (await lease.complete(AgentRequest(1, CompletionKind.FINAL, TALK), b"1")).completion is not None


@pytest.mark.parametrize(
    ("error", "name"),
    [(CompletionError("HTTP 500"), "llm_error"), (ContextLengthError("too long"), "context_length")],
)
async def test_what_the_endpoint_refuses_ends_the_lease_by_name(error: Exception, name: str) -> None:
    lease, _ = a_lease([error])
    assert (await lease.complete(AgentRequest(1, ACTION, TALK), b"1")).ended == name
    assert not lease.live


@pytest.mark.parametrize("takes_ids", [True, False])
async def test_a_conversation_far_too_long_ends_the_lease_before_it_is_encoded(
    takes_ids: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder()))
    sizes: list[int] = []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, plain=(): sizes.append(len(text)) or encode(text))
    completer = ScriptedCompleter(["one"])
    completer.takes_ids = takes_ids
    lease = Lease(a_plan(), completer, tokenizer, {})
    reply = await lease.complete(AgentRequest(1, ACTION, (*TALK, Message("user", "word " * (800 << 10)))), b"1")
    assert reply.ended == "context_length"
    assert "characters for a line of 16384 tokens" in (await lease.ended()).detail  # type: ignore[union-attr]
    assert sum(sizes) < 1 << 20
    assert completer.requests == []


async def test_many_short_messages_are_counted_together_and_not_to_their_end() -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder()))
    lease = Lease(a_plan(), ScriptedCompleter(["one"]), tokenizer, {})
    reply = await lease.complete(AgentRequest(1, ACTION, (Message("user", "word " * 3_200),) * 260), b"1")
    assert reply.ended == "context_length"


async def test_a_record_holds_no_more_text_than_the_tokens_of_a_rollout_can_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("orchestrator.proxy.budgets.MAX_RECORDED_CHARS", 1_000)
    lease, completer = a_lease(["one", "two", "three"])
    first = Message("user", "x" * 600)
    assert (await lease.complete(AgentRequest(1, ACTION, (first,)), b"1")).completion is not None
    grown = (first, Message("assistant", "one"), Message("user", "y" * 390))  # what was there counts once
    assert (await lease.complete(AgentRequest(2, ACTION, grown), b"2")).completion is not None
    assert (await lease.complete(AgentRequest(3, ACTION, (Message("user", "z" * 20),)), b"3")).ended == "budget"
    assert await lease.ended() == Refused("budget", "1000 characters of conversation")
    assert len(completer.requests) == 2


async def test_turns_record_only_what_is_new() -> None:
    lease, _ = a_lease(["one", "two"])
    await lease.complete(AgentRequest(1, ACTION, TALK), b"1")
    longer = (*TALK, Message("assistant", "one</code>"), Message("user", "Observation:\n1"))
    await lease.complete(AgentRequest(2, ACTION, longer), b"2")
    await lease.complete(AgentRequest(3, ACTION, (Message("user", "something else"),)), b"3")
    assert [(t.kept, len(t.messages), t.segment) for t in lease.turns] == [(0, 2, 0), (2, 2, 0), (0, 1, 1)]


async def test_each_completion_has_a_seed_of_its_own_and_all_sampling_is_ours() -> None:
    lease, completer = a_lease(["one", "two"])
    await lease.complete(AgentRequest(1, ACTION, TALK), b"1")
    await lease.complete(AgentRequest(2, ACTION, TALK), b"2")
    seeds = [r.sampling.seed for r in completer.requests]
    assert len(set(seeds)) == 2
    assert completer.requests[0].stop == ("Observation:", "Calling tools:", "</code>")


def test_a_closing_tag_inside_the_opening_one_is_no_stop_string() -> None:
    assert stop_strings(ACTION, ("```python", "```")) == ("Observation:", "Calling tools:")
    assert stop_strings(CompletionKind.PLAN, ("<code>", "</code>")) == ("<end_plan>",)


async def test_the_first_result_wins() -> None:
    lease, _ = a_lease(["x"])
    await lease.submit(Submission("final_answer", b"1", ""))
    with pytest.raises(ProtocolError):
        await lease.submit(Submission("final_answer", b"2", ""))
    assert await lease.ended() == Submission("final_answer", b"1", "")


class _Failing:
    description, inputs, output_type = "", {}, "string"  # type: ignore[var-annotated]

    async def call(self, arguments: object) -> str:
        raise ToolError("no network")


async def test_a_failing_tool_is_an_observation_and_is_recorded() -> None:
    lease = Lease(a_plan(limits=some_limits(tool_calls=2)), ScriptedCompleter([""]), None, {"web": _Failing()})
    assert (await lease.call_tool(1, b"1", "web", {})).error == "no network"
    assert "there is no tool" in str((await lease.call_tool(2, b"2", "shell", {})).error)
    assert (await lease.call_tool(3, b"3", "web", {})).ended == "budget"
    assert [call.error is not None for call in lease.tool_calls] == [True, True]
