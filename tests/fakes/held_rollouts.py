"""An engine whose rollouts end when the test lets them: real sockets, sandboxes in this process."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc.aio
from rollout_api.v1 import sandbox_pb2 as pb
from rollout_api.v1 import sandbox_pb2_grpc as pb_grpc

from orchestrator.completion.base import CompletionRequest
from orchestrator.engine.orchestrator import Orchestrator
from orchestrator.engine.shared import Opened
from orchestrator.errors import CompletionError
from orchestrator.host.local import LocalHost
from orchestrator.host.resources import Resources
from orchestrator.launch.names import SOCKET_NAME
from orchestrator.proxy.wire import CONTRACT
from orchestrator.rules.observer import Observer
from orchestrator.scorers.base import Scorer
from orchestrator.settings.config import Config
from orchestrator.settings.table import EnvSettings
from orchestrator.types import Completion, SandboxExit, Task
from tests.fakes.completers import text_completion
from tests.fakes.fake_launcher import CONFINED, FakeLauncher
from tests.fakes.scorers import DirectScorer

HANG_S = 60.0


async def answering(channel: Path) -> SandboxExit:
    """Asks for one completion and submits it."""
    async with grpc.aio.insecure_channel(f"unix:{channel / SOCKET_NAME}") as connection:
        stub: Any = pb_grpc.SandboxServiceStub(connection)
        async for _ in stub.Park(pb.ParkRequest(contract=CONTRACT, confinement=CONFINED)):
            pass
        message = pb.Message(role=pb.ROLE_USER, content="What is 6 times 7?")
        request = pb.CompleteRequest(sequence=1, kind=pb.COMPLETION_KIND_ACTION, messages=[message])
        response = await stub.Complete(request)
        if response.WhichOneof("result") == "completion":
            answer = response.completion.text.encode()
            reason = pb.STOP_REASON_FINAL_ANSWER
            await stub.SubmitResult(pb.SubmitResultRequest(stop_reason=reason, answer=answer))
    return SandboxExit(0, oom_killed=False)


class HeldCompleter:
    """Answers "42" to a rollout when it is let go. `dead`: whether a rollout of this group breaks instead."""

    takes_ids = False

    def __init__(self) -> None:
        self.asked: list[str] = []  # rollouts, as g0-r1-a0, in the order in which they asked
        self.running: list[str] = []
        self.dead: Callable[[int, int, int], bool] = lambda group, index, attempt: False
        self._held: dict[str, asyncio.Event] = {}
        self._free: Callable[[str], bool] = lambda rollout: False

    async def sample(self, request: CompletionRequest) -> Completion:
        group, index, attempt = (int(n) for n in re.findall(r"\d+", request.rollout_id))
        rollout = f"g{group}-r{index}-a{attempt}"
        self.asked.append(rollout)
        self.running.append(rollout)
        try:
            if not self._free(rollout):
                await self._held.setdefault(rollout, asyncio.Event()).wait()
        finally:
            self.running.remove(rollout)
        if self.dead(group, index, attempt):
            raise CompletionError("HTTP 400: this prompt is refused")
        return text_completion("42", request.stop)

    def let_go(self, *rollouts: str) -> None:
        for rollout in rollouts:
            self._held.setdefault(rollout, asyncio.Event()).set()

    def let_all_go(self, which: Callable[[str], bool] = lambda rollout: True) -> None:
        """Those that ask later too."""
        self._free = which
        self.let_go(*(rollout for rollout in self._held if which(rollout)))

    async def aclose(self) -> None:
        """Nothing is open."""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0.005)


async def unchanged(look: Callable[[], object]) -> None:
    """What is seen stays as it is, as far as a test can wait."""
    before = look()
    await asyncio.sleep(0.15)
    assert look() == before


def some_tasks(count: int) -> Iterator[Task]:
    for number in range(count):
        yield Task(f"q{number}", "What is 6 times 7?", "42")


class Held:
    """An engine, opened without Docker or an endpoint."""

    def __init__(self, orchestrator: Orchestrator, completer: HeldCompleter, launcher: FakeLauncher) -> None:
        self.orchestrator = orchestrator
        self.completer = completer
        self.launcher = launcher

    @property
    def running(self) -> list[str]:
        return sorted(self.completer.running)

    async def runs(self, *rollouts: str) -> None:
        """Waits until these and no others have a completion to wait for."""
        await until(lambda: self.running == sorted(rollouts))


@asynccontextmanager
async def held(
    observer: Observer | None = None,
    scorer: Scorer | None = None,
    completer: HeldCompleter | None = None,
    **env: Any,
) -> AsyncIterator[Held]:
    """An engine with these settings."""
    settings: dict[str, Any] = {"launcher": "process", "group_size": 2, "max_concurrent_sandboxes": 2, "seed": 7}
    config = Config(env=EnvSettings(**{**settings, **env}))
    completer, launcher = completer or HeldCompleter(), FakeLauncher(answering, max_sandboxes=1000)
    with TemporaryDirectory(prefix="x") as directory:

        @contextmanager
        def channel() -> Iterator[Path]:
            with TemporaryDirectory(dir=directory) as path:
                yield Path(path)

        orchestrator = Orchestrator(config, observer)
        around = Resources(launcher, completer, None, channel)
        most, graders = config.env.max_concurrent_sandboxes, config.env.most_grading
        hosts = LocalHost(around, config.sandbox_spec(), max_sandboxes=most, graders=graders)
        orchestrator.shared.opened = Opened(hosts, scorer or DirectScorer("correctness"))
        yield Held(orchestrator, completer, launcher)
    assert launcher.live == {}
