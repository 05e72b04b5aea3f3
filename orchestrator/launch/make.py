"""Makes the launcher that the settings ask for. Each is imported only where it is used."""

from collections.abc import Callable
from typing import Any, Literal

from orchestrator.launch.base import Launcher


def make_launcher(
    kind: str,
    run_id: str,
    *,
    max_sandboxes: int,
    waived: frozenset[str],
    allow_localhost_tcp: bool,
    oci_runtime: str,
    start: Literal["run", "fork"],
    advise: Callable[[str], None],
) -> Launcher:
    """`kind`: docker, oci or process; auto: docker, and oci for what that cannot make. `start`: how oci starts
    sandboxes. `waived`: names of measures that need not hold. `advise` gets lines that an operator should know and
    may ignore. Raises EnvironmentUnusable."""
    if kind == "process":
        from orchestrator.launch.process import ProcessLauncher

        return ProcessLauncher(run_id, max_sandboxes=max_sandboxes)
    options: dict[str, Any] = {"waived": waived, "allow_localhost_tcp": allow_localhost_tcp, "advise": advise}
    if kind != "docker":
        from orchestrator.launch.oci.launcher import OciLauncher

        oci = OciLauncher(run_id, max_sandboxes=max_sandboxes, runtime=oci_runtime, start=start, **options)
        if kind == "oci":
            return oci
    from orchestrator.launch.docker.launcher import DockerLauncher

    docker = DockerLauncher(run_id, max_sandboxes=max_sandboxes, **options)
    if kind == "docker":
        return docker
    from orchestrator.launch.auto import BothLaunchers

    return BothLaunchers(docker, oci, oci_runtime, waived)
