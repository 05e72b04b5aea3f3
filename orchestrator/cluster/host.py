"""The host actor of one node: carries out whole rollouts there, and owns everything they need on that node.

It knows nothing of Ray: `link` makes an actor of it. Its event loop runs in a thread of the actor's process. When
that process ends in any way, the sandboxes' tethers hang up and they end too.
"""

import asyncio
import itertools
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.cluster.image import has_engine, image_id, load_image
from orchestrator.cluster.layers import layers_of, with_layers_in
from orchestrator.cluster.order import (
    Broken,
    Delivery,
    Inspection,
    News,
    NodeFacts,
    Opening,
    Order,
    Pulse,
    RemoteTool,
    demand_same,
    software,
)
from orchestrator.cluster.parcels import PIECE_BYTES, Shelf, grow
from orchestrator.completion.replay import Replayed
from orchestrator.completion.startup import Wait
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.doctor.finding import Finding
from orchestrator.doctor.host import check_host
from orchestrator.doctor.machine import check_room
from orchestrator.errors import (
    EnvironmentUnusable,
    ImageUnusable,
    LaunchError,
    OrchestratorError,
    RolloutError,
    os_error_as,
)
from orchestrator.host.base import HostNow, Provision
from orchestrator.host.local import LocalHost
from orchestrator.host.open import open_local
from orchestrator.host.setup import HostSetup
from orchestrator.launch.channels import make_owned_directory, remove_owned_directory
from orchestrator.launch.docker.request import used_of_image
from orchestrator.launch.workspaces import Workspaces
from orchestrator.proxy.left_files import OutputRule
from orchestrator.rules.egress import EGRESS_FOLDER
from orchestrator.rules.outcome import failed
from orchestrator.rules.policy import Policy, Served
from orchestrator.rules.waits import uninterrupted
from orchestrator.settings.config import Config
from orchestrator.types import Attempt, Entry, Failed, Record, SandboxSpec

_LINES = 100  # for people, between two pulses
_NEWS = 10_000  # of rollouts, while the run does not ask for them


class HostActor:
    """What one run has on one node, from `open` to `close`. Errors of ours are returned, not raised."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._news: deque[News] = deque(maxlen=_NEWS)
        self._is_news = asyncio.Event()
        self._waits: dict[str, Wait] = {}  # for endpoints, since the last pulse
        self._demand = float("inf")
        self._local: LocalHost | None = None
        self._folder = Path()
        self._replayed = Replayed(0, 0, 0)
        self._policy = Policy()
        self._shelf: Shelf
        self._workspaces = Workspaces()

    # ------------------------------------------------------------ opening

    async def look(self, image: str, *, docker: bool) -> Inspection:
        """What decides whether the node can be opened."""
        found_id = await asyncio.to_thread(image_id, image) if docker else None
        engine = not docker or found_id is not None or await asyncio.to_thread(has_engine)
        return Inspection(await asyncio.to_thread(software), found_id, engine)

    async def examine(
        self, config: Config, *, image_comes: bool, tokenizer_digest: str | None
    ) -> tuple[Finding, ...]:
        """The doctor's findings on this node. Nothing needs to be open."""
        checks = check_host(config, image_comes=image_comes, tokenizer_digest=tokenizer_digest)
        findings = [finding async for finding in checks]
        cure = "set TMPDIR to a larger disk, or make room: files of tasks go there, and the image"
        return (*findings, check_room("files", Path(tempfile.gettempdir()), cure))

    async def add_image(self, piece: bytes, *, begins: bool, ends: bool) -> Broken | None:
        """Takes the next piece of an image; after the last one, the node's Engine has it."""
        return await _broken(asyncio.to_thread(self._add_image, piece, begins, ends))

    def _add_image(self, piece: bytes, begins: bool, ends: bool) -> None:
        path = self._place() / "image.tar"
        grow(path, piece, begins=begins)
        if ends:
            try:
                load_image(path)
            finally:
                path.unlink(missing_ok=True)

    async def open(self, opening: Opening) -> NodeFacts | Broken:
        """Opens the launcher, its sandboxes, the tokenizer, the way to the endpoint. After a failure, nothing is
        open."""
        notes: list[str] = []
        try:
            demand_same(await asyncio.to_thread(software), opening.software)
            async with AsyncExitStack() as stack:
                stack.callback(self._leave)
                stack.callback(self._workspaces.close)
                setup = HostSetup(
                    opening.config,
                    notes,
                    self._lines.append,
                    self._wait,
                    policy=self._policy,
                    equipment=opening.equipment,
                )
                local = await open_local(setup, stack)
                tokenizer = local.tokenizer
                digest = None
                if isinstance(tokenizer, HubTokenizer):
                    digest = await asyncio.to_thread(lambda: tokenizer.digest)
                if digest != opening.tokenizer_digest:
                    raise EnvironmentUnusable("its tokenizer is not the run's; put the same files on all nodes")
                self._shelf = Shelf(await asyncio.to_thread(self._place))
                stack.enter_context(local.following(lambda: self._demand))
                facts = NodeFacts(
                    local.takes_ids,
                    (await local.describe())["sandbox"],
                    {
                        name: RemoteTool(t.description, t.inputs, t.output_type, getattr(t, "server", ""))
                        for name, t in local.tools.items()
                    },
                    tuple(notes),
                    local.why_text,
                )
                self._stack, self._local = stack.pop_all(), local
        except OrchestratorError as error:
            return Broken.of(error)
        except OSError as error:
            return Broken("EnvironmentUnusable", f"it cannot be opened: {error}")
        return facts

    def _wait(self, wait: Wait) -> None:
        """The run decides what of it is said: nodes may be many, and wait for the same endpoint."""
        self._waits[wait.who] = wait

    def _place(self) -> Path:
        """A folder for files on this node. If this process is killed, the next one on the node removes it. Raises
        LaunchError."""
        if not self._folder.name:
            parent = Path(tempfile.gettempdir())
            with os_error_as(LaunchError, f"no place for files in {parent}", "; make room there"):
                self._folder = make_owned_directory("files", parent)
        return self._folder

    def _leave(self) -> None:
        if self._folder.name:
            remove_owned_directory(self._folder)
            self._folder = Path()

    async def close(self) -> None:
        """Removes all sandboxes and files. Idempotent."""
        self._local = None
        await uninterrupted(self._stack.aclose())

    async def why_unfit(self, spec: SandboxSpec, image: Mapping[str, Any] | None) -> str | None:
        """As of `Hosts`, on this node. `image`: as the run's machine describes the one that it sends when a
        rollout needs it; None: it sends none."""
        if image is None:
            return await self.local.why_unfit(spec)
        try:
            used_of_image(spec.image, image)
        except ImageUnusable as error:
            return str(error)
        return None

    # ------------------------------------------------------------ rollouts

    @property
    def local(self) -> LocalHost:
        """Only while open."""
        if self._local is None:
            raise RuntimeError("the node is not open")
        return self._local

    async def add_file(self, digest: str, piece: bytes, *, begins: bool, ends: bool) -> Broken | None:
        """Takes the next piece of a file that a task brings."""
        return await _broken(asyncio.to_thread(lambda: self._shelf.add(digest, piece, begins=begins, ends=ends)))

    async def add_layer(self, name: str, piece: bytes, *, begins: bool, ends: bool) -> Broken | None:
        """Takes the next piece of a layer, as a tar; after the last one, the node has it."""
        return await _broken(asyncio.to_thread(self._add_layer, name, piece, begins, ends))

    def _add_layer(self, name: str, piece: bytes, begins: bool, ends: bool) -> None:
        path = self._place() / f"{name}.tar"
        grow(path, piece, begins=begins)
        if ends:
            try:
                self._workspaces.take(name, path)
            finally:
                path.unlink(missing_ok=True)

    async def carry_out(self, order: Order) -> Delivery:
        """One attempt, under this node's budget of sandboxes. A cancel removes the sandbox."""
        names = [Path(layer).name for layer in layers_of(order.plan)]
        try:
            lacking = await asyncio.to_thread(self._workspaces.missing, names) if names else ()
        except EnvironmentUnusable as error:
            return Delivery(broken=Broken.of(error))
        if missing := (*self._shelf.missing(order.parcels), *lacking):
            return Delivery(missing=missing)
        local, self._demand = self.local, order.demand
        plan, rule = with_layers_in(order.plan, self._workspaces.layers), None
        if order.output is not None:
            rule = OutputRule(self._folder / "output", *order.output)
        try:
            with self._shelf.used(plan.task.attachments, order.parcels) as attachments:
                plan = replace(plan, task=replace(plan.task, attachments=attachments))
                async with local.slot(local.turn(), plan.sandbox) as room:
                    if away := local.away_now:  # meanwhile: another node may work
                        return Delivery(broken=Broken("SandboxLostError", f"{away} is away"), away=away)
                    provision = Provision(rule, order.tools, self._teller(order.number), self._folder)
                    attempt = await room.carry_out(plan, provision)
        except RolloutError as error:
            return Delivery(broken=Broken.of(error), away=await local.away(failed(error)))
        except OrchestratorError as error:  # the node cannot confine, or the endpoint refuses the key
            return Delivery(broken=Broken.of(error))
        away = await local.away(attempt.outcome) if isinstance(attempt.outcome, Failed) else ""
        try:
            contents = await asyncio.to_thread(self._contents, attempt, rule)
        except OSError:  # the disk failed since; `fetch` will fail too, and the run notes that files are missing
            contents = {}
        return Delivery(
            attempt.record, attempt.outcome, away=away, contents=contents, warm=self._warm(), now=self._now()
        )

    def _teller(self, number: int) -> Callable[[float, Entry], None]:
        places = itertools.count()

        def tell(started_at: float, one: Entry) -> None:
            self._news.append(News(number, next(places), started_at, one))
            self._is_news.set()

        return tell

    async def news(self) -> tuple[News, ...]:
        """Waits until rollouts were served something that was not told yet: a node that dies has told it by then,
        which a pulse every few seconds would not have."""
        await self._is_news.wait()
        self._is_news.clear()
        news = tuple(self._news)
        self._news.clear()
        return news

    def _contents(self, attempt: Attempt, rule: OutputRule | None) -> Mapping[str, bytes]:
        """All output files if they are small together; else none, and `fetch` gives them."""
        record = attempt.record
        if rule is None or record.output is None or _size(record) > PIECE_BYTES:
            return {}
        folder = rule.folder / attempt.plan.rollout_id
        contents = {file.path: (folder / file.path).read_bytes() for file in record.output.files}
        self._forget(attempt.plan.rollout_id)
        return contents

    async def fetch(self, rollout_id: str, path: str, offset: int) -> bytes | Broken:
        """The next piece of an output file; empty: that was all."""
        return await self._piece(self._folder / "output" / rollout_id / path, offset)

    async def fetch_body(self, digest: str, offset: int) -> bytes | Broken:
        """The next piece of a body that went through the border; empty: that was all."""
        return await self._piece(self._folder / EGRESS_FOLDER / digest, offset)

    async def _piece(self, path: Path, offset: int) -> bytes | Broken:
        def read() -> bytes:
            with path.open("rb") as file:
                file.seek(offset)
                return file.read(PIECE_BYTES)

        try:
            return await asyncio.to_thread(read)
        except OSError as error:
            return Broken("LaunchError", f"the rollout's file {path.name} cannot be read: {error.strerror}")

    async def forget(self, rollout_id: str) -> None:
        """Removes the output files of a rollout."""
        await asyncio.to_thread(self._forget, rollout_id)

    def _forget(self, rollout_id: str) -> None:
        shutil.rmtree(self._folder / "output" / rollout_id, ignore_errors=True)

    async def works(self) -> Broken | None:
        """Returns once all that rollouts need on this node works, or has been away for too long."""
        return await _broken(self.local.works())

    # ------------------------------------------------------------ the node's life

    async def pulse(self) -> Pulse:
        """A sign of life."""
        lines, waits = tuple(self._lines), tuple(self._waits.values())
        self._lines.clear()
        self._waits.clear()
        return Pulse(lines, self._warm(), waits, self._now())

    def _now(self) -> HostNow | None:
        return None if self._local is None else self._local.now()[self._local.name]

    def _warm(self) -> int:
        pool = None if self._local is None else self._local.resources.pool
        return 0 if pool is None else pool.parked

    async def drain(self) -> None:
        """No sandbox is made ahead any more."""
        if self._local is not None:
            self._local.drain()

    async def serve(self, served: Served) -> None:
        """A trainer's weights are served from now on."""
        if served.version is not None:
            await self._policy.serve(served.version, served.model)

    async def replayed(self) -> Replayed | None:
        """What was replayed on this node since the last call."""
        now = None if self._local is None else await self._local.replayed()
        if now is None:
            return None
        before, self._replayed = self._replayed, now
        return now - before


async def _broken(work: Coroutine[Any, Any, None]) -> Broken | None:
    """An error of ours as a value; None: it went well."""
    try:
        await work
    except OrchestratorError as error:
        return Broken.of(error)
    return None


def _size(record: Record) -> int:
    return 0 if record.output is None else sum(file.size_bytes for file in record.output.files)
