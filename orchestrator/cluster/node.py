"""One node of the cluster, from joining to leaving: sends it what it needs, and notices whether it answers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from orchestrator.border.bodies import Bodies
from orchestrator.cluster.layers import layers_of, packed
from orchestrator.cluster.order import Broken, Delivery, Order, Parcel, Pulse
from orchestrator.cluster.parcels import KeptOutput, pieces
from orchestrator.cluster.remote import ListedNode, NodeLost, Remote
from orchestrator.completion.startup import Wait
from orchestrator.errors import LaunchError, SandboxLostError, os_error_as
from orchestrator.host.base import HostNow
from orchestrator.host.setup import HostSetup
from orchestrator.proxy.left_files import OF_THE_DISK, cannot_be_kept
from orchestrator.rules.backoff import Backoff
from orchestrator.rules.policy import Served
from orchestrator.rules.waits import running_timeout, uninterrupted
from orchestrator.tasks.attachments import open_attachment
from orchestrator.types import Attachment, Crossing, Entry, Output, OutputFile

log = logging.getLogger(__name__)

PULSE_S = 3.0  # a node is asked for a sign of life if nothing came from it for so long
SILENT_S = 10.0  # and is away if it gives none for so long
GIVEN_UP_S = 120.0  # and ended if it gives none for so long
GRACE_S = 1.0  # for an answer that is there, while this process itself stood still
QUEUED = 2  # rollouts that wait on a node, so that none of its sandboxes waits for the way there and back
SENDINGS = 3  # of a file that the node says it does not have
BEFORE_ASKING_AGAIN = Backoff(first_s=1.0, most_s=60.0)
T = TypeVar("T")


@dataclass(slots=True)
class _Told:
    """Who is told what a rollout is served, and how often it was."""

    tell: Callable[[float, Entry], None]
    times: int = 0


class Node:
    """`changed` is called when its room changes, `on_wait` when the node reports how a wait for an endpoint
    stands."""

    def __init__(
        self,
        listed: ListedNode,
        remote: Remote,
        setup: HostSetup,
        changed: Callable[[Node], None],
        on_wait: Callable[[Node, Wait], None],
    ) -> None:
        self.node_id, self.name = listed.node_id, listed.name
        self.remote = remote
        self.sandboxes = setup.config.env.max_concurrent_sandboxes  # at a time
        self.images: set[str] = set()
        self.used = 0  # rollouts that were placed here and are not over
        self.warm = 0
        self.now = HostNow(self.sandboxes, 0)  # by its last report
        self.away: str | None = None  # why no rollout goes there now
        self.lost: str | None = None  # why none will go there any more
        self.draining = False
        self.loading: Wait | None = None  # what it waits for while it is opened
        self.waits = asyncio.Event()  # set once it has waited for an endpoint
        self._changed = changed
        self._say = setup.say
        self._on_wait = on_wait
        self._policy = setup.policy
        self._served = Served()  # the weights that it was told of
        self._calls: set[asyncio.Future[Any]] = set()
        self._told: dict[int, _Told] = {}  # of the orders that are being carried out
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._one_image = asyncio.Lock()  # the node puts the pieces of one at a time together
        self._heard_s = asyncio.get_running_loop().time()

    @property
    def works(self) -> bool:
        """Whether rollouts go there."""
        return self.away is None and self.lost is None and not self.draining

    @property
    def free(self) -> int:
        """How many more rollouts it takes now."""
        return self.sandboxes + QUEUED - self.used if self.works else 0

    # ------------------------------------------------------------ calls

    async def call(self, request: Awaitable[T]) -> T:
        """The answer of one call. Raises SandboxLostError when none will come."""
        call: asyncio.Future[T] = asyncio.ensure_future(request)
        if self.lost is not None:
            call.cancel()  # before it has begun
        self._calls.add(call)
        try:
            await asyncio.wait([call])
        except asyncio.CancelledError:
            call.cancel()  # the node is told; this waits for no answer
            raise
        finally:
            self._calls.discard(call)
        if call.cancelled():
            raise SandboxLostError(f"node {self.name}: {self.lost or self.away or 'the call was cancelled'}")
        if isinstance(error := call.exception(), NodeLost):
            self.lose(str(error))
            raise SandboxLostError(f"node {self.name}: {error}") from error
        self._heard_s = asyncio.get_running_loop().time()
        return call.result()

    @property
    def knows_policy(self) -> bool:
        """Whether it knows what the trainer serves now. Until then no rollout goes there."""
        return self._served == self._policy.served

    async def learn_policy(self) -> None:
        """Returns when it knows what the trainer serves. Raises SandboxLostError."""
        while not self.knows_policy:
            served = self._policy.served
            await self.call(self.remote.serve(served))
            self._served = served

    async def carry_out(
        self, order: Order, attachments: tuple[Attachment, ...], tell: Callable[[float, Entry], None]
    ) -> Delivery:
        """Sends what the node lacks. `tell`: gets what the rollout is served. Raises SandboxLostError,
        LaunchError."""
        self._told[order.number] = _Told(tell)
        try:
            return await self._carry_out(order, attachments)
        finally:
            del self._told[order.number]

    async def _carry_out(self, order: Order, attachments: tuple[Attachment, ...]) -> Delivery:
        for _ in range(SENDINGS):
            delivery = await self.call(self.remote.carry_out(order))
            if not delivery.missing:
                self.warm, self.now = delivery.warm, delivery.now or self.now
                return delivery
            for attachment, parcel in zip(attachments, order.parcels, strict=True):
                if parcel.digest in delivery.missing:
                    await self._once(parcel.digest, partial(self._send, attachment, parcel))
            for layer in layers_of(order.plan):
                if (name := Path(layer).name) in delivery.missing:
                    await self._once(name, partial(self._send_layer, layer, name))
        raise LaunchError(f"node {self.name} does not keep the files of the task")

    async def _once(self, what: str, send: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Sends it unless that is done already for another rollout; then waits for that."""
        task = self._sending.get(what)
        if task is None:
            task = self._sending[what] = asyncio.create_task(send())
            task.add_done_callback(lambda done: self._sent(what, done))
        await asyncio.shield(task)

    def _sent(self, what: str, done: asyncio.Task[None]) -> None:
        del self._sending[what]
        if not done.cancelled():
            done.exception()  # marked as retrieved: all that waited for it may have been cancelled

    async def _send(self, attachment: Attachment, parcel: Parcel) -> None:
        add = partial(self.remote.add_file, parcel.digest)
        await self._send_file(f"the task's file {attachment.name}", partial(open_attachment, attachment), add)

    async def _send_layer(self, layer: str, name: str) -> None:
        await self._send_file("a layer of the task", partial(packed, layer), partial(self.remote.add_layer, name))

    async def _send_file(
        self, what: str, opened: Callable[[], BinaryIO], add: Callable[..., Coroutine[Any, Any, Broken | None]]
    ) -> None:
        with os_error_as(LaunchError, f"{what} cannot be read"), await asyncio.to_thread(opened) as file:
            parts = pieces(file, os.fstat(file.fileno()).st_size)
            while part := await asyncio.to_thread(next, parts, None):
                piece, begins, ends = part
                broken = await self.call(add(piece, begins=begins, ends=ends))
                if broken is not None:
                    raise broken.rollout_error(self.name)

    async def send_image(self, name: str, saved: Callable[[str], AbstractAsyncContextManager[Path]]) -> None:
        """Sends an image, once however many rollouts wait for it. `saved` gives its file. Raises LaunchError,
        SandboxLostError."""
        await self._once(f"image {name}", partial(self._send_image, name, saved))

    async def _send_image(self, name: str, saved: Callable[[str], AbstractAsyncContextManager[Path]]) -> None:
        async with self._one_image:
            if name in self.images:  # it came while another rollout asked for it
                return
            async with saved(name) as path:
                await self._send_file(f"the saved image {name}", lambda: path.open("rb"), self.remote.add_image)
            self.images.add(name)

    async def take_output(self, folder: Path, rollout_id: str, output: Output, delivery: Delivery) -> Output:
        """Brings the files that the rollout left into `folder`: all, or none. A scorer would take files that are
        missing for files not written: if no policy can be the cause, raises SandboxLostError or LaunchError."""
        kept = await asyncio.to_thread(KeptOutput, folder, rollout_id)
        came = bool(delivery.contents) or not sum(file.size_bytes for file in output.files)
        try:
            for file in output.files:
                if came:
                    content = delivery.contents.get(file.path, b"")
                    await uninterrupted(asyncio.to_thread(kept.append, file.path, content))
                else:
                    await self._fetch(kept, rollout_id, file)
            await uninterrupted(asyncio.to_thread(kept.finish, output.files))
        except OSError as error:
            if error.errno in OF_THE_DISK:
                raise cannot_be_kept(error) from error
            log.warning("output of %s cannot be kept: %s", rollout_id, error.strerror)
            return Output(left_out=output.left_out + len(output.files), complete=False)
        except ValueError as error:
            raise LaunchError(
                f"node {self.name}: a file that the rollout left did not come whole: {error}"
            ) from error
        finally:
            await uninterrupted(self._clear(kept, rollout_id, on_node=not came))
        return output

    async def _fetch(self, kept: KeptOutput, rollout_id: str, file: OutputFile) -> None:
        at = 0
        while True:
            piece = await self.call(self.remote.fetch(rollout_id, file.path, at))
            if isinstance(piece, Broken):
                raise piece.rollout_error(self.name)
            await uninterrupted(asyncio.to_thread(kept.append, file.path, piece))
            at += len(piece)
            if not piece or at >= file.size_bytes:
                return

    async def take_bodies(self, bodies: Bodies, crossings: tuple[Crossing, ...]) -> tuple[Crossing, ...]:
        """Brings what requests sent and got, as far as `bodies` lacks it. What does not come is not kept: the
        rollout is none the worse for it."""
        return tuple([replace(one, kept=one.kept and await self._have(bodies, one)) for one in crossings])

    async def _have(self, bodies: Bodies, crossing: Crossing) -> bool:
        for digest in (crossing.sent_sha256, crossing.received_sha256):
            if digest is not None and not bodies.holds(digest) and not await self._fetch_body(bodies, digest):
                return False
        return True

    async def _fetch_body(self, bodies: Bodies, digest: str) -> bool:
        body = bodies.body()
        try:
            while piece := await self.call(self.remote.fetch_body(digest, body.size)):
                if isinstance(piece, Broken):
                    return False
                await body.add(piece)
            return await body.whole(digest) == (digest, True)
        except SandboxLostError:
            return False
        finally:
            await uninterrupted(body.drop())

    async def _clear(self, kept: KeptOutput, rollout_id: str, *, on_node: bool) -> None:
        """Removes files on their way: from this machine, and with `on_node` from the node."""
        await asyncio.to_thread(kept.discard)
        if on_node:
            with suppress(SandboxLostError):
                await self.call(self.remote.forget(rollout_id))

    # ------------------------------------------------------------ its life

    def pause(self, why: str) -> None:
        """Rollouts go elsewhere until `watch` finds that the node works again."""
        if self.away is None and self.lost is None:
            self.away = why
            self._say(f"node {self.name} pauses, its rollouts go elsewhere: {why}")
            self._changed(self)

    def lose(self, why: str) -> None:
        """The node is given up: nothing that it may still send counts. Idempotent."""
        if self.lost is None:
            self.lost = why
            self.remote.end()
            self._drop_calls()
            self._changed(self)

    def _drop_calls(self) -> None:
        for call in list(self._calls):
            call.cancel()

    async def watch(self) -> None:
        """Returns when the node is lost. Until then it notices when the node falls silent, and when it works
        again."""
        loop = asyncio.get_running_loop()
        working: asyncio.Task[None] | None = None
        listening = asyncio.create_task(self._listen(), name=f"news of node {self.name}")
        try:
            while self.lost is None:
                await asyncio.sleep(max(0.05, self._heard_s + PULSE_S - loop.time()))
                if self.lost is not None or (self.away is None and loop.time() < self._heard_s + PULSE_S):
                    continue
                if await self._answers() and self.away is not None and (working is None or working.done()):
                    working = asyncio.create_task(self._back(), name=f"node {self.name} works again")
        finally:
            tasks = [listening] if working is None else [listening, working]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self) -> None:
        """Tells what rollouts are served there, until the node is lost. One call waits at the node for the next
        news, also while it is silent."""
        while self.lost is None:
            try:
                news = await self.remote.news()
            except NodeLost as error:
                self.lose(str(error))
                return
            self._heard_s = asyncio.get_running_loop().time()
            for one in news:
                told = self._told.get(one.number)
                if told is not None and told.times == one.place:  # behind a gap nothing is a record
                    told.times += 1
                    told.tell(one.started_at, one.served)

    async def silence(self) -> None:
        """Raises NodeLost when the node has given no sign of life for long: while it is opened, `watch` does not
        run yet."""
        while True:
            try:
                async with running_timeout(GIVEN_UP_S):
                    self._hear(await self.remote.pulse())
            except TimeoutError:
                raise NodeLost(f"it has not answered for {GIVEN_UP_S:g} s") from None
            await asyncio.sleep(PULSE_S)

    def _hear(self, pulse: Pulse) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        for line in pulse.lines:
            self._say(f"node {self.name}: {line}")
        self.warm, self.now = pulse.warm, pulse.now or self.now
        for wait in pulse.waits:
            self.loading = wait if wait.answer else None
            self.waits.set()
            self._on_wait(self, wait)

    async def _answers(self) -> bool:
        """Whether the node gives a sign of life now."""
        loop = asyncio.get_running_loop()
        pulse = asyncio.ensure_future(self.remote.pulse())
        try:
            await asyncio.wait([pulse], timeout=SILENT_S)
            if not pulse.done():
                await asyncio.wait([pulse], timeout=GRACE_S)
        finally:
            silent = pulse.cancel()
        if silent:
            self.pause("it does not answer")
            self._drop_calls()
            if (silent_s := loop.time() - self._heard_s) > GIVEN_UP_S:
                self.lose(f"it has not answered for {silent_s:.0f} s")
            return False
        if isinstance(error := pulse.exception(), NodeLost):
            self.lose(str(error))
            return False
        warm = self.warm
        self._hear(pulse.result())
        if self.warm != warm:
            self._changed(self)
        return True

    async def _back(self) -> None:
        """Waits until the node itself finds that what it needs works."""
        for attempt in itertools.count(1):
            try:
                broken = await self.call(self.remote.works())
                await self.learn_policy()  # it may have been away when the trainer said something else
            except SandboxLostError:
                return
            if broken is None:
                self.away = None
                self._say(f"node {self.name} works again")
                self._changed(self)
                return
            self._say(f"node {self.name}: {broken.text}")
            await asyncio.sleep(BEFORE_ASKING_AGAIN.pause_s(attempt))
