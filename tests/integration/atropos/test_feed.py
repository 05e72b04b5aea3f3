"""The feed against a real run-api that is killed, reset, slow or broken: every group arrives once, or is accounted
for. Groups are made out of thin air here; where they come from is the other tests'."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from orchestrator.atropos.feed import MAX_RETURNED, Feed
from orchestrator.atropos.position import Ledger, Position
from orchestrator.atropos.run_api import Registration, RunApi
from orchestrator.atropos.run_api import Trainer as Told
from orchestrator.atropos.stream import Item, TaskStream
from orchestrator.atropos.terms import Terms
from orchestrator.errors import ConfigError, RunUnhealthy
from orchestrator.types import BadTask, Task
from tests.fakes.faulty_run_api import FaultyRunApi
from tests.fakes.runs import DEADLINE_S
from tests.fakes.trainers import RunApiProcess, Trainer

TASKS = 1000


class Maker:
    """Groups at once, or one per permit. Counts what was begun, cancelled and delivered."""

    def __init__(self, group_size: int, name: str = "") -> None:
        self.group_size = group_size
        self.name = name
        self.permits = asyncio.Semaphore(10**6)
        self.begun: Counter[int] = Counter()
        self.under_way: set[int] = set()
        self.shares: list[float] = []
        self.cancelled: Counter[int] = Counter()
        self.kept: list[int] = []
        self.delivered_items: list[int] = []
        self.given_up_items: list[int] = []
        self.steps: list[int] = []
        self.checkpoints: list[int] = []
        self.evaluated: list[int] = []
        self.registrations: list[Registration] = []
        self.bad: Callable[[dict[str, Any]], None] = lambda group: None

    def has_room(self, share: float) -> bool:
        self.shares.append(share)
        return True

    def begin(self, item: Item) -> None:
        assert item.number not in self.under_way
        self.under_way.add(item.number)

    async def make(self, item: Item) -> list[dict[str, Any]]:
        self.under_way.remove(item.number)
        self.begun[item.number] += 1
        try:
            await self.permits.acquire()
        except asyncio.CancelledError:
            self.cancelled[item.number] += 1
            raise
        group = a_group(item, self.group_size, self.name)
        self.bad(group)
        return [group]

    async def given_up(self, item: Item) -> None:
        self.given_up_items.append(item.number)

    async def registered(self, registration: Registration, trainer: Told) -> None:
        self.registrations.append(registration)

    async def stepped(self, step: int) -> None:
        self.steps.append(step)

    async def checkpoint(self, step: int) -> None:
        self.checkpoints.append(step)

    async def keep(self, item: Item, groups: Any) -> None:
        self.kept.append(item.number)

    async def saved(self) -> None:
        """Nothing is on disk here."""

    async def delivered(self, item: Item) -> None:
        self.delivered_items.append(item.number)

    async def evaluate(self, step: int) -> None:
        self.evaluated.append(step)


def a_group(item: Item, group_size: int, name: str) -> dict[str, Any]:
    return {
        "tokens": [[1, 2, 3]] * group_size,
        "masks": [[-100, 2, 3]] * group_size,
        "scores": [float(index % 2) for index in range(group_size)],
        "inference_logprobs": [[1.0, -0.5, -0.25]] * group_size,
        "messages": [[{"role": "user", "content": "q"}]] * group_size,
        "overrides": [
            {"rollout_id": f"{name}g{item.number}-r{index}", "task_id": item.task.task_id}
            for index in range(group_size)
        ],
    }


def tasks() -> Iterator[Task | BadTask]:
    yield BadTask("torn", "no row")
    for number in range(1, TASKS):
        yield Task(f"q{number}", "?")


class Feeding:
    """A feed under way."""

    def __init__(self, feed: Feed, maker: Maker) -> None:
        self.feed = feed
        self.maker = maker
        self.said: list[str] = []
        self.task: asyncio.Task[None] | None = None

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                assert self.task is not None
                if self.task.done():
                    self.task.result()
                    assert condition(), "the feed has ended"
                await asyncio.sleep(0.01)

    def permit(self, groups: int) -> None:
        for _ in range(groups):
            self.maker.permits.release()

    async def ended(self) -> None:
        assert self.task is not None
        async with asyncio.timeout(DEADLINE_S):
            await self.task

    def heard(self, text: str) -> bool:
        return any(text in line for line in self.said)


@asynccontextmanager
async def feeding(
    url: str, *, name: str = "quick", group_size: int = 2, permits: int | None = None, **terms: Any
) -> AsyncIterator[Feeding]:
    ledger = Ledger(Position(7, "tasks"))

    async def bad_task(task: BadTask, number: int) -> None:
        ledger.drop(number)

    stream = TaskStream([*tasks()], ledger.is_done, bad_task)
    maker = Maker(group_size, name)
    if permits is not None:
        maker.permits = asyncio.Semaphore(permits)
    all_terms = {"workers": 3, "worker_timeout_s": 60.0, "max_token_length": 4096, **terms}
    async with aiohttp.ClientSession() as session:
        said: list[str] = []
        feed = Feed(
            RunApi(url, session),
            maker,
            lambda: stream,
            ledger,
            Terms(name=name, group_size=group_size, **all_terms),
            said.append,
        )
        under_way = Feeding(feed, maker)
        under_way.said = said
        under_way.task = asyncio.create_task(feed.run())
        try:
            yield under_way
        finally:
            under_way.task.cancel()
            await asyncio.gather(under_way.task, return_exceptions=True)


@pytest.fixture(scope="module")
def shared() -> Iterator[RunApiProcess]:
    process = RunApiProcess()
    yield process
    process.end()


@pytest.fixture
async def api(shared: RunApiProcess) -> RunApiProcess:
    """The one process of these tests, as it is after its start."""
    await shared.fresh()
    return shared


async def test_waits_for_run_api_and_trainer_then_keeps_to_the_bound_and_ends(api: RunApiProcess) -> None:
    await api.kill()
    async with feeding(api.url, total=20, steps_per_eval=1, stop_for_eval=False, share_in_eval=0.5) as serve:
        await serve.until(lambda: serve.heard("waiting for the run-api"))
        await api.start()
        await serve.until(lambda: serve.heard("waiting for a trainer"))
        trainer = await Trainer.registered(api.url, batch_size=4, interval=3)
        # The trainer is away: 3 batches of 2 groups wait for it, and no group more.
        await serve.until(lambda: serve.feed.queued == 6)
        await asyncio.sleep(0.5)
        assert len(serve.maker.delivered_items) == 6
        await trainer.take(10)
        await serve.ended()
        assert len(trainer.rollouts) == len(set(trainer.rollouts)) == 40
        # In the order of the tasks, but for what finished side by side; bad rows are passed over.
        assert sorted(serve.maker.delivered_items) == list(range(1, 21))
        assert serve.feed.ledger.delivered_position(0).following == 21
        assert set(serve.maker.checkpoints) <= {3, 6, 9}
        assert serve.maker.evaluated, "steps_per_eval 1 evaluates"
        assert set(serve.maker.shares) <= {0.5, 1.0}
        assert not serve.maker.cancelled, "a full queue stops nobody"
        env = await asyncio.to_thread(trainer.api._call, "/status")
        assert env["queue_size"] == 0


async def test_drained_while_it_waits_it_ends_at_once(api: RunApiProcess) -> None:
    async with feeding(api.url) as serve:
        await serve.until(lambda: serve.heard("waiting for a trainer"))
        serve.feed.drain()
        await serve.ended()
        assert not serve.maker.begun


@pytest.mark.slow
async def test_restarted_and_reset_run_api_is_registered_at_again(api: RunApiProcess) -> None:
    async with feeding(api.url) as serve:
        first = await Trainer.registered(api.url, batch_size=4)
        await first.take(3)
        await serve.until(lambda: serve.feed.step >= 3 and serve.feed.queued == 6)
        await api.kill()
        await api.start()
        await serve.until(lambda: serve.heard("restarted or reset"))
        second = await Trainer.registered(api.url, batch_size=4, step=3)
        await second.take(3)
        await serve.until(lambda: serve.feed.step >= 6 and serve.feed.queued == 6)
        await api.reset()
        third = await Trainer.registered(api.url, batch_size=2)
        await third.take(5)
        given = [*first.rollouts, *second.rollouts, *third.rollouts]
        assert len(given) == len(set(given))
        assert [r.name for r in serve.maker.registrations] == ["quick_0"] * 3
        ledger = serve.feed.ledger
        # What waited there at those two moments, and what may have waited in batches already formed.
        assert 12 <= ledger.lost <= 12 + 8
        waiting = 3 + 2  # in the queue, and in batches already formed
        assert ledger.delivered - len(given) // 2 <= ledger.lost + waiting, "what is missing is told"


@pytest.mark.long
async def test_what_is_finished_while_the_run_api_is_away_is_delivered_later(api: RunApiProcess) -> None:
    async with feeding(api.url, workers=2, permits=2) as serve:
        trainer = await Trainer.registered(api.url, batch_size=4)
        await trainer.take(1)
        # Each batch is seen to be formed alone: of two formed at once, one might still wait in the run-api.
        await serve.until(lambda: serve.feed.step == 1)
        serve.permit(2)
        await trainer.take(1)
        await serve.until(lambda: serve.feed.step == 2 and serve.feed.queued == 0 and serve.feed.under_way == 2)
        await api.kill()
        serve.permit(2)
        await serve.until(lambda: serve.heard("kept until it is back"))
        assert len(serve.maker.delivered_items) == 4
        assert serve.feed.under_way == 2
        await api.start()
        await trainer.register(batch_size=4, step=2)
        await trainer.take(1)
        assert len(trainer.rollouts) == len(set(trainer.rollouts)) == 12
        assert not serve.maker.cancelled
        assert serve.feed.ledger.lost == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "500 after",
        "502 after",
        "503 after",
        "504 after",
        "504 late",
        "reset after",
        "429",
        "502",
        "504",
        "reset before",
    ],
)
async def test_gateway_s_answer_is_no_proof_that_nothing_arrived(api: RunApiProcess, fault: str) -> None:
    async with FaultyRunApi(api.url).serving() as between, feeding(between.url, total=6, max_batches=6) as serve:
        between.faults = ["", fault, "", fault]
        trainer = await Trainer.registered(api.url, batch_size=2)
        await serve.ended()
        await between.settled()
        await trainer.take(6)
        await trainer.rest()
        assert Counter(trainer.rollouts) == Counter(f"quickg{n}-r{i}" for n in range(1, 7) for i in range(2))
        assert between.done[fault] == 2
        assert serve.feed.delivery.uncertain == serve.feed.refused == 0


async def test_gateway_whose_run_api_is_slow_is_not_registered_at_again(api: RunApiProcess) -> None:
    """Its 502 to every question says nothing of what the run-api knows."""
    async with FaultyRunApi(api.url).serving() as between, feeding(between.url, total=8) as serve:
        trainer = await Trainer.registered(api.url, batch_size=2)
        await trainer.take(3)
        between.closed = True
        await serve.until(lambda: serve.heard("kept until it is back"))
        between.closed = False
        await trainer.take(5)
        await serve.ended()
        assert [r.env_id for r in serve.maker.registrations] == [0]
        assert serve.feed.ledger.lost == 0
        assert len(trainer.rollouts) == len(set(trainer.rollouts)) == 16


@pytest.mark.long
async def test_broken_deliveries_arrive_once_and_refused_ones_are_counted(api: RunApiProcess) -> None:
    # Room for all of them: a batch taken between a reset and the look for what arrived may leave that unclear.
    async with FaultyRunApi(api.url).serving() as between, feeding(between.url, total=12, max_batches=6) as serve:
        between.faults = ["500", "503", "reset before", "reset after", "422", "", "reset after"]
        trainer = await Trainer.registered(api.url, batch_size=4)
        await serve.ended()
        await trainer.take(6)
        assert not between.faults
        assert len(trainer.rollouts) == len(set(trainer.rollouts)) == 24
        assert serve.feed.refused == 1
        assert serve.heard("told to answer 422")


async def test_another_environment_s_group_of_the_same_name_is_not_taken_for_ours(api: RunApiProcess) -> None:
    async with FaultyRunApi(api.url).serving() as between:
        trainer = await Trainer.registered(api.url, batch_size=2)
        async with feeding(api.url, total=1) as other:
            await other.ended()
        between.faults = ["reset before"]
        async with feeding(between.url, total=1) as ours:
            await trainer.take(2)
            await ours.ended()
        assert trainer.rollouts[:2] == trainer.rollouts[2:], "the same names"
        assert [group["env_id"] for group in trainer.groups] == [0, 1]


@pytest.mark.parametrize("fault", ["reset before", "reset after"])
@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("others", [False, True])
async def test_broken_delivery_never_comes_twice_whatever_happens_meanwhile(
    api: RunApiProcess, fault: str, taken: bool, others: bool
) -> None:
    async with FaultyRunApi(api.url).serving() as between, aiohttp.ClientSession() as session:
        trainer = await Trainer.registered(api.url, batch_size=2)
        other = RunApi(api.url, session)
        terms = Terms("other", group_size=2, max_token_length=4096, workers=1, worker_timeout_s=60.0)
        there = await other.register(terms)
        assert there is not None

        async def send(number: int) -> None:
            await other.send([a_group(Item(number, 0, Task("q", "?")), 2, "other")], there.env_id)

        async def meanwhile() -> None:
            if others:
                await send(1)
            if taken:
                await trainer.take(1)

        await send(0)
        between.faults, between.meanwhile = [fault], meanwhile
        async with feeding(between.url, total=2, workers=1, max_batches=10) as ours:
            await ours.ended()
            await trainer.rest()
            # Nothing of ours but perhaps the one that cannot be told from one that was taken.
            unclear = taken and (others or fault == "reset before")
            assert ours.feed.delivery.uncertain == unclear
            assert ours.heard("cannot be told") == unclear
        found = Counter(trainer.rollouts)
        assert set(found.values()) == {1}
        lost = unclear and fault == "reset before"
        assert ("quickg1-r0" in found) != lost
        assert "quickg2-r0" in found


async def test_run_api_that_refuses_everything_ends_the_run(api: RunApiProcess) -> None:
    async with feeding(api.url) as serve:
        serve.maker.bad = lambda group: group.update(messages=["not a list"])
        await Trainer.registered(api.url, batch_size=4)
        with pytest.raises(BaseExceptionGroup) as caught:
            await serve.ended()
        assert caught.group_contains(RunUnhealthy, match="refuses")
        assert serve.heard("422")


async def test_evaluation_stops_training_and_what_it_cancelled_comes_again(api: RunApiProcess) -> None:
    # With five under way and one delivered a round, the last ones are cancelled round after round.
    rounds, total, workers = MAX_RETURNED + 3, MAX_RETURNED + 3 + 8, 5
    terms = {"steps_per_eval": 1, "total": total, "workers": workers, "permits": 0, "max_batches": 20}
    async with feeding(api.url, **terms) as serve:
        trainer = await Trainer.registered(api.url, batch_size=2)
        for number in range(1, rounds + 1):
            # They are under way when the trainer takes a step, and no permit is left for them.
            await serve.until(lambda: serve.feed.under_way == workers)
            serve.permit(1)
            await trainer.take(1)
            await serve.until(lambda number=number: len(serve.maker.evaluated) == number)
        serve.permit(total)
        await trainer.take(total - rounds)
        await serve.ended()
        cancelled = serve.maker.cancelled
        assert cancelled, "an evaluation stops the groups under way"
        assert max(cancelled.values()) == MAX_RETURNED, "and leaves one alone that was cancelled too often"
        assert serve.feed.cancelled == cancelled.total()
        assert all(serve.maker.begun[number] == times + 1 for number, times in cancelled.items())
        assert sorted(serve.maker.delivered_items) == list(range(1, total + 1))
        assert len(trainer.rollouts) == len(set(trainer.rollouts)) == 2 * total


async def test_group_that_takes_too_long_comes_again_a_bounded_number_of_times(api: RunApiProcess) -> None:
    async with feeding(api.url, total=2, workers=1, worker_timeout_s=0.05, permits=0) as serve:
        trainer = await Trainer.registered(api.url, batch_size=2)
        await serve.until(lambda: serve.heard("given up"))
        serve.permit(10)
        await trainer.take(2)
        await serve.ended()
        assert serve.maker.cancelled[1] == MAX_RETURNED + 1
        assert 1 not in serve.maker.delivered_items
        assert serve.maker.given_up_items == [1]


async def test_two_environments_of_different_sizes_and_weights_share_a_run_api(api: RunApiProcess) -> None:
    async with (
        feeding(api.url, name="small", group_size=2, weight=1.0) as small,
        feeding(api.url, name="large", group_size=4, weight=3.0) as large,
    ):
        trainer = await Trainer.registered(api.url, batch_size=8)
        sizes: set[int] = set()
        while len(trainer.batches) < 10 or sizes != {2, 4}:
            await trainer.take(1)
            sizes |= {len(group["tokens"]) for group in trainer.groups}
            assert len(trainer.batches) < 500, f"only groups of {sizes} came"
        assert len(trainer.rollouts) == len(set(trainer.rollouts)) == 8 * len(trainer.batches)
        assert small.maker.registrations[0].name == "small_0"
        assert large.maker.registrations[0].name == "large_0"


async def test_group_size_that_does_not_divide_the_batch_is_refused_with_the_fix(api: RunApiProcess) -> None:
    async with feeding(api.url, group_size=3) as serve:
        await Trainer.registered(api.url, batch_size=8)
        with pytest.raises(BaseExceptionGroup) as caught:
            await serve.ended()
        assert caught.group_contains(ConfigError, match=r"--env.group_size 2, .* multiple of 3")


async def test_drained_feed_delivers_what_is_under_way_and_disconnects(api: RunApiProcess) -> None:
    async with feeding(api.url, workers=2, permits=0) as serve:
        trainer = await Trainer.registered(api.url, batch_size=4)
        await serve.until(lambda: serve.feed.under_way == 2)
        serve.feed.drain()
        serve.permit(2)
        await serve.ended()
        assert sorted(serve.maker.delivered_items) == [1, 2]
        await trainer.take(1)
        # It says goodbye: the weights of those that stay are theirs alone.
        async with feeding(api.url, name="other") as other:
            await other.until(lambda: other.feed.queued > 0)
            assert (await asyncio.to_thread(status_of, api.url, 1))["env_weight"] == 1.0


def status_of(url: str, env_id: int) -> Any:
    body, headers = json.dumps({"env_id": env_id}).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/status-env", body, headers, method="GET")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)
