"""Sandboxes that are ready: created, verified, connected, each waiting for its one rollout."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import LaunchError, RolloutError
from orchestrator.launch.base import Launcher, Sandbox
from orchestrator.launch.ramp import Ramp
from orchestrator.proxy.server import SandboxServer
from orchestrator.rules.waits import first_of, standstill, stood_still
from orchestrator.types import SandboxExit, SandboxSpec

PARK_TIMEOUT_S = 60.0  # from create to parked takes about half a second, under load some seconds


@dataclass(frozen=True, slots=True)
class ParkedSandbox:
    """A sandbox that waits for its one assignment."""

    sandbox: Sandbox
    server: SandboxServer

    @property
    def connected(self) -> bool:
        """Whether an assignment would reach the sandbox."""
        return self.server.connected

    async def lost(self) -> str:
        """Waits until the sandbox can take no assignment any more. Returns the reason."""
        try:
            end = await first_of(self.sandbox.exited(), self.server.hung_up())
        except RolloutError as error:
            return str(error)
        return end if isinstance(end, str) else end.reason or f"exit code {end.exit_code}"


@asynccontextmanager
async def parked_sandbox(
    spec: SandboxSpec,
    launcher: Launcher,
    channel_directory: Callable[[], AbstractContextManager[Path]],
    ramp: Ramp | None = None,
) -> AsyncIterator[ParkedSandbox]:
    """A fresh sandbox, verified and parked. When the block is left it is removed with its socket and directory.

    `ramp` decides when the start begins. Raises LaunchError, DockerError, SandboxLostError; EnvironmentUnusable if
    the sandbox is not confined as it must be.
    """
    async with AsyncExitStack() as stack:
        async with ramp.start() if ramp is not None else nullcontext():
            directory = stack.enter_context(channel_directory())
            server = await stack.enter_async_context(SandboxServer(directory))
            sandbox = await stack.enter_async_context(launcher.launch(spec, directory))
            late = asyncio.sleep(PARK_TIMEOUT_S, None)
            start = await first_of(server.parked(), standstill(), sandbox.exited(), late)
            if start is None:
                raise LaunchError(f"the sandbox was not ready within {PARK_TIMEOUT_S:g} s")
            if isinstance(start, float):  # the sandbox has given up meanwhile
                raise stood_still(start)
            if isinstance(start, SandboxExit):
                raise LaunchError(f"the sandbox ended at start: {start.reason or start.exit_code}")
        launcher.demand_confined(start, spec)
        yield ParkedSandbox(sandbox, server)
