"""A cluster without Ray: nodes that a test lets join, fall silent, break and leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from orchestrator.agents.equipment import Equipment
from orchestrator.cluster.image import SavedImages
from orchestrator.cluster.nodes import Nodes
from orchestrator.cluster.order import (
    Broken,
    Delivery,
    Inspection,
    News,
    NodeFacts,
    Opening,
    Order,
    Pulse,
    software,
)
from orchestrator.cluster.remote import ListedNode, NodeLost
from orchestrator.completion.replay import Replayed
from orchestrator.completion.startup import Wait
from orchestrator.doctor.finding import Finding
from orchestrator.engine.executor import Executor, Result
from orchestrator.host.setup import HostSetup
from orchestrator.rules.policy import Policy, Served
from orchestrator.settings.config import Config
from orchestrator.settings.table import EnvSettings
from orchestrator.types import Attempt, Ended, EndedName, Failed, FailedName, Member, Record, SandboxSpec
from tests.fakes.plans import a_plan

SPEC = Config().sandbox_spec()
DOCKER_AWAY = Delivery(Record(started_at=1.0), Failed(FailedName.DOCKER_ERROR, "no answer"), away="Docker")


class FakeNode:
    """A host actor whose rollouts end when the test says so, or at once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.orders: list[Order] = []
        self.cancelled: list[str] = []
        self.files: dict[str, bytes] = {}
        self.images: dict[str, str] = {}  # ids, by name
        self.sent_images: list[str] = []
        self.engine = True
        self.unfit: str | None = None
        self.looked_at: list[tuple[str, Mapping[str, Any] | None]] = []
        self.taking = asyncio.Event()  # unless it is set, no piece of an image is taken
        self.taking.set()
        self.told: list[News] = []  # that the run will hear of
        self.go = asyncio.Event()
        self.go.set()
        self.silent = asyncio.Event()  # while it is set, nothing is answered
        self.answers: list[Delivery] = []  # in the place of finished rollouts, the first one first
        self.works_again = asyncio.Event()
        self.software = dict(software())
        self.refusal: Broken | None = None
        self.loaded = asyncio.Event()  # unless it is set, the node waits for its endpoint while it is opened
        self.loaded.set()
        self.waits: tuple[Wait, ...] = ()  # what its next pulse tells
        self.warm = 0
        self.unreadable = False  # output files
        self.large = b"large"  # what is in one that does not come with its rollout
        self.fetched = asyncio.Event()  # unless it is set, the empty one does not come
        self.fetched.set()
        self.forgotten: list[str] = []
        self.bodies: (
            dict[str, bytes] | None
        ) = {}  # of what its rollouts asked; None: it is lost when asked for one
        self.asked_bodies: list[str] = []
        self.ended = self.closed = self.drained = False
        self.opening: Opening | None = None
        self.served: list[Served] = []
        self.examined: list[tuple[Config, bool, str | None]] = []
        self.findings: tuple[Finding, ...] = (Finding("ok", "docker", "it works"),)

    async def _there(self) -> None:
        while self.silent.is_set() and not self.ended:
            await asyncio.sleep(0.01)
        if self.ended:
            raise NodeLost("the actor is dead")

    async def look(self, image: str, *, docker: bool) -> Inspection:
        await self._there()
        return Inspection(self.software, self.images.get(image) if self.engine else None, self.engine)

    async def examine(
        self, config: Config, *, image_comes: bool, tokenizer_digest: str | None
    ) -> tuple[Finding, ...]:
        await self._there()
        self.examined.append((config, image_comes, tokenizer_digest))
        return self.findings

    async def add_image(self, piece: bytes, *, begins: bool, ends: bool) -> Broken | None:
        """The file's content is the name of the image, and its id."""
        await self.taking.wait()
        await asyncio.sleep(0.01)
        if begins:
            self.sent_images.append("")
        self.sent_images[-1] += piece.decode()
        if ends:
            name = self.sent_images[-1]
            self.images[name] = f"id of {name}"
        return None

    async def open(self, opening: Opening) -> NodeFacts | Broken:
        self.opening = opening
        await self.loaded.wait()
        return self.refusal or NodeFacts(True, {"launcher": "process"}, {}, ())

    async def add_file(self, digest: str, piece: bytes, *, begins: bool, ends: bool) -> Broken | None:
        await self._there()
        self.files[digest] = (b"" if begins else self.files[digest]) + piece
        return None

    async def carry_out(self, order: Order) -> Delivery:
        await self._there()
        missing = tuple(p.digest for p in order.parcels if p.digest not in self.files)
        if missing:
            return Delivery(missing=missing)
        self.orders.append(order)
        try:
            await self.go.wait()
            await self._there()
        except asyncio.CancelledError:
            self.cancelled.append(order.plan.rollout_id)
            raise
        if self.answers:
            return self.answers.pop(0)
        return Delivery(Record(started_at=1.0, answer=self.name), Ended(EndedName.FINISHED), warm=self.warm)

    async def news(self) -> tuple[News, ...]:
        while not self.told:
            await self._there()
            await asyncio.sleep(0.005)
        news, self.told = tuple(self.told), []
        return news

    async def fetch(self, rollout_id: str, path: str, offset: int) -> bytes | Broken:
        if self.unreadable:
            return Broken("LaunchError", "the disk is gone")
        if path == "empty":
            await self.fetched.wait()
            await self._there()
            return b""
        return self.large[offset:]

    async def fetch_body(self, digest: str, offset: int) -> bytes | Broken:
        if not offset:
            self.asked_bodies.append(digest)
        if self.bodies is None:
            raise NodeLost("the actor is dead")
        if digest not in self.bodies:
            return Broken("LaunchError", "the disk is gone")
        return self.bodies[digest][offset : offset + 2]

    async def forget(self, rollout_id: str) -> None:
        await self._there()
        self.forgotten.append(rollout_id)

    async def why_unfit(self, spec: SandboxSpec, image: Mapping[str, Any] | None) -> str | None:
        await self._there()
        self.looked_at.append((spec.image, image))
        return self.unfit

    async def works(self) -> Broken | None:
        await self._there()
        await self.works_again.wait()
        return None

    async def pulse(self) -> Pulse:
        await self._there()
        waits, self.waits = self.waits, ()
        return Pulse((), self.warm, waits)

    async def drain(self) -> None:
        await self._there()
        self.drained = True

    async def serve(self, served: Served) -> None:
        await self._there()
        self.served.append(served)

    async def replayed(self) -> Replayed | None:
        await self._there()
        return Replayed(len(self.orders), 0, 0)

    async def close(self) -> None:
        await self._there()
        self.closed = True

    def end(self) -> None:
        self.ended = True


class FakeCluster:
    """`there`: the nodes that are listed, by id. An actor that is started anew on a node is another FakeNode.
    `said`, `notes`, `away`: what people were told of the nodes."""

    def __init__(self, *names: str) -> None:
        self.said: list[str] = []
        self.notes: list[str] = []
        self.away: dict[str, str | None] = {}
        self.there: dict[str, ListedNode] = {}
        self.head_away_s = 60.0
        self.headless = False  # nobody says which nodes there are
        self.started: list[FakeNode] = []
        self.prepare: Callable[[FakeNode], None] = lambda node: None
        for name in names:
            self.join(name)

    def join(self, name: str) -> None:
        self.there[name] = ListedNode(name, name)

    def prepare_one(self, name: str, prepare: Callable[[FakeNode], None]) -> None:
        """Prepares the actors of this node alone."""
        self.prepare = lambda node: prepare(node) if node.name == name else None

    def node(self, name: str, away: str | None) -> None:
        """People are told why a node is away; None: it is not."""
        self.away[name] = away

    def hold(self) -> None:
        """No rollout ends before `release`."""
        for node in self.started:
            node.go.clear()

    def release(self) -> None:
        for node in self.started:
            node.go.set()

    def __getitem__(self, name: str) -> FakeNode:
        """The actor that was started last on that node."""
        return next(node for node in reversed(self.started) if node.name == name)

    async def nodes(self) -> list[ListedNode]:
        if self.headless:
            raise NodeLost("the head is gone")
        return list(self.there.values())

    async def start(self, node_id: str) -> FakeNode:
        node = FakeNode(node_id)
        self.prepare(node)
        self.started.append(node)
        return node


@asynccontextmanager
async def nodes_of(
    cluster: FakeCluster,
    *,
    images: SavedImages | None = None,
    policy: Policy | None = None,
    **env: Any,
) -> AsyncIterator[Nodes]:
    """The nodes as a run's hosts, opened: with Docker where there are images."""
    settings: dict[str, Any] = {
        "launcher": "docker" if images else "process",
        "max_concurrent_sandboxes": 2,
        "warm_sandboxes": 0,
        "seed": 7,
    }
    config = Config(env=EnvSettings(**{**settings, "cluster": "ray", **env}))
    opening = Opening(config, Equipment(), None, software())
    images = images or SavedImages(Path("none"))
    setup = HostSetup(
        config,
        cluster.notes,
        cluster.said.append,
        on_node=cluster.node,
        policy=Policy() if policy is None else policy,
    )
    nodes = Nodes(setup, cluster, opening, None, images)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(nodes.opened())
        yield nodes


@asynccontextmanager
async def rollouts_on(
    cluster: FakeCluster, *, stopping: asyncio.Event | None = None, **more: Any
) -> AsyncIterator[tuple[Nodes, Executor, list[Result]]]:
    """(the nodes, an executor of rollouts on them, which grades none and tries none twice; what it recorded)."""
    recorded: list[Result] = []

    async def record(result: Result) -> None:
        recorded.append(result)

    async def graded(attempt: Attempt) -> Result:
        return attempt

    async with nodes_of(cluster, **more) as nodes:
        yield (
            nodes,
            Executor(nodes, max_retries=0, graded=graded, recorded=record, stopping=stopping or asyncio.Event()),
            recorded,
        )


def begun(executor: Executor, number: int, **changes: Any) -> list[asyncio.Task[tuple[Result, ...] | None]]:
    """So many rollouts of one group."""
    return [asyncio.create_task(executor.execute(a_plan(index, **changes))) for index in range(number)]


def names(results: tuple[Result, ...] | None) -> list[tuple[str, str, str]]:
    """(end of the rollout's id, outcome, node) of each attempt."""
    assert results is not None
    attempts = [result.attempt if isinstance(result, Member) else result for result in results]
    return [(a.plan.rollout_id[-2:], a.outcome.name, a.record.node) for a in attempts]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.005)
