"""One attempt, from the launch to the result."""

import asyncio
import logging
from contextlib import nullcontext
from dataclasses import replace
from time import time

from orchestrator.errors import RolloutError
from orchestrator.grading.grade import grade
from orchestrator.grading.steps import of_step, total
from orchestrator.host.base import Provision
from orchestrator.host.endings import ending_of, unhealthy
from orchestrator.host.resources import Resources
from orchestrator.host.steps import Grading, Steps, demand_still
from orchestrator.launch.base import Sandbox, StatefulSandbox
from orchestrator.proxy.lease import Lease
from orchestrator.rules.outcome import Ending, Submission, decide
from orchestrator.rules.waits import first_of, standstill, stood_still
from orchestrator.types import Attempt, Difference, Ended, Output, Record, RolloutPlan, SandboxExit

log = logging.getLogger(__name__)

OUTPUT_LIMIT_S = 60.0  # for sending the files a rollout left; the rollout's own clock runs no more
CHANGES_LIMIT_S = 30.0  # for reading what it changed of its root
NO_MORE = Provision()
SHARED_IDENTITY = "the agent is a program: it shares its identity with model-written code"


async def run_rollout(
    plan: RolloutPlan,
    resources: Resources,
    provision: Provision = NO_MORE,
    grading: Grading = lambda goes_on: nullcontext(),
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
        if plan.task.steps:
            await demand_still(box.sandbox)
        box.server.assign(lease)
        resources.leases.add(lease)
        try:
            sick = await unhealthy(lease, box.sandbox)
            healthy_s = loop.time() - launch_start - launch_s
            steps = Steps(lease, box.sandbox, resources.launcher, grading)
            ending = sick or await steps.all_but_last(await ending_of(lease, box.sandbox))
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
            graded = steps.graded
            if not steps.ended_early:
                task = plan.task.at(len(graded))
                async with grading(False):
                    last = await grade(task, plan.sandbox, resources.launcher, (box.sandbox,))
                record = replace(record, grade=last)
                graded += (of_step(plan.task, len(graded), last),) if plan.task.steps else ()
            if graded:
                record = replace(record, grade=total(plan.task, graded), step_grades=graded)
    return Attempt(plan, replace(record, answer=answer), outcome)


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
