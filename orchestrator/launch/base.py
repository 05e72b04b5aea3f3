"""What every launcher offers: one sandbox per call, removed when its block is left."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from orchestrator.types import Confinement, Difference, SandboxExit, SandboxSpec


class Sandbox(Protocol):
    """One running sandbox, used for one rollout."""

    @property
    def sandbox_id(self) -> str:
        """Container id, or another name of the sandbox on this machine."""

    async def exited(self) -> SandboxExit:
        """Waits until the sandbox has ended by itself. Raises SandboxLostError, DockerError."""

    async def cpu_s(self) -> float | None:
        """CPU seconds used so far by all processes inside; None: unknown."""

    async def changes(self) -> Difference | None:
        """What was changed of its root, which nothing inside changes any more afterwards. None: it is read-only.
        Raises RolloutError, OSError."""


class Launcher(Protocol):
    """Makes sandboxes and removes them."""

    async def check(self, spec: SandboxSpec) -> None:
        """Checks that this machine can launch `spec`. Raises EnvironmentUnusable, which says what to do."""

    async def check_image(self, spec: SandboxSpec) -> None:
        """Gets the image ready, and looks up the user that the agent is to run as. Raises ImageUnusable if no
        sandbox can be made with these, EnvironmentUnusable and RolloutError for what is not their doing."""

    async def describe(self, spec: SandboxSpec) -> dict[str, str]:
        """Versions and image digest, for the run's record. Raises DockerError."""

    async def ready(self, spec: SandboxSpec) -> None:
        """Checks that sandboxes can be made now, without launching one. Raises LaunchError, DockerError."""

    def demand_confined(self, seen: Confinement, spec: SandboxSpec) -> None:
        """Compares what pid 1 of a sandbox read about itself with `spec`, except what the operator waived.
        Raises EnvironmentUnusable."""

    def launch(self, spec: SandboxSpec, channel: Path) -> AbstractAsyncContextManager[Sandbox]:
        """A sandbox whose runner connects to the socket `s` in the directory `channel`.

        On any exit of the block, cancellation included, the sandbox is removed.
        Raises LaunchError, DockerError; EnvironmentUnusable if it is not confined as it must be.
        """

    async def aclose(self) -> None:
        """Closes clients and ends threads. Idempotent."""
