"""What every launcher offers: one sandbox per call, removed when its block is left."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import NamedTuple, Protocol, runtime_checkable

from orchestrator.types import Confinement, Difference, Healthcheck, SandboxExit, SandboxSpec, Way

NO_COMMANDS = "what an agent left is graded in a sandbox of the launcher oci: --env.launcher oci"
NO_SERVICES = "services run in sandboxes of the launcher oci: --env.launcher oci"


class TooMuch(Exception):
    """More than is kept. The text is one line."""


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


@runtime_checkable
class StatefulSandbox(Sandbox, Protocol):
    """A sandbox that may write to its root. What it wrote is there until its block is left."""

    async def kill(self) -> None:
        """Kills all that runs in it, and returns when nothing does. Idempotent. Raises SandboxLostError."""

    def still(self) -> AbstractAsyncContextManager[None]:
        """Within the block nothing runs in it, and its state may be that of another sandbox, as a copy. Raises
        SandboxLostError."""

    def written(self) -> AbstractContextManager[int]:
        """A descriptor of the folder with what it wrote, as overlayfs keeps it. Untrusted. Raises
        SandboxLostError."""


@dataclass(frozen=True, slots=True)
class Command:
    """What is run in a sandbox without an agent.

    `environment`: on top of the image's. `programs`: files that are made executable first. `layers`: absolute
    paths of folders that are laid over everything, top first. `inputs`: arguments and standard input of each run;
    none: it is run once, and nobody types. `timeout_s`: of each run. `ways`: what listens on its loopback.
    `healthcheck`: is run first; whatever becomes of it, the command follows.
    """

    argv: tuple[str, ...]
    timeout_s: float
    cwd: str
    environment: Mapping[str, str] = field(default_factory=dict)
    programs: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    inputs: tuple[tuple[tuple[str, ...], str], ...] = ()
    ways: tuple[Way, ...] = ()
    healthcheck: Healthcheck | None = None

    @property
    def longest_s(self) -> float:
        """That all of it can take."""
        before_s = 0.0 if self.healthcheck is None else self.healthcheck.longest_s
        return before_s + self.timeout_s * max(1, len(self.inputs))


@dataclass(frozen=True, slots=True)
class State:
    """What sandboxes have left of their roots, as layers of another one. They have ended, or stand still, and stay
    so until that other one is removed. `sandboxes`: top first; all but the last were made over the state of the
    last.

    `kept`: absolute paths, none of which lies in another one; None: all. `dropped`: a pattern of paths that are
    not kept all the same, matched at their beginning; those of folders end with `/`. `merged`: a pattern of
    folders that hide nothing of what lies below them. Empty: none. `copied`: the sandboxes keep what they have.
    """

    sandboxes: tuple[StatefulSandbox, ...]
    kept: tuple[str, ...] | None = None
    dropped: str = ""
    merged: str = ""
    copied: bool = False


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """How a command ended. `status`: its exit code, or minus the number of the signal that ended it; None: it did
    not end in its time. `left`: how many processes it left running. `error`: why it could not be started.
    `duration_s`: without its healthcheck. `unhealthy`: why that failed; empty: it succeeded, or there is none."""

    status: int | None
    left: int
    error: str
    duration_s: float
    unhealthy: str = ""


@dataclass(frozen=True, slots=True)
class SavedLayer:
    """`digest`: of its content, in hex."""

    digest: str
    size_bytes: int


class CommandSandbox(StatefulSandbox, Protocol):
    """A sandbox in which a command is run."""

    async def command_end(self) -> CommandEnd:
        """Waits for it. Raises SandboxLostError if the sandbox ended otherwise."""

    def save_layer(self, folder: Path, dropped: str, merged: str) -> SavedLayer:
        """Copies what it wrote to its root, when it has ended, into an empty folder, which can be a layer of other
        sandboxes. `dropped`: a pattern of paths that are not copied, matched at their beginning; those of folders
        end with `/`. Folders that it made hide what other layers have there, but for those that match `merged`.
        Blocks. Raises SandboxLostError, OSError; TooMuch for what is more than a layer may hold."""


@dataclass(frozen=True, slots=True)
class Program:
    """What serves others in a sandbox of its own. `environment`: on top of the image's. `folders`: absolute paths
    of folders for everybody to write to; `volumes`: that are made where there are none. `cwd`: empty: the
    image's."""

    argv: tuple[str, ...]
    cwd: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    host_name: str = ""


class ServingSandbox(StatefulSandbox, Protocol):
    """A sandbox in which a program serves others. It has ended when the program has."""

    async def begin(self) -> None:
        """Starts the program. Raises SandboxLostError."""

    async def check(self, check: Healthcheck, user: str | None = None) -> str:
        """Runs the command there until it succeeds. Why it has failed; empty: it has not. `user`: None: the
        program's. Raises SandboxLostError, LaunchError."""

    async def program_end(self) -> CommandEnd:
        """Waits for the program. Raises SandboxLostError if the sandbox ended otherwise."""

    async def log(self) -> str:
        """The end of what it printed. Untrusted. Empty where it cannot be had."""

    async def connected(self, port: int, source: str) -> socket:
        """A connection to a port of its loopback, which seems to come from the address `source` there. Raises
        OSError, LaunchError."""

    async def listening(self, address: str, port: int) -> socket:
        """A socket that listens there. Raises LaunchError."""

    def save_layer(self, folder: Path, dropped: str, merged: str) -> SavedLayer:
        """As of a CommandSandbox; while it stands still, too."""


class LauncherNow(NamedTuple):
    """How a launcher stands: `parents` that sandboxes are forked from, how many were `forked` so far, and the
    memory of one sandbox on average, in bytes, what it shares with others not counted; None: it is not known."""

    parents: int = 0
    forked: int = 0
    memory_bytes: int | None = None


class Launcher(Protocol):
    """Makes sandboxes and removes them."""

    def now(self) -> LauncherNow:
        """At once, however many sandboxes there are."""

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

    def run(
        self, spec: SandboxSpec, command: Command, state: State | None = None
    ) -> AbstractAsyncContextManager[CommandSandbox]:
        """A sandbox without an agent and without a channel, sealed as any other, in which the command is run. With
        a `state` it has the place of its last sandbox among those that there may be. On any exit of the block it
        is removed. Raises LaunchError."""

    def serve(self, spec: SandboxSpec, program: Program) -> AbstractAsyncContextManager[ServingSandbox]:
        """A sandbox without an agent and without a channel, sealed as any other, in which the program waits for
        its begin. It is not one of the sandboxes that there may be: it belongs to one. On any exit of the block it
        is removed. Raises LaunchError."""

    async def aclose(self) -> None:
        """Closes clients and ends threads. Idempotent."""
