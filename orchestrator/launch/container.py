"""What the launchers of containers share: slots, user ids, one owner per container, CPU time."""

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Generic, TypeVar

from orchestrator.errors import LaunchError, RolloutError
from orchestrator.launch.base import (
    NO_COMMANDS,
    NO_SERVICES,
    Command,
    CommandSandbox,
    LauncherNow,
    Program,
    ServingSandbox,
    State,
)
from orchestrator.launch.confinement import untold_by, verify_confinement
from orchestrator.launch.contents import PROGRAM
from orchestrator.launch.cpu_clock import CpuClock
from orchestrator.launch.hardening import NO_MEASURES, Hardening, demand, harden
from orchestrator.launch.uids import UidPair, UidSlots
from orchestrator.rules.text import printable
from orchestrator.rules.waits import uninterrupted
from orchestrator.types import Confinement, Difference, SandboxExit, SandboxSpec

log = logging.getLogger(__name__)

STARTS_AT_ONCE = 8  # more only queue up inside the Engine or the runtime
_TAIL_CHARS = 500


class ContainerSandbox(ABC):
    """A `Sandbox`. Its launcher reports to it how the container ends."""

    def __init__(self, uids: UidPair) -> None:
        self.name = f"sandbox-{secrets.token_hex(8)}"
        self.sandbox_id = self.name
        self.uids = uids
        self.begun_s: float | None = None  # loop time; None: not started
        self.cpu_clock: CpuClock | None = None
        self.why_unready: str | None = None  # empty: it got ready; None: nobody knows
        self._ended = asyncio.Event()
        self._exit: SandboxExit | None = None
        self._lost: RolloutError | None = None

    async def exited(self) -> SandboxExit:
        """Waits until the container has ended by itself.

        SandboxLostError: another process killed or removed it. DockerError: the Engine is gone.
        """
        await self._ended.wait()
        if self._exit is None:
            if self._lost is not None:
                raise self._lost
            self._exit = await self._post_mortem()
        return self._exit

    def lose(self, error: RolloutError) -> None:
        """The container is lost: `exited` raises `error`, unless the container has ended before."""
        self._lost = self._lost or error
        self._ended.set()

    async def cpu_s(self) -> float | None:
        """CPU seconds so far by the kernel's counter; None: unknown."""
        return None if self.cpu_clock is None else self.cpu_clock.read_s(self._running_s())

    async def changes(self) -> Difference | None:
        """None: its root is read-only."""
        return None

    def _running_s(self) -> float:
        return 0.0 if self.begun_s is None else asyncio.get_running_loop().time() - self.begun_s

    @abstractmethod
    async def _post_mortem(self) -> SandboxExit:
        """How it ended. Raises SandboxLostError, DockerError."""


def exit_of(code: int, out_of_memory: bool, output: str) -> SandboxExit:
    """`output`: the end of what the container printed; untrusted, and shown after a failure."""
    reason = f"exit code {code}" + (", killed for memory" if out_of_memory else "")
    if code != 0 and (tail := printable(" | ".join(output.splitlines()), "?")[-_TAIL_CHARS:]):
        reason += f": {tail}"
    return SandboxExit(code, out_of_memory, reason)


S = TypeVar("S", bound=ContainerSandbox)


class ContainerLauncher(ABC, Generic[S]):
    """A `Launcher`: at most `max_sandboxes` containers at a time, those being created or removed included.

    `waived`: names of measures (`hardening.MEASURE_NAMES`) that need not hold. `advise` gets lines that an
    operator should know and may ignore. `program`: what runs in the place of pid 1, to look around.
    """

    def __init__(
        self,
        run_id: str,
        *,
        max_sandboxes: int,
        waived: frozenset[str] = NO_MEASURES,
        allow_localhost_tcp: bool = False,
        advise: Callable[[str], None] = log.warning,
        program: tuple[str, ...] = PROGRAM,
    ) -> None:
        self.run_id = run_id
        self._max_sandboxes = max_sandboxes
        self._waived = waived
        self._allow_localhost_tcp = allow_localhost_tcp
        self._advise = advise
        self._program = program
        self._slots = asyncio.Semaphore(max_sandboxes)
        self._starting = asyncio.Semaphore(min(max_sandboxes, STARTS_AT_ONCE))
        self._uids = UidSlots()
        self._live: dict[str, S] = {}  # by name
        self._cpu_known = True

    def now(self) -> LauncherNow:
        return LauncherNow()

    def demand_confined(self, seen: Confinement, spec: SandboxSpec) -> None:
        """Raises EnvironmentUnusable, naming every measure that is missing and was not waived."""
        waived = self._waived | untold_by(spec.runtime)
        demand(verify_confinement(seen, spec, waived, self._volumes(spec.image)))

    def _volumes(self, image: str) -> Collection[str]:
        """Places of the image that are mounted, read-only."""
        return ()

    @asynccontextmanager
    async def launch(self, spec: SandboxSpec, channel: Path) -> AsyncIterator[S]:
        """A running, verified container. On any exit it is removed, cancellation included.

        Raises LaunchError, DockerError; EnvironmentUnusable when it is not confined as it must be.
        """
        async with self._slots:
            await self._open()
            sandbox = self._sandbox(self._uids.take())
            self._live[sandbox.name] = sandbox
            try:
                async with self._starting:
                    demands = harden(spec, sandbox.uids, channel, allow_localhost_tcp=self._allow_localhost_tcp)
                    await self._start(sandbox, spec, demands)
                yield sandbox
                sandbox.why_unready = ""
            except LaunchError as error:  # also of who waited for it to get ready
                sandbox.why_unready = str(error)
                raise
            finally:
                await uninterrupted(self._remove(sandbox))

    def run(
        self, spec: SandboxSpec, command: Command, state: State | None = None
    ) -> AbstractAsyncContextManager[CommandSandbox]:
        """Raises LaunchError: this launcher's sandboxes leave no state."""
        raise LaunchError(NO_COMMANDS)

    def serve(self, spec: SandboxSpec, program: Program) -> AbstractAsyncContextManager[ServingSandbox]:
        """Raises LaunchError: this launcher has none."""
        raise LaunchError(NO_SERVICES)

    async def aclose(self) -> None:
        """Tries again to remove what could not be removed; ends threads and processes. Idempotent."""
        await uninterrupted(self._close())

    def _warn_of_cpu(self, clock: CpuClock) -> None:
        if clock.counter is None and not clock.elsewhere and self._cpu_known:
            self._cpu_known = False
            log.warning(
                "sandboxes have no control group of their own that counts CPU time: theirs is unknown, and "
                "env.max_cpu_seconds holds nothing back"
            )

    @abstractmethod
    async def _open(self) -> object:
        """Connects to what makes containers, once."""

    @abstractmethod
    def _sandbox(self, uids: UidPair) -> S: ...

    @abstractmethod
    async def _start(self, sandbox: S, spec: SandboxSpec, hardening: Hardening) -> None:
        """Creates, starts and verifies the container."""

    @abstractmethod
    async def _remove(self, sandbox: S) -> None:
        """Bounded in time. A container that cannot be removed is logged and keeps its uids."""

    @abstractmethod
    async def _close(self) -> None: ...
