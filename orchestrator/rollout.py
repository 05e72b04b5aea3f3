"""One attempt, launch to result."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import time
from typing import Any

from orchestrator.agents.equipment import Equipment
from orchestrator.breaker import Breaker
from orchestrator.completion.base import Completer, Tokenizer
from orchestrator.completion.control import EndpointControl
from orchestrator.errors import LaunchError, RolloutError, SandboxLostError
from orchestrator.launch.base import Launcher, Sandbox
from orchestrator.launch.pool import WarmPool
from orchestrator.launch.ramp import Ramp
from orchestrator.outcome import ClockExpired, DeadlineExpired, Ending, decide
from orchestrator.proxy.clock import standstill
from orchestrator.proxy.lease import Lease, Submission
from orchestrator.proxy.left_files import OutputRule
from orchestrator.proxy.server import SandboxServer
from orchestrator.tools.base import HostTool
from orchestrator.types import (
    Attempt,
    Confinement,
    Output,
    Record,
    RolloutPlan,
    SandboxExit,
    SandboxSpec,
)

log = logging.getLogger(__name__)

OUTPUT_LIMIT_S = 60.0  # for the files a rollout left: no clock runs any more
PARK_TIMEOUT_S = 60.0  # create to parked takes about half a second; under load some seconds
SHARED_IDENTITY = "the agent is a program: it shares its identity with model-written code"


async def _nobody_to_ask() -> None:
    """Completions that come from this process do not go away."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every rollout of a run shares.

    `endpoint_answers` samples nothing and raises CompletionError. `docker` pauses launching while the Engine is
    away. Without a `pool` each rollout makes its own sandbox. `output`: where the files go that rollouts leave;
    None: they are not asked for. `control`: shared, so that controls are few; None: each rollout has its own.
    """

    launcher: Launcher
    completer: Completer
    tokenizer: Tokenizer | None
    channel_directory: Callable[[], AbstractContextManager[Path]]
    verify: Callable[[Confinement, SandboxSpec], None]
    tools: Mapping[str, HostTool] = field(default_factory=dict)
    endpoint_answers: Callable[[], Awaitable[None]] = _nobody_to_ask
    docker: Breaker | None = None
    pool: WarmPool[ParkedSandbox] | None = None
    equipment: Equipment = Equipment()  # noqa: RUF009 - immutable
    output: OutputRule | None = None
    control: EndpointControl | None = None

    def sandbox(self, spec: SandboxSpec) -> AbstractAsyncContextManager[ParkedSandbox]:
        """One for one rollout, from the pool where there is one."""
        if self.pool is not None:
            return self.pool.claim(spec)
        return parked_sandbox(spec, self.launcher, self.channel_directory, self.verify)


@dataclass(frozen=True, slots=True)
class ParkedSandbox:
    """A sandbox that waits for its one assignment."""

    sandbox: Sandbox
    server: SandboxServer

    @property
    def connected(self) -> bool:
        """Whether an assignment would reach it."""
        return self.server.connected

    async def lost(self) -> str:
        """Waits until it can take no assignment any more; why."""
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
    verify: Callable[[Confinement, SandboxSpec], None],
    ramp: Ramp | None = None,
) -> AsyncIterator[ParkedSandbox]:
    """A fresh sandbox, verified and parked. On any exit it is removed, socket and directory with it.

    `ramp` decides when it is begun. Raises LaunchError, DockerError; EnvironmentUnusable when its confinement
    is not what it must be.
    """
    async with AsyncExitStack() as stack:
        async with ramp.start() if ramp is not None else nullcontext():
            directory = stack.enter_context(channel_directory())
            server = await stack.enter_async_context(SandboxServer(directory))
            sandbox = await stack.enter_async_context(launcher.launch(spec, directory))
            try:
                async with asyncio.timeout(PARK_TIMEOUT_S):
                    parked = await first_of(server.parked(), sandbox.exited())
            except TimeoutError as error:
                raise LaunchError(f"the sandbox was not ready within {PARK_TIMEOUT_S:g} s") from error
            if isinstance(parked, SandboxExit):
                raise LaunchError(f"the sandbox ended at start: {parked.reason or parked.exit_code}")
        verify(parked, spec)
        yield ParkedSandbox(sandbox, server)


async def run_rollout(plan: RolloutPlan, around: Surroundings) -> Attempt:
    """Carries out one plan. Raises RolloutError with nothing left behind, AuthenticationError to stop the run."""
    launched_at, loop = time(), asyncio.get_running_loop()
    launch_start = loop.time()
    async with around.sandbox(plan.sandbox) as parked:
        lease = Lease(
            plan,
            around.completer,
            around.tokenizer,
            around.tools,
            parked.sandbox.cpu_s,
            around.equipment,
            output=around.output,
            control=around.control,
        )
        launch_s = loop.time() - launch_start
        parked.server.assign(lease)
        try:
            ending = await _ending(lease, parked.sandbox)
            duration_s, waiting_s = lease.clock.elapsed_s, lease.clock.waiting_s
            output = await _output(ending, lease, parked.sandbox)
        finally:
            await lease.aclose()  # nothing is sampled for it any more, however long its removal takes
        record = Record(
            started_at=launched_at + launch_s,
            turns=tuple(lease.turns),
            tool_calls=tuple(lease.tool_calls),
            steps=tuple(lease.steps),
            sandbox_id=parked.sandbox.sandbox_id,
            exit=ending if isinstance(ending, SandboxExit) else None,
            launch_s=launch_s,
            duration_s=duration_s,
            waiting_s=waiting_s,
            cpu_s=await parked.sandbox.cpu_s(),
            notes=(SHARED_IDENTITY,) if plan.agent.kind == "program" else (),
            output=output,
        )
        if lease.fatal is not None:
            raise lease.fatal
    outcome, answer = decide(ending, record)
    return Attempt(plan, replace(record, answer=answer), outcome)


async def _ending(lease: Lease, sandbox: Sandbox) -> Ending:
    """Whatever ends the rollout first."""
    try:
        async with asyncio.timeout(lease.plan.limits.deadline_s):
            ending: Ending | float | None = await first_of(
                lease.ended(), standstill(), sandbox.exited(), lease.clock.expired()
            )
    except TimeoutError:
        sampling_s = lease.clock.sampling_s
        mostly_waited = lease.turns and sampling_s > lease.clock.elapsed_s / 2
        return DeadlineExpired(sampling_s, await lease.control.answer(lease.plan) if mostly_waited else None)
    except RolloutError as error:  # the record so far is kept: tokens were paid for
        return error
    if isinstance(ending, float):
        return SandboxLostError(f"the orchestrator itself stood still for {ending:.0f} s")
    return ClockExpired() if ending is None else ending


async def _output(ending: Ending, lease: Lease, sandbox: Sandbox) -> Output | None:
    """The files that follow a result. It is accepted by now: whatever becomes of them changes nothing about it.

    The code that left them is dead before the first of them comes, so it gains nothing by their number or size.
    """
    if lease.output.rule is not None and isinstance(ending, Submission) and ending.reason != "crashed":
        with suppress(TimeoutError, RolloutError):
            async with asyncio.timeout(OUTPUT_LIMIT_S):
                await first_of(lease.output.sent(), sandbox.exited())
    return await lease.output.finish()


async def first_of(*waits: Coroutine[Any, Any, Any]) -> Any:
    """The first result or exception; in a tie the earlier argument's. The others are cancelled and awaited."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
