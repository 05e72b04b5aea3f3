"""Requests of one program side by side: what is recorded, in which order, and what becomes of those given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from orchestrator.completion.base import CompletionRequest
from orchestrator.completion.line import visible_text
from orchestrator.completion.tokenizer import HubTokenizer, load_tokenizer
from orchestrator.completion.trajectory import trajectory
from orchestrator.errors import ProtocolError
from orchestrator.proxy import budgets
from orchestrator.proxy.completions import MAX_GIVEN_UP
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.numbered_calls import SequenceError
from orchestrator.proxy.requests import AgentRequest, Reply
from orchestrator.rules.cost_limit import CostLimit
from orchestrator.rules.outcome import Refused
from orchestrator.run.line import attempt_line, read_attempt
from orchestrator.run.lines import dumps
from orchestrator.types import (
    Attempt,
    Completion,
    CompletionKind,
    Ended,
    EndedName,
    Limits,
    Message,
    Record,
    Turn,
    conversations,
)
from tests.fakes.plans import TALK, a_plan, an_agent, some_limits
from tests.fakes.tokenizer import tokenizer_folder

ACTION = CompletionKind.ACTION


class HeldEndpoint:
    """Says `answer to N`, when `let(N)` was called; N is the request's number. With ids if it has a tokenizer."""

    guides = False

    def __init__(self, tokenizer: HubTokenizer | None) -> None:
        self.takes_ids = tokenizer is not None
        self.tokenizer = tokenizer
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self.limits: dict[int, int] = {}
        self._gates: dict[int, asyncio.Event] = {}

    def let(self, number: int) -> None:
        self._gates.setdefault(number, asyncio.Event()).set()

    async def sample(self, request: CompletionRequest) -> Completion:
        number = request.sequence
        self.begun.append(number)
        self.limits[number] = request.sampling.max_tokens
        try:
            await self._gates.setdefault(number, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        text = f"answer to {number}"
        if self.tokenizer is None:
            return Completion(text, text, "stop", None, None, 10, 4)
        ids = (*self.tokenizer.encode(text), *self.tokenizer.encode("<|im_end|>"))
        text, visible, _ = visible_text(self.tokenizer, ids, ())
        prompt = len(request.prompt_ids or ())
        return Completion(text, visible, "stop", ids, (-0.5,) * len(ids), prompt, len(ids))

    async def aclose(self) -> None:
        """Nothing is open."""


@pytest.fixture(scope="module")
def tokenizer() -> HubTokenizer:
    return load_tokenizer(str(tokenizer_folder()))


@pytest.fixture(params=[True, False], ids=["ids", "text"])
def endpoint(request: pytest.FixtureRequest, tokenizer: HubTokenizer) -> HeldEndpoint:
    return HeldEndpoint(tokenizer if request.param else None)


def a_lease(endpoint: HeldEndpoint, limits: Limits | None = None) -> Lease:
    plan = a_plan(agent=an_agent(kind="program", max_steps=100), limits=limits or some_limits())
    return Lease(plan, endpoint, endpoint.tokenizer, {})


def asked(number: int, *messages: Message) -> AgentRequest:
    return AgentRequest(number, ACTION, messages or (*TALK, Message("user", f"part {number}")))


async def begin(lease: Lease, request: AgentRequest) -> asyncio.Task[Reply]:
    task = asyncio.ensure_future(lease.complete(request, repr(request).encode()))
    await settled()
    return task


async def settled(until: Callable[[], bool] = lambda: False) -> None:
    """Lets everything go on that can."""
    for _ in range(30):
        await asyncio.sleep(0)
        if until():
            return


def sampled(turn: Turn) -> str:
    return turn.completion.visible


def lines(turns: list[Turn], tokenizer: HubTokenizer | None) -> dict[int, str]:
    """What each line says, by its segment. Raises RecordError."""
    if tokenizer is not None:
        return trained(turns, tokenizer)
    told = Record(0.0, turns=tuple(turns))
    segments = sorted({turn.segment for turn in turns if not turn.abandoned})
    made = {segment: trajectory(told, tokenizer, "", segment) for segment in segments}
    return {
        segment: " | ".join(m.content for m in line.messages if m.role == "assistant")
        for segment, line in made.items()
    }


def trained(turns: list[Turn], tokenizer: HubTokenizer) -> dict[int, str]:
    """The trained tokens of each line as text. The whole line must be as the template prints the conversation."""
    told, found = Record(0.0, turns=tuple(turns)), {}
    for segment in sorted({turn.segment for turn in turns if not turn.abandoned}):
        line = trajectory(told, tokenizer, "", segment)
        learnt = [token for token, learn in zip(line.tokens_T, line.trained_T, strict=True) if learn]
        found[segment] = tokenizer.decode(learnt).removesuffix("<|im_end|>").replace("<|im_end|>", " | ")
        printed = tokenizer.render(line.messages, generation_prompt=False)
        assert tokenizer.decode(line.tokens_T).strip() == printed.strip()
    return found


async def test_requests_run_side_by_side_and_stand_in_the_order_of_their_starts(endpoint: HeldEndpoint) -> None:
    lease = a_lease(endpoint)
    waiting = [await begin(lease, asked(number)) for number in (1, 2, 3)]
    assert endpoint.begun == [1, 2, 3]
    for number in (3, 1, 2):
        endpoint.let(number)
        await waiting[number - 1]
    assert [sampled(turn) for turn in lease.turns] == ["answer to 1", "answer to 2", "answer to 3"]
    talks = list(conversations(lease.turns))
    assert [talk[-1].content for talk in talks] == ["part 1", "part 2", "part 3"]
    assert lines(lease.turns, endpoint.tokenizer) == {n: f"answer to {n + 1}" for n in range(3)}
    await lease.aclose()


async def test_the_record_of_parallel_requests_is_read_as_it_was_written(endpoint: HeldEndpoint) -> None:
    lease = a_lease(endpoint)
    waiting = [await begin(lease, asked(number)) for number in (1, 2)]
    for number in (2, 1):
        endpoint.let(number)
        await waiting[number - 1]
    await lease.completions.give_up(2)
    record = Record(0.0, turns=tuple(lease.turns))
    attempt = Attempt(lease.plan, record, Ended(EndedName.FINISHED))
    assert read_attempt(dumps(attempt_line(attempt))).record.turns == record.turns
    assert [turn.abandoned for turn in record.turns] == [False, True]


async def test_more_at_a_time_than_the_plan_has_are_refused(endpoint: HeldEndpoint) -> None:
    lease = a_lease(endpoint, some_limits(parallel_completions=2))
    for number in (1, 2):
        await begin(lease, asked(number))
    with pytest.raises(SequenceError):
        await lease.complete(asked(3), b"3")
    assert endpoint.begun == [1, 2]
    await lease.aclose()
    assert endpoint.cancelled == [1, 2]


async def test_numbers_may_arrive_in_another_order_and_each_is_taken_once(endpoint: HeldEndpoint) -> None:
    lease = a_lease(endpoint, some_limits(parallel_completions=4))
    for number in (2, 1, 4, 3):
        endpoint.let(number)
        await lease.complete(asked(number), b"%d" % number)
    again = await lease.complete(asked(1), b"1")
    assert again.completion is not None
    assert endpoint.begun == [2, 1, 4, 3]
    for number, content in ((1, b"other"), (9, b"9"), (0, b"0")):
        with pytest.raises(SequenceError):
            await lease.complete(asked(number), content)


async def test_two_that_continue_the_same_conversation_are_two_lines(endpoint: HeldEndpoint) -> None:
    lease = a_lease(endpoint)
    endpoint.let(1)
    await (await begin(lease, asked(1, *TALK)))
    spoken = (*TALK, Message("assistant", "answer to 1"))
    waiting = [await begin(lease, asked(n, *spoken, Message("user", f"branch {n}"))) for n in (2, 3)]
    for number in (3, 2):
        endpoint.let(number)
        await waiting[number - 2]
    assert [turn.segment for turn in lease.turns] == [0, 0, 1]
    said = lines(lease.turns, endpoint.tokenizer)
    # With ids, what was sampled is trained once: the first answer is context of the second line.
    assert said == {
        0: "answer to 1 | answer to 2",
        1: "answer to 3" if endpoint.takes_ids else "answer to 1 | answer to 3",
    }


async def test_a_guessed_answer_makes_no_record_that_cannot_be_read(endpoint: HeldEndpoint) -> None:
    """Code may know what will be sampled: a request that continues it, sent before, is a line of its own."""
    lease = a_lease(endpoint)
    first = await begin(lease, asked(1, *TALK))
    guess = (*TALK, Message("assistant", "answer to 1"), Message("user", "go on"))
    second = await begin(lease, asked(2, *guess))
    for number, task in ((2, second), (1, first)):
        endpoint.let(number)
        await task
    endpoint.let(3)
    await lease.complete(asked(3, *guess), b"3")
    lines(lease.turns, endpoint.tokenizer)
    assert [turn.segment for turn in lease.turns] == [0, 1, 0]


async def test_what_nobody_waits_for_is_cancelled_at_the_endpoint(endpoint: HeldEndpoint) -> None:
    lease = a_lease(endpoint, some_limits(parallel_completions=1))
    endpoint.let(1)
    await (await begin(lease, asked(1, *TALK)))
    spoken = (*TALK, Message("assistant", "answer to 1"), Message("user", "go on"))
    given_up = await begin(lease, asked(2, *spoken))
    assert not lease.completions.awaited or lease.clock.sampling == 1
    await lease.completions.give_up(2)
    assert endpoint.cancelled == [2]
    assert (await given_up).refused is not None
    assert lease.completions.awaited, "its program got nothing since"
    assert lease.live
    endpoint.let(3)
    again = await lease.complete(asked(3, *spoken), b"3")
    assert again.completion is not None
    assert not lease.completions.awaited
    assert lines(lease.turns, endpoint.tokenizer) == {0: "answer to 1 | answer to 3"}


async def test_an_answer_that_nobody_read_is_no_part_of_a_line(endpoint: HeldEndpoint) -> None:
    lease = a_lease(endpoint)
    for number in (1, 2, 3, 4):
        endpoint.let(number)
    await lease.complete(asked(1, *TALK), b"1")
    spoken = (*TALK, Message("assistant", "answer to 1"), Message("user", "go on"))
    await lease.complete(asked(2, *spoken), b"2")
    await lease.completions.give_up(2)
    await lease.complete(asked(3, *spoken), b"3")
    further = (*spoken, Message("assistant", "answer to 3"), Message("user", "and on"))
    await lease.complete(asked(4, *further), b"4")
    assert [turn.abandoned for turn in lease.turns] == [False, True, False, False]
    assert lines(lease.turns, endpoint.tokenizer) == {0: "answer to 1 | answer to 3 | answer to 4"}


async def test_the_first_answer_of_all_may_be_the_one_that_nobody_read(endpoint: HeldEndpoint) -> None:
    lease = a_lease(endpoint)
    for number in (1, 2):
        endpoint.let(number)
    await lease.complete(asked(1, *TALK), b"1")
    await lease.completions.give_up(1)
    await lease.complete(asked(2, *TALK), b"2")
    assert [(turn.segment, turn.abandoned) for turn in lease.turns] == [(0, True), (1, False)]
    assert lines(lease.turns, endpoint.tokenizer) == {1: "answer to 2"}


@pytest.mark.parametrize("ended", [True, False])
async def test_what_was_continued_was_read_whatever_is_said_of_it(endpoint: HeldEndpoint, ended: bool) -> None:
    lease = a_lease(endpoint)
    for number in (1, 2) if ended else (1,):
        endpoint.let(number)
    await lease.complete(asked(1, *TALK), b"1")
    spoken = (*TALK, Message("assistant", "answer to 1"), Message("user", "go on"))
    task = await begin(lease, asked(2, *spoken))
    await lease.completions.give_up(1)
    endpoint.let(2)
    await task
    assert [turn.abandoned for turn in lease.turns] == [False, False]
    assert lines(lease.turns, endpoint.tokenizer) == {0: "answer to 1 | answer to 2"}


async def test_a_request_given_up_before_it_came_is_never_sampled(endpoint: HeldEndpoint) -> None:
    lease = a_lease(endpoint)
    await lease.completions.give_up(1)
    assert (await lease.complete(asked(1), b"1")).refused is not None
    assert endpoint.begun == []
    with pytest.raises(ProtocolError):
        await lease.completions.give_up(1_000)


async def test_giving_up_costs_a_completion_a_step_and_what_may_have_been_sampled(endpoint: HeldEndpoint) -> None:
    lease = a_lease(endpoint, some_limits(completions=3, completion_tokens=10_000))
    for number in (1, 2, 3):
        task = await begin(lease, asked(number))
        await lease.completions.give_up(number)
        await task
    assert (await lease.complete(asked(4), b"4")).ended == "budget"
    assert await lease.ended() == Refused("budget", "3 completions")


async def test_requests_at_a_time_share_what_is_left_of_the_tokens(endpoint: HeldEndpoint) -> None:
    """A request waits until it is known what those before it leave, and gets that."""
    lease = a_lease(endpoint, some_limits(completion_tokens=150))
    first, second = [await begin(lease, asked(number)) for number in (1, 2)]
    assert endpoint.begun == [1]
    endpoint.let(1)
    used = (await first).completion
    assert used is not None
    await settled(lambda: endpoint.begun == [1, 2])
    assert endpoint.limits == {1: 100, 2: min(100, 150 - used.completion_tokens)}
    endpoint.let(2)
    assert (await second).completion is not None
    assert sum(turn.completion.completion_tokens for turn in lease.turns) <= 150


async def test_an_agent_of_smolagents_still_asks_for_one_at_a_time(endpoint: HeldEndpoint) -> None:
    lease = Lease(a_plan(), endpoint, endpoint.tokenizer, {})
    task = await begin(lease, asked(1, *TALK))
    with pytest.raises(SequenceError):
        await lease.complete(asked(2, *TALK), b"2")
    endpoint.let(1)
    await task


@pytest.mark.parametrize("together", [1, 4])
async def test_requests_cut_before_they_came_keep_no_number_back(endpoint: HeldEndpoint, together: int) -> None:
    """A long one is read first: its client may hang up before the lease knows of it."""
    lease = a_lease(endpoint, some_limits(parallel_completions=together))
    for number in range(1, together + 1):
        await lease.completions.give_up(number)
    endpoint.let(together + 1)
    assert (await lease.complete(asked(together + 1), b"next")).completion is not None
    assert (await lease.complete(asked(1), b"late")).refused is not None


async def test_what_was_continued_was_read_also_where_nobody_read_on(endpoint: HeldEndpoint) -> None:
    lease = a_lease(endpoint)
    for number in (1, 2, 3):
        endpoint.let(number)
    await lease.complete(asked(1, *TALK), b"1")
    spoken = (*TALK, Message("assistant", "answer to 1"), Message("user", "go on"))
    for number in (2, 3):
        await lease.complete(asked(number, *spoken), str(number).encode())
        await lease.completions.give_up(number)
    await lease.completions.give_up(1)
    assert [(turn.segment, turn.abandoned) for turn in lease.turns] == [(0, False), (0, True), (0, True)]
    assert lines(lease.turns, endpoint.tokenizer) == {0: "answer to 1"}


async def test_tokens_that_are_only_counted_stand_on_no_record(
    endpoint: HeldEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "MAX_RECORDED_CHARS", 10_000)
    lease = a_lease(endpoint, some_limits(max_token_length=1 << 20))
    other = Message("user", "x" * 1_000)
    endpoint.let(1)
    for number in range(2, 30):  # together more than a record may have
        counted = replace(asked(number, *TALK, other), count_only=True)
        assert (await lease.complete(counted, str(number).encode())).ended is None
    assert (await lease.complete(asked(1, *TALK), b"1")).completion is not None
    await lease.completions.give_up(2)
    assert lease.notes == ()
    assert not lease.completions.awaited


async def test_what_is_sampled_when_the_result_comes_is_cut(endpoint: HeldEndpoint) -> None:
    lease = a_lease(endpoint)
    task = await begin(lease, asked(1))
    await lease.stop()
    endpoint.let(1)
    await asyncio.wait([task])
    assert task.cancelled()
    assert endpoint.cancelled == [1]
    assert lease.turns == []
    await lease.aclose()


async def test_giving_up_costs_as_much_as_the_completion_could_have(endpoint: HeldEndpoint) -> None:
    """A service may take money for what was sampled and not read."""
    cost_limit = CostLimit(1_000.0, lambda _, prompt, sampled: float(prompt + sampled), lambda: None)
    plan = a_plan(agent=an_agent(kind="program", max_steps=100))
    lease = Lease(plan, endpoint, endpoint.tokenizer, {}, cost_limit=cost_limit)
    task = await begin(lease, asked(1))
    await settled(lambda: endpoint.begun == [1])
    await lease.completions.give_up(1)
    await task
    assert cost_limit.spent > endpoint.limits[1]


async def test_numbers_that_are_given_up_are_kept_up_to_a_limit(endpoint: HeldEndpoint) -> None:
    lease = a_lease(endpoint)
    for number in range(1, MAX_GIVEN_UP + 2):
        await lease.completions.give_up(number)
    assert await lease.ended() == Refused("budget", f"{MAX_GIVEN_UP} completions that were given up")


async def test_a_request_given_up_while_it_was_read_takes_no_place(endpoint: HeldEndpoint) -> None:
    """The program asks for another one in its place, perhaps in the same moment."""
    lease = a_lease(endpoint, some_limits(parallel_completions=1))
    await lease.completions.give_up(1)
    late = asyncio.ensure_future(lease.complete(asked(1), b"1"))
    endpoint.let(2)
    next_ = asyncio.ensure_future(lease.complete(asked(2), b"2"))
    assert (await late).refused is not None
    assert (await next_).completion is not None
