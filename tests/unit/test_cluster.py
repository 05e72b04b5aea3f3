"""Rollouts on many nodes, without Ray: who gets one, what becomes of a node's rollouts when it breaks."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import pickle
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests

from orchestrator.agents.equipment import Equipment
from orchestrator.cluster import host as host_module
from orchestrator.cluster import image as image_module
from orchestrator.cluster import members as members_module
from orchestrator.cluster import node as node_module
from orchestrator.cluster.host import HostActor
from orchestrator.cluster.image import SavedImages
from orchestrator.cluster.nodes import Nodes
from orchestrator.cluster.order import (
    Broken,
    Delivery,
    Opening,
    Parcel,
    Pulse,
    differences,
    for_node,
    settings_for_nodes,
    software,
)
from orchestrator.cluster.parcels import Desk, KeptOutput, Shelf, pieces
from orchestrator.cluster.placement import Rooms
from orchestrator.cluster.remote import ListedNode, NodeLost
from orchestrator.completion.startup import Wait
from orchestrator.engine.executor import Executor, Result, failure_of
from orchestrator.errors import (
    AuthenticationError,
    EnvironmentUnusable,
    LaunchError,
    NotServing,
    RunUnhealthy,
    SandboxLostError,
)
from orchestrator.host.base import Provision
from orchestrator.host.setup import HostSetup
from orchestrator.launch import channels
from orchestrator.proxy.left_files import OutputRule
from orchestrator.rules.policy import Policy, Served
from orchestrator.rules.redact import Secret
from orchestrator.settings.config import Config
from orchestrator.settings.endpoint import OpenAISettings
from orchestrator.settings.table import EnvSettings
from orchestrator.types import (
    Attachment,
    Attempt,
    Ended,
    EndedName,
    Failed,
    FailedName,
    Member,
    Output,
    OutputFile,
    Record,
    RolloutPlan,
)
from tests.fakes.cluster import FakeCluster, FakeNode, Told, nodes_of
from tests.fakes.plans import a_plan, a_sandbox
from tests.fakes.runs import place

SPEC = Config().sandbox_spec()
DOCKER_AWAY = Delivery(Record(started_at=1.0), Failed(FailedName.DOCKER_ERROR, "no answer"), away="Docker")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes are looked at often."""
    for module, name, value in (
        (members_module, "LOOK_S", 0.02),
        (members_module, "JOIN_AGAIN_S", 0.02),
        (node_module, "PULSE_S", 0.02),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent node is soon noticed. Long enough that a busy machine makes no node silent."""
    monkeypatch.setattr(node_module, "SILENT_S", 1.0)
    monkeypatch.setattr(node_module, "GRACE_S", 0.5)


silence = pytest.mark.usefixtures("short_silence")


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.005)


@contextmanager
def executing(nodes: Nodes, **more: object) -> Iterator[tuple[Executor, list[Result]]]:
    recorded: list[Result] = []

    async def record(result: Result) -> None:
        recorded.append(result)

    async def graded(attempt: Attempt) -> Result:
        return attempt

    settings: dict[str, object] = {"max_retries": 0, "graded": graded, "recorded": record, **more}
    yield Executor(nodes, **settings), recorded  # type: ignore[arg-type]


def names(results: tuple[Result, ...] | None) -> list[tuple[str, str, str]]:
    assert results is not None
    attempts = [result.attempt if isinstance(result, Member) else result for result in results]
    return [(a.plan.rollout_id[-2:], a.outcome.name, a.record.node) for a in attempts]


# ---------------------------------------------------------------- who gets a rollout


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
    async with nodes_of(cluster) as nodes:
        assert nodes.capacity == 6
        with executing(nodes) as (executor, recorded):
            for node in cluster.started:
                node.go.clear()
            runs = [asyncio.create_task(executor.execute(a_plan(index))) for index in range(6)]
            await until(lambda: sorted(len(node.orders) for node in cluster.started) == [2, 2, 2])
            for node in cluster.started:
                node.go.set()
            found = [names(await run) for run in runs]
    assert sorted(node for ((_, _, node),) in found) == ["a", "a", "b", "b", "c", "c"]
    assert len(recorded) == 6
    assert all(node.closed and node.ended for node in cluster.started)


async def test_what_finds_no_room_waits_in_the_order_of_the_groups() -> None:
    cluster = FakeCluster("a")
    async with nodes_of(cluster, max_concurrent_sandboxes=1) as nodes:
        cluster["a"].go.clear()
        with executing(nodes) as (executor, _):
            for group in (0, 1):
                executor.begin(group, 4)
            late = [asyncio.create_task(executor.execute(replace(a_plan(i), group=1))) for i in range(4)]
            await until(lambda: len(cluster["a"].orders) == 1 + node_module.QUEUED)
            early = [asyncio.create_task(executor.execute(replace(a_plan(i), group=0))) for i in range(4)]
            await until(lambda: executor.waiting == 5)
            cluster["a"].go.set()
            await asyncio.gather(*late, *early)
    groups = [order.plan.group for order in cluster["a"].orders]
    assert groups == [1, 1, 1, 0, 0, 0, 0, 1]


# ---------------------------------------------------------------- nodes come and go


async def test_a_node_that_joins_is_used_and_said() -> None:
    cluster, told, grown = FakeCluster("a"), Told(), []
    async with nodes_of(cluster, told, max_concurrent_sandboxes=1) as nodes:
        with nodes.following(lambda: 1, lambda: grown.append(nodes.capacity)):
            cluster.join("b")
            await until(lambda: nodes.capacity == 2)
            assert grown[-1] == 2
        cluster.join("c")
        await until(lambda: nodes.capacity == 3)
        assert grown[-1] == 2, "nobody listens any more"
        assert told.away == {"a": None, "b": None, "c": None}
        assert any("node b has joined" in line for line in told.said)


async def test_a_node_that_is_to_be_left_ends_its_rollouts_and_gets_no_more() -> None:
    cluster = FakeCluster("a", "b")
    async with nodes_of(cluster, max_concurrent_sandboxes=1) as nodes:
        for node in cluster.started:
            node.go.clear()
        with executing(nodes) as (executor, _):
            runs = [asyncio.create_task(executor.execute(a_plan(index))) for index in range(2)]
            await until(lambda: all(node.orders for node in cluster.started))
            cluster.there["a"] = replace(cluster.there["a"], draining=True)
            await until(lambda: cluster["a"].drained)
            more = asyncio.create_task(executor.execute(a_plan(2)))
            await until(lambda: len(cluster["b"].orders) == 2)
            for node in cluster.started:
                node.go.set()
            found = [names(await run) for run in (*runs, more)]
            await until(lambda: cluster["a"].closed and cluster["a"].ended)
    assert sorted(node for ((_, name, node),) in found if name == "finished") == ["a", "b", "b"]


async def test_a_node_that_dies_costs_no_retry_and_its_rollouts_are_drawn_elsewhere() -> None:
    cluster, told = FakeCluster("a", "b"), Told()
    async with nodes_of(cluster, told, max_concurrent_sandboxes=2) as nodes:
        for node in cluster.started:
            node.go.clear()
        with executing(nodes) as (executor, recorded):
            runs = [asyncio.create_task(executor.execute(a_plan(index))) for index in range(4)]
            await until(lambda: all(len(node.orders) == 2 for node in cluster.started))
            del cluster.there["a"]
            await until(lambda: told.away["a"] == "it left the cluster")
            cluster["b"].go.set()
            found = [names(await run) for run in runs]
    redrawn = [attempts for attempts in found if len(attempts) == 2]
    assert redrawn == [[("a0", "sandbox_lost", "a"), ("a1", "finished", "b")]] * 2
    assert len(recorded) == 6
    assert sorted(cluster["a"].cancelled) == sorted(order.plan.rollout_id for order in cluster["a"].orders)


async def test_an_actor_that_dies_is_started_anew_on_its_node() -> None:
    cluster, told = FakeCluster("a"), Told()
    async with nodes_of(cluster, told) as nodes:
        first = cluster["a"]
        first.ended = True
        await until(lambda: cluster["a"] is not first and nodes.capacity == 2)
        assert any("node a is lost: the actor is dead" in line for line in told.said)
        with executing(nodes) as (executor, _):
            assert names(await executor.execute(a_plan())) == [("a0", "finished", "a")]


@silence
async def test_a_silent_node_is_away_until_it_answers_and_late_results_count_for_nothing() -> None:
    cluster, told = FakeCluster("a", "b"), Told()
    async with nodes_of(cluster, told, max_concurrent_sandboxes=1) as nodes:
        for node in cluster.started:
            node.go.clear()
        with executing(nodes) as (executor, recorded):
            runs = [asyncio.create_task(executor.execute(a_plan(index))) for index in range(2)]
            await until(lambda: all(node.orders for node in cluster.started))
            cluster["a"].silent.set()
            await until(lambda: told.away["a"] == "it does not answer")
            assert nodes.capacity == 1
            for node in cluster.started:
                node.go.set()
            assert sorted([len(names(await run)) for run in runs]) == [1, 2]
            cluster["a"].works_again.set()
            cluster["a"].silent.clear()
            await until(lambda: told.away["a"] is None and nodes.capacity == 2)
    assert told.said == ["node a pauses, its rollouts go elsewhere: it does not answer", "node a works again"]
    assert [str(r.outcome.name) for r in recorded if isinstance(r, Attempt)].count("finished") == 2
    assert len(recorded) == 3


@silence
async def test_a_node_that_stays_silent_is_given_up_and_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "GIVEN_UP_S", 0.3)
    cluster, told = FakeCluster("a"), Told()
    async with nodes_of(cluster, told) as nodes:
        silent = cluster["a"]
        silent.silent.set()
        await until(lambda: cluster["a"] is not silent and nodes.capacity == 2)
        assert silent.ended
        assert any("node a is lost: it has not answered for" in line for line in told.said)


async def test_the_end_of_a_node_is_told_once_also_if_another_has_its_name_by_then() -> None:
    cluster, told = FakeCluster("a"), Told()
    ends: list[str | None] = []
    told.node = lambda name, away: ends.append(away)  # type: ignore[method-assign]
    async with nodes_of(cluster, told, max_concurrent_sandboxes=1) as nodes:
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
    cluster, told = FakeCluster("a", "b"), Told()
    async with nodes_of(cluster, told, max_concurrent_sandboxes=1) as nodes:
        cluster["a"].answers = [DOCKER_AWAY]
        with executing(nodes) as (executor, _):
            found = [names(await executor.execute(a_plan(index))) for index in range(4)]
            assert [("a0", "docker_error", "a"), ("a1", "finished", "b")] in found
            assert told.away["a"] == "Docker is away"
            assert {attempts[-1][2] for attempts in found if len(attempts) == 1} <= {"a", "b"}
            cluster["a"].works_again.set()
            await until(lambda: told.away["a"] is None)
            assert cluster["a"].orders[1:] == []


@silence
async def test_without_any_node_that_works_the_run_ends_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "PATIENCE_S", 0.2)
    cluster = FakeCluster("a")
    async with nodes_of(cluster) as nodes:
        cluster["a"].silent.set()
        await until(lambda: nodes.capacity == 0)
        with executing(nodes) as (executor, _), pytest.raises(RunUnhealthy, match="no node of the cluster"):
            await executor.execute(a_plan())


async def test_a_head_that_is_away_is_told_and_its_return_too() -> None:
    cluster, told = FakeCluster("a"), Told()
    async with nodes_of(cluster, told) as nodes:
        cluster.headless = True
        await until(lambda: len(told.said) == 1)
        cluster.headless = False
        await until(lambda: len(told.said) == 2)
        assert nodes.capacity == 2
    assert told.said == [
        "the cluster's head is away, no node can join meanwhile: the head is gone",
        "the cluster's head is back",
    ]


async def test_a_head_that_stays_away_ends_the_run_in_order_before_it_ends_the_process() -> None:
    cluster = FakeCluster("a")
    async with nodes_of(cluster) as nodes:
        cluster["a"].go.clear()
        cluster.head_away_s = members_module.HEAD_MARGIN_S + 0.3
        with executing(nodes) as (executor, recorded):
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
    async with nodes_of(cluster, max_concurrent_sandboxes=1) as nodes:
        cluster["a"].go.clear()
        with executing(nodes, stopping=stopping) as (executor, _):
            runs = [asyncio.create_task(executor.execute(a_plan(index))) for index in range(5)]
            await until(lambda: len(cluster["a"].orders) == 3)  # those have room, on the node or in its queue
            stopping.set()
            nodes.drain()
            cluster["a"].go.set()
            assert sorted([await run is None for run in runs]) == [False] * 3 + [True] * 2
        assert cluster["a"].drained


async def test_a_cancelled_rollout_is_cancelled_on_its_node_and_gives_its_room_back() -> None:
    cluster = FakeCluster("a")
    async with nodes_of(cluster, max_concurrent_sandboxes=1) as nodes:
        cluster["a"].go.clear()
        with executing(nodes) as (executor, recorded):
            run = asyncio.create_task(executor.execute(a_plan()))
            await until(lambda: len(cluster["a"].orders) == 1)
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            assert cluster["a"].cancelled == [a_plan().rollout_id]
            assert [str(r.outcome.name) for r in recorded if isinstance(r, Attempt)] == ["cancelled"]
            cluster["a"].go.set()
            assert names(await executor.execute(a_plan(1))) == [("a0", "finished", "a")]


async def test_a_node_gets_the_keys_that_rollouts_need_and_no_other() -> None:
    config = Config(openai=(OpenAISettings(api_key=Secret("sk-e")),), judge_api_key=Secret("sk-j"))
    given = settings_for_nodes(replace(config, tavily_api_key=Secret("tv")), None)
    assert given.openai[0].api_key.reveal() == "sk-e"
    assert given.tavily_api_key.reveal() == "tv"
    assert not given.judge_api_key
    assert b"sk-j" not in pickle.dumps(given)


# ---------------------------------------------------------------- nodes that are refused


async def test_a_node_with_other_software_is_refused_by_name() -> None:
    def other(node: FakeNode) -> None:
        if node.name == "b":
            node.software |= {"python": "3.9.1", "grpcio": "1.0"}

    cluster, told = FakeCluster("a", "b"), Told()
    cluster.prepare = other
    async with nodes_of(cluster, told) as nodes:
        assert nodes.capacity == 2
    (note,) = told.notes
    assert note.startswith("node b is not used: it has python 3.9.1 and not ")
    assert "grpcio 1.0 and not" in note
    assert cluster["b"].opening is None, "no key goes to a node that is refused"


@pytest.mark.parametrize("refused", [True, False])
async def test_without_a_node_to_use_nothing_begins(refused: bool) -> None:
    def broken(node: FakeNode) -> None:
        node.refusal = Broken("EnvironmentUnusable", "no Docker there")

    cluster = FakeCluster(*(["a"] if refused else []))
    cluster.prepare = broken
    with pytest.raises(EnvironmentUnusable, match="no Docker there" if refused else "the resource `sandbox`"):
        async with nodes_of(cluster):
            pass
    assert all(node.ended for node in cluster.started)


async def test_a_node_whose_tmpdir_is_on_a_network_file_system_refuses_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config(env=EnvSettings(launcher="process"))
    with place() as home:
        device = home.stat().st_dev
        (home / "mounts").write_text(f"9 1 {os.major(device)}:{os.minor(device)} / / rw - nfs4 server:/x rw\n")
        monkeypatch.setattr(channels, "MOUNTS", home / "mounts")
        monkeypatch.setattr("tempfile.tempdir", str(home))
        broken = await HostActor().open(Opening(config, Equipment(), None, software()))
    assert isinstance(broken, Broken)
    assert isinstance(error := broken.error("a"), EnvironmentUnusable)
    assert str(error).startswith(f"node a: {home} is on a network file system (nfs4)")


async def test_a_node_that_is_refused_again_and_again_is_said_once() -> None:
    def old(node: FakeNode) -> None:
        if node.name == "b":
            node.software["python"] = "3.9.1"

    cluster, told = FakeCluster("a"), Told()
    cluster.prepare = old
    async with nodes_of(cluster, told):
        cluster.join("b")
        await until(lambda: len(cluster.started) > 4)
    assert [line.split(":")[0] for line in told.said] == ["node b is not used"]


async def test_the_run_begins_without_nodes_that_take_long_to_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "TOGETHER_S", 0.1)
    slow = asyncio.Event()
    slow.set()

    def prepare(node: FakeNode) -> None:
        if node.name == "b":
            node.silent = slow

    cluster, told = FakeCluster("a", "b"), Told()
    cluster.prepare = prepare
    async with nodes_of(cluster, told) as nodes:
        assert nodes.capacity == 2
        slow.clear()
        await until(lambda: nodes.capacity == 4)
    assert told.said == ["node b has joined"]
    assert told.notes == []


async def test_the_first_node_is_waited_for_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "TOGETHER_S", 0.05)
    slow = asyncio.Event()
    slow.set()
    cluster, told = FakeCluster("a"), Told()
    cluster.prepare = lambda node: setattr(node, "silent", slow)
    asyncio.get_running_loop().call_later(0.3, slow.clear)
    async with nodes_of(cluster, told) as nodes:
        assert nodes.capacity == 2
    assert told.said == []


def waiting(waited_s: float, answer: str = "HTTP 503: Loading model") -> tuple[Wait, ...]:
    return (Wait("the endpoint http://localhost:8000/v1", waited_s, 300.0, answer),)


async def test_a_node_whose_endpoint_is_loading_holds_up_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "TOGETHER_S", 3600.0)
    monkeypatch.setattr(members_module, "JOINING", 1)  # it was begun first, and leaves its place to the other one
    cluster, told = FakeCluster("loads", "works"), Told()

    def prepare(node: FakeNode) -> None:
        if node.name == "loads":
            node.loaded.clear()
            node.waits = waiting(0.0)

    cluster.prepare = prepare
    async with nodes_of(cluster, told) as nodes:
        assert nodes.capacity == 2
        assert told.notes == []
        assert told.away["loads"] == "waiting for the endpoint http://localhost:8000/v1: HTTP 503: Loading model"
        cluster["loads"].waits = waiting(40.0, "")
        await until(lambda: "node loads: the endpoint http://localhost:8000/v1 answers after 40 s" in told.said)
        cluster["loads"].loaded.set()
        await until(lambda: nodes.capacity == 4)
        assert told.away["loads"] is None
        await until(lambda: told.said[-1] == "node loads has joined")


async def test_while_all_nodes_wait_for_their_endpoint_the_run_waits_and_says_so_once() -> None:
    cluster, told = FakeCluster("a", "b", "c"), Told()

    def prepare(node: FakeNode) -> None:
        node.loaded.clear()
        node.waits = waiting(0.0)

    cluster.prepare = prepare

    async def loads() -> None:
        await until(lambda: len(told.away) == 3)
        for node in cluster.started:
            node.waits = waiting(4.0)
        await until(lambda: not any(node.waits for node in cluster.started))
        for node in cluster.started:
            node.waits = waiting(10.0)
        await until(lambda: not any(node.waits for node in cluster.started))
        cluster["b"].loaded.set()

    loading = asyncio.create_task(loads())
    async with nodes_of(cluster, told) as nodes:
        await loading
        assert nodes.capacity == 2
        assert [line.partition(": ")[2].partition(":")[0] for line in told.said if "waiting" in line] == [
            "waiting for the endpoint http",
            "still waiting for the endpoint http",
        ]


async def test_without_an_endpoint_that_serves_in_time_no_node_can_be_used() -> None:
    cluster = FakeCluster("a", "b")
    text = "the endpoint http://localhost:8000/v1 does not serve after 300 s: HTTP 503; start it"
    cluster.prepare = lambda node: setattr(node, "refusal", Broken("NotServing", text))
    with pytest.raises(EnvironmentUnusable, match=r"no node can be used; node a is not used: .* after 300 s"):
        async with nodes_of(cluster):
            pass


async def test_a_run_that_is_stopped_while_a_node_waits_for_its_endpoint_ends_its_actor() -> None:
    cluster = FakeCluster("a")
    cluster.prepare = lambda node: node.loaded.clear()

    async def opened() -> None:
        async with nodes_of(cluster):
            pass

    opening = asyncio.create_task(opened())
    await until(lambda: bool(cluster.started) and cluster["a"].opening is not None)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert cluster["a"].ended


async def test_a_node_tells_of_its_waits_and_not_of_lines_about_them(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = HostActor()

    async def opens(setup: HostSetup, stack: object) -> None:
        assert setup.on_wait is not None
        for wait in (*waiting(0.0), *waiting(3.0)):
            setup.on_wait(wait)
        pulses.append(await actor.pulse())
        pulses.append(await actor.pulse())
        raise NotServing("too late")

    pulses: list[Pulse] = []
    monkeypatch.setattr(host_module, "open_local", opens)
    told = await actor.open(Opening(Config(), Equipment(), None, software()))
    assert pulses == [Pulse(waits=waiting(3.0)), Pulse()]
    assert told == Broken("NotServing", "too late")
    assert isinstance(told, Broken)
    assert isinstance(told.error("a"), NotServing)


async def test_a_node_that_falls_silent_while_it_is_opened_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "GIVEN_UP_S", 1.0)

    def prepare(node: FakeNode) -> None:
        if node.name == "b" and len(cluster.started) < 2:
            node.silent.set()

    cluster, told = FakeCluster("a", "b"), Told()
    cluster.prepare = prepare
    async with nodes_of(cluster, told) as nodes:
        assert told.notes == ["node b is not used: it has not answered for 1 s"]
        assert cluster.started[1].ended
        await until(lambda: nodes.capacity == 4)


async def test_every_node_knows_what_a_trainer_serves_also_one_that_joins_later() -> None:
    cluster, policy = FakeCluster("a", "b"), Policy()
    async with nodes_of(cluster, policy=policy) as nodes:
        await policy.serve("1", "lora-1")
        assert [node.served[-1] for node in cluster.started] == [Served("1", "lora-1")] * 2
        cluster.join("c")
        await until(lambda: nodes.capacity == 6 and Served("1", "lora-1") in cluster["c"].served)


async def test_no_rollout_goes_to_a_node_that_does_not_know_what_a_trainer_serves() -> None:
    """The trainer says something else while the node is being told."""
    cluster, policy = FakeCluster("a"), Policy()
    async with nodes_of(cluster, policy=policy) as nodes:
        await policy.serve("1")
        telling, go_on = asyncio.Event(), asyncio.Event()

        def held(node: FakeNode) -> None:
            async def serve(served: Served) -> None:
                telling.set()
                await go_on.wait()
                node.served.append(served)

            node.serve = serve  # type: ignore[method-assign]

        cluster.prepare = held
        cluster.join("b")
        await telling.wait()
        assert nodes.capacity == 2
        await policy.serve("2")
        go_on.set()
        await until(lambda: nodes.capacity == 4)
        assert cluster["b"].served == [Served("1"), Served("2")]


@silence
async def test_a_node_that_was_silent_learns_what_a_trainer_serves_before_it_gets_rollouts() -> None:
    cluster, policy = FakeCluster("a", "b"), Policy()
    async with nodes_of(cluster, policy=policy) as nodes:
        node = cluster["a"]
        node.works_again.set()
        node.silent.set()
        await until(lambda: nodes.capacity == 2)
        await policy.serve("1")
        assert node.served == []
        node.silent.clear()
        await until(lambda: nodes.capacity == 4)
        assert node.served[-1:] == [Served("1")]


@silence
async def test_a_node_that_does_not_answer_holds_up_no_trainer() -> None:
    cluster, policy = FakeCluster("a", "b"), Policy()
    async with nodes_of(cluster, policy=policy):
        cluster["a"].silent.set()
        async with asyncio.timeout(30):
            await policy.serve("1")
        assert cluster["b"].served[-1] == Served("1")


# ---------------------------------------------------------------- images


class Images(SavedImages):
    """This machine's images; saving takes a while. The file of an image holds its name."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder, self.names, self.saved = folder, names, Counter[str]()
        self.broken: set[str] = set()

    def path(self, name: str) -> Path:
        if name not in self.names or name in self.broken:
            raise LaunchError(f"the image {name} cannot be sent to nodes: No such image")
        self.saved[name] += 1
        path = self.folder / name.replace(":", "-")
        if not path.exists():  # another node may be reading it
            path.write_text(name)
        return path


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Images:
    found = Images(tmp_path, SPEC.image, "own:1", "own:2")
    ids = {name: f"id of {name}" for name in found.names}
    monkeypatch.setattr(members_module, "image_id", ids.get)
    return found


async def test_a_node_that_lacks_the_image_gets_it_and_others_do_not(images: Images) -> None:
    def has(node: FakeNode) -> None:
        if node.name == "b":
            node.images[SPEC.image] = f"id of {SPEC.image}"

    cluster = FakeCluster("a", "b")
    cluster.prepare = has
    async with nodes_of(cluster, images=images, launcher="docker") as nodes:
        assert nodes.capacity == 4
    assert cluster["a"].sent_images == [SPEC.image]
    assert cluster["b"].sent_images == []


async def test_the_image_of_a_task_is_sent_once_however_many_rollouts_wait_for_it(images: Images) -> None:
    cluster = FakeCluster("a")
    async with nodes_of(cluster, images=images, launcher="docker", max_concurrent_sandboxes=4) as nodes:
        own = a_sandbox("own:1")
        with executing(nodes) as (executor, _):
            runs = [executor.execute(replace(a_plan(index), sandbox=own)) for index in range(4)]
            assert [names(await run) for run in [*map(asyncio.ensure_future, runs)]] == [
                [("a0", "finished", "a")]
            ] * 4
    assert cluster["a"].sent_images == [SPEC.image, "own:1"]
    assert images.saved["own:1"] == 1


def test_an_engine_that_falls_silent_has_no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def inspect_image(self, name: str) -> None:
            raise requests.ReadTimeout(f"no answer about {name}")

        def close(self) -> None: ...

    monkeypatch.setattr(image_module, "connect", lambda timeout_s: Silent())
    assert image_module.image_id(SPEC.image) is None


async def test_images_go_to_a_node_one_after_the_other(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node adds pieces to what it has."""
    monkeypatch.setattr("orchestrator.cluster.parcels.PIECE_BYTES", 2)
    cluster = FakeCluster("a")
    async with nodes_of(cluster, images=images, launcher="docker", max_concurrent_sandboxes=4) as nodes:
        with executing(nodes) as (executor, _):
            plans = [replace(a_plan(i), sandbox=a_sandbox(f"own:{1 + i % 2}")) for i in range(4)]
            await asyncio.gather(*(executor.execute(plan) for plan in plans))
    assert sorted(cluster["a"].sent_images) == ["own:1", "own:2", SPEC.image]


async def test_many_rollouts_that_wait_for_an_image_on_one_node_hold_no_other_node_up(images: Images) -> None:
    cluster = FakeCluster("a", "b")
    async with nodes_of(cluster, images=images, launcher="docker", max_concurrent_sandboxes=8) as nodes:
        for node in cluster.started:
            node.taking.clear()
        with executing(nodes) as (executor, _):
            plans = [replace(a_plan(i), sandbox=a_sandbox("own:1")) for i in range(16)]
            runs = [asyncio.create_task(executor.execute(plan)) for plan in plans]
            await until(lambda: [node.used for node in nodes._members.nodes.values()] == [8, 8])
            cluster["b"].taking.set()
            await until(lambda: "own:1" in cluster["b"].images)
            assert "own:1" not in cluster["a"].images
            cluster["a"].taking.set()
            await asyncio.gather(*runs)
    assert [node.sent_images.count("own:1") for node in cluster.started] == [1, 1]


@pytest.mark.parametrize("here", [True, False])
async def test_a_node_s_own_image_is_taken_only_where_this_machine_has_none(images: Images, here: bool) -> None:
    name = "own:1" if here else "theirs:1"
    images.broken.add(name)
    cluster = FakeCluster("a")
    async with nodes_of(cluster, images=images, launcher="docker") as nodes:
        cluster["a"].images[name] = "another id"
        with executing(nodes) as (executor, _):
            results = await executor.execute(replace(a_plan(), sandbox=a_sandbox(name)))
    assert names(results) == [("a0", "launch_error" if here else "finished", "a")]


async def test_no_image_is_sent_to_a_node_without_docker(images: Images) -> None:
    def without(node: FakeNode) -> None:
        if node.name == "b":
            node.engine, node.refusal = False, Broken("EnvironmentUnusable", "Docker is not running here")

    cluster, told = FakeCluster("a", "b"), Told()
    cluster.prepare = without
    async with nodes_of(cluster, told, images=images, launcher="docker") as nodes:
        assert told.notes == ["node b is not used: Docker is not running here"]
        assert cluster["b"].sent_images == []
        cluster["a"].engine, cluster["a"].answers = False, [DOCKER_AWAY]
        with executing(nodes) as (executor, _):
            run = asyncio.create_task(executor.execute(replace(a_plan(), sandbox=a_sandbox("own:1"))))
            await until(lambda: told.away["a"] == "Docker is away")
            assert cluster["a"].sent_images == [SPEC.image]
            cluster["a"].engine = True
            cluster["a"].works_again.set()
            assert names(await run) == [("a0", "docker_error", "a"), ("a1", "finished", "a")]
    assert cluster["a"].sent_images == [SPEC.image, "own:1"]


def test_saved_images_of_tasks_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def engine(what: str) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(get_image=lambda name: [name.encode()])

    monkeypatch.setattr(image_module, "_engine", engine)
    (tmp_path / "owner").write_text("this process")
    saved = SavedImages(tmp_path)
    for number in range(image_module.KEPT + 3):
        assert saved.path("the/run:1").read_bytes() == b"the/run:1"
        assert saved.path(f"own:{number}").read_bytes() == f"own:{number}".encode()
    kept = {path.name for path in tmp_path.iterdir()}
    assert len(kept) == image_module.KEPT + 1
    assert {"owner", "the%run:1", f"own:{image_module.KEPT + 2}"} <= kept


async def test_an_image_that_is_nowhere_breaks_its_rollouts_by_name(images: Images) -> None:
    async with nodes_of(FakeCluster("a"), images=images, launcher="docker") as nodes:
        with executing(nodes) as (executor, recorded):
            await executor.execute(replace(a_plan(), sandbox=a_sandbox("nowhere:1")))
    (broken,) = recorded
    assert (failure := failure_of(broken)) is not None
    assert (failure.name, "nowhere:1" in failure.reason) == (FailedName.LAUNCH_ERROR, True)


# ---------------------------------------------------------------- what crosses


def test_no_answer_and_no_metadata_go_to_a_node() -> None:
    task = replace(a_plan().task, answer="SECRET", metadata={"key": "SECRET"})
    assert b"SECRET" not in pickle.dumps(for_node(replace(a_plan(), task=task)))


@pytest.mark.parametrize("kind", [LaunchError, SandboxLostError, AuthenticationError, EnvironmentUnusable])
def test_errors_cross_as_what_they_are(kind: type[Exception]) -> None:
    error = Broken.of(kind("it broke")).error("a")  # type: ignore[arg-type]
    assert type(error) is kind
    assert str(error) == "node a: it broke"


def test_an_error_of_an_unknown_kind_is_infrastructure() -> None:
    assert isinstance(Broken("Nonsense", "x").error("a"), SandboxLostError)
    assert isinstance(Broken("log", "x").error("a"), SandboxLostError)
    assert isinstance(Broken("OrchestratorError", "x").rollout_error("a"), SandboxLostError)


def test_differences_are_named() -> None:
    assert differences({"python": "3.11.1", "ray": "2"}, {"python": "3.11.1", "ray": "2"}) == ""
    assert differences({}, {"ray": "2"}) == "ray unknown and not 2"


async def test_attachments_go_to_a_node_once(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"content")
    files = (Attachment("f", tmp_path / "f", 7), Attachment("g", tmp_path / "f", 7))
    cluster = FakeCluster("a")
    async with nodes_of(cluster) as nodes:
        with executing(nodes) as (executor, _):
            plans = [replace(a_plan(i), task=replace(a_plan(i).task, attachments=files)) for i in range(3)]
            await asyncio.gather(*(executor.execute(plan) for plan in plans))
    assert list(cluster["a"].files.values()) == [b"content"]
    assert len(cluster["a"].orders) == 3


def test_a_shelf_keeps_what_is_used_and_checks_what_it_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.cluster.parcels.KEPT_BYTES", 10)
    shelf, desk, files = Shelf(tmp_path), Desk(), tmp_path / "mine"
    files.mkdir()
    attachments = []
    for number in range(3):
        (files / str(number)).write_bytes(bytes([number]) * 8)
        attachments.append(Attachment(str(number), files / str(number), 8))
    for attachment in attachments:
        (parcel,) = desk.parcels((attachment,))
        assert shelf.missing((parcel,)) == (parcel.digest,)
        with attachment.path.open("rb") as file:
            for piece, begins, ends in pieces(file, 8):
                shelf.add(parcel.digest, piece, begins=begins, ends=ends)
        with shelf.used((attachment,), (parcel,)) as (there,):
            assert there.path.read_bytes() == attachment.path.read_bytes()
            assert shelf.missing((parcel,)) == ()
    assert len([path for path in tmp_path.iterdir() if path.is_file()]) == 1
    with pytest.raises(LaunchError, match="changed on its way"):
        shelf.add("0" * 64, b"other", begins=True, ends=True)


def on_shelf(shelf: Shelf, content: bytes) -> Parcel:
    parcel = Parcel(hashlib.sha256(content).hexdigest(), len(content))
    shelf.add(parcel.digest, content, begins=True, ends=True)
    return parcel


def test_a_file_is_on_the_shelf_when_it_lies_there_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces are added in a thread, and rollouts look in another one."""
    shelf, seen = Shelf(tmp_path), []
    rename = Path.rename

    def slow(path: Path, target: Path) -> Path:
        seen.append(shelf.missing((Parcel(target.name, 1),)))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", slow)
    parcel = on_shelf(shelf, b"x")
    assert seen == [(parcel.digest,)]
    assert shelf.missing((parcel,)) == ()


def test_the_end_of_a_rollout_costs_the_same_however_many_files_are_kept(tmp_path: Path) -> None:
    """Looking at all of them also failed when another came meanwhile."""

    class Counted(dict[str, int]):
        looked_at = 0

        def __iter__(self) -> Iterator[str]:
            for key in super().__iter__():
                Counted.looked_at += 1
                yield key

    shelf = Shelf(tmp_path)
    parcels = [on_shelf(shelf, bytes([number])) for number in range(200)]
    for name, value in vars(shelf).items():
        if isinstance(value, dict):
            setattr(shelf, name, Counted(value))
    with shelf.used((), ()), shelf.used((Attachment("f", tmp_path, 1),), (parcels[7],)):
        pass
    assert Counted.looked_at < 20


def test_a_disk_that_fails_on_a_node_breaks_what_needs_it_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(tmp_path)
    parcel = on_shelf(shelf, b"x")

    def fails(*_: object, **__: object) -> Path:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("orchestrator.cluster.parcels.KEPT_BYTES", 0)
    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(LaunchError, match="Read-only file system"):
        on_shelf(shelf, b"y")
    monkeypatch.setattr(Path, "unlink", fails)
    with shelf.used((Attachment("f", tmp_path, 1),), (parcel,)):
        pass


async def test_a_node_without_room_cannot_be_opened_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/x")

    monkeypatch.setattr(host_module, "open_local", full)
    told = await HostActor().open(Opening(Config(), Equipment(), None, software()))
    assert told == Broken(
        "EnvironmentUnusable", "it cannot be opened: [Errno 28] No space left on device: '/tmp/x'"
    )


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 24])
def test_pieces_are_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("orchestrator.cluster.parcels.PIECE_BYTES", 8)
    (tmp_path / "f").write_bytes(bytes(range(size)))
    with (tmp_path / "f").open("rb") as file:
        found = list(pieces(file, size))
    assert b"".join(piece for piece, _, _ in found) == bytes(range(size))
    assert [begins for _, begins, _ in found] == [True] + [False] * (len(found) - 1)
    assert [ends for _, _, ends in found] == [False] * (len(found) - 1) + [True]


OUTPUT = Output((OutputFile("sub/x.txt", 5), OutputFile("empty", 0)))


@asynccontextmanager
async def leaving_files(
    cluster: FakeCluster, folder: Path, contents: dict[str, bytes]
) -> AsyncIterator[asyncio.Task[Attempt]]:
    """An attempt that left OUTPUT on its node, of which `contents` come with it."""
    async with nodes_of(cluster) as nodes, nodes.slot(0, SPEC) as room:
        assert room is not None
        record = Record(started_at=1.0, output=OUTPUT)
        node = cluster["a"]
        node.answers = [Delivery(record, Ended(EndedName.FINISHED), contents=contents)]
        yield asyncio.create_task(room.carry_out(a_plan(), Provision(OutputRule(folder, 10, 1000))))
    assert node.orders[0].output == (10, 1000)


@pytest.mark.parametrize("small", [True, False])
async def test_output_files_come_into_the_run_s_folder(tmp_path: Path, small: bool) -> None:
    contents = {"sub/x.txt": b"small", "empty": b""} if small else {}
    cluster = FakeCluster("a")
    async with leaving_files(cluster, tmp_path, contents) as made:
        assert (await made).record.output == OUTPUT
    folder = tmp_path / a_plan().rollout_id
    assert (folder / "sub" / "x.txt").read_bytes() == (b"small" if small else b"large")
    assert (folder / "empty").read_bytes() == b""
    assert cluster["a"].forgotten == ([] if small else [a_plan().rollout_id])


@pytest.mark.parametrize("fault", [{"unreadable": True}, {"large": b"lar"}, {"large": b"larger"}])
async def test_a_rollout_whose_output_does_not_come_whole_is_drawn_again_and_leaves_nothing(
    tmp_path: Path, fault: dict[str, object]
) -> None:
    """Without its files a scorer would take it for one that wrote none."""
    cluster = FakeCluster("a")
    cluster.prepare = lambda node: vars(node).update(fault)
    async with leaving_files(cluster, tmp_path, {}) as made:
        with pytest.raises(LaunchError):
            await made
    assert list(tmp_path.iterdir()) == []
    assert cluster["a"].forgotten == [a_plan().rollout_id]


@pytest.mark.parametrize(("number", "ended"), [(errno.ENOSPC, False), (errno.EINVAL, True)])
async def test_output_that_this_disk_does_not_keep_is_drawn_again_unless_a_name_may_be_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, ended: bool
) -> None:
    def fail(kept: KeptOutput, path: str, piece: bytes) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(KeptOutput, "append", fail)
    async with leaving_files(FakeCluster("a"), tmp_path, {}) as made:
        if ended:
            attempt = await made
            assert attempt.outcome == Ended(EndedName.FINISHED)
            assert attempt.record.output == Output(left_out=2, complete=False)
        else:
            with pytest.raises(LaunchError, match="cannot be kept"):
                await made


async def test_a_node_that_is_lost_with_the_output_of_a_rollout_ends_that_rollout(tmp_path: Path) -> None:
    cluster = FakeCluster("a")
    async with leaving_files(cluster, tmp_path, {}) as made:
        (node := cluster["a"]).fetched.clear()
        await until(lambda: any(tmp_path.rglob("x.txt")))
        node.ended = True
        node.fetched.set()
        with pytest.raises(SandboxLostError):
            await made
    assert list(tmp_path.iterdir()) == []


async def test_output_on_its_way_leaves_nothing_when_the_rollout_is_cancelled(tmp_path: Path) -> None:
    cluster = FakeCluster("a")
    async with leaving_files(cluster, tmp_path, {}) as made:
        cluster["a"].fetched.clear()
        await until(lambda: any(tmp_path.rglob("x.txt")))
        made.cancel()
        with pytest.raises(asyncio.CancelledError):
            await made
        assert list(tmp_path.iterdir()) == []
        assert cluster["a"].forgotten == [a_plan().rollout_id]


async def test_output_that_came_whole_is_kept_whatever_becomes_of_its_node(tmp_path: Path) -> None:
    async def lost(rollout_id: str) -> None:
        raise NodeLost("the actor is dead")

    cluster = FakeCluster("a")
    cluster.prepare = lambda node: setattr(node, "forget", lost)
    async with leaving_files(cluster, tmp_path, {}) as made:
        assert (await made).record.output == OUTPUT
    assert (tmp_path / a_plan().rollout_id / "sub" / "x.txt").read_bytes() == b"large"


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x"])
def test_no_output_file_leaves_its_folder(tmp_path: Path, path: str) -> None:
    kept = KeptOutput(tmp_path / "out", "r")
    with pytest.raises(ValueError, match="leaves its folder"):
        kept.append(path, b"x")


async def test_a_key_that_the_endpoint_refuses_ends_the_run() -> None:
    cluster = FakeCluster("a")
    async with nodes_of(cluster) as nodes:
        cluster["a"].answers = [Delivery(broken=Broken("AuthenticationError", "401"))]
        with executing(nodes) as (executor, _), pytest.raises(AuthenticationError, match="node a: 401"):
            await executor.execute(a_plan())


async def test_a_node_that_cannot_confine_is_given_up_and_its_rollouts_are_drawn_elsewhere() -> None:
    unfit = Broken("EnvironmentUnusable", "no seccomp")
    cluster, told = FakeCluster("a", "b"), Told()
    async with nodes_of(cluster, told, max_concurrent_sandboxes=1) as nodes:
        cluster["a"].answers = [Delivery(broken=unfit)] * 100
        cluster["a"].works_again.set()  # as far as it can tell
        cluster["b"].go.clear()
        cluster.prepare = lambda node: setattr(node, "refusal", unfit)
        with executing(nodes) as (executor, _):
            runs = [asyncio.create_task(executor.execute(a_plan(index))) for index in range(8)]
            await until(lambda: any("node a is not used: no seccomp" in line for line in told.said))
            await asyncio.sleep(0.2)
            cluster["b"].go.set()
            found = [names(await run) for run in runs]
    assert any("node a is lost: no seccomp" in line for line in told.said)
    assert {attempts[-1][1:] for attempts in found} == {("finished", "b")}
    assert max(len(attempts) for attempts in found) == 2


def _plan_is_whole(plan: RolloutPlan, result: Result) -> bool:
    return isinstance(result, Attempt) and result.plan == plan and failure_of(result) is None


async def test_the_attempt_has_the_run_s_own_plan() -> None:
    plan = replace(a_plan(), task=replace(a_plan().task, answer="42"))
    async with nodes_of(FakeCluster("a")) as nodes:
        with executing(nodes) as (executor, recorded):
            await executor.execute(plan)
    assert _plan_is_whole(plan, recorded[0])
