"""One container while it lives: the events about it, and how it ended."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from orchestrator.errors import DockerError, SandboxLostError
from orchestrator.launch.container import ContainerSandbox, exit_of
from orchestrator.launch.docker.calls import Engine
from orchestrator.launch.docker.events import ContainerEvent
from orchestrator.launch.uids import UidPair
from orchestrator.types import SandboxExit

_DEADLY_SIGNALS = frozenset({"9", "15", "SIGKILL", "SIGTERM"})
_CPU_TIMEOUT_S = 0.02  # a removal must not wait longer for a figure
# Its clocks would run on. As with a kill, nothing inside can bring it about.
PAUSED = "the container was paused through the Engine by somebody else"


class DockerSandbox(ContainerSandbox):
    """A `Sandbox`. The launcher feeds it events by `name`, which is known before the container exists."""

    def __init__(self, engine: Engine, uids: UidPair, *, cpu_timeout_s: float = _CPU_TIMEOUT_S) -> None:
        super().__init__(uids)
        self.sandbox_id = ""  # the container's, when there is one
        self.in_doubt = False  # the Engine was asked to create it and has not answered
        self.running_since_s: float | None = None  # loop time; None: not started yet
        self._cpu_timeout_s = cpu_timeout_s
        self._engine = engine
        self._out_of_memory = False
        self._killed = False
        self._exit_code: int | None = None

    async def cpu_s(self) -> float | None:
        """If only the Engine counts them, they are unknown after the end."""
        if (clock := self.cpu_clock) is None or not clock.elsewhere:
            return await super().cpu_s()
        if not self._ended.is_set():
            with suppress(DockerError):
                used_ns = await self._engine.cpu_ns(self.sandbox_id, self._cpu_timeout_s)
                return clock.plausible(used_ns / 1e9, self._running_s())
        return None

    def on_event(self, event: ContainerEvent) -> None:
        """Takes an event. The Engine may send the same one twice."""
        match event.action:
            case "oom":
                self._out_of_memory = True
            case "kill":
                # Only calls to the Engine cause this event; nothing inside the container can.
                self._killed |= event.attributes.get("signal", "") in _DEADLY_SIGNALS
            case "die":
                code = event.attributes.get("exitCode", "")
                self._exit_code = int(code) if code.isdecimal() else None
                self._ended.set()
            case "pause":
                self.lose(SandboxLostError(PAUSED))
            case "destroy":
                self.lose(SandboxLostError("the container was removed by somebody else"))

    def end(self) -> None:
        """The container has ended. `exited` will ask the Engine how."""
        self._ended.set()

    async def _post_mortem(self) -> SandboxExit:
        state = await self._engine.inspect(self.sandbox_id, _state)
        if state is None or state[0] in ("removing", "dead"):
            raise SandboxLostError("the container was removed by somebody else")
        if self._killed:
            raise SandboxLostError("the container was killed through the Engine by somebody else")
        _, code, killed_for_memory = state
        if self._exit_code is None and code in (137, 143):
            # It ended while no events came: stopping the Engine has ended it too.
            raise SandboxLostError("the container ended while the Engine was away")
        out_of_memory = self._out_of_memory or killed_for_memory
        output = ""
        if code != 0:
            with suppress(DockerError):
                output = await self._engine.log_tail(self.sandbox_id)
        return exit_of(code, out_of_memory, output)


def _state(inspected: Mapping[str, Any]) -> tuple[str, int, bool]:
    """Status, exit code, and the Engine's OOM flag."""
    state = inspected["State"]
    return str(state["Status"]), int(state["ExitCode"]), bool(state["OOMKilled"])
