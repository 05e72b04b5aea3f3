"""Which nodes of the cluster a run has: looks for them, opens them, watches them, leaves them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from orchestrator.cluster.image import SavedImages, image_id, nowhere
from orchestrator.cluster.node import Node
from orchestrator.cluster.order import Broken, NodeFacts, Opening, demand_same
from orchestrator.cluster.remote import Link, ListedNode, NodeLost
from orchestrator.completion.replay import Replayed
from orchestrator.completion.startup import Wait, WaitLines
from orchestrator.errors import EnvironmentUnusable, OrchestratorError, RunUnhealthy, SandboxLostError
from orchestrator.host.breaker import PATIENCE_S
from orchestrator.host.setup import HostSetup
from orchestrator.rules.policy import Served
from orchestrator.rules.waits import first_of, uninterrupted

log = logging.getLogger(__name__)

LOOK_S = 3.0  # between two looks at which nodes there are
JOIN_AGAIN_S = 30.0  # after a node could not be opened, or was lost while its machine is still listed
TOGETHER_S = 60.0  # for nodes to be opened at the start; those that take longer join later
LOOKING_S = 60.0  # for the cluster to say which nodes there are, at the start
HEAD_SILENT_S = 5.0  # and later
HEAD_MARGIN_S = 20.0  # for an end in order, before a head that is away ends this process
CLOSE_S = 60.0  # for a node to remove its sandboxes
JOINING = 32  # nodes that are being opened at a time
SENDING = 4  # images on their way at a time


class Members:
    """The nodes that are open, by Ray's id. `changed` is called when the room of one may have changed, `failed`
    with what ends the watch over them, which is kept in `ended`."""

    def __init__(
        self,
        setup: HostSetup,
        link: Link,
        opening: Opening,
        images: SavedImages,
        *,
        changed: Callable[[Node], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.nodes: dict[str, Node] = {}
        self.ended: BaseException | None = None
        self.replayed: Replayed | None = None
        self.facts: NodeFacts | None = None  # of the first node that was opened: all are alike
        self._env = setup.config.env
        self._spec = setup.config.sandbox_spec()
        self._setup = setup
        self._link = link
        self._opening = opening
        self._images = images
        setup.policy.changed(self._serve)
        self._changed, self._failed, self._say = changed, failed, setup.say
        self._refused: dict[str, str] = {}  # why a node is not used, by name
        self._noted: set[str] = set()
        self._not_before: dict[str, float] = {}  # when a node may be opened again, by Ray's id
        self._joining: set[str] = set()
        self._loading: set[str] = set()  # those of them that wait for their endpoint, which may take minutes
        self._news = asyncio.Event()  # a node was opened, was refused, or began to wait for its endpoint
        self._waits = WaitLines()
        self._begun = False  # from now on each node that joins is announced
        self._tasks: set[asyncio.Task[None]] = set()
        self._watches: set[asyncio.Task[None]] = set()  # those of them that watch a node
        self._join_room, self._send_room = asyncio.Semaphore(JOINING), asyncio.Semaphore(SENDING)
        self._saving = asyncio.Lock()
        self._image_id: str | None = None

    # ------------------------------------------------------------ opening and closing

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Within this block nodes are looked for, watched and used."""
        if self._env.takes_docker:
            self._image_id = await asyncio.to_thread(image_id, self._spec.image)
        try:
            await self._join_first(await first_nodes(self._link))
            for name, why in self._refused.items():
                self._setup.notes.append(f"node {name} is not used: {why}")
            if not self.nodes:
                raise EnvironmentUnusable("env.cluster: no node can be used; " + "; ".join(self._setup.notes[-3:]))
            self._start(self._follow(), "nodes")
            yield
        finally:
            await uninterrupted(self._close())

    async def _join_first(self, listed: list[ListedNode]) -> None:
        """Returns when all are open, refused, or waiting for their endpoint, and after TOGETHER_S in any case; but
        not while none is open and one may still be."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + TOGETHER_S
        joining = {self._start(self._join_and_tell(node), f"joining {node.name}"): node for node in listed}
        while self.ended is None and (left := {node.node_id for task, node in joining.items() if not task.done()}):
            if self.nodes and (left <= self._loading or loop.time() >= end_s):
                break
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(end_s if self.nodes else None):
                    await self._news.wait()
        if self.ended is not None:
            raise self.ended
        self._begun = True

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._watches.discard(task)
        self._news.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        """Rollouts that wait for room get the error at once, running ones soon after. It ends the run."""
        self.ended = self.ended or error
        for node in list(self.nodes.values()):
            node.lose(str(error))
        self._failed(error)

    async def _close(self) -> None:
        """No node joins any more. They are watched until they are left: one that does not answer is not waited
        for."""
        await _cancelled(self._tasks - self._watches)
        await asyncio.gather(*(self._leave(node) for node in list(self.nodes.values())))
        await _cancelled(self._tasks)

    async def _leave(self, node: Node) -> None:
        """Removes what the run has on a node."""
        with suppress(SandboxLostError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.count_replayed(node)
                await node.call(node.remote.close())
        node.lose("it was left")

    # ------------------------------------------------------------ which nodes there are

    async def _follow(self) -> None:
        """Opens nodes that join, and lets go of those that leave. Raises RunUnhealthy."""
        loop = asyncio.get_running_loop()
        worked_s = heard_s = loop.time()
        head_away = False
        while True:
            before_s = loop.time()
            await asyncio.sleep(LOOK_S)
            stood_s = loop.time() - before_s - LOOK_S  # this process itself
            worked_s, heard_s = worked_s + stood_s, heard_s + stood_s
            try:
                listed = {node.node_id: node for node in await _look(self._link, HEAD_SILENT_S)}
            except NodeLost as error:
                if not head_away:
                    self._say(f"the cluster's head is away, no node can join meanwhile: {error}")
                head_away = True
                if (away_s := loop.time() - heard_s) > self._link.head_away_s - HEAD_MARGIN_S:
                    raise RunUnhealthy(f"the cluster's head has been away for {away_s:.0f} s") from error
            else:
                if head_away:
                    self._say("the cluster's head is back")
                heard_s, head_away = loop.time(), False
                self._compare(listed)
            if any(node.works for node in self.nodes.values()):
                worked_s = loop.time()
            elif loop.time() - worked_s > PATIENCE_S:
                raise RunUnhealthy(f"no node of the cluster has worked for {loop.time() - worked_s:.0f} s")

    def _compare(self, listed: Mapping[str, ListedNode]) -> None:
        now = asyncio.get_running_loop().time()
        for node_id, node in list(self.nodes.items()):
            if node_id not in listed:
                node.lose("it left the cluster")
            elif listed[node_id].draining and not node.draining:
                node.draining = True
                self._say(f"node {node.name} is leaving the cluster: its rollouts end there, and none begin")
                self._changed(node)
                self._start(self._drain_node(node), f"draining {node.name}")
        for node_id, one in listed.items():
            member = node_id in self.nodes or node_id in self._joining
            if not member and not one.draining and now >= self._not_before.get(node_id, 0.0):
                self._start(self._join_and_tell(one), f"joining {one.name}")

    async def _drain_node(self, node: Node) -> None:
        await _drained(node)
        while node.used and node.lost is None:  # noqa: ASYNC110 - it tells of its room alone
            await asyncio.sleep(LOOK_S / 10)
        if node.lost is None:
            await self._leave(node)

    async def _join_and_tell(self, listed: ListedNode) -> None:
        before = self._refused.get(listed.name)
        await self._join(listed)
        why = self._refused.get(listed.name)
        if self._begun and why is None:
            self._say(f"node {listed.name} has joined")
        elif self._begun and why != before:
            self._say(f"node {listed.name} is not used: {why}")

    async def _join(self, listed: ListedNode) -> None:
        """Opens a node and watches it; or notes why it is not used."""
        self._joining.add(listed.node_id)
        self._not_before[listed.node_id] = asyncio.get_running_loop().time() + JOIN_AGAIN_S
        node: Node | None = None
        opening: asyncio.Task[None] | None = None
        try:
            async with self._join_room:
                remote = await self._link.start(listed.node_id)
                node = Node(listed, remote, self._setup, self._changed, self._wait)
                opening = asyncio.create_task(first_of(self._open(node), node.silence()))
                # A node that waits for its endpoint keeps no other one from being opened.
                await first_of(_done(opening), node.waits.wait())
            await opening
            while not node.knows_policy:  # the trainer may say something else while the node is told
                await first_of(node.learn_policy(), node.silence())
        except BaseException as error:
            if node is not None:
                node.lose("it is not used")
            if not isinstance(error, NodeLost | OrchestratorError):
                raise
            self._refused[listed.name] = str(error).removeprefix(f"node {listed.name}: ")
        else:
            self._refused.pop(listed.name, None)
            node.loading = None
            self.nodes[listed.node_id] = node
            self._watches.add(self._start(self._watch(node), f"node {node.name}"))
            self._changed(node)
        finally:
            if opening is not None:
                await _cancelled({opening})
            self._joining.discard(listed.node_id)
            self._loading.discard(listed.node_id)

    def _wait(self, node: Node, wait: Wait) -> None:
        """Called when a node tells of a wait for an endpoint. What is said of it is said once for all nodes that
        wait for the same one."""
        if node.node_id in self._joining:
            self._loading.add(node.node_id)
        if (line := self._waits.line(wait)) is not None:
            self._say(f"node {node.name}: {line}")
        self._changed(node)
        self._news.set()

    async def _open(self, node: Node) -> None:
        """Raises NodeLost, EnvironmentUnusable, LaunchError, SandboxLostError."""
        docker, image, remote = self._env.takes_docker, self._spec.image, node.remote
        inspection = await remote.look(image, docker=docker)
        demand_same(inspection.software, self._opening.software)
        if docker and inspection.engine:  # without an Engine, opening it says what to do
            await self._demand_image(node, image, inspection.image_id)
        facts = await remote.open(self._opening)
        if isinstance(facts, Broken):
            raise facts.error(node.name)
        self.facts = self.facts or facts
        if facts.takes_ids != self.facts.takes_ids:
            raise EnvironmentUnusable("its endpoint gives token ids and the others' do not, or the reverse")
        for note in facts.notes:
            if note not in self._noted:  # the nodes of a cluster are alike
                self._noted.add(note)
                self._say(f"node {node.name}: {note}")

    async def _demand_image(self, node: Node, image: str, theirs: str | None) -> None:
        """All nodes have the same image: this machine's, or that of the first node. Raises as `_open`."""
        if theirs is None and self._image_id is None:
            raise EnvironmentUnusable(nowhere(image))
        if self._image_id is None:
            self._image_id = theirs
        elif theirs != self._image_id:
            await node.send_image(image, self._saved)
            if (await node.remote.look(image, docker=True)).image_id != self._image_id:
                raise EnvironmentUnusable(f"its image {image} is another one; build it anew, or remove it there")
        node.images.add(image)

    @asynccontextmanager
    async def _saved(self, image: str) -> AsyncIterator[Path]:
        """The image's file, while there is room for one more on its way. Raises LaunchError."""
        async with self._send_room:
            async with self._saving:
                path = await asyncio.to_thread(self._images.path, image)
            yield path

    async def _watch(self, node: Node) -> None:
        try:
            await node.watch()
        finally:
            if self.nodes.get(node.node_id) is node:
                del self.nodes[node.node_id]
            self._changed(node)
        if node.lost != "it was left" and self.ended is None:
            self._say(f"node {node.name} is lost: {node.lost}")

    async def need_image(self, node: Node, image: str) -> None:
        """Sends a task's own image, unless the node has it; one that is not on this machine is taken as the node
        has it. Raises LaunchError, SandboxLostError."""
        if image in node.images:
            return
        inspection = await node.call(node.remote.look(image, docker=True))
        if not inspection.engine:
            return  # carrying the rollout out shows what is away
        ours = await asyncio.to_thread(image_id, image)
        if inspection.image_id is None or ours not in (None, inspection.image_id):
            await node.send_image(image, self._saved)
        node.images.add(image)

    async def count_replayed(self, node: Node) -> None:
        """What a node has replayed since it was asked last."""
        replayed = await node.call(node.remote.replayed())
        if replayed is not None:
            self.replayed = replayed if self.replayed is None else self.replayed + replayed

    async def _serve(self, served: Served) -> None:
        """When this returns, all nodes know it. Those that are lost, away or joining get no rollout before."""
        await asyncio.gather(*(_taught(node) for node in list(self.nodes.values())))

    def drain(self) -> None:
        """No node makes a sandbox ahead any more."""
        for node in self.nodes.values():
            self._start(_drained(node), f"draining {node.name}")


async def first_nodes(link: Link) -> list[ListedNode]:
    """The nodes to begin with, at least one. Raises EnvironmentUnusable."""
    try:
        listed = await _look(link, LOOKING_S)
    except NodeLost as error:
        raise EnvironmentUnusable(f"env.ray_address: {error}; see `ray status`") from error
    if not listed:
        raise EnvironmentUnusable(
            "env.cluster: no node of the Ray cluster has the resource `sandbox`; start nodes with "
            """`ray start --resources '{"sandbox": 1}'`"""
        )
    return listed


async def _look(link: Link, within_s: float) -> list[ListedNode]:
    """Raises NodeLost."""
    try:
        async with asyncio.timeout(within_s):
            return await link.nodes()
    except TimeoutError:
        raise NodeLost(f"the cluster's head has not answered for {within_s:.0f} s") from None


async def _done(task: asyncio.Task[None]) -> None:
    """Returns when it has ended; a cancel of this wait leaves it alone."""
    await asyncio.wait([task])


async def _cancelled(tasks: set[asyncio.Task[None]]) -> None:
    tasks = set(tasks)  # the original changes as they end
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _taught(node: Node) -> None:
    with suppress(SandboxLostError):
        await node.learn_policy()


async def _drained(node: Node) -> None:
    with suppress(SandboxLostError):
        await node.call(node.remote.drain())
