"""A rollout whose sandbox, node or orchestrator is lost goes on; no policy gains another draw by it."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from rollout_api.v1 import sandbox_pb2 as pb
from rollout_api.v1 import sandbox_pb2_grpc as pb_grpc

from orchestrator.completion.base import CompletionRequest
from orchestrator.engine import executor as executor_module
from orchestrator.launch.names import SOCKET_NAME
from orchestrator.proxy.completions import Completions
from orchestrator.proxy.playback import Playback
from orchestrator.proxy.playback_clock import PlaybackClock
from orchestrator.proxy.wire import CONTRACT
from orchestrator.rules.backoff import Backoff
from orchestrator.types import (
    Attempt,
    Member,
    Record,
    SandboxExit,
    going_on,
)
from orchestrator.types.prefix import branching
from tests.fakes.completers import FunctionCompleter
from tests.fakes.fake_launcher import CONFINED, FakeLauncher
from tests.fakes.plans import a_plan, a_turn, an_agent
from tests.unit.test_executor import Bench, name

TURNS = 4
# What a step prints, by its turn and what the model said in all turns so far.
Observation = Callable[[int, list[str]], str]
NUMBERS = itertools.count()  # what differs whenever it is looked at: a clock, an address


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "BEFORE_RETRIES", Backoff(0.001, 0.01))


def agent(observe: Observation, dies: Callable[[list[str]], SandboxExit | None] = lambda said: None) -> Any:
    """A sandbox in which an agent asks for TURNS completions and submits what the first one said."""

    async def inhabit(channel: Path) -> SandboxExit:
        async with grpc.aio.insecure_channel(f"unix:{channel / SOCKET_NAME}") as connection:
            stub: Any = pb_grpc.SandboxServiceStub(connection)
            async for _ in stub.Park(pb.ParkRequest(contract=CONTRACT, confinement=CONFINED)):
                pass
            messages, said = [pb.Message(role=pb.ROLE_USER, content="What is it?")], list[str]()
            for turn in range(1, TURNS + 1):
                request = pb.CompleteRequest(sequence=turn, kind=pb.COMPLETION_KIND_ACTION, messages=messages)
                response = await stub.Complete(request)
                if response.WhichOneof("result") != "completion":
                    return SandboxExit(0, oom_killed=False)
                said.append(response.completion.text)
                if (end := dies(said)) is not None:
                    return end
                messages += [
                    pb.Message(role=pb.ROLE_ASSISTANT, content=said[-1]),
                    pb.Message(role=pb.ROLE_USER, content=observe(turn, said)),
                ]
            reason = pb.STOP_REASON_FINAL_ANSWER
            await stub.SubmitResult(pb.SubmitResultRequest(stop_reason=reason, answer=said[0].encode()))
        return SandboxExit(0, oom_killed=False)

    return inhabit


class Luck(FunctionCompleter):
    """Samples `good` or `bad` with the same chance, whatever the seed: another draw is worth a try. While the
    completion of turn `turns[rollout]` is awaited, somebody else removes the sandbox, once."""

    def __init__(self, turns: Callable[[str], int]) -> None:
        super().__init__(self._say)
        self.dice = random.Random(7)
        self._turns, self._lost = turns, set[tuple[str, int]]()
        self.bench: Bench

    def _say(self, request: CompletionRequest) -> str:
        return f"{self.dice.choice(('good', 'bad'))} {next(NUMBERS)}"

    async def sample(self, request: CompletionRequest) -> Any:
        place = request.rollout_id, request.sequence
        if request.sequence == self._turns(request.rollout_id) and place not in self._lost:
            self._lost.add(place)
            (box,) = self.bench.launcher.live.values()
            box.lose()
            await asyncio.Event().wait()
        return await super().sample(request)


def bench_of(inhabitant: Any, turns: Callable[[str], int], luck: type[Luck] = Luck, **more: Any) -> Bench:
    completer = luck(turns)
    bench = Bench(launcher=FakeLauncher(inhabitant), max_sandboxes=1, **more)
    host: Any = bench.executor.hosts
    host.resources = replace(host.resources, completer=completer)
    bench.completer, completer.bench = completer, bench
    return bench


def plain(turn: int, said: list[str]) -> str:
    return f"observed {turn}"


@pytest.mark.parametrize("turn", range(2, TURNS + 1))
async def test_it_goes_on_behind_its_last_completion(turn: int) -> None:
    bench = bench_of(agent(plain), lambda rollout: turn)
    (result,) = await bench.executor.execute(a_plan()) or ()
    assert isinstance(result, Member)
    record = result.attempt.record
    assert bench.names == ["finished"]
    assert len(bench.started) == 1
    assert bench.launcher.launched == 2
    assert [one.turn for one in record.continued] == [turn - 1]
    assert not record.continued[0].refused
    assert [request.sequence for request in bench.completer.requests] == [1, 2, 3, 4]
    assert {request.sampling.seed - request.sequence for request in bench.completer.requests} == {0}
    assert result.attempt.plan == a_plan()
    assert record.sampled_tokens == sum(t.completion.completion_tokens for t in record.turns)


async def test_what_differs_parts_from_the_record_and_keeps_what_was_before() -> None:
    def clock(turn: int, said: list[str]) -> str:
        return f"it is {next(NUMBERS)}" if turn == 2 else plain(turn, said)

    bench = bench_of(agent(clock), lambda rollout: 4)
    (result,) = await bench.executor.execute(a_plan()) or ()
    assert isinstance(result, Member)
    record = result.attempt.record
    (continued,) = record.continued
    assert continued.turn == 2
    assert "prompt 3 is not the recorded one" in continued.refused
    assert continued.tokens == sum(turn.completion.completion_tokens for turn in record.turns[:2])
    # The third was sampled once before the loss and once behind the difference.
    assert [request.sequence for request in bench.completer.requests] == [1, 2, 3, 3, 4]
    times = [(turn.started_s, turn.ended_s) for turn in record.turns]
    assert times == sorted(times)


async def test_the_end_in_a_replay_is_the_policy_s_own() -> None:
    """Code that ends the second sandbox and did not end the first: scored, as it would be if drawn again."""
    boxes = itertools.count()

    def dies(said: list[str]) -> SandboxExit | None:
        return SandboxExit(1, oom_killed=False) if len(said) == 2 and next(boxes) else None

    bench = bench_of(agent(plain, dies), lambda rollout: 3)
    (result,) = await bench.executor.execute(a_plan()) or ()
    assert isinstance(result, Member)
    assert name(result) == "sandbox_crashed"
    assert [one.turn for one in result.attempt.record.continued] == [2]


async def test_a_launch_that_fails_meanwhile_costs_no_turn() -> None:
    class Launching(Luck):
        async def sample(self, request: CompletionRequest) -> Any:
            if request.sequence == 3 and self.bench.launcher.launched == 1:
                self.bench.launcher._failures = 1
            return await super().sample(request)

    bench = bench_of(agent(plain), lambda rollout: 3)
    launching = Launching(lambda rollout: 3)
    launching.bench = bench
    host: Any = bench.executor.hosts
    host.resources = replace(host.resources, completer=launching)
    (result,) = await bench.executor.execute(a_plan()) or ()
    assert bench.names == ["finished"]
    assert isinstance(result, Member)
    assert [one.turn for one in result.attempt.record.continued] == [2]
    assert [request.sequence for request in launching.requests] == [1, 2, 3, 4]


async def test_losses_use_up_the_retries_of_their_rollout_once() -> None:
    """However often it went on, no more sandboxes are made than if it were drawn again each time."""
    losses = itertools.count()

    class Unlucky(Luck):
        async def sample(self, request: CompletionRequest) -> Any:
            if request.sequence == 2:
                next(losses)
                (box,) = self.bench.launcher.live.values()
                box.lose()
                await asyncio.Event().wait()
            return await FunctionCompleter.sample(self, request)

    bench = bench_of(agent(plain), lambda rollout: 0)
    host: Any = bench.executor.hosts
    unlucky = Unlucky(lambda rollout: 0)
    unlucky.bench = bench
    host.resources = replace(host.resources, completer=unlucky)
    (result,) = await bench.executor.execute(a_plan()) or ()
    assert bench.names == ["sandbox_lost"]
    assert bench.launcher.launched == 1 + 2
    assert isinstance(result, Attempt)
    assert len(result.record.turns) == 1


async def test_stopped_before_it_goes_on_a_rollout_is_on_record_as_cancelled_and_nothing_is_begun() -> None:
    stopping = asyncio.Event()

    class Stopping(Luck):
        async def sample(self, request: CompletionRequest) -> Any:
            if request.sequence == 3:
                stopping.set()
            return await super().sample(request)

    bench = bench_of(agent(plain), lambda rollout: 3, stopping=stopping)
    stops = Stopping(lambda rollout: 3)
    stops.bench = bench
    host: Any = bench.executor.hosts
    host.resources = replace(host.resources, completer=stops)
    assert await bench.executor.execute(a_plan()) is None
    assert bench.names == ["cancelled"]
    assert bench.launcher.launched == 1
    (stopped,) = bench.recorded
    assert isinstance(stopped, Attempt)
    assert stopped.lacks_turns


async def test_cancelled_before_it_goes_on_a_rollout_is_on_record_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "BEFORE_RETRIES", Backoff(3600.0, 3600.0))
    bench = bench_of(agent(plain), lambda rollout: 3)
    run = asyncio.create_task(bench.executor.execute(a_plan()))
    async with asyncio.timeout(30):
        while bench.launcher.live or len(bench.completer.requests) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    assert bench.names == ["cancelled"]
    (stopped,) = bench.recorded
    assert isinstance(stopped, Attempt)
    assert stopped.lacks_turns


def test_a_branch_whose_host_gives_nothing_back_is_still_one() -> None:
    """As where a node of a cluster dies: what is known of it is what it told."""
    first, second = a_turn(), replace(a_turn(sequence=2), started_s=2.0, ended_s=3.0)
    prefix = branching("g000000-r01-a0", Record(0.0, (first, second)), 2)
    record = executor_module._so_far(replace(a_plan(), prefix=prefix), (*prefix.turns, second), Record(0.0))
    assert record.branch == prefix.branch
    assert [turn.inherited for turn in record.turns] == [True, False]


def by_first_word(said: list[str]) -> bool:
    return said[0].startswith("bad")


def dying(exit: SandboxExit) -> Callable[[list[str]], SandboxExit | None]:
    """It ends so at the second turn, where the first word was bad."""
    return lambda said: exit if by_first_word(said) and len(said) == 2 else None


HOSTILE: dict[str, tuple[Observation, Callable[[list[str]], SandboxExit | None]]] = {
    "honest": (plain, lambda said: None),
    "clock": (lambda turn, said: f"it is {next(NUMBERS)}", lambda said: None),
    # Whoever had bad luck sees to it that its replay differs.
    "differs": (
        lambda turn, said: f"it is {next(NUMBERS)}" if by_first_word(said) else plain(turn, said),
        lambda said: None,
    ),
    # Or ends its box, in each way that code in there has: by itself, by a signal to pid 1, by its memory.
    **{
        way: (plain, dying(exit))
        for way, exit in {
            "exits": SandboxExit(0, oom_killed=False),
            "crashes": SandboxExit(1, oom_killed=False),
            "is killed": SandboxExit(137, oom_killed=False),
            "fills memory": SandboxExit(137, oom_killed=True),
        }.items()
    },
}


async def mean_score(policy: str, rollouts: int) -> float:
    """Of rollouts of which half lose their sandbox at the last turn: 1 where the first word was good."""
    dice = random.Random(policy)
    lost = {index: dice.random() < 0.5 for index in range(rollouts)}

    def turn(rollout_id: str) -> int:
        return TURNS if lost[int(rollout_id.split("-")[1][1:])] and rollout_id.endswith("a0") else 0

    bench = bench_of(agent(*HOSTILE[policy]), turn)
    scores = []
    for index in range(rollouts):
        results = await bench.executor.execute(a_plan(index))
        assert results is not None
        last = results[-1]
        assert isinstance(last, Member), last
        scores.append(not by_first_word([last.attempt.record.turns[0].completion.text]))
    return sum(scores) / rollouts


@pytest.mark.long
@pytest.mark.parametrize("policy", HOSTILE)
async def test_no_policy_gains_another_draw_by_a_loss(policy: str) -> None:
    """400 rollouts with an endpoint that gives another answer each time: the mean of one draw is 0.5, its standard
    error 0.025."""
    assert abs(await mean_score(policy, 400) - 0.5) < 3.3 * 0.025


def a_program(policy: str) -> Any:
    """A sandbox whose program asks for two parts, and then for more behind the second, which it submits. It is as
    hostile as `policy` says. In the box after a loss: it asks for the second part first and differs if it was bad,
    or gives it up. Before it: a bad second part makes it give up the first one, which it got and did not read, or
    still awaits. After that: it asks for another second part unless the first one comes at once."""
    boxes: Counter[str] = Counter()

    async def inhabit(channel: Path) -> SandboxExit:
        async with grpc.aio.insecure_channel(f"unix:{channel / SOCKET_NAME}") as connection:
            stub: Any = pb_grpc.SandboxServiceStub(connection)
            async for item in stub.Park(pb.ParkRequest(contract=CONTRACT, confinement=CONFINED)):
                if item.HasField("assignment"):
                    question = item.assignment.question
            boxes[question] += 1
            again, numbers = boxes[question] > 1, itertools.count(1)

            def begin(*said: str) -> Any:
                roles = itertools.cycle((pb.ROLE_USER, pb.ROLE_ASSISTANT))
                messages = [pb.Message(role=role, content=text) for role, text in zip(roles, said, strict=False)]
                request = pb.CompleteRequest(
                    sequence=next(numbers), kind=pb.COMPLETION_KIND_ACTION, messages=messages
                )
                return asyncio.ensure_future(stub.Complete(request))

            async def text(asked: Any) -> str:
                response = await asked
                if response.WhichOneof("result") == "ended":
                    raise EOFError
                return str(response.completion.text)

            async def ask(*said: str) -> str:
                return await text(begin(*said))

            async def give_up(number: int) -> None:
                await stub.AbandonCompletion(pb.AbandonCompletionRequest(sequence=number))

            try:
                if again and policy == "another order":
                    second = await ask("part 2")
                    first = await ask("other" if by_first_word([second]) else "part 1")
                elif policy in AWAITING:
                    awaited = begin("part 1")
                    at_once, _ = await asyncio.wait([awaited], timeout=SLOW_S / 2)
                    second = await ask("other" if again and policy == "peeks" and not at_once else "part 2")
                    if by_first_word([second]):
                        await give_up(1)
                    first = await text(awaited)
                else:
                    first, second = await ask("part 1"), await ask("part 2")
                if by_first_word([second]) and policy == ("gives up" if again else "reads late"):
                    await give_up(2 if again else 1)
                third = await ask("part 2", second, f"go on with {first}")
                await ask("part 2", second, f"go on with {first}", third, "once more")
            except EOFError:
                return SandboxExit(0, oom_killed=False)
            reason = pb.STOP_REASON_FINAL_ANSWER
            await stub.SubmitResult(pb.SubmitResultRequest(stop_reason=reason, answer=second.encode()))
        return SandboxExit(0, oom_killed=False)

    return inhabit


AWAITING, SLOW_S = ("hangs up", "peeks"), 0.04


class Slow(Luck):
    """The first part takes its time."""

    async def sample(self, request: CompletionRequest) -> Any:
        if request.messages[-1].content == "part 1":
            await asyncio.sleep(SLOW_S)
        return await super().sample(request)


async def program_score(policy: str, rollouts: int) -> float:
    """As `mean_score`, of programs: 1 where the second part that it submits was good."""
    dice = random.Random(policy)
    lost = {index: dice.random() < 0.5 for index in range(rollouts)}
    luck = Slow if policy in AWAITING else Luck

    def turn(rollout_id: str) -> int:
        return 4 if lost[int(rollout_id.split("-")[1][1:])] and rollout_id.endswith("a0") else 0

    bench = bench_of(a_program(policy), turn, luck)
    scores = []
    for index in range(rollouts):
        plan = a_plan(index)
        plan = replace(plan, agent=an_agent(kind="program"), task=replace(plan.task, question=str(index)))
        results = await bench.executor.execute(plan)
        assert results is not None
        last = results[-1]
        assert isinstance(last, Member), last
        scores.append(not by_first_word([last.attempt.record.answer or ""]))
    return sum(scores) / rollouts


@pytest.mark.long
@pytest.mark.parametrize("policy", ["honest", "another order", "gives up", "reads late", *AWAITING])
async def test_no_program_gains_another_draw_by_a_loss(policy: str) -> None:
    assert abs(await program_score(policy, 400) - 0.5) < 3.3 * 0.025


def _before_what_was_given_up(record: Record, reason: str) -> Any:
    at = next((at for at, turn in enumerate(record.turns) if turn.abandoned), len(record.turns))
    return going_on(replace(record, turns=record.turns[:at]), reason)


def _part_for_good(playback: Playback, why: str) -> bool:
    playback.unlike = why
    playback.cut()
    return True


async def _end_for_it(completions: Any, sequence: int) -> None:
    if completions._playback_clock.playback is not None:
        completions._end("record_error", f"it gave up {sequence}")


async def _come_at_once(playback_clock: PlaybackClock, *then: Any) -> None:
    pass


# What takes the defence away.
UNDEFENDED: dict[str, tuple[Any, str, Any]] = {
    "another order": (Playback, "part", lambda self, why: False),
    "gives up": (Completions, "give_up", _end_for_it),
    "reads late": (executor_module, "going_on", _before_what_was_given_up),
    "hangs up": (Playback, "part", _part_for_good),
    "peeks": (PlaybackClock, "in_time", _come_at_once),
}


@pytest.mark.long
@pytest.mark.parametrize("policy", UNDEFENDED)
async def test_a_redraw_of_programs_would_be_a_gain(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*UNDEFENDED[policy])
    assert await program_score(policy, 400) > 0.5 + 3.3 * 0.025


@pytest.mark.long
async def test_a_redraw_where_the_replay_differs_would_be_a_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: without the parting, who differs at bad luck alone gets half of it drawn again."""
    monkeypatch.setattr(Playback, "part", lambda self, why: False)
    assert await mean_score("differs", 400) > 0.5 + 3.3 * 0.025
