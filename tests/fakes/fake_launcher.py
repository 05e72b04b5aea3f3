"""A launcher whose sandboxes are coroutines in this process, for tests of what is built on launchers.

Each sandbox runs `inhabitant(channel)`; the default one parks on the real socket, as a runner does, and
stays until the orchestrator hangs up.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import grpc.aio
from rollout_api.v1 import sandbox_pb2 as pb
from rollout_api.v1 import sandbox_pb2_grpc as pb_grpc

from orchestrator.errors import LaunchError, SandboxLostError
from orchestrator.launch.base import Command, CommandEnd, LauncherNow, State
from orchestrator.launch.confinement import verify_confinement
from orchestrator.launch.hardening import demand
from orchestrator.launch.names import ATTACHMENTS_DIR, CHANNEL_FOLDER, RUNTIME_MOUNT, SOCKET_NAME, WORKSPACE_DIR
from orchestrator.proxy.wire import CONTRACT
from orchestrator.rules.waits import uninterrupted
from orchestrator.types import Confinement, Difference, SandboxExit, SandboxSpec

Inhabitant = Callable[[Path], Awaitable[SandboxExit]]

CONFINED = pb.Confinement(
    capability_bounding_set=0xC0,
    no_new_privileges=True,
    seccomp_mode=2,
    network_interfaces=["lo"],
    root_read_only=True,
    runner_uid=20000,
    worker_uid=20001,
    process_id=1,
    own_control_groups=True,
    mounts=[
        pb.Mount(target="/", type="overlay", read_only=True),
        pb.Mount(target=RUNTIME_MOUNT, type="ext4", read_only=True, no_suid=True, no_dev=True),
        *(
            pb.Mount(target=t, type="tmpfs", no_suid=True, no_dev=True, no_exec=True, size_bytes=4096, inodes=8)
            for t in (WORKSPACE_DIR, ATTACHMENTS_DIR, "/tmp", "/dev/shm", CHANNEL_FOLDER)
        ),
    ],
    limits=[
        pb.Limit(name=name, value=1)
        for name in ("memory", "memory_and_swap", "cpu_millis", "pids", "terminals", "fsize", "nofile")
    ]
    + [pb.Limit(name=name, value=0) for name in ("core", "msgqueue", "terminals")],
)


async def parked_inhabitant(channel: Path) -> SandboxExit:
    """Parks and waits; exit code 1 when the orchestrator is gone, as the real runner."""
    async with grpc.aio.insecure_channel(f"unix:{channel / SOCKET_NAME}") as connection:
        stub: Any = pb_grpc.SandboxServiceStub(connection)
        try:
            async for _ in stub.Park(pb.ParkRequest(contract=CONTRACT, confinement=CONFINED)):
                pass
        except grpc.aio.AioRpcError:
            return SandboxExit(1, oom_killed=False, reason="the orchestrator is gone")
    return SandboxExit(0, oom_killed=False)


class FakeSandbox:
    """A `Sandbox` whose end can also be brought about by the test."""

    def __init__(self, sandbox_id: str, life: Awaitable[SandboxExit]) -> None:
        self.sandbox_id = sandbox_id
        self.changed: Difference | Exception | float | None = None
        self.life = asyncio.ensure_future(life)
        self._fate: asyncio.Future[SandboxExit] = asyncio.get_running_loop().create_future()

    def end(self, how: SandboxExit) -> None:
        """It ends like this, whatever the inhabitant does."""
        self._fate.set_result(how)

    def lose(self) -> None:
        """Somebody else removes it."""
        self._fate.set_exception(SandboxLostError("the container was removed by somebody else"))

    async def exited(self) -> SandboxExit:
        await asyncio.wait([self.life, self._fate], return_when=asyncio.FIRST_COMPLETED)
        return self._fate.result() if self._fate.done() else self.life.result()

    async def cpu_s(self) -> float | None:
        return 0.25

    async def changes(self) -> Difference | None:
        if isinstance(self.changed, Exception):
            raise self.changed
        if isinstance(self.changed, float):
            await asyncio.sleep(self.changed)
            return None
        return self.changed

    async def kill(self) -> None:
        """Nothing in it changes anything any more."""

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        yield

    @contextmanager
    def written(self) -> Iterator[int]:
        raise SandboxLostError("a fake writes nothing")
        yield

    async def remove(self) -> None:
        self.life.cancel()
        await asyncio.wait([self.life])
        if self._fate.done():
            self._fate.exception()


class FakeCommandSandbox(FakeSandbox):
    """Its command ends with exit code 0 when the launcher's `commands` lets it."""

    def __init__(self, sandbox_id: str, commands: asyncio.Semaphore) -> None:
        super().__init__(sandbox_id, asyncio.sleep(3600, SandboxExit(0, oom_killed=False)))
        self._commands = commands

    async def command_end(self) -> CommandEnd:
        await self._commands.acquire()
        return CommandEnd(0, 0, "", 0.1)

    @contextmanager
    def written(self) -> Iterator[int]:
        with TemporaryDirectory() as folder:
            top = os.open(folder, os.O_RDONLY)
            try:
                yield top
            finally:
                os.close(top)


class FakeLauncher:
    """A `Launcher`. `failures` launches fail before the first one works. `commands`: so many commands may end."""

    def __init__(
        self,
        inhabitant: Inhabitant = parked_inhabitant,
        *,
        max_sandboxes: int = 8,
        failures: int = 0,
        create_s: float = 0.0,
    ) -> None:
        self.live: dict[str, FakeSandbox] = {}
        self.launched = 0
        self.most_at_once = 0
        self.closed = False
        self.commands = asyncio.Semaphore(0)
        self.commanding = 0
        self.images: dict[str, Exception] = {}  # what is raised for those of these names
        self.looked_at: list[str] = []
        self._inhabitant = inhabitant
        self._failures = failures
        self._create_s = create_s
        self._slots = asyncio.Semaphore(max_sandboxes)
        self._numbers = itertools.count(1)

    async def check(self, spec: SandboxSpec) -> None:
        """Anything goes."""

    async def check_image(self, spec: SandboxSpec) -> None:
        """Any image goes, but those that `images` names."""
        self.looked_at.append(spec.image)
        if (error := self.images.get(spec.image)) is not None:
            raise error

    async def describe(self, spec: SandboxSpec) -> dict[str, str]:
        return {"isolation": "fake"}

    async def ready(self, spec: SandboxSpec) -> None:
        """Always."""

    def now(self) -> LauncherNow:
        return LauncherNow()

    def demand_confined(self, seen: Confinement, spec: SandboxSpec) -> None:
        """As of a container; nothing here tells of a root that could be written to."""
        if not spec.is_writable:
            demand(verify_confinement(seen, spec))

    @asynccontextmanager
    async def launch(self, spec: SandboxSpec, channel: Path) -> AsyncIterator[FakeSandbox]:
        async with self._slots:
            await asyncio.sleep(self._create_s)
            if self._failures > 0:
                self._failures -= 1
                raise LaunchError("this launch was told to fail")
            sandbox = FakeSandbox(f"fake-{next(self._numbers)}", self._inhabitant(channel))
            self.live[sandbox.sandbox_id] = sandbox
            self.launched += 1
            self.most_at_once = max(self.most_at_once, len(self.live))
            try:
                yield sandbox
            finally:
                await uninterrupted(self._remove(sandbox))

    @asynccontextmanager
    async def run(
        self, spec: SandboxSpec, command: Command, state: State | None = None
    ) -> AsyncIterator[FakeCommandSandbox]:
        sandbox = FakeCommandSandbox(f"fake-{next(self._numbers)}", self.commands)
        self.commanding += 1
        try:
            yield sandbox
        finally:
            self.commanding -= 1
            await sandbox.remove()

    async def aclose(self) -> None:
        self.closed = True

    async def _remove(self, sandbox: FakeSandbox) -> None:
        await sandbox.remove()
        del self.live[sandbox.sandbox_id]
