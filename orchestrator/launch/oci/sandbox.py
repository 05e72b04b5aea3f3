"""One container of the OCI runtime while it lives, and how it ended."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from contextlib import suppress
from pathlib import Path

from orchestrator.errors import RolloutError, SandboxLostError
from orchestrator.launch.control_groups import control_groups, group_files
from orchestrator.launch.cpu_clock import CpuClock
from orchestrator.launch.uids import UidPair
from orchestrator.rules.text import printable
from orchestrator.types import SandboxExit

_BY_OTHERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TAIL_CHARS = 500


class OciSandbox:
    """A `Sandbox`. The launcher tells it that it runs, and how it ended."""

    def __init__(self, uids: UidPair) -> None:
        self.sandbox_id = f"sandbox-{secrets.token_hex(8)}"
        self.uids = uids
        self.pid = 0  # of its pid 1, here
        self.last_words = ""  # the end of what it printed; known when it has ended; untrusted
        self._begun_s = 0.0  # loop time
        self.cpu_clock: CpuClock | None = None
        self.kills: Path | None = None  # the kernel's count of processes killed for memory; None: there is none
        self._ended = asyncio.Event()
        self._exit: SandboxExit | None = None
        self._lost: RolloutError | None = None

    def runs(self, pid: int, begun_s: float) -> None:
        """Its pid 1 is process `pid` here; it was begun at `begun_s` (loop time)."""
        self.pid, self._begun_s = pid, begun_s
        self.cpu_clock = CpuClock.of(pid, self.sandbox_id, os.cpu_count() or 1)
        try:
            groups = control_groups(pid, self.sandbox_id)
        except OSError:  # it has ended already
            return
        self.kills = next(group_files(groups, "memory", "memory.oom_control", "memory.events"), None)

    @property
    def cpu_known(self) -> bool:
        """Whether a control group of its own counts its CPU time."""
        return self.cpu_clock is not None and self.cpu_clock.counter is not None

    async def exited(self) -> SandboxExit:
        """Waits until it has ended by itself. SandboxLostError: somebody else ended it."""
        await self._ended.wait()
        if self._lost is not None:
            raise self._lost
        assert self._exit is not None
        return self._exit

    async def has_ended(self, within_s: float) -> bool:
        """Whether it has ended, or does so soon."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._ended.wait()
        return self._ended.is_set()

    async def cpu_s(self) -> float | None:
        """CPU seconds so far, from its control group; None: unknown."""
        running_s = asyncio.get_running_loop().time() - self._begun_s
        return None if self.cpu_clock is None else self.cpu_clock.read_s(running_s)

    def ended(self, status: int, said: str) -> None:
        """Pid 1 ended with this wait status.

        Nothing inside can signal pid 1, so one that asks it to end came from outside. SIGKILL may be the kernel's,
        or that of a daemon that watches memory, and the code may have earned it: so it counts as the code's own
        doing, which must not be able to choose an end that is drawn again.
        """
        self.last_words = said
        code, out_of_memory = os.waitstatus_to_exitcode(status), self._killed_for_memory()
        deadly = -code if code < 0 else code - 128
        if deadly in _BY_OTHERS and not out_of_memory:
            self.lose(SandboxLostError(f"the sandbox was ended by somebody else ({signal.Signals(deadly).name})"))
            return
        code = code if code >= 0 else 128 - code
        reason = f"exit code {code}" + (", killed for memory" if out_of_memory else "")
        if code != 0 and (tail := printable(" | ".join(said.splitlines()), "?")[-_TAIL_CHARS:]):
            reason += f": {tail}"
        self._exit = self._exit or SandboxExit(code, out_of_memory, reason)
        self._ended.set()

    def lose(self, error: RolloutError) -> None:
        """It is lost: `exited` raises `error`."""
        if self._exit is None:
            self._lost = self._lost or error
        self._ended.set()

    def _killed_for_memory(self) -> bool:
        """Whether the kernel has killed any of its processes because its memory was used up."""
        try:
            lines = [] if self.kills is None else self.kills.read_text().splitlines()
            return any(int(line.split()[1]) > 0 for line in lines if line.startswith("oom_kill "))
        except (OSError, ValueError, IndexError):
            return False
