"""One attempt, from the launch to the result."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
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
from orchestrator.rules.outcome import Ending, ServiceEnd, Submission, decide
from orchestrator.rules.waits import first_of, standstill, stood_still
from orchestrator.services.control import ServiceControl
from orchestrator.services.life import Services, Unready, services
from orchestrator.types import (
    Attempt,
    Difference,
    Ended,
    Failed,
    FailedName,
    Output,
    Record,
    RolloutPlan,
    SandboxExit,
)

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
    async with (
        resources.sandbox(plan.sandbox) as box,
        resources.world(plan, provision) as world,
        _services(plan, resources) as beside,
    ):
        if isinstance(beside, Unready):
            record = Record(launched_at, sandbox_id=box.sandbox.sandbox_id, notes=plan.task.notes)
            record = replace(record, launch_s=loop.time() - launch_start, services=beside.records)
            return Attempt(plan, record, Failed(FailedName.BAD_TASK, str(beside)))
        if beside is not None:
            world = replace(world, ways=(*world.ways, *beside.ways))
        launch_s = loop.time() - launch_start
        started_at = launched_at + launch_s
        began_at = started_at if plan.prefix is None else plan.prefix.started_at
        lease = Lease(
            plan,
            resources.completer,
            resources.tokenizer and resources.tokenizer.dated(began_at),
            resources.tools if provision.tools is None else provision.tools,
            box.sandbox.cpu_s,
            resources.equipment,
            output=provision.output,
            control=resources.control,
            cost_limit=resources.cost_limit,
            served=partial(provision.served, began_at),
            world=world,
        )
        if plan.task.steps:
            await demand_still(box.sandbox)
        box.server.assign(lease)
        resources.leases.add(lease)
        try:
            sick = await unhealthy(lease, box.sandbox)
            healthy_s = loop.time() - launch_start - launch_s
            steps = Steps(lease, box.sandbox, resources.launcher, grading, beside)
            ending = sick or await steps.all_but_last(await ending_of(lease, box.sandbox, beside))
            duration_s, waiting_s = lease.clock.elapsed_s, lease.clock.waiting_s
            if plan.prefix is not None:
                started_at = time() - duration_s
            awaited = lease.completions.awaited
            await lease.stop()  # nothing comes on record while the files are sent
            ending, output = await _output(ending, lease, box.sandbox)
            if isinstance(ending, ServiceEnd) and lease.turns:
                control = resources.service_control or ServiceControl(resources.launcher)
                ending = replace(ending, excuse=await control.excuse(ending, plan.task, plan.sandbox))
        finally:
            resources.leases.discard(lease)
            await lease.aclose()  # stops sampling at once, however long the removal of the sandbox takes
        cpu_s = await box.sandbox.cpu_s()
        changes, trouble = await _changes(box.sandbox)
        record = Record(
            started_at=started_at,
            turns=tuple(lease.turns),
            tool_calls=tuple(lease.tool_calls),
            crossings=world.crossings(),
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
                *lease.playback_notes,
                *world.notes(),
            ),
            requests=lease.requests,
            output=output,
            changes=changes,
            branch=plan.prefix.branch if plan.prefix else None,
            continued=lease.playback.continued if lease.playback else (),
            services=() if beside is None else await beside.records(),
        )
        if lease.completions.fatal is not None:
            raise lease.completions.fatal
        outcome, answer = decide(ending, record, program=plan.agent.kind == "program", awaited=awaited)
        if lease.playback is not None and not lease.playback.over and isinstance(outcome, Ended):
            refused = lease.playback.refused(outcome)
            if lease.playback.part(refused.reason):  # what it did is its own, behind what was served
                lease.playback.cut()
                record = replace(record, continued=lease.playback.continued)
            else:
                outcome, answer = refused, None
        if lease.playback is not None and isinstance(outcome, Failed):
            record = lease.playback.with_rest(record)
        if plan.task.grader is not None and isinstance(outcome, Ended):
            assert isinstance(box.sandbox, StatefulSandbox), "with a grader there is a root to write to"
            graded = steps.graded
            if not steps.ended_early:
                task = plan.task.at(len(graded))
                async with grading(False):
                    last = await grade(task, plan.sandbox, resources.launcher, (box.sandbox,), beside=beside)
                record = replace(record, grade=last)
                graded += (of_step(plan.task, len(graded), last),) if plan.task.steps else ()
            if graded:
                record = replace(record, grade=total(plan.task, graded), step_grades=graded)
    return Attempt(plan, replace(record, answer=answer), outcome)


@asynccontextmanager
async def _services(plan: RolloutPlan, resources: Resources) -> AsyncIterator[Services | Unready | None]:
    """Those of the task, ready to be used, or why they cannot be; None: it has none. Raises RolloutError."""
    async with AsyncExitStack() as stack:
        found: Services | Unready | None = None
        if plan.task.services:
            try:
                found = await stack.enter_async_context(services(plan.task, plan.sandbox, resources.launcher))
            except Unready as error:
                found = error
        yield found


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
