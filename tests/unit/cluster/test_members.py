"""Who gets a rollout, and what becomes of it when its node leaves, breaks, falls silent or is cut off."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from orchestrator.cluster import members as members_module
from orchestrator.cluster import node as node_module
from orchestrator.cluster.order import (
    Broken,
    Delivery,
    News,
)
from orchestrator.cluster.placement import Rooms
from orchestrator.cluster.remote import ListedNode
from orchestrator.engine.executor import failure_of
from orchestrator.errors import (
    AuthenticationError,
    RunUnhealthy,
    SandboxLostError,
)
from orchestrator.host.base import Provision
from orchestrator.types import (
    Attempt,
    Turn,
)
from tests.fakes.cluster import (
    DOCKER_AWAY,
    SPEC,
    FakeCluster,
    begun,
    names,
    nodes_of,
    rollouts_on,
    until,
)
from tests.fakes.plans import a_plan, a_turn

silence = pytest.mark.usefixtures("short_silence")


def test_the_freest_node_gets_it_a_warm_one_before_a_cold_one() -> None:
    rooms: Rooms[str] = Rooms()
    rooms.set("small", 2, warm=False)
    rooms.set("large", 5, warm=False)
    assert rooms.best() == "large"
    rooms.set("small", 2, warm=True)
    assert rooms.best() == "small"
    rooms.set("small", 0, warm=True)
    assert rooms.best() == "large"
    assert rooms.best(["small", "large"]) == "large"
    rooms.set("large", 0, warm=False)
    assert rooms.best() is None


def test_those_with_the_image_come_first_and_others_only_if_none_of_them_has_room() -> None:
    rooms: Rooms[str] = Rooms()
    rooms.set("with", 1, warm=False)
    rooms.set("without", 9, warm=True)
    assert rooms.best(["with"]) == "with"
    rooms.set("with", 0, warm=False)
    assert rooms.best(["with"]) == "without"


def test_the_best_node_is_that_of_a_look_at_all_of_them() -> None:
    rooms: Rooms[int] = Rooms()
    state: dict[int, tuple[bool, int]] = {}
    draw = random.Random(5)
    for _ in range(5000):
        node, free, warm = draw.randrange(20), draw.randrange(6), draw.random() < 0.3
        rooms.set(node, free, warm=warm)
        state[node] = (warm, free)
        there = {n: (w, f) for n, (w, f) in state.items() if f}
        best = rooms.best()
        assert (best is None) == (not there)
        if best is not None:
            assert there[best] == max(there.values())


async def test_rollouts_are_spread_over_the_nodes_and_say_where_they_were() -> None:
    cluster = FakeCluster("a", "b", "c")
    async with rollouts_on(cluster) as (nodes, executor, recorded):
        assert nodes.capacity == 6
        cluster.hold()
        runs = begun(executor, 6)
        await until(lambda: sorted(len(node.orders) for node in cluster.started) == [2, 2, 2])
        cluster.release()
        found = [names(await run) for run in runs]
    assert sorted(node for ((_, _, node),) in found) == ["a", "a", "b", "b", "c", "c"]
    assert len(recorded) == 6
    assert all(node.closed and node.ended for node in cluster.started)


async def test_what_finds_no_room_waits_in_the_order_of_the_groups() -> None:
    cluster = FakeCluster("a")
    async with rollouts_on(cluster, max_concurrent_sandboxes=1) as (_, executor, _):
        cluster["a"].go.clear()
        for group in (0, 1):
            executor.begin(group, 4)
        late = begun(executor, 4, group=1)
        await until(lambda: len(cluster["a"].orders) == 1 + node_module.QUEUED)
        early = begun(executor, 4, group=0)
        await until(lambda: executor.waiting == 5)
        cluster["a"].go.set()
        await asyncio.gather(*late, *early)
    groups = [order.plan.group for order in cluster["a"].orders]
    assert groups == [1, 1, 1, 0, 0, 0, 0, 1]


# ---------------------------------------------------------------- nodes come and go


async def test_a_node_that_joins_is_used_and_said() -> None:
    cluster, grown = FakeCluster("a"), []
    async with nodes_of(cluster, max_concurrent_sandboxes=1) as nodes:
        with nodes.following(lambda: 1, lambda: grown.append(nodes.capacity)):
            cluster.join("b")
            await until(lambda: nodes.capacity == 2)
            assert grown[-1] == 2
        cluster.join("c")
        await until(lambda: nodes.capacity == 3)
        assert grown[-1] == 2, "nobody listens any more"
        assert cluster.away == {"a": None, "b": None, "c": None}
        assert any("node b has joined" in line for line in cluster.said)


async def test_a_node_that_is_to_be_left_ends_its_rollouts_and_gets_no_more() -> None:
    cluster = FakeCluster("a", "b")
    async with rollouts_on(cluster, max_concurrent_sandboxes=1) as (_, executor, _):
        cluster.hold()
        runs = begun(executor, 2)
        await until(lambda: all(node.orders for node in cluster.started))
        cluster.there["a"] = replace(cluster.there["a"], draining=True)
        await until(lambda: cluster["a"].drained)
        more = asyncio.create_task(executor.execute(a_plan(2)))
        await until(lambda: len(cluster["b"].orders) == 2)
        cluster.release()
        found = [names(await run) for run in (*runs, more)]
        await until(lambda: cluster["a"].closed and cluster["a"].ended)
    assert sorted(node for ((_, name, node),) in found if name == "finished") == ["a", "b", "b"]


async def test_a_node_that_dies_costs_no_retry_and_its_rollouts_are_drawn_elsewhere() -> None:
    cluster = FakeCluster("a", "b")
    async with rollouts_on(cluster, max_concurrent_sandboxes=2) as (_, executor, recorded):
        cluster.hold()
        runs = begun(executor, 4)
        await until(lambda: all(len(node.orders) == 2 for node in cluster.started))
        del cluster.there["a"]
        await until(lambda: cluster.away["a"] == "it left the cluster")
        cluster["b"].go.set()
        found = [names(await run) for run in runs]
    redrawn = [attempts for attempts in found if len(attempts) == 2]
    assert redrawn == [[("a0", "sandbox_lost", "a"), ("a1", "finished", "b")]] * 2
    assert len(recorded) == 6
    assert sorted(cluster["a"].cancelled) == sorted(order.plan.rollout_id for order in cluster["a"].orders)


@silence
async def test_a_completion_that_is_given_up_counts_once_among_the_turns_of_a_rollout_under_way() -> None:
    turn = a_turn("said 1", 1)
    told = [turn, replace(turn, abandoned=True), a_turn("said 2", 2)]
    cluster = FakeCluster("a")
    async with rollouts_on(cluster, max_concurrent_sandboxes=1) as (nodes, executor, _):
        cluster.hold()
        (run,) = begun(executor, 1)
        await until(lambda: bool(cluster["a"].orders))
        number = cluster["a"].orders[0].number
        for place, one in enumerate(told):
            cluster["a"].told.append(News(number, place, 1000.0, one))
            await until(lambda: not cluster["a"].told)
        await until(lambda: bool(nodes.under_way()))
        await until(lambda: nodes.under_way()[0].turns >= 2)
        assert nodes.under_way()[0].turns == 2
        cluster.release()
        await run


@pytest.mark.parametrize("how", ["it leaves", "its actor dies", "it falls silent", "it fails"])
@silence
async def test_a_node_that_is_lost_costs_no_turn_that_it_told_of(how: str) -> None:
    told: list[Turn] = [a_turn("said 1", 1), replace(a_turn("said 2", 2), started_s=2.0, ended_s=3.0)]
    cluster = FakeCluster("a", "b")
    async with rollouts_on(cluster, max_concurrent_sandboxes=1) as (nodes, executor, recorded):
        executor.max_retries = 1
        cluster.hold()
        (run,) = begun(executor, 1)
        assert list(nodes.under_way()) == []
        await until(lambda: any(node.orders for node in cluster.started))
        lost = next(node for node in cluster.started if node.orders)
        other = next(node for node in cluster.started if node is not lost)
        number = lost.orders[0].number
        news = [News(number, place, 1000.0, turn) for place, turn in enumerate(told)]
        # Of an order that is over, and behind one that is missing: neither is on record.
        lost.told += [News(number + 9, 0, 1.0, told[0]), *news, News(number, 7, 1000.0, a_turn("said 9", 9))]
        await until(lambda: not lost.told)
        await until(lambda: [one.turns for one in nodes.under_way()] == [2])
        (one,) = nodes.under_way()
        assert (one.plan.rollout_id, one.attempt) == ("g000000-r00-a0", None)
        assert one.elapsed_s > 0
        match how:
            case "it leaves":
                del cluster.there[lost.name]
            case "its actor dies":
                lost.ended = True
            case "it falls silent":
                lost.silent.set()
            case "it fails":
                lost.answers.append(Delivery(broken=Broken("SandboxLostError", "it is gone")))
                lost.go.set()
        await until(lambda: bool(other.orders) or len(lost.orders) > 1)
        (following,) = [*other.orders, *lost.orders[1:]]
        assert following.plan.rollout_id == "g000000-r00-a0"
        assert following.plan.prefix is not None
        assert [turn.completion.text for turn in following.plan.prefix.turns] == ["said 1", "said 2"]
        assert following.plan.prefix.started_at == 1000.0
        lost.silent.clear()
        cluster.release()
        await run
        assert list(nodes.under_way()) == []
    assert len(recorded) == 1


async def test_an_actor_that_dies_is_started_anew_on_its_node() -> None:
    cluster = FakeCluster("a")
    async with rollouts_on(cluster) as (nodes, executor, _):
        first = cluster["a"]
        first.ended = True
        await until(lambda: cluster["a"] is not first and nodes.capacity == 2)
        assert any("node a is lost: the actor is dead" in line for line in cluster.said)
        assert names(await executor.execute(a_plan())) == [("a0", "finished", "a")]


@silence
async def test_a_silent_node_is_away_until_it_answers_and_late_results_count_for_nothing() -> None:
    cluster = FakeCluster("a", "b")
    async with rollouts_on(cluster, max_concurrent_sandboxes=1) as (nodes, executor, recorded):
        cluster.hold()
        runs = begun(executor, 2)
        await until(lambda: all(node.orders for node in cluster.started))
        cluster["a"].silent.set()
        await until(lambda: cluster.away["a"] == "it does not answer")
        assert nodes.capacity == 1
        cluster.release()
        assert sorted([len(names(await run)) for run in runs]) == [1, 2]
        cluster["a"].works_again.set()
        cluster["a"].silent.clear()
        await until(lambda: cluster.away["a"] is None and nodes.capacity == 2)
    assert cluster.said == ["node a pauses, its rollouts go elsewhere: it does not answer", "node a works again"]
    assert [str(r.outcome.name) for r in recorded if isinstance(r, Attempt)].count("finished") == 2
    assert len(recorded) == 3


@silence
async def test_a_node_that_stays_silent_is_given_up_and_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "GIVEN_UP_S", 0.3)
    cluster = FakeCluster("a")
    async with nodes_of(cluster) as nodes:
        silent = cluster["a"]
        silent.silent.set()
        await until(lambda: cluster["a"] is not silent and nodes.capacity == 2)
        assert silent.ended
        assert any("node a is lost: it has not answered for" in line for line in cluster.said)


async def test_the_end_of_a_node_is_told_once_also_if_another_has_its_name_by_then() -> None:
    cluster = FakeCluster("a")
    ends: list[str | None] = []
    cluster.node = lambda name, away: ends.append(away)  # type: ignore[method-assign]
    async with nodes_of(cluster, max_concurrent_sandboxes=1) as nodes:
        del cluster.there["a"]
        cluster.there["b"] = ListedNode("b", "a")
        await until(lambda: nodes.capacity == 1 and ends[-1] is None)
        await asyncio.sleep(0.2)
        assert ends == [None, "it left the cluster", None]


async def test_nothing_is_asked_of_a_node_that_was_given_up() -> None:
    """Ending its actor may take as long as Ray's head is away."""
    cluster = FakeCluster("a")
    async with nodes_of(cluster) as nodes, nodes.slot(0, SPEC) as room:
        assert room is not None
        actor = cluster["a"]
        actor.end = lambda: None  # type: ignore[method-assign]
        del cluster.there["a"]
        await until(lambda: nodes.capacity == 0)
        with pytest.raises(SandboxLostError, match="it left the cluster"):
            await room.carry_out(a_plan(), Provision())
        assert actor.orders == []


@silence
async def test_when_a_node_that_does_not_answer_was_left_nobody_asks_it_any_more() -> None:
    before = asyncio.all_tasks()
    cluster = FakeCluster("a")
    async with nodes_of(cluster):
        cluster["a"].silent.set()
        await asyncio.sleep(0.05)  # it is being asked, and not away yet
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


@silence
async def test_the_end_waits_for_no_node_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "CLOSE_S", 1e6)
    cluster = FakeCluster("a", "b")
    async with asyncio.timeout(30), nodes_of(cluster):
        cluster["a"].silent.set()
    assert (cluster["a"].closed, cluster["b"].closed) == (False, True)
    assert cluster["a"].ended


async def test_a_node_without_docker_pauses_itself_and_not_the_run() -> None:
    cluster = FakeCluster("a", "b")
    async with rollouts_on(cluster, max_concurrent_sandboxes=1) as (_, executor, _):
        cluster["a"].answers = [DOCKER_AWAY]
        found = [names(await executor.execute(a_plan(index))) for index in range(4)]
        assert [("a0", "docker_error", "a"), ("a1", "finished", "b")] in found
        assert cluster.away["a"] == "Docker is away"
        assert {attempts[-1][2] for attempts in found if len(attempts) == 1} <= {"a", "b"}
        cluster["a"].works_again.set()
        await until(lambda: cluster.away["a"] is None)
        assert cluster["a"].orders[1:] == []


@silence
async def test_without_any_node_that_works_the_run_ends_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "PATIENCE_S", 0.2)
    cluster = FakeCluster("a")
    async with rollouts_on(cluster) as (nodes, executor, _):
        cluster["a"].silent.set()
        await until(lambda: nodes.capacity == 0)
        with pytest.raises(RunUnhealthy, match="no node of the cluster"):
            await executor.execute(a_plan())


async def test_a_head_that_is_away_is_told_and_its_return_too() -> None:
    cluster = FakeCluster("a")
    async with nodes_of(cluster) as nodes:
        cluster.headless = True
        await until(lambda: len(cluster.said) == 1)
        cluster.headless = False
        await until(lambda: len(cluster.said) == 2)
        assert nodes.capacity == 2
    assert cluster.said == [
        "the cluster's head is away, no node can join meanwhile: the head is gone",
        "the cluster's head is back",
    ]


async def test_a_head_that_stays_away_ends_the_run_in_order_before_it_ends_the_process() -> None:
    cluster = FakeCluster("a")
    async with rollouts_on(cluster) as (_, executor, recorded):
        cluster["a"].go.clear()
        cluster.head_away_s = members_module.HEAD_MARGIN_S + 0.3
        cut_off = asyncio.create_task(executor.execute(a_plan()))
        await until(lambda: len(cluster["a"].orders) == 1)
        cluster.headless = True
        with pytest.raises(RunUnhealthy, match="the cluster's head has been away for"):
            await cut_off
        with pytest.raises(RunUnhealthy, match="the cluster's head has been away for"):
            await executor.execute(a_plan(1))
    assert {str(failure_of(result).name) for result in recorded} == {"sandbox_lost"}  # type: ignore[union-attr]


async def test_a_drained_run_waits_for_no_node() -> None:
    cluster, stopping = FakeCluster("a"), asyncio.Event()
    async with rollouts_on(cluster, max_concurrent_sandboxes=1, stopping=stopping) as (nodes, executor, _):
        cluster["a"].go.clear()
        runs = begun(executor, 5)
        await until(lambda: len(cluster["a"].orders) == 3)  # those have room, on the node or in its queue
        stopping.set()
        nodes.drain()
        cluster["a"].go.set()
        assert sorted([await run is None for run in runs]) == [False] * 3 + [True] * 2
        assert cluster["a"].drained


async def test_a_cancelled_rollout_is_cancelled_on_its_node_and_gives_its_room_back() -> None:
    cluster = FakeCluster("a")
    async with rollouts_on(cluster, max_concurrent_sandboxes=1) as (_, executor, recorded):
        cluster["a"].go.clear()
        run = asyncio.create_task(executor.execute(a_plan()))
        await until(lambda: len(cluster["a"].orders) == 1)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert cluster["a"].cancelled == [a_plan().rollout_id]
        assert [str(r.outcome.name) for r in recorded if isinstance(r, Attempt)] == ["cancelled"]
        cluster["a"].go.set()
        assert names(await executor.execute(a_plan(1))) == [("a0", "finished", "a")]


async def test_a_key_that_the_endpoint_refuses_ends_the_run() -> None:
    cluster = FakeCluster("a")
    async with rollouts_on(cluster) as (_, executor, _):
        cluster["a"].answers = [Delivery(broken=Broken("AuthenticationError", "401"))]
        with pytest.raises(AuthenticationError, match="node a: 401"):
            await executor.execute(a_plan())


async def test_a_node_that_cannot_confine_is_given_up_and_its_rollouts_are_drawn_elsewhere() -> None:
    unfit = Broken("EnvironmentUnusable", "no seccomp")
    cluster = FakeCluster("a", "b")
    async with rollouts_on(cluster, max_concurrent_sandboxes=1) as (_, executor, _):
        cluster["a"].answers = [Delivery(broken=unfit)] * 100
        cluster["a"].works_again.set()  # as far as it can tell
        cluster["b"].go.clear()
        cluster.prepare = lambda node: setattr(node, "refusal", unfit)
        runs = begun(executor, 8)
        await until(lambda: any("node a is not used: no seccomp" in line for line in cluster.said))
        await asyncio.sleep(0.2)
        cluster["b"].go.set()
        found = [names(await run) for run in runs]
    assert any("node a is lost: no seccomp" in line for line in cluster.said)
    assert {attempts[-1][1:] for attempts in found} == {("finished", "b")}
    assert max(len(attempts) for attempts in found) == 2


async def test_the_attempt_has_the_run_s_own_plan() -> None:
    plan = replace(a_plan(), task=replace(a_plan().task, answer="42"))
    async with rollouts_on(FakeCluster("a")) as (_, executor, recorded):
        await executor.execute(plan)
    (attempt,) = recorded
    assert isinstance(attempt, Attempt)
    assert (attempt.plan, failure_of(attempt)) == (plan, None)
