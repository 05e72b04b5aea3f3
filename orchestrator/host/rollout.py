"""One attempt, from the launch to the result."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from time import time

from orchestrator.errors import RolloutError, SandboxLostError
from orchestrator.grading.grade import grade
from orchestrator.host.base import Provision
from orchestrator.host.resources import Resources
from orchestrator.launch.base import Sandbox, StatefulSandbox
from orchestrator.proxy.lease import Lease
from orchestrator.rules.outcome import ClockExpired, DeadlineExpired, Ending, Submission, decide
from orchestrator.rules.waits import first_of, ran, standstill, stood_still
from orchestrator.types import Attempt, Difference, Ended, Output, Record, RolloutPlan, SandboxExit

log = logging.getLogger(__name__)

OUTPUT_LIMIT_S = 60.0  # for sending the files a rollout left; the rollout's own clock runs no more
HEALTHY_MARGIN_S = 60.0  # for what stands between the sandbox's own limit of a healthcheck and here
CHANGES_LIMIT_S = 30.0  # for reading what it changed of its root
NO_MORE = Provision()
_DEADLINE = object()
SHARED_IDENTITY = "the agent is a program: it shares its identity with model-written code"


async def run_rollout(
    plan: RolloutPlan,
    resources: Resources,
    provision: Provision = NO_MORE,
    grading: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
) -> Attempt:
    """Carries out one plan. Raises RolloutError, and AuthenticationError to stop the run. The sandbox is gone
    afterwards. `grading`: entered while the state is graded that the agent left."""
    launched_at, loop = time(), asyncio.get_running_loop()
    launch_start = loop.time()
    async with resources.sandbox(plan.sandbox) as box:
        launch_s = loop.time() - launch_start
        started_at = launched_at + launch_s
        lease = Lease(
            plan,
            resources.completer,
            resources.tokenizer and resources.tokenizer.dated(started_at),
            resources.tools if provision.tools is None else provision.tools,
            box.sandbox.cpu_s,
            resources.equipment,
            output=provision.output,
            control=resources.control,
            cost_limit=resources.cost_limit,
        )
        box.server.assign(lease)
        resources.leases.add(lease)
        try:
            unhealthy = await _unhealthy(lease, box.sandbox)
            healthy_s = loop.time() - launch_start - launch_s
            ending = unhealthy or await _ending(lease, box.sandbox)
            duration_s, waiting_s = lease.clock.elapsed_s, lease.clock.waiting_s
            awaited = lease.completions.awaited
            await lease.stop()  # nothing comes on record while the files are sent
            ending, output = await _output(ending, lease, box.sandbox)
        finally:
            resources.leases.discard(lease)
            await lease.aclose()  # stops sampling at once, however long the removal of the sandbox takes
        cpu_s = await box.sandbox.cpu_s()
        changes, trouble = await _changes(box.sandbox)
        record = Record(
            started_at=started_at,
            turns=tuple(lease.turns),
            tool_calls=tuple(lease.tool_calls),
            steps=tuple(lease.steps),
            sandbox_id=box.sandbox.sandbox_id,
            exit=ending if isinstance(ending, SandboxExit) else None,
            launch_s=launch_s,
            duration_s=duration_s,
            waiting_s=waiting_s,
            cpu_s=cpu_s,
            notes=(
                *plan.task.notes,
                *((f"its healthcheck took {healthy_s:.1f} s",) if plan.task.healthcheck else ()),
                *((SHARED_IDENTITY, *lease.notes) if plan.agent.kind == "program" else ()),
                *trouble,
            ),
            requests=lease.requests,
            output=output,
            changes=changes,
        )
        if lease.completions.fatal is not None:
            raise lease.completions.fatal
        outcome, answer = decide(ending, record, program=plan.agent.kind == "program", awaited=awaited)
        if plan.task.grader is not None and isinstance(outcome, Ended):
            assert isinstance(box.sandbox, StatefulSandbox), "with a grader there is a root to write to"
            async with grading():
                graded = await grade(plan.task, plan.sandbox, resources.launcher, box.sandbox)
            record = replace(record, grade=graded)
    return Attempt(plan, replace(record, answer=answer), outcome)


async def _unhealthy(lease: Lease, sandbox: Sandbox) -> Ending | None:
    """Waits for the task's healthcheck, before the rollout's clock and deadline run. None: it has succeeded, or
    there is none. Else what ended the rollout: nothing of a policy's was in the sandbox."""
    if (healthcheck := lease.plan.task.healthcheck) is None:
        return None
    limit_s = healthcheck.longest_s + HEALTHY_MARGIN_S
    late = ran(limit_s, SandboxLostError(f"the healthcheck did not end within {limit_s:g} s"))
    try:
        ending = await first_of(lease.ended(), lease.clock.started(), standstill(), sandbox.exited(), late)
    except RolloutError as error:
        return error
    return stood_still(ending) if isinstance(ending, float) else ending


async def _ending(lease: Lease, sandbox: Sandbox) -> Ending:
    """Waits for what ends the rollout first, and returns it."""
    # After a standstill everything is late at once: it is named before what only seems to have ended the rollout.
    deadline = ran(lease.plan.limits.deadline_s, _DEADLINE)
    try:
        ending = await first_of(lease.ended(), standstill(), sandbox.exited(), lease.clock.expired(), deadline)
    except RolloutError as error:  # returned, not raised: what was sampled so far stays on record
        return error
    if ending is _DEADLINE:
        sampling_s = lease.clock.sampling_s
        mostly_waited = lease.turns and sampling_s > lease.clock.elapsed_s / 2
        return DeadlineExpired(sampling_s, await lease.control.answer(lease.plan) if mostly_waited else None)
    if isinstance(ending, float):
        return stood_still(ending)
    if isinstance(ending, Submission) and lease.plan.agent.kind == "program" and lease.completions.awaited:
        return await _impatient(ending, lease)
    return ClockExpired() if ending is None else ending


async def _impatient(ending: Submission, lease: Lease) -> Submission:
    """The submission of a program that ended while a completion was awaited, with the endpoint's answer to a
    control if the endpoint may be the cause."""
    if ending.answer is not None or not lease.turns:
        return ending
    return replace(ending, control=await lease.control.answer(lease.plan))


async def _output(ending: Ending, lease: Lease, sandbox: Sandbox) -> tuple[Ending, Output | None]:
    """The files that follow a result, and what ended the rollout. The result is accepted by now: whatever the
    sandbox does changes it no more. But a scorer would take files that are missing for files not written: if they
    are missing because of somebody else, the rollout ends by that.

    The code that left the files is dead before the first one is sent, so their number or size gains it no time.
    """
    if lease.output.rule is None or not isinstance(ending, Submission) or ending.reason in ("crashed", "bad_task"):
        return ending, await lease.output.finish()
    came: object = None
    try:
        late = asyncio.sleep(OUTPUT_LIMIT_S)
        came = await first_of(lease.output.sent(), standstill(), sandbox.exited(), late)
    except RolloutError as error:
        came = error
    output = await lease.output.finish()
    failure = stood_still(came) if isinstance(came, float) else lease.output.failure or came
    if isinstance(failure, RolloutError) and (output is None or not output.complete):
        return failure, output
    return ending, output


async def _changes(sandbox: Sandbox) -> tuple[Difference | None, tuple[str, ...]]:
    """What the rollout changed of its root, and a note if that cannot be read: it ended before, so nothing that it
    left gives it another end."""
    try:
        async with asyncio.timeout(CHANGES_LIMIT_S):
            return await sandbox.changes(), ()
    except (RolloutError, OSError) as error:  # a TimeoutError too
        reason = str(error) or f"it took more than {CHANGES_LIMIT_S:g} s"
        return None, (f"what the agent changed of its file system is not known: {reason}",)
