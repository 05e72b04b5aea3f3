"""Which nodes a run begins with, and what they are told before they get a rollout."""

from __future__ import annotations

import asyncio
import os

import pytest

from orchestrator.agents.equipment import Equipment
from orchestrator.cluster import host as host_module
from orchestrator.cluster import members as members_module
from orchestrator.cluster import node as node_module
from orchestrator.cluster.host import HostActor
from orchestrator.cluster.order import (
    Broken,
    Opening,
    Pulse,
    software,
)
from orchestrator.completion.startup import Wait
from orchestrator.errors import (
    EnvironmentUnusable,
    NotServing,
)
from orchestrator.host.setup import HostSetup
from orchestrator.launch import channels
from orchestrator.rules.policy import Policy, Served
from orchestrator.settings.config import Config
from orchestrator.settings.table import EnvSettings
from tests.fakes.cluster import (
    FakeCluster,
    FakeNode,
    nodes_of,
    until,
)
from tests.fakes.runs import place

silence = pytest.mark.usefixtures("short_silence")


async def test_a_node_with_other_software_is_refused_by_name() -> None:
    cluster = FakeCluster("a", "b")
    cluster.prepare_one("b", lambda node: node.software.update(python="3.9.1", grpcio="1.0"))
    async with nodes_of(cluster) as nodes:
        assert nodes.capacity == 2
    (note,) = cluster.notes
    assert note.startswith("node b is not used: it has python 3.9.1 and not ")
    assert "grpcio 1.0 and not" in note
    assert cluster["b"].opening is None, "no key goes to a node that is refused"


@pytest.mark.parametrize("refused", [True, False])
async def test_without_a_node_to_use_nothing_begins(refused: bool) -> None:
    cluster = FakeCluster(*(["a"] if refused else []))
    cluster.prepare = lambda node: setattr(node, "refusal", Broken("EnvironmentUnusable", "no Docker there"))
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
    cluster = FakeCluster("a")
    cluster.prepare_one("b", lambda node: node.software.update(python="3.9.1"))
    async with nodes_of(cluster):
        cluster.join("b")
        await until(lambda: len(cluster.started) > 4)
    assert [line.split(":")[0] for line in cluster.said] == ["node b is not used"]


async def test_the_run_begins_without_nodes_that_take_long_to_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "TOGETHER_S", 0.1)
    slow = asyncio.Event()
    slow.set()
    cluster = FakeCluster("a", "b")
    cluster.prepare_one("b", lambda node: setattr(node, "silent", slow))
    async with nodes_of(cluster) as nodes:
        assert nodes.capacity == 2
        slow.clear()
        await until(lambda: nodes.capacity == 4)
    assert cluster.said == ["node b has joined"]
    assert cluster.notes == []


async def test_the_first_node_is_waited_for_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "TOGETHER_S", 0.05)
    slow = asyncio.Event()
    slow.set()
    cluster = FakeCluster("a")
    cluster.prepare = lambda node: setattr(node, "silent", slow)
    asyncio.get_running_loop().call_later(0.3, slow.clear)
    async with nodes_of(cluster) as nodes:
        assert nodes.capacity == 2
    assert cluster.said == []


def waiting(waited_s: float, answer: str = "HTTP 503: Loading model") -> tuple[Wait, ...]:
    return (Wait("the endpoint http://localhost:8000/v1", waited_s, 300.0, answer),)


def loading(node: FakeNode) -> None:
    """Its endpoint is."""
    node.loaded.clear()
    node.waits = waiting(0.0)


async def test_a_node_whose_endpoint_is_loading_holds_up_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "TOGETHER_S", 3600.0)
    monkeypatch.setattr(members_module, "JOINING", 1)  # it was begun first, and leaves its place to the other one
    cluster = FakeCluster("loads", "works")
    cluster.prepare_one("loads", loading)
    async with nodes_of(cluster) as nodes:
        assert nodes.capacity == 2
        assert cluster.notes == []
        assert (
            cluster.away["loads"] == "waiting for the endpoint http://localhost:8000/v1: HTTP 503: Loading model"
        )
        cluster["loads"].waits = waiting(40.0, "")
        await until(lambda: "node loads: the endpoint http://localhost:8000/v1 answers after 40 s" in cluster.said)
        cluster["loads"].loaded.set()
        await until(lambda: nodes.capacity == 4)
        assert cluster.away["loads"] is None
        await until(lambda: cluster.said[-1] == "node loads has joined")


async def test_while_all_nodes_wait_for_their_endpoint_the_run_waits_and_says_so_once() -> None:
    cluster = FakeCluster("a", "b", "c")
    cluster.prepare = loading

    async def loads() -> None:
        await until(lambda: len(cluster.away) == 3)
        for node in cluster.started:
            node.waits = waiting(4.0)
        await until(lambda: not any(node.waits for node in cluster.started))
        for node in cluster.started:
            node.waits = waiting(10.0)
        await until(lambda: not any(node.waits for node in cluster.started))
        cluster["b"].loaded.set()

    later = asyncio.create_task(loads())
    async with nodes_of(cluster) as nodes:
        await later
        assert nodes.capacity == 2
        assert [line.partition(": ")[2].partition(":")[0] for line in cluster.said if "waiting" in line] == [
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

    cluster = FakeCluster("a", "b")
    cluster.prepare = prepare
    async with nodes_of(cluster) as nodes:
        assert cluster.notes == ["node b is not used: it has not answered for 1 s"]
        assert cluster.started[1].ended
        await until(lambda: nodes.capacity == 4)


# ---------------------------------------------------------------- what a trainer serves


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
