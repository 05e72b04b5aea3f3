"""A sandbox is brought to where a record stands: what is served, and what is refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.completion.base import CompletionRequest
from orchestrator.completion.line import visible_text
from orchestrator.completion.tokenizer import HubTokenizer, load_tokenizer
from orchestrator.errors import ToolError
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.playback import OtherState
from orchestrator.proxy.requests import AgentRequest, Reply
from orchestrator.rules.outcome import Refused
from orchestrator.types import (
    Completion,
    CompletionKind,
    Continued,
    Ended,
    EndedName,
    Entry,
    FailedName,
    Grader,
    Message,
    Prefix,
    Record,
    RolloutPlan,
    Task,
    TaskStep,
    ToolCall,
    gathered,
)
from orchestrator.types.prefix import branching, going_on
from tests.fakes.plans import TALK, a_plan, an_agent, some_limits
from tests.fakes.tokenizer import tokenizer_folder

ACTION, PLAN = CompletionKind.ACTION, CompletionKind.PLAN
LOST = Continued(2, 0, "it was lost")
THEN, NOW = "<A object at 0x7f2a9f92d990>", "<A object at 0x7f459db5d890>"


class Endpoint:
    """Says `answer to N`, N being the request's number; with ids if it has a tokenizer."""

    guides = False

    def __init__(self, tokenizer: HubTokenizer | None) -> None:
        self.takes_ids = tokenizer is not None
        self.tokenizer = tokenizer
        self.requests: list[CompletionRequest] = []

    async def sample(self, request: CompletionRequest) -> Completion:
        self.requests.append(request)
        text = f"answer to {request.sequence}"
        if self.tokenizer is None:
            return Completion(text, text, "stop", None, None, 10, 4)
        ids = (*self.tokenizer.encode(text), *self.tokenizer.encode("<|im_end|>"))
        text, visible, _ = visible_text(self.tokenizer, ids, ())
        return Completion(text, visible, "stop", ids, (-0.5,) * len(ids), len(request.prompt_ids or ()), len(ids))

    async def aclose(self) -> None:
        """Nothing is open."""


class CountingTool:
    """Says how often it was called, or fails."""

    name, description, inputs, output_type = "search", "", {}, "string"

    def __init__(self) -> None:
        self.calls: list[Mapping[str, Any]] = []

    async def call(self, arguments: Mapping[str, Any]) -> str:
        self.calls.append(arguments)
        if arguments.get("fail"):
            raise ToolError("no such page")
        return f"result {len(self.calls)}"


@pytest.fixture(scope="module")
def tokenizer() -> HubTokenizer:
    return load_tokenizer(str(tokenizer_folder()))


@pytest.fixture(params=[True, False], ids=["ids", "text"])
def endpoint(request: pytest.FixtureRequest, tokenizer: HubTokenizer) -> Endpoint:
    return Endpoint(tokenizer if request.param else None)


def code(**changes: Any) -> RolloutPlan:
    return a_plan(agent=an_agent(planning_interval=2), **changes)


def program(**changes: Any) -> RolloutPlan:
    return a_plan(agent=an_agent(kind="program", max_steps=100), **changes)


def a_lease(
    endpoint: Endpoint,
    plan: RolloutPlan,
    prefix: Prefix | None = None,
    served: Callable[[Entry], None] = lambda one: None,
) -> Lease:
    tools: Any = {"search": CountingTool()}
    lease = Lease(replace(plan, prefix=prefix), endpoint, endpoint.tokenizer, tools, served=served)
    lease.clock.start()
    return lease


def again(endpoint: Endpoint, first: Lease) -> Lease:
    """Another sandbox, which is brought to where the first one stood, and may not part from the record."""
    record = Record(0.0, turns=tuple(first.turns), tool_calls=tuple(first.tool_calls))
    prefix = going_on(record, "it was lost")
    assert prefix is not None
    return a_lease(endpoint, first.plan, replace(prefix, continued=()))


def talk(*said: str) -> tuple[Message, ...]:
    """A conversation: what the agent says and what it sees, in turn."""
    roles = ("assistant", "user")
    return (*TALK, *(Message(roles[place % 2], text) for place, text in enumerate(said)))  # type: ignore[arg-type]


async def ask(lease: Lease, number: int, *said: str, kind: CompletionKind = ACTION, **fields: Any) -> Reply:
    request = AgentRequest(number, kind, fields.pop("messages", talk(*said)), **fields)
    return await lease.complete(request, repr(request).encode())


async def refusal(lease: Lease) -> str:
    async with asyncio.timeout(5):
        ending = await lease.ended()
    assert isinstance(ending, Refused)
    assert ending.name == "record_error"
    return ending.detail


async def both(endpoint: Endpoint, plan: RolloutPlan, *said: str) -> Lease:
    """A lease with two turns, whose second prompt has these."""
    first = a_lease(endpoint, plan)
    await ask(first, 1)
    await ask(first, 2, *said)
    return first


@pytest.mark.parametrize("plan", [code(), program()], ids=["code", "program"])
async def test_a_lost_rollout_parts_from_its_record_at_the_first_difference(
    endpoint: Endpoint, plan: RolloutPlan
) -> None:
    first = await both(endpoint, plan, "answer to 1", "seen 1")
    prefix = going_on(Record(0.0, turns=tuple(first.turns)), "it was lost")
    lease = a_lease(endpoint, plan, prefix)
    await ask(lease, 1)
    reply = await ask(lease, 2, "answer to 1", "seen something else")
    assert reply.completion is not None
    assert [turn.completion.visible for turn in lease.turns] == ["answer to 1", "answer to 2"]
    assert lease.turns[0] == first.turns[0], "what came before is kept"
    assert lease.turns[1].messages != first.turns[1].messages
    assert len(endpoint.requests) == 3, "what followed is sampled"
    assert lease.playback is not None
    assert (lease.playback.parting is None) == (plan.agent.kind == "program"), "a program may still ask for it"
    lease.playback.cut()
    (continued,) = lease.playback.continued
    assert continued.turn == 1
    assert "prompt 2 is not the recorded one" in continued.refused


async def test_a_program_that_asks_for_more_than_the_record_has_is_still_served_all_of_it(
    endpoint: Endpoint,
) -> None:
    """What is awaited when a sandbox is lost, or was given up while it was, is in no record."""
    first = await both(endpoint, program(), "answer to 1", "seen")
    aside = (Message("user", "aside"),)
    await ask(first, 4, messages=aside)
    record = Record(0.0, tuple(first.turns), continued=(LOST,))
    lease = a_lease(endpoint, program(), going_on(record, "it was lost"))
    await ask(lease, 1)
    assert (await ask(lease, 2, "answer to 1", "other")).completion is not None
    assert len(endpoint.requests) == 4, "it is sampled"
    assert lease.playback is not None
    lost_again = lease.playback.with_rest(replace(record, turns=tuple(lease.turns)))
    assert len(lost_again.turns) == 4, "nothing of it is dropped"
    for number, said in ((3, {"messages": aside}), (4, {"messages": talk("answer to 1", "seen")})):
        assert (await ask(lease, number, **said)).completion is not None
    assert len(endpoint.requests) == 4, "the rest is served, whatever its numbers are"
    assert lease.playback.over
    assert not lease.playback.continued[-1].refused
    assert sorted(turn.segment for turn in lease.turns) == [0, 0, 1, 2], "what was sampled has a line of its own"
    rest = "answer to 1", "seen", "answer to 2", "go on"
    for one in (first, lease):
        await ask(one, 5, *rest)
    then, now = endpoint.requests[4:]
    assert then == now, "the line is the recorded one"


async def test_a_rollout_that_gave_up_a_completion_goes_on_behind_all_of_them(endpoint: Endpoint) -> None:
    first = await both(endpoint, program(), "answer to 1", "seen")
    await first.completions.give_up(2)
    await ask(first, 3, "answer to 1", "seen")
    assert [turn.abandoned for turn in first.turns] == [False, True, False]
    told: list[Entry] = []
    lease = a_lease(endpoint, program(), going_on(Record(0.0, tuple(first.turns)), "it was lost"), told.append)
    await ask(lease, 1)
    await lease.completions.give_up(1)  # and not the other one: neither changes what is on record
    await ask(lease, 2, "answer to 1", "seen")
    await ask(lease, 3, "answer to 1", "seen")
    assert lease.turns == first.turns
    assert told == []
    for one in (first, lease):
        await ask(one, 4, "answer to 1", "seen", "answer to 3", "go on")
    then, now = endpoint.requests[3:]
    assert then == now


async def test_the_next_completion_is_asked_for_as_if_nothing_had_been_lost(endpoint: Endpoint) -> None:
    plan = code(limits=some_limits(max_token_length=300))
    first = await both(endpoint, plan, "answer to 1", "seen 1")
    lease = again(endpoint, first)
    await ask(lease, 1)
    await ask(lease, 2, "answer to 1", "seen 1")
    assert lease.turns == first.turns
    assert len(endpoint.requests) == 2, "the record was served"
    rest = "answer to 1", "seen 1", "answer to 2", "seen 2"
    await ask(first, 3, *rest)
    await ask(lease, 3, *rest)
    then, now = endpoint.requests[2:]
    assert then == now, "seed, ids, room"
    assert [replace(turn, started_s=0, ended_s=0) for turn in lease.turns] == [
        replace(turn, started_s=0, ended_s=0) for turn in first.turns
    ]


async def test_limits_go_on(endpoint: Endpoint) -> None:
    first = await both(endpoint, code(limits=some_limits(completions=2)), "answer to 1", "seen")
    lease = again(endpoint, first)
    await ask(lease, 1)
    await ask(lease, 2, "answer to 1", "seen")
    assert (await ask(lease, 3, "answer to 1", "seen", "answer to 2", "more")).ended == "budget"


async def test_state_is_refused_in_one_line_with_its_place(endpoint: Endpoint) -> None:
    lease = again(endpoint, await both(endpoint, code(), "answer to 1", "took 1 ms: 41"))
    await ask(lease, 1)
    assert (await ask(lease, 2, "answer to 1", "took 2 ms: 42")).ended == "record_error"
    told = "message 4 (user) has 'took <duration>: 41' then, 'took <duration>: 42' now"
    assert await refusal(lease) == f"prompt 2 is not the recorded one: {told}"


async def test_the_records_words_stay_wherever_the_text_comes_again(endpoint: Endpoint) -> None:
    first = await both(endpoint, code(), "answer to 1", THEN)
    lease = again(endpoint, first)
    await ask(lease, 1)
    await ask(lease, 2, "answer to 1", NOW)
    assert lease.playback is not None
    assert lease.playback.differences == {"address": 1}
    await ask(lease, 3, "answer to 1", NOW, "answer to 2", "seen")
    plan = (Message("system", "Plan."), Message("user", NOW))  # another conversation, as for a plan
    await ask(lease, 4, kind=PLAN, messages=plan)
    third, fourth = (request.messages for request in endpoint.requests[2:])
    assert third == talk("answer to 1", THEN, "answer to 2", "seen")
    assert fourth[1].content == THEN
    assert [turn.segment for turn in lease.turns] == [0, 0, 0, 1]


async def test_no_step_becomes_a_plan_and_no_number_another_seed(endpoint: Endpoint) -> None:
    first = await both(endpoint, code(), "answer to 1", "seen")
    lease = again(endpoint, first)
    assert (await ask(lease, 1, kind=PLAN)).ended == "record_error"
    assert await refusal(lease) == "prompt 1 is for action of the agent, now for plan of the agent: state"
    side = a_lease(endpoint, program())
    await ask(side, 1)
    lease = again(endpoint, side)
    await ask(lease, 1, count_only=True)
    assert (await ask(lease, 2)).ended == "record_error"
    assert await refusal(lease) == "prompt 1 came as request 2: state"


async def test_what_the_model_said_is_never_put_right(endpoint: Endpoint) -> None:
    plan = program()
    first = a_lease(endpoint, plan)
    await ask(first, 1, THEN, "go on")
    lease = again(endpoint, first)
    assert (await ask(lease, 1, NOW, "go on")).ended == "record_error"


# ---------------------------------------------------------------- programs


async def test_conversations_side_by_side_keep_their_own_words(endpoint: Endpoint) -> None:
    plan = program()
    first = a_lease(endpoint, plan)
    for number, words in enumerate(("took 2 ms", "took 3 ms"), 1):
        await ask(first, number, f"part {number}", words)
    lease = again(endpoint, first)
    for number in (2, 1):  # they come in another order, too
        await ask(lease, number, f"part {number}", "took 9 ms")
    rest = [(f"part {n}", "took 9 ms", f"answer to {n}", "go on") for n in (1, 2)]
    for number, said in enumerate(rest, 3):
        await ask(lease, number, *said)
    seen = [request.messages[3].content for request in endpoint.requests]
    assert seen == ["took 2 ms", "took 3 ms"] * 2
    assert [turn.segment for turn in lease.turns] == [1, 0, 0, 1]


async def test_equal_prompts_get_the_completion_with_their_number(endpoint: Endpoint) -> None:
    first = a_lease(endpoint, program())
    for number in (1, 2):
        await ask(first, number)
    lease = again(endpoint, first)
    said = [(await ask(lease, number)).completion for number in (2, 1)]
    assert [completion.visible for completion in said if completion] == ["answer to 2", "answer to 1"]


async def test_a_prompt_that_was_refused_then_is_refused_now(tokenizer: HubTokenizer) -> None:
    endpoint = Endpoint(tokenizer)
    first = a_lease(endpoint, program(limits=some_limits(max_token_length=120)))
    await ask(first, 1)
    long = "word " * 200
    refused = await ask(first, 2, "answer to 1", long)
    assert refused.refused is not None
    await ask(first, 3, "answer to 1", "short")
    lease = again(endpoint, first)
    await ask(lease, 1)
    assert await ask(lease, 2, "answer to 1", long) == refused
    assert (await ask(lease, 3, "answer to 1", "short")).completion == first.turns[-1].completion
    assert lease.playback is not None
    assert lease.playback.over


async def test_a_prompt_that_the_record_does_not_have_is_not_sampled(endpoint: Endpoint) -> None:
    lease = again(endpoint, await both(endpoint, program(), "answer to 1", "seen"))
    sampled = len(endpoint.requests)
    assert (await ask(lease, 1, "another", "question")).ended == "record_error"
    assert len(endpoint.requests) == sampled


async def test_nothing_is_continued_before_its_answer_came(endpoint: Endpoint) -> None:
    first = await both(endpoint, program(), "answer to 1", "seen")
    playback = again(endpoint, first).playback
    assert playback is not None
    second = AgentRequest(2, ACTION, talk("answer to 1", "seen"))
    playback.next(AgentRequest(1, ACTION, TALK), TALK, ())
    with pytest.raises(OtherState, match="prompt 2 came before the answer that it follows: state"):
        playback.next(second, second.messages, (), busy=(0,))
    turn, _ = playback.next(second, second.messages, ())
    assert turn == first.turns[1]


async def test_tokens_of_texts_are_counted_as_then(tokenizer: HubTokenizer) -> None:
    endpoint = Endpoint(tokenizer)
    endpoint.takes_ids = False
    first = await both(endpoint, code(limits=some_limits(max_token_length=150)), "answer to 1", "seen 1")
    lease = again(endpoint, first)
    await ask(lease, 1)
    await ask(lease, 2, "answer to 1", "seen 1")
    for one in (first, lease):
        await ask(one, 3, "answer to 1", "seen 1", "answer to 2", "seen 2")
    then, now = (request.sampling.max_tokens for request in endpoint.requests[2:])
    assert then == now < 100


async def test_a_record_without_ids_is_no_beginning_of_a_line(tokenizer: HubTokenizer) -> None:
    first = await both(Endpoint(None), code(), "answer to 1", "seen")
    lease = again(Endpoint(tokenizer), first)
    assert (await ask(lease, 1)).ended == "record_error"
    assert await refusal(lease) == "turn 1 of the record has no ids that could go on"


# ---------------------------------------------------------------- host tools


async def search(lease: Lease, number: int, **arguments: Any) -> str | None:
    reply = await lease.call_tool(number, repr(arguments).encode(), "search", arguments)
    return reply.output or reply.error


async def with_calls(endpoint: Endpoint) -> Lease:
    first = a_lease(endpoint, code())
    await ask(first, 1)
    await asyncio.sleep(0.001)
    for number in (1, 2):
        await search(first, number, query=1)
    await search(first, 3, fail=True)
    await ask(first, 2, "answer to 1", "seen")
    await asyncio.sleep(0.001)
    await search(first, 4, query="last")
    return first


async def test_tools_answer_from_the_record_in_its_order_and_then_live(endpoint: Endpoint) -> None:
    first = await with_calls(endpoint)
    lease = again(endpoint, first)
    await ask(lease, 1)
    assert [await search(lease, number, query=1) for number in (1, 2)] == ["result 1", "result 2"]
    assert await search(lease, 3, fail=True) == "no such page"
    await ask(lease, 2, "answer to 1", "seen")
    assert await search(lease, 4, query="last") == "result 4"
    assert lease.tool_calls == first.tool_calls
    assert await search(lease, 5, query="last") == "result 1", "the first call of this sandbox' own tool"


async def test_an_answer_that_was_not_fetched_again_is_not_kept_for_later(endpoint: Endpoint) -> None:
    lease = again(endpoint, await with_calls(endpoint))
    await ask(lease, 1)
    for number, arguments in enumerate(({"query": 1}, {"query": 1}, {"fail": True}), 1):
        await search(lease, number, **arguments)
    await ask(lease, 2, "answer to 1", "seen")
    await ask(lease, 3, "answer to 1", "seen", "answer to 2", "more")
    assert await search(lease, 4, query="last") == "result 1"


async def test_a_call_that_a_program_makes_again_beside_its_next_completion_is_not_made_live(
    endpoint: Endpoint,
) -> None:
    """Of two threads one may be slow: its page was paid for, and its order was placed."""
    first = a_lease(endpoint, program())
    await ask(first, 1)
    await asyncio.sleep(0.001)
    await search(first, 1, query="slow")
    lease = again(endpoint, first)
    await ask(lease, 1)
    await ask(lease, 2, "answer to 1", "the other thread's")
    assert await search(lease, 1, query="slow") == "result 1"
    assert lease.tool_calls == first.tool_calls
    await search(lease, 2, query="slow")
    assert len(lease.tool_calls) == 2, "the second one is its own"


async def test_a_program_that_parts_and_is_lost_again_keeps_what_its_tools_said(endpoint: Endpoint) -> None:
    first = a_lease(endpoint, program())
    await ask(first, 1)
    await asyncio.sleep(0.001)
    await search(first, 1, query=1)
    await ask(first, 2, "answer to 1", "result 1")
    record = Record(0.0, turns=tuple(first.turns), tool_calls=tuple(first.tool_calls))
    served: list[Entry] = []
    lease = a_lease(endpoint, program(), going_on(record, "it was lost"), served.append)
    await ask(lease, 1)
    assert await search(lease, 1, query=1) == "result 1"
    await ask(lease, 2, "answer to 1", "result 1 and more")
    known = gathered(served, replace(record, continued=(LOST,)))
    assert list(known.tool_calls) == first.tool_calls


@pytest.mark.parametrize("arguments", [{"query": True}, {"query": 1.0}, {"query": 2}, {"query": "last"}])
async def test_other_calls_are_state(endpoint: Endpoint, arguments: dict[str, Any]) -> None:
    """Also one that the record has further on: nobody looks ahead."""
    lease = again(endpoint, await with_calls(endpoint))
    await ask(lease, 1)
    await search(lease, 1, **arguments)
    assert await refusal(lease) == "a call of search that the record does not have there: state"


async def test_a_call_that_is_left_out_is_state(endpoint: Endpoint) -> None:
    lease = again(endpoint, await with_calls(endpoint))
    await ask(lease, 1)
    await search(lease, 1, query=1)
    assert (await ask(lease, 2, "answer to 1", "seen")).ended == "record_error"
    assert await refusal(lease) == "there was a call of search before prompt 2, now none: state"


# ---------------------------------------------------------------- clocks, ends


def timed(first: Lease, *times: tuple[float, float]) -> Record:
    turns = zip(first.turns, times, strict=True)
    return Record(0.0, turns=tuple(replace(turn, started_s=a, ended_s=b) for turn, (a, b) in turns))


async def test_time_is_neither_won_nor_lost_on_the_way(endpoint: Endpoint) -> None:
    first = await both(endpoint, code(), "answer to 1", "seen")
    record = timed(first, (1.0, 11.0), (14.0, 24.0))  # four seconds of its own, twenty of waiting
    for own_s, expected_s in ((0.0, 4.0), (7.0, 7.0)):
        lease = a_lease(endpoint, first.plan, going_on(record, "lost"))
        lease.clock.go_on(own_s, own_s, 0.0)  # what it takes on its way
        await ask(lease, 1)
        await ask(lease, 2, "answer to 1", "seen")
        assert lease.clock.own_s == pytest.approx(expected_s, abs=0.5)
        assert lease.clock.elapsed_s == pytest.approx(20 + expected_s, abs=0.5)
        assert lease.clock.sampling_s == pytest.approx(20, abs=0.5)
        assert lease.deadline_s == pytest.approx(first.plan.limits.deadline_s - 20)


@pytest.mark.parametrize("parts", [False, True])
async def test_what_is_begun_on_the_way_begins_where_the_clock_goes_on(endpoint: Endpoint, parts: bool) -> None:
    """Else it would have taken all the time of the record, which was the sandbox' own then."""
    first = await both(endpoint, program(), "answer to 1", "seen")
    record = timed(first, (1.0, 11.0), (14.0, 24.0))
    lease = a_lease(endpoint, first.plan, going_on(record, "lost"))
    await ask(lease, 1)
    new = [ask(lease, n, messages=(Message("user", f"aside {n}"),), is_long=True) for n in (3, 4)]
    known = ask(lease, 2, "answer to 1", "seen", is_long=True)
    await asyncio.gather(*((*new, known) if parts else (known, *new)))
    assert lease.playback is not None
    assert lease.playback.over
    lost_again = lease.playback.with_rest(replace(record, turns=tuple(lease.turns), continued=(LOST,)))
    assert lost_again.turns[0].sequence == 1
    prefix = going_on(lost_again, "lost again")
    assert prefix is not None
    assert prefix.elapsed_s - prefix.waiting_s == pytest.approx(4, abs=0.5)


async def test_the_time_between_steps_is_nobodys(endpoint: Endpoint) -> None:
    grader = Grader("command")
    steps = tuple(TaskStep(name, name, grader, timeout_s=30.0) for name in ("one", "two"))
    first = await both(endpoint, code(task=Task("task", "one", "", steps=steps)), "answer to 1", "seen")
    record = timed(first, (1.0, 2.0), (100.0, 101.0))  # a step was graded in between
    lease = a_lease(endpoint, first.plan, going_on(record, "lost"))
    await ask(lease, 1)
    await ask(lease, 2, "answer to 1", "seen")
    assert lease.clock.own_s < 1
    assert lease.clock.elapsed_s == pytest.approx(101, abs=0.5)
    assert lease.deadline_s == 30, "a step has all of its time"


async def test_an_end_on_the_way_is_no_outcome_of_the_policy(endpoint: Endpoint) -> None:
    lease = again(endpoint, await both(endpoint, code(), "answer to 1", "seen"))
    await ask(lease, 1)
    assert lease.playback is not None
    failed = lease.playback.refused(Ended(EndedName.FINISHED))
    assert failed.name is FailedName.RECORD_ERROR
    assert failed.reason == "it ended before turn 2 of the record: finished"


async def test_a_branch_begins_behind_the_recorded_prompt_and_its_calls(endpoint: Endpoint) -> None:
    first = await with_calls(endpoint)
    record = Record(0.0, turns=tuple(first.turns), tool_calls=tuple(first.tool_calls))
    lease = a_lease(endpoint, first.plan, branching("g000000-r00-a0", record, 2))
    await ask(lease, 1)
    assert (await ask(lease, 2, "answer to 1", "seen")).ended == "record_error", "without the calls"
    lease = a_lease(endpoint, first.plan, branching("g000000-r00-a0", record, 2))
    await ask(lease, 1)
    for number, arguments in enumerate(({"query": 1}, {"query": 1}, {"fail": True}), 1):
        await search(lease, number, **arguments)
    await ask(lease, 2, "answer to 1", "seen")
    assert [turn.inherited for turn in lease.turns] == [True, False]
    assert [isinstance(call, ToolCall) for call in lease.tool_calls] == [True] * 3
