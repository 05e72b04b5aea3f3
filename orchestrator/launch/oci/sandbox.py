"""One container of the OCI runtime while it lives, and how it ended."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from orchestrator.errors import SandboxLostError
from orchestrator.launch.base import CommandEnd, SavedLayer
from orchestrator.launch.container import ContainerSandbox, exit_of
from orchestrator.launch.control_groups import ControlGroup, control_groups, group_files, groups_beside_ours
from orchestrator.launch.cpu_clock import CpuClock
from orchestrator.launch.difference import OPAQUE, OPAQUE_OF_USERS, walk
from orchestrator.launch.oci.commands import command_end
from orchestrator.launch.oci.saved_layer import LayerRules, save_layer
from orchestrator.launch.uids import UidPair
from orchestrator.rules.waits import uninterrupted
from orchestrator.types import Difference, SandboxExit

_BY_OTHERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class OciSandbox(ContainerSandbox):
    """A `Sandbox`. The launcher reports that it runs, and how it ended."""

    def __init__(
        self,
        uids: UidPair,
        kill: Callable[[str], Awaitable[None]],
        pause: Callable[[str, bool], Coroutine[Any, Any, None]],
        *,
        is_guest: bool = False,
    ) -> None:
        super().__init__(uids)
        self._pause = pause  # gets the name, and whether it is to stand still
        self.is_guest = is_guest  # it has the uids of another one, which keeps them
        self._kill = kill  # gets the name
        self.parent = ""  # the name of the one that it was forked from
        self.pid = 0  # of its pid 1, here
        self.last_words = ""  # the end of what it printed; known when it has ended; untrusted
        self.kills: Path | None = None  # the kernel's count of processes killed for memory; None: there is none
        self.used: Path | None = None  # its count of the memory that is used
        self.upper: Path | None = None  # what takes what is written to the root; None: the root is read-only
        self.lowers: Sequence[Path] = ()  # what lies below it, the topmost first

    def runs(self, pid: int, begun_s: float) -> CpuClock:
        """Its pid 1 is process `pid` here; it was begun at `begun_s` (loop time)."""
        self.pid, self.begun_s = pid, begun_s
        with suppress(OSError):  # it has ended already
            groups = control_groups(pid, self.sandbox_id)
            self.kills = _kills(groups)
            self.used = next(group_files(groups, "memory", "memory.usage_in_bytes", "memory.current"), None)
        clock = CpuClock.of(pid, self.sandbox_id, os.cpu_count() or 1)
        # Nobody else can be asked.
        self.cpu_clock = CpuClock(clock.counter, False, clock.cpus)
        return self.cpu_clock

    def memory_bytes(self) -> int:
        """Of its control group. What was there before it, of a parent it was forked from, is not its. 0: it is not
        known."""
        with suppress(OSError, ValueError):
            if self.used is not None:
                return int(self.used.read_bytes())
        return 0

    async def has_ended(self, within_s: float) -> bool:
        """Whether it has ended, or does so soon."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._ended.wait()
        return self._ended.is_set()

    def ended(self, status: int, output: str) -> None:
        """Pid 1 ended with this wait status.

        Nothing inside can signal pid 1, so SIGTERM and the like came from outside. SIGKILL may be the kernel's, or
        that of a daemon that watches memory: it counts as the code's own doing, which must not be able to choose
        an end that is drawn again.
        """
        self.last_words = output
        if self.kills is None:  # it has ended before anybody could ask which groups its pid 1 had
            self.kills = _kills(groups_beside_ours(self.sandbox_id))
        code, out_of_memory = os.waitstatus_to_exitcode(status), self._killed_for_memory()
        deadly = -code if code < 0 else code - 128
        if deadly in _BY_OTHERS and not out_of_memory:
            self.lose(SandboxLostError(f"the sandbox was ended by somebody else ({signal.Signals(deadly).name})"))
        elif self._lost is None:
            self._exit = exit_of(code if code >= 0 else 128 - code, out_of_memory, output)
        self._ended.set()

    async def changes(self) -> Difference | None:
        """Ends all that still runs in it first. Raises SandboxLostError, OSError."""
        if self.upper is None:
            return None
        await self.kill()
        return await asyncio.to_thread(self._difference)

    async def kill(self) -> None:
        """Kills all that runs in it, and returns when nothing does. Idempotent. Raises SandboxLostError."""
        await self._kill(self.name)
        await self._ended.wait()

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Raises SandboxLostError."""
        await self._pause(self.name, True)
        try:
            yield
        finally:
            await uninterrupted(self._pause(self.name, False))

    async def command_end(self) -> CommandEnd:
        """Waits for the command. Raises SandboxLostError if the sandbox ended otherwise."""
        ended = await self.exited()
        if (end := command_end(self.last_words)) is None:
            raise SandboxLostError(f"the sandbox of a command ended: {ended.reason}")
        return end

    def save_layer(self, folder: Path, dropped: str, merged: str) -> SavedLayer:
        """Raises SandboxLostError, OSError, TooMuch."""
        first_id = self.uids.first_of_range if os.geteuid() == 0 else None
        rules = LayerRules(re.compile(dropped), re.compile(merged), _mark(), first_id)
        with self._folders() as (upper, lowers):
            return save_layer(upper, folder, lowers, rules)

    def _difference(self) -> Difference:
        with self._folders() as (upper, lowers):
            return walk(upper, lowers=lowers, opaque=_mark())

    @contextmanager
    def _folders(self) -> Iterator[tuple[int, list[int]]]:
        """Descriptors of what it wrote, and of what lies below. Raises SandboxLostError, OSError."""
        with self.written() as upper, ExitStack() as stack:
            lowers: list[int] = []
            for folder in self.lowers:
                lowers.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
                stack.callback(os.close, lowers[-1])
            yield upper, lowers

    @contextmanager
    def written(self) -> Iterator[int]:
        """A descriptor of the folder with what was written to the root, as overlayfs keeps it, while the sandbox
        is there. Its agent may still be writing unless it has ended. Raises SandboxLostError."""
        if self.upper is None:
            raise SandboxLostError("the root of this sandbox is read-only: there is no difference to its image")
        try:
            folder = os.open(self.upper, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise SandboxLostError(f"what the sandbox wrote is gone: {error.strerror}") from error
        try:
            yield folder
        finally:
            os.close(folder)

    async def _post_mortem(self) -> SandboxExit:
        raise AssertionError("`ended` or `lose` comes first")

    def _killed_for_memory(self) -> bool:
        """Whether the kernel has killed any of its processes because its memory was used up."""
        try:
            lines = [] if self.kills is None else self.kills.read_text().splitlines()
            return any(int(line.split()[1]) > 0 for line in lines if line.startswith("oom_kill "))
        except (OSError, ValueError, IndexError):
            return False


def _kills(groups: list[ControlGroup]) -> Path | None:
    return next(group_files(groups, "memory", "memory.oom_control", "memory.events"), None)


def _mark() -> str:
    """The attribute of folders that hide what lies below."""
    return OPAQUE if os.geteuid() == 0 else OPAQUE_OF_USERS
