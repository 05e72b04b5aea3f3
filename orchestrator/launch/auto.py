"""What makes sandboxes where `env.launcher` is `auto`: Docker where it answers, and an OCI runtime for what Docker
cannot make or where there is no Docker."""

from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

from orchestrator.errors import DockerError, EnvironmentUnusable, LaunchError
from orchestrator.launch.base import (
    Command,
    CommandSandbox,
    Launcher,
    LauncherNow,
    Program,
    Sandbox,
    ServingSandbox,
    State,
)
from orchestrator.launch.docker.calls import Engine
from orchestrator.launch.docker.facts import engine_problem
from orchestrator.launch.oci.machine import why_not_here
from orchestrator.types import Confinement, SandboxSpec

_ENGINE_S = 30


async def no_docker(oci_runtime: str, waived: frozenset[str]) -> str | None:
    """Why an OCI runtime makes the sandboxes here; None: Docker does. Raises EnvironmentUnusable if neither
    can."""
    engine = Engine(threads=1, timeout_s=_ENGINE_S)
    try:
        await engine.open()
        reason = engine_problem(await engine.info())
    except (DockerError, EnvironmentUnusable) as error:
        reason = str(error)
    finally:
        await engine.aclose()
    if reason is not None and (also := why_not_here(oci_runtime, waived)) is not None:
        raise EnvironmentUnusable(f"{reason}; the launcher oci cannot help here: {also}")
    return reason


class BothLaunchers:
    """A `Launcher`: `docker` for most sandboxes, `oci` for those that Docker cannot make."""

    def __init__(self, docker: Launcher, oci: Launcher, oci_runtime: str, waived: frozenset[str]) -> None:
        self._docker, self._oci = docker, oci
        self._runtime, self._waived = oci_runtime, waived

    def _for(self, spec: SandboxSpec) -> tuple[Launcher, SandboxSpec]:
        """Raises LaunchError where there is none."""
        if not spec.is_writable:
            return self._docker, spec
        if (reason := why_not_here(self._runtime, self._waived)) is not None:
            raise LaunchError(f"this sandbox needs --env.launcher oci, which does not work here: {reason}")
        return self._oci, replace(spec, runtime=Path(self._runtime).name)

    def now(self) -> LauncherNow:
        return self._oci.now()

    async def check(self, spec: SandboxSpec) -> None:
        """Raises EnvironmentUnusable, ConfigError."""
        try:
            launcher, spec = self._for(spec)
        except LaunchError as error:
            raise EnvironmentUnusable(str(error)) from error
        await launcher.check(spec)

    async def check_image(self, spec: SandboxSpec) -> None:
        """Raises ImageUnusable, EnvironmentUnusable, LaunchError, DockerError."""
        launcher, spec = self._for(spec)
        await launcher.check_image(spec)

    async def describe(self, spec: SandboxSpec) -> dict[str, str]:
        """Versions and image digest. Raises DockerError, LaunchError."""
        launcher, spec = self._for(spec)
        return await launcher.describe(spec)

    async def ready(self, spec: SandboxSpec) -> None:
        """Raises LaunchError, DockerError, EnvironmentUnusable."""
        launcher, spec = self._for(spec)
        await launcher.ready(spec)

    def demand_confined(self, seen: Confinement, spec: SandboxSpec) -> None:
        """Raises EnvironmentUnusable."""
        launcher, spec = self._for(spec)
        launcher.demand_confined(seen, spec)

    def launch(self, spec: SandboxSpec, channel: Path) -> AbstractAsyncContextManager[Sandbox]:
        """Raises LaunchError, DockerError, EnvironmentUnusable."""
        launcher, spec = self._for(spec)
        return launcher.launch(spec, channel)

    def run(
        self, spec: SandboxSpec, command: Command, state: State | None = None
    ) -> AbstractAsyncContextManager[CommandSandbox]:
        """Raises LaunchError."""
        launcher, spec = self._for(spec)
        return launcher.run(spec, command, state)

    def serve(self, spec: SandboxSpec, program: Program) -> AbstractAsyncContextManager[ServingSandbox]:
        """Raises LaunchError."""
        launcher, spec = self._for(spec)
        return launcher.serve(spec, program)

    async def aclose(self) -> None:
        """Idempotent."""
        try:
            await self._docker.aclose()
        finally:
            await self._oci.aclose()
