"""The steps of a task, as far as its agent comes: behind each but the last one all in the sandbox stands still,
and a copy of what the agent has left by then is graded where the agent never was. Then it goes on, or the task
ends.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from orchestrator.errors import LaunchError, RolloutError
from orchestrator.grading.grade import grade
from orchestrator.grading.steps import of_step, shortfall
from orchestrator.host.endings import HEALTHY_MARGIN_S, ending_of
from orchestrator.launch.base import Launcher, Sandbox, StatefulSandbox
from orchestrator.proxy.instructions import needs_setup
from orchestrator.proxy.lease import Lease
from orchestrator.rules.outcome import ClockExpired, Ending, Submission
from orchestrator.rules.waits import first_of, ran, standstill, stood_still
from orchestrator.services.life import Services
from orchestrator.types import Grade, SandboxExit, StepGrade, TaskStep

# Entered while a state is graded. True: the agent's sandbox goes on afterwards.
Grading = Callable[[bool], AbstractAsyncContextManager[None]]
_ENDING_S = 2.0


async def demand_still(sandbox: Sandbox) -> None:
    """Before a word of the policy's: later it may be the policy's doing that the sandbox cannot be held still.
    Raises LaunchError."""
    assert isinstance(sandbox, StatefulSandbox), "with a grader there is a root to write to"
    try:
        async with sandbox.still():
            pass
    except RolloutError as error:
        raise LaunchError(str(error)) from error


class Steps:
    """Of one rollout. `graded`: the grades so far; `ended_early`: the last of them ended the task."""

    def __init__(
        self, lease: Lease, sandbox: Sandbox, launcher: Launcher, grading: Grading, beside: Services | None = None
    ) -> None:
        self.graded: tuple[StepGrade, ...] = ()
        self.ended_early = False
        self._lease, self._sandbox, self._launcher, self._grading = lease, sandbox, launcher, grading
        self._beside = beside

    async def all_but_last(self, ending: Ending) -> Ending:
        """What ended the rollout. `ending`: of the first step. What the agent left in the last step that it came
        to is not graded yet, unless the task has ended early."""
        task = self._lease.plan.task
        for following in task.steps[1:]:
            # Without a completion there is nobody who could go on.
            if not (isinstance(ending, Submission) and ending.ends_step and self._lease.turns):
                break
            try:
                self.graded += (of_step(task, len(self.graded), await self._grade()),)
            except RolloutError as error:
                ending = await self._why_lost(error)
                break
            if shortfall(task, self.graded):
                self.ended_early = True
                break
            self._lease.go_on(following)
            ending = await self._set_up(following) or await ending_of(self._lease, self._sandbox, self._beside)
        self._lease.finish()
        return ending

    async def _grade(self) -> Grade:
        """Raises RolloutError if the sandbox has ended, or cannot be held still."""
        lease, sandbox = self._lease, self._sandbox
        assert isinstance(sandbox, StatefulSandbox), "with a grader there is a root to write to"
        task = lease.plan.task.at(len(self.graded))
        with lease.clock.waiting():
            async with sandbox.still(), self._grading(True):
                return await grade(
                    task, lease.plan.sandbox, self._launcher, (sandbox,), copied=True, beside=self._beside
                )

    async def _set_up(self, step: TaskStep) -> Ending | None:
        """Waits until all is there that comes before the step. None: it is. Model-written code may run meanwhile:
        what goes wrong is its doing."""
        if not needs_setup(step):
            return None
        lease = self._lease
        checks = [check for check in (step.setup, step.healthcheck) if check is not None]
        late = ran(sum(check.longest_s for check in checks) + 2 * HEALTHY_MARGIN_S, ClockExpired())
        with lease.clock.waiting():
            try:
                came = await first_of(
                    lease.ended(), lease.healthy.wait(), standstill(), self._sandbox.exited(), late
                )
            except RolloutError as error:
                return error
        if isinstance(came, bool):
            return None
        return stood_still(came) if isinstance(came, float) else came

    async def _why_lost(self, error: RolloutError) -> Ending:
        try:
            async with asyncio.timeout(_ENDING_S):
                return await self._sandbox.exited()
        except RolloutError as lost:
            return lost
        except TimeoutError:
            return SandboxExit(None, oom_killed=False, reason=str(error))
