"""Sandboxes as plain processes of this machine: the same protocol and NO isolation.

For work on the agent or the protocol without Docker. Model-written code runs as this user, with this user's files
and network. Only the environment, where keys may be, is not passed on.
"""

import asyncio
import logging
import os
import secrets
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from orchestrator.errors import EnvironmentUnusable, LaunchError
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
from orchestrator.launch.channels import make_owned_directory, remove_owned_directory
from orchestrator.launch.hardening import preload_arguments
from orchestrator.launch.image.context import context_root
from orchestrator.rules.waits import uninterrupted
from orchestrator.types import Confinement, Difference, SandboxExit, SandboxSpec

log = logging.getLogger(__name__)

_TERMINATE_GRACE_S = 2.0  # time for the supervisor to end what model-written code has started
_KILL_GRACE_S = 5.0
_TAIL_BYTES = 2000


class ProcessSandbox:
    """A `Sandbox`: `python -m sandbox` in a session of its own, all its files in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.sandbox_id = f"process-{secrets.token_hex(8)}"
        self._directory = directory
        self._started: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._tail = bytearray()

    async def start(self, spec: SandboxSpec, channel: Path) -> None:
        """Starts the process. Must not be cancelled: the process would be orphaned. Raises LaunchError."""
        places = {name: self._directory / name for name in ("attachments", "workspace", "tmp")}
        try:
            for place in places.values():
                place.mkdir()
            self._started = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "sandbox", "--channel", channel),
                *("--attachments", places["attachments"], "--workspace", places["workspace"]),
                *preload_arguments(spec),
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=PIPE,
                cwd=self._directory,
                env=_environment(places["workspace"], places["tmp"]),
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"cannot start a process: {error}") from error
        self._reading = asyncio.create_task(self._read_output(), name=self.sandbox_id)

    async def exited(self) -> SandboxExit:
        """Waits until it has ended by itself."""
        assert self._started is not None
        status = await self._started.wait()
        code = status if status >= 0 else 128 - status
        last_line = self._tail.decode("utf-8", "replace").strip().rpartition("\n")[2]
        return SandboxExit(code, oom_killed=False, reason=f"exit code {code}: {last_line}".rstrip(": "))

    async def cpu_s(self) -> float | None:
        """None: children of model-written code are not counted."""
        return None

    async def changes(self) -> Difference | None:
        """None: it has no root of its own."""
        return None

    async def remove(self) -> None:
        """Ends the process and its children, and removes its files. Bounded in time."""
        if (process := self._started) is not None:
            for number, grace_s in ((signal.SIGTERM, _TERMINATE_GRACE_S), (signal.SIGKILL, _KILL_GRACE_S)):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(TimeoutError):
                    async with asyncio.timeout(grace_s):
                        await process.wait()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        await asyncio.to_thread(remove_owned_directory, self._directory)

    async def _read_output(self) -> None:
        """Reads what the process prints, so that its pipe never fills up, and keeps the end."""
        assert self._started is not None
        assert self._started.stderr is not None
        while chunk := await self._started.stderr.read(65536):
            self._tail += chunk
            del self._tail[:-_TAIL_BYTES]


class ProcessLauncher:
    """A `Launcher`: at most `max_sandboxes` at a time. Limits of memory, CPU and processes do not apply."""

    def __init__(self, run_id: str, *, max_sandboxes: int) -> None:
        self._run_id = run_id
        self._slots = asyncio.Semaphore(max_sandboxes)
        log.warning(
            "the launcher `process` does not isolate: model-written code runs as this user, with this user's "
            "files and network"
        )

    async def check(self, spec: SandboxSpec) -> None:
        """Raises EnvironmentUnusable if the sandbox program or a package it needs is missing."""
        context_root()
        for module in ("smolagents", "grpc"):
            if find_spec(module) is None:
                raise EnvironmentUnusable(f"{module} is not installed: run `pip install rollout-orchestrator`")

    async def check_image(self, spec: SandboxSpec) -> None:
        """There is no image."""

    async def describe(self, spec: SandboxSpec) -> dict[str, str]:
        """Version and path of the interpreter."""
        return {"isolation": "none", "python": sys.version.split()[0], "executable": sys.executable}

    async def ready(self, spec: SandboxSpec) -> None:
        """Starting a process will show whether it works."""

    def now(self) -> LauncherNow:
        return LauncherNow()

    def demand_confined(self, seen: Confinement, spec: SandboxSpec) -> None:
        """Demands nothing: the operator chose a launcher without isolation."""

    @asynccontextmanager
    async def launch(self, spec: SandboxSpec, channel: Path) -> AsyncIterator[ProcessSandbox]:
        """A started process. On any exit its processes are ended and its files removed. Raises LaunchError."""
        async with self._slots:
            try:
                directory = make_owned_directory(self._run_id, Path(tempfile.gettempdir()))
            except OSError as error:
                raise LaunchError(f"no directory for a sandbox: {error}") from error
            sandbox = ProcessSandbox(directory)
            try:
                await uninterrupted(sandbox.start(spec, channel))
                yield sandbox
            finally:
                await uninterrupted(sandbox.remove())

    def run(
        self, spec: SandboxSpec, command: Command, state: State | None = None
    ) -> AbstractAsyncContextManager[CommandSandbox]:
        """Raises LaunchError."""
        raise LaunchError(NO_COMMANDS)

    def serve(self, spec: SandboxSpec, program: Program) -> AbstractAsyncContextManager[ServingSandbox]:
        """Raises LaunchError."""
        raise LaunchError(NO_SERVICES)

    async def aclose(self) -> None:
        """Does nothing: there is nothing to close but the sandboxes."""


def _environment(home: Path, temporary: Path) -> dict[str, str]:
    """As in the image. Nothing of this process' environment, where keys may be."""
    root = context_root()
    return {
        "PATH": os.defpath,
        "PYTHONPATH": os.pathsep.join((str(root), str(root / "proto"))),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "HOME": str(home),
        "TMPDIR": str(temporary),
    }
