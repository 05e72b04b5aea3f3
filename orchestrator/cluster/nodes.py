"""The nodes of a cluster as the hosts of a run: found, opened, given rollouts, left.

A node that stops working pauses itself and not the run: its rollouts break as infrastructure, without using up a
retry, and are drawn again elsewhere under new attempt ids. What it may still send of the old ones is not listened
to.
"""

from __future__ import annotations

import asyncio
import logging
import math
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.agents.equip import equip
from orchestrator.breaker import PATIENCE_S
from orchestrator.cluster.image import SavedImages, image_id
from orchestrator.cluster.node import Node
from orchestrator.cluster.order import Broken, Opening, Order, differences, for_node, software
from orchestrator.cluster.parcels import Desk
from orchestrator.cluster.placement import Rooms
from orchestrator.cluster.remote import Link, NodeLost, NodeSeen, Remote
from orchestrator.completion.replay import Replayed
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.errors import (
    EnvironmentUnusable,
    LaunchError,
    OrchestratorError,
    RolloutError,
    RunUnhealthy,
    SandboxLostError,
)
from orchestrator.hosts import Provision
from orchestrator.launch.channels import make_owned_directory, remove_owned_directory
from orchestrator.opening import REPLAY, find_tokenizer
from orchestrator.slots import Line
from orchestrator.tools.base import ToolFacts
from orchestrator.types import Attempt, Failed, RolloutPlan, SandboxSpec
from orchestrator.waits import uninterrupted

if TYPE_CHECKING:
    from orchestrator.settings.config import Config

log = logging.getLogger(__name__)

LOOK_S = 3.0  # between two looks at which nodes there are
JOIN_AGAIN_S = 30.0  # after a node could not be opened, or was lost while its machine is still listed
LOOKING_S = 60.0  # for the cluster to say which nodes there are
CLOSE_S = 60.0  # for a node to remove its sandboxes
JOINING = 32  # nodes that are being opened at a time
SENDING = 4  # images on their way at a time


async def open_nodes(
    config: Config,
    stack: AsyncExitStack,
    notes: list[str],
    say: Callable[[str], None] = log.warning,
    tell: Callable[[str, str | None], None] = lambda node, away: None,
) -> Nodes:
    """The nodes of the Ray cluster; `stack` closes them. `tell`: a node works (None), or why rollouts do not go
    there.

    Raises EnvironmentUnusable if no node can be used; those that cannot are named in `notes`.
    """
    from orchestrator.cluster.link import RayLink

    equipment = await asyncio.to_thread(equip, config.env)
    tokenizer = await asyncio.to_thread(find_tokenizer, config)
    link = RayLink(config.env.ray_address)
    await link.open()
    stack.push_async_callback(link.close)
    # If this process is killed, the next run removes it.
    folder = await asyncio.to_thread(make_owned_directory, "images", Path(tempfile.gettempdir()))
    stack.callback(remove_owned_directory, folder)
    images = SavedImages(folder)
    digest = None if tokenizer is None else await asyncio.to_thread(lambda: tokenizer.digest)
    told = await asyncio.to_thread(software)
    opening = Opening(_for_nodes(config, tokenizer), equipment, digest, told)
    nodes = Nodes(config, link, opening, tokenizer, images, say, tell)
    await stack.enter_async_context(nodes.opened(notes))
    return nodes


class Nodes:
    """See `open_nodes`. `capacity` counts the nodes that work now."""

    def __init__(
        self,
        config: Config,
        link: Link,
        opening: Opening,
        tokenizer: HubTokenizer | None,
        images: SavedImages,
        say: Callable[[str], None],
        tell: Callable[[str, str | None], None],
    ) -> None:
        self.tokenizer = tokenizer
        self.capacity = 0
        self._env = config.env
        self._spec = config.sandbox_spec()
        self._link = link
        self._images = images
        self._say, self._tell = say, tell
        self._desk = Desk()
        self._nodes: dict[str, Node] = {}  # by Ray's id; those that were lost are not in it
        self._refused: dict[str, str] = {}  # why a node is not used, by name
        self._not_before: dict[str, float] = {}  # when a node may be opened again, by Ray's id
        self._joining: set[str] = set()
        self._rooms: Rooms[Node] = Rooms()
        self._counted: dict[Node, tuple[int, str | None]] = {}  # its share of `capacity`, and what was told of it
        self._line: Line[SandboxSpec, Node] = Line(self._place, self._release)
        self._told: list[Callable[[], None]] = []
        self._demands: list[Callable[[], float]] = []
        self._drained = False
        self._ended: BaseException | None = None  # what ended the watch over the nodes; slots raise it
        self._tasks: set[asyncio.Task[None]] = set()
        self._join_room, self._send_room = asyncio.Semaphore(JOINING), asyncio.Semaphore(SENDING)
        self._saving = asyncio.Lock()
        self._replayed: Replayed | None = None
        self._opening = opening
        self._image_id: str | None = None
        self.takes_ids = False
        self.tools: Mapping[str, ToolFacts] = {}
        self._sandbox: Mapping[str, Any] = {}

    # ------------------------------------------------------------ opening and closing

    @asynccontextmanager
    async def opened(self, notes: list[str]) -> AsyncIterator[None]:
        """Within this block nodes are found, watched and used."""
        if self._env.launcher == "docker":
            self._image_id = await asyncio.to_thread(image_id, self._spec.image)
        try:
            try:
                seen = await self._look()
            except NodeLost as error:
                raise EnvironmentUnusable(f"env.ray_address: {error}; see `ray status`") from error
            if not seen:
                raise EnvironmentUnusable(
                    "env.cluster: no node of the Ray cluster has the resource `sandbox`; start nodes with "
                    """`ray start --resources '{"sandbox": 1}'`"""
                )
            await asyncio.gather(*(self._join(node) for node in seen))
            for name, why in self._refused.items():
                notes.append(f"node {name} is not used: {why}")
            if not self._nodes:
                raise EnvironmentUnusable("env.cluster: no node can be used; " + "; ".join(notes[-3:]))
            self._start(self._follow(), "nodes")
            yield
        finally:
            await uninterrupted(self._close())

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        """Whoever waits for room gets the error, which ends the run."""
        self._ended = self._ended or error
        self._line.end(error)

    async def _close(self) -> None:
        nodes, tasks = list(self._nodes.values()), list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._leave(node) for node in nodes))

    async def _leave(self, node: Node) -> None:
        """Removes what the run has on a node."""
        with suppress(SandboxLostError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._count_replayed(node)
                await node.call(node.remote.close())
        node.lose("it was left")

    # ------------------------------------------------------------ which nodes there are

    async def _look(self) -> list[NodeSeen]:
        """Raises NodeLost."""
        try:
            async with asyncio.timeout(LOOKING_S):
                return await self._link.nodes()
        except TimeoutError:
            raise NodeLost(f"the cluster's head has not answered for {LOOKING_S:.0f} s") from None

    async def _follow(self) -> None:
        """Opens nodes that join, and lets go of those that leave."""
        loop = asyncio.get_running_loop()
        worked_s, head_away = loop.time(), False
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                seen = {node.node_id: node for node in await self._look()}
            except NodeLost as error:
                if not head_away:
                    self._say(f"the cluster's head is away, no node can join meanwhile: {error}")
                head_away = True
            else:
                head_away = False
                self._compare(seen)
            if any(node.works for node in self._nodes.values()):
                worked_s = loop.time()
            elif loop.time() - worked_s > PATIENCE_S:
                raise RunUnhealthy(f"no node of the cluster has worked for {loop.time() - worked_s:.0f} s")

    def _compare(self, seen: Mapping[str, NodeSeen]) -> None:
        now = asyncio.get_running_loop().time()
        for node_id, node in list(self._nodes.items()):
            if node_id not in seen:
                node.lose("it left the cluster")
            elif seen[node_id].draining and not node.draining:
                node.draining = True
                self._say(f"node {node.name} is to be left: its rollouts come to their ends, and none are begun")
                self._changed(node)
                self._start(self._drain_node(node), f"draining {node.name}")
        for node_id, found in seen.items():
            known = node_id in self._nodes or node_id in self._joining or found.draining
            if not known and now >= self._not_before.get(node_id, 0.0):
                self._start(self._join_later(found), f"joining {found.name}")

    async def _drain_node(self, node: Node) -> None:
        with suppress(SandboxLostError):
            await node.call(node.remote.drain())
        while node.used and node.lost is None:  # noqa: ASYNC110 - it tells of its room alone
            await asyncio.sleep(LOOK_S / 10)
        if node.lost is None:
            await self._leave(node)

    async def _join_later(self, seen: NodeSeen) -> None:
        await self._join(seen)
        if seen.node_id in self._nodes:
            self._say(f"node {seen.name} has joined: {self.summary()}")
        elif why := self._refused.get(seen.name):
            self._say(f"node {seen.name} is not used: {why}")

    async def _join(self, seen: NodeSeen) -> None:
        """Opens a node and watches it; or notes why it is not used."""
        self._joining.add(seen.node_id)
        self._not_before[seen.node_id] = asyncio.get_running_loop().time() + JOIN_AGAIN_S
        remote: Remote | None = None
        try:
            async with self._join_room:
                remote = await self._link.start(seen.node_id)
                node = await self._open(seen, remote)
        except (NodeLost, OrchestratorError) as error:
            self._refused[seen.name] = str(error).removeprefix(f"node {seen.name}: ")
            if remote is not None:
                remote.end()
        except BaseException:
            if remote is not None:
                remote.end()
            raise
        else:
            self._refused.pop(seen.name, None)
            self._nodes[seen.node_id] = node
            self._start(self._watch(node), f"node {node.name}")
            self._changed(node)
        finally:
            self._joining.discard(seen.node_id)

    async def _open(self, seen: NodeSeen, remote: Remote) -> Node:
        """Raises NodeLost, EnvironmentUnusable, LaunchError."""
        docker, image = self._env.launcher == "docker", self._spec.image
        looked = await remote.look(image, docker=docker)
        if differs := differences(looked.software, self._opening.software):
            raise EnvironmentUnusable(f"it has {differs}; install the same versions on all nodes")
        node = Node(seen, remote, self._env.max_concurrent_sandboxes, self._changed, self._say)
        if docker and looked.image_id is None and self._image_id is None:
            raise EnvironmentUnusable(
                f"neither it nor this machine has the image {image}; run `orchestrator image build` on either"
            )
        if docker and self._image_id is None:
            self._image_id = looked.image_id  # the first node's: all must have the same
        elif docker and looked.image_id != self._image_id:
            await self._send_image(node, image)
            if (await remote.look(image, docker=True)).image_id != self._image_id:
                raise EnvironmentUnusable(f"its image {image} is another one; build it anew, or remove it there")
        node.images.add(image)
        facts = await remote.open(self._opening)
        if isinstance(facts, Broken):
            raise facts.error(seen.name)
        if self._sandbox and facts.takes_ids != self.takes_ids:
            raise EnvironmentUnusable("its endpoint gives token ids and that of the others not, or the reverse")
        if not self._sandbox:
            self._sandbox, self.takes_ids, self.tools = facts.sandbox, facts.takes_ids, facts.tools
        for note in facts.notes:
            self._say(f"node {seen.name}: {note}")
        return node

    async def _send_image(self, node: Node, image: str) -> None:
        """Raises LaunchError."""

        async def saved() -> Path:
            async with self._saving:
                return await asyncio.to_thread(self._images.path, image)

        async with self._send_room:
            await node.send_image(image, saved)

    async def _watch(self, node: Node) -> None:
        try:
            await node.watch()
        finally:
            if self._nodes.get(node.seen.node_id) is node:
                del self._nodes[node.seen.node_id]
            self._changed(node)
        if node.lost != "it was left":
            self._say(f"node {node.name} is lost: {node.lost}")

    # ------------------------------------------------------------ room

    def _changed(self, node: Node) -> None:
        """Counts the node's room anew, and gives it to whoever waits."""
        there = node.works and node.seen.node_id in self._nodes
        self._rooms.set(node, node.free if there else 0, warm=node.warm > 0)
        before, now = self._counted.get(node, (0, None)), (node.sandboxes if there else 0, _why_away(node, there))
        if now != before:
            self.capacity += now[0] - before[0]
            self._tell(node.name, now[1])
            if node.lost is None:
                self._counted[node] = now
            else:
                self._counted.pop(node, None)
        self._line.serve()
        if now[0] > before[0]:
            for told in self._told:
                told()

    def _place(self, spec: SandboxSpec) -> Node | None:
        """The node that gets the next rollout, with its room taken."""
        if spec.image == self._spec.image:
            node = self._rooms.best()
        else:
            node = self._rooms.best(node for node in self._nodes.values() if spec.image in node.images)
        if node is not None:
            node.used += 1
            node.warm = max(0, node.warm - 1)
            self._rooms.set(node, node.free, warm=node.warm > 0)
        return node

    def turn(self) -> int:
        return self._line.turn()

    @asynccontextmanager
    async def slot(self, turn: int, spec: SandboxSpec) -> AsyncIterator[RoomOnNode | None]:
        if self._ended is not None:
            raise self._ended
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

    @contextmanager
    def following(self, demand: Callable[[], float]) -> Iterator[None]:
        self._demands.append(demand)
        try:
            yield
        finally:
            self._demands.remove(demand)

    def demand(self) -> float:
        """How many more rollouts each node will get, as far as is known."""
        wanted = sum(demand() for demand in self._demands) if self._demands else math.inf
        return wanted if math.isinf(wanted) else math.ceil(wanted / max(1, len(self._nodes)))

    def drain(self) -> None:
        self._drained = True
        self._line.end()
        for node in self._nodes.values():
            self._start(_drained(node), f"draining {node.name}")

    def changed(self, told: Callable[[], None]) -> None:
        self._told.append(told)

    async def describe(self) -> dict[str, Any]:
        names = sorted(node.name for node in self._nodes.values())
        return {"agent": self._opening.equipment.describe(), "sandbox": dict(self._sandbox), "nodes": names}

    def summary(self) -> str:
        warm = self._env.most_warm
        on_top = f" and {warm} warm on top" if warm else ""
        working = [node for node in self._nodes.values() if node.works]
        each = f"{self._env.max_concurrent_sandboxes}{on_top}"
        nodes = "1 node" if len(working) == 1 else f"{len(working)} nodes"
        return f"at most {self.capacity} sandboxes on {nodes}, {each} on each"

    async def replayed(self) -> Replayed | None:
        for node in list(self._nodes.values()):
            with suppress(SandboxLostError):
                await self._count_replayed(node)
        return self._replayed

    async def _count_replayed(self, node: Node) -> None:
        """What a node has replayed since it was asked last."""
        told = await node.call(node.remote.replayed())
        if told is not None:
            self._replayed = told if self._replayed is None else self._replayed + told

    # ------------------------------------------------------------ one attempt

    async def carry_out(self, node: Node, plan: RolloutPlan, provision: Provision) -> tuple[Attempt, bool]:
        """(the attempt, whether something that the node needs is away). Raises RolloutError,
        AuthenticationError."""
        attachments, rule = plan.task.attachments, provision.output
        try:
            parcels = await asyncio.to_thread(self._desk.parcels, attachments) if attachments else ()
        except OSError as error:
            raise LaunchError(f"the task's files cannot be read: {error.strerror}") from error
        image = plan.sandbox.image
        if self._env.launcher == "docker" and image not in node.images:
            await self._need_image(node, image)
        limits = None if rule is None else (rule.max_files, rule.max_bytes)
        order = Order(for_node(plan), parcels, limits, provision.tools, self.demand())
        delivery = await node.carry_out(order, attachments)
        if delivery.away:
            node.pause(f"{delivery.away} is away")
        if delivery.broken is not None:
            raise _raised(delivery.broken, node)
        assert delivery.record is not None
        assert delivery.outcome is not None
        record = replace(delivery.record, node=node.name)
        if rule is not None and record.output is not None and record.output.files:
            output = await node.take_output(rule.folder, plan.rollout_id, record.output, delivery)
            record = replace(record, output=output)
        return Attempt(plan, record, delivery.outcome), bool(delivery.away)

    async def _need_image(self, node: Node, image: str) -> None:
        """A task's own image: the node's, if it has it, else this machine's. Raises LaunchError,
        SandboxLostError."""
        looked = await node.call(node.remote.look(image, docker=True))
        if looked.image_id is None or looked.image_id != await asyncio.to_thread(image_id, image):
            with suppress(LaunchError) if looked.image_id is not None else nullcontext():
                await self._send_image(node, image)
        node.images.add(image)


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

    async def carry_out(self, plan: RolloutPlan, provision: Provision) -> Attempt:
        try:
            attempt, self._away = await self._nodes.carry_out(self._node, plan, provision)
        except RolloutError:
            self._away = not self._node.works
            raise
        return attempt

    async def excuses(self, failure: Failed) -> bool:
        return self._away


async def _drained(node: Node) -> None:
    with suppress(SandboxLostError):
        await node.call(node.remote.drain())


def _why_away(node: Node, there: bool) -> str | None:
    if there:
        return None
    return node.lost or node.away or ("it is to be left" if node.draining else "it is being opened")


def _raised(broken: Broken, node: Node) -> RolloutError:
    """Of a node that cannot be used at all, the rollout's error; the node is paused."""
    error = broken.error(node.name)
    if isinstance(error, RolloutError):
        return error
    node.pause(broken.text)
    return SandboxLostError(str(error))


def _for_nodes(config: Config, tokenizer: HubTokenizer | None) -> Config:
    """The settings of a node: its own machine, the run's tokenizer, and a recording by its absolute path."""
    env = replace(config.env, cluster="none", tokenizer_name="none" if tokenizer is None else tokenizer.name)
    servers = []
    for server in config.openai:
        if server.base_url.startswith(REPLAY):
            path = Path(server.base_url.removeprefix(REPLAY)).absolute()
            server = replace(server, base_url=f"{REPLAY}{path}")
        servers.append(server)
    return replace(config, env=env, openai=tuple(servers))
