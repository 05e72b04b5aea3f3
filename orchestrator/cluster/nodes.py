"""The nodes of a cluster as the hosts of a run: who gets the next rollout, and what comes back.

A node that stops working pauses itself and not the run: its rollouts break as infrastructure, without using up a
retry, and go on elsewhere behind their last completion that was told of; without one they are drawn again. What it
may still send of them is not listened to.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import time
from typing import Any

from orchestrator.agents.equip import equip
from orchestrator.border.bodies import Bodies
from orchestrator.cluster.image import SavedImages, described
from orchestrator.cluster.members import Members
from orchestrator.cluster.node import Node
from orchestrator.cluster.order import Broken, NodeFacts, Opening, Order, for_node, settings_for_nodes, software
from orchestrator.cluster.parcels import Desk
from orchestrator.cluster.placement import Rooms
from orchestrator.cluster.remote import Link
from orchestrator.completion.find_tokenizer import find_tokenizer
from orchestrator.completion.replay import Replayed
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.errors import ConfigError, LaunchError, RolloutError, SandboxLostError, os_error_as
from orchestrator.host.base import HostNow, Provision, SlotNeedless, UnderWay
from orchestrator.host.setup import HostSetup
from orchestrator.host.slots import Line
from orchestrator.launch.channels import make_owned_directory, remove_owned_directory
from orchestrator.rules.egress import EGRESS_FOLDER
from orchestrator.tools.base import ToolFacts
from orchestrator.types import Attempt, Entry, Failed, RolloutPlan, SandboxSpec, Turn


async def open_nodes(setup: HostSetup, stack: AsyncExitStack) -> Nodes:
    """The nodes of the Ray cluster; `stack` closes them. Nodes that cannot be used are named in the notes. Raises
    EnvironmentUnusable if none can."""
    from orchestrator.cluster.link import RayLink

    config = setup.config
    equipment = await asyncio.to_thread(equip, config.env)
    tokenizer = await asyncio.to_thread(find_tokenizer, config.env, config.openai[0].model_name)
    link = RayLink(config.env.ray_address)
    await link.open()
    stack.push_async_callback(link.close)
    # If this process is killed, the next run removes it.
    folder = await asyncio.to_thread(make_owned_directory, "images", Path(tempfile.gettempdir()))
    stack.callback(remove_owned_directory, folder)
    images = SavedImages(folder)
    digest = None if tokenizer is None else await asyncio.to_thread(lambda: tokenizer.digest)
    versions = await asyncio.to_thread(software)
    name = "none" if tokenizer is None else tokenizer.name
    opening = Opening(settings_for_nodes(config, name), equipment, digest, versions)
    nodes = Nodes(setup, link, opening, tokenizer, images)
    await stack.enter_async_context(nodes.opened())
    return nodes


class Nodes:
    """See `open_nodes`. `capacity` counts the nodes that work now."""

    def __init__(
        self, setup: HostSetup, link: Link, opening: Opening, tokenizer: HubTokenizer | None, images: SavedImages
    ) -> None:
        self.tokenizer = tokenizer
        self.capacity = 0
        self._env = setup.config.env
        self._spec = setup.config.sandbox_spec()
        self._equipment = opening.equipment
        self._tell = setup.on_node
        self._desk = Desk()
        self._kept_bodies: dict[Path, Bodies] = {}  # by the run directory
        self._one_opens = asyncio.Lock()
        self._orders = itertools.count()
        self._served: dict[int, _Served] = {}  # of the orders that are being carried out
        self._rooms: Rooms[Node] = Rooms()
        self._counted: dict[Node, tuple[int, str | None]] = {}  # its share of `capacity`, and why it is away
        self._line: Line[SandboxSpec, Node] = Line(self._place, self._release)
        self._on_change: list[Callable[[], None]] = []
        self._demands: list[Callable[[], float]] = []
        self._drained = False
        self._members = Members(setup, link, opening, images, changed=self._changed, failed=self._line.end)

    def opened(self) -> AbstractAsyncContextManager[None]:
        """Within this block nodes are looked for, watched and used."""
        return self._members.opened()

    # ------------------------------------------------------------ room

    def _changed(self, node: Node) -> None:
        """Counts the node's room anew, and gives it to whoever waits."""
        used = node.works and node.node_id in self._members.nodes
        self._rooms.set(node, node.free if used else 0, warm=node.warm > 0)
        before = self._counted.get(node, (0, None))
        now = (node.sandboxes, None) if used else (0, _why_away(node))
        if now != before and (node.lost is None or node in self._counted):
            self.capacity += now[0] - before[0]
            self._tell(node.name, now[1])
            if node.lost is None:
                self._counted[node] = now
            else:
                self._counted.pop(node, None)
        self._line.serve()
        if now[0] > before[0]:
            for call in self._on_change:
                call()

    def _place(self, spec: SandboxSpec) -> Node | None:
        """The node that gets the next rollout, with its room taken."""
        if spec.image == self._spec.image:
            node = self._rooms.best()
        else:
            node = self._rooms.best(node for node in self._members.nodes.values() if spec.image in node.images)
        if node is not None:
            node.used += 1
            node.warm = max(0, node.warm - 1)
            self._rooms.set(node, node.free, warm=node.warm > 0)
        return node

    @property
    def waiting(self) -> int:
        return self._line.waiting

    def now(self) -> Mapping[str, HostNow]:
        return {node.name: node.now for node in self._members.nodes.values()}

    def under_way(self) -> Sequence[UnderWay]:
        now = time()
        return [UnderWay(one.plan, one.turns, now - one.began, None) for one in self._served.values() if one.began]

    async def why_unfit(self, spec: SandboxSpec) -> str | None:
        """What the last node says, if all that work say something."""
        image, reason = None, None
        if self._env.takes_docker and not spec.is_writable:
            image = await asyncio.to_thread(described, spec.image)
        for node in [node for node in self._members.nodes.values() if node.works]:
            with suppress(SandboxLostError):
                if (reason := await node.call(node.remote.why_unfit(spec, image))) is None:
                    return None
        return reason

    def turn(self) -> int:
        return self._line.turn()

    @asynccontextmanager
    async def slot(self, turn: int, spec: SandboxSpec) -> AsyncIterator[RoomOnNode | None]:
        if self._members.ended is not None:
            raise self._members.ended
        node = None if self._drained else await self._line.wait(turn, spec)
        if node is None:
            yield None
            return
        try:
            yield RoomOnNode(self, node)
        finally:
            self._release(node)

    def _release(self, node: Node) -> None:
        node.used -= 1
        self._changed(node)

    # ------------------------------------------------------------ as `Hosts`

    @property
    def _facts(self) -> NodeFacts:
        assert self._members.facts is not None  # a run opens with at least one node
        return self._members.facts

    @property
    def takes_ids(self) -> bool:
        return self._facts.takes_ids

    @property
    def why_text(self) -> str:
        return self._facts.why_text

    @property
    def tools(self) -> Mapping[str, ToolFacts]:
        return self._facts.tools

    @contextmanager
    def following(self, demand: Callable[[], float], changed: Callable[[], None]) -> Iterator[None]:
        self._demands.append(demand)
        self._on_change.append(changed)
        try:
            yield
        finally:
            self._demands.remove(demand)
            self._on_change.remove(changed)

    def expecting(self, spec: SandboxSpec, rollouts: int = 1) -> AbstractContextManager[None]:
        """Nothing is made ahead for tasks with an image of their own: which node gets the rollout is not known."""
        return nullcontext()

    def demand(self) -> float:
        """How many more rollouts each node will get, as far as is known."""
        wanted = sum(demand() for demand in self._demands) if self._demands else math.inf
        return wanted if math.isinf(wanted) else math.ceil(wanted / max(1, len(self._members.nodes)))

    def drain(self) -> None:
        self._drained = True
        self._line.end()
        self._members.drain()

    async def describe(self) -> dict[str, Any]:
        names = sorted(node.name for node in self._members.nodes.values())
        return {"agent": self._equipment.describe(), "sandbox": dict(self._facts.sandbox), "nodes": names}

    def summary(self) -> str:
        warm = self._env.most_warm
        on_top = f" and {warm} warm on top" if warm else ""
        working = [node for node in self._members.nodes.values() if node.works]
        each = f"{self._env.max_concurrent_sandboxes}{on_top}"
        nodes = "1 node" if len(working) == 1 else f"{len(working)} nodes"
        return f"at most {self.capacity} sandboxes on {nodes}, {each} on each"

    async def replayed(self) -> Replayed | None:
        for node in list(self._members.nodes.values()):
            with suppress(SandboxLostError):
                await self._members.count_replayed(node)
        return self._members.replayed

    # ------------------------------------------------------------ one attempt

    async def carry_out(self, node: Node, plan: RolloutPlan, provision: Provision) -> tuple[Attempt, bool]:
        """(the attempt, whether something that the node needs is away). Raises RolloutError,
        AuthenticationError."""
        attachments, rule = plan.task.attachments, provision.output
        with os_error_as(LaunchError, "the task's files cannot be read"):
            parcels = await asyncio.to_thread(self._desk.parcels, attachments) if attachments else ()
        if self._env.takes_docker:
            await self._members.need_image(node, plan.sandbox.image)
        limits = None if rule is None else (rule.max_files, rule.max_bytes)
        order = Order(for_node(plan), parcels, limits, provision.tools, self.demand(), next(self._orders))
        served = self._served[order.number] = _Served(plan, provision.served)
        try:
            delivery = await node.carry_out(order, attachments, served.note)
        finally:
            del self._served[order.number]
        if delivery.away:
            node.pause(f"{delivery.away} is away")
        if delivery.broken is not None:
            raise _raised(delivery.broken, node)
        assert delivery.record is not None
        assert delivery.outcome is not None
        record = replace(delivery.record, node=node.name)
        if record.crossings and (bodies := await self._bodies(provision.run_folder)) is not None:
            record = replace(record, crossings=await node.take_bodies(bodies, record.crossings))
        if rule is not None and record.output is not None and record.output.files:
            output = await node.take_output(rule.folder, plan.rollout_id, record.output, delivery)
            record = replace(record, output=output)
        return Attempt(plan, record, delivery.outcome), bool(delivery.away)

    async def _bodies(self, run: Path | None) -> Bodies | None:
        """Where bodies of the run are kept. None: they are not."""
        if run is None:
            return None
        async with self._one_opens:
            if run not in self._kept_bodies:
                with os_error_as(ConfigError, f"env.egress: {run / EGRESS_FOLDER} cannot be used"):
                    made = await asyncio.to_thread(Bodies, run / EGRESS_FOLDER, self._env.egress_kept)
                self._kept_bodies[run] = made
        return self._kept_bodies[run]


@dataclass(slots=True)
class _Served:
    """How far a rollout on a node is, by what it was served. `began`: Unix time of its record's begin; 0: it was
    served nothing yet."""

    plan: RolloutPlan
    tell: Callable[[float, Entry], None]
    began: float = 0.0
    sequences: set[int] = field(default_factory=set)  # of its completions; one that is given up comes again

    @property
    def turns(self) -> int:
        before = self.plan.prefix.turns if self.plan.prefix else ()
        return len(before) + len(self.sequences)

    def note(self, started_at: float, one: Entry) -> None:
        self.began = started_at
        if isinstance(one, Turn):
            self.sequences.add(one.sequence)
        self.tell(started_at, one)


class RoomOnNode:
    """Room for one attempt on a node."""

    def __init__(self, nodes: Nodes, node: Node) -> None:
        self._nodes = nodes
        self._node = node
        self._away = False

    @property
    def name(self) -> str:
        return self._node.name

    async def works(self) -> None:
        """A node that does not work gets no rollouts."""

    async def carry_out(
        self, plan: RolloutPlan, provision: Provision, needless: SlotNeedless = nullcontext
    ) -> Attempt:
        try:
            attempt, self._away = await self._nodes.carry_out(self._node, plan, provision)
        except RolloutError:
            self._away = not self._node.works
            raise
        return attempt

    async def excuses(self, failure: Failed) -> bool:
        return self._away


def _why_away(node: Node) -> str:
    if node.loading is not None and node.lost is None:
        return f"waiting for {node.loading.who}: {node.loading.answer}"
    return node.lost or node.away or ("it is leaving the cluster" if node.draining else "it is being opened")


def _raised(broken: Broken, node: Node) -> RolloutError:
    """The rollout's error. If the error says that no rollout can run on this node, the node is given up: its
    `works` would return, because its Engine and the endpoint answer. It is used again when it can be opened
    anew."""
    error = broken.error(node.name)
    if isinstance(error, RolloutError):
        return error
    node.lose(broken.text)
    return SandboxLostError(str(error))
