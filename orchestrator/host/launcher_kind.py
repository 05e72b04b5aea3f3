"""What `env.launcher auto` is on this machine."""

from typing import Literal

from orchestrator.launch.auto import no_docker
from orchestrator.settings.sandbox import SandboxSettings


async def launcher_kind(env: SandboxSettings, notes: list[str]) -> Literal["auto", "docker", "oci", "process"]:
    """What `make_launcher` is to make here: the launcher of the settings, but `oci` in the place of `auto` where
    there is no Docker, which `notes` then say, or no need of it. Raises EnvironmentUnusable."""
    if env.launcher != "auto":
        return env.launcher
    if not env.takes_docker:
        return "oci"
    if env.docker_runtime is not None:
        return "auto"
    reason = await no_docker(env.oci_runtime, frozenset(env.waive_hardening))
    if reason is None:
        return "auto"
    notes.append(f"sandboxes are made by {env.oci_runtime} itself, as {reason}")
    return "oci"
