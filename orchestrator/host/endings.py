"""Waits for what ends a rollout, or a step of its task."""

from dataclasses import replace

from orchestrator.errors import RolloutError, SandboxLostError
from orchestrator.launch.base import Sandbox
from orchestrator.proxy.instructions import needs_setup
from orchestrator.proxy.lease import Lease
from orchestrator.rules.outcome import ClockExpired, DeadlineExpired, Ending, ServiceEnd, Submission
from orchestrator.rules.waits import first_of, ran, standstill, stood_still
from orchestrator.services.life import Services

HEALTHY_MARGIN_S = 60.0  # for what stands between the sandbox's own limit of a healthcheck and here
_DEADLINE = object()


async def unhealthy(lease: Lease, sandbox: Sandbox) -> Ending | None:
    """Waits for the task's healthcheck, and for what comes before its first step, before the rollout's clock and
    deadline run. None: all has succeeded, or there is none. Else what ended the rollout: nothing of a policy's was
    in the sandbox."""
    task = lease.plan.task
    first = task.steps[0] if task.steps and needs_setup(task.steps[0]) else None
    if task.healthcheck is None and first is None:
        return None
    checks = [task.healthcheck, *((first.setup, first.healthcheck) if first else ())]
    margin_s = HEALTHY_MARGIN_S * (1 if first is None else 2)
    limit_s = sum(check.longest_s for check in checks if check is not None) + margin_s
    late = ran(limit_s, SandboxLostError(f"the healthcheck did not end within {limit_s:g} s"))
    try:
        ending = await first_of(lease.ended(), lease.clock.started(), standstill(), sandbox.exited(), late)
    except RolloutError as error:
        return error
    return stood_still(ending) if isinstance(ending, float) else ending


async def ending_of(lease: Lease, sandbox: Sandbox, beside: Services | None = None) -> Ending:
    """Waits for what ends the rollout first, and returns it. `beside`: the services of its task."""
    ending = await _first_ending(lease, sandbox, beside)
    if beside is None or not beside.has_ended or isinstance(ending, ServiceEnd):
        return ending
    try:  # what the agent did behind the end of a service does not count
        return await beside.ended()
    except RolloutError as error:
        return error


async def _first_ending(lease: Lease, sandbox: Sandbox, beside: Services | None) -> Ending:
    # After a standstill everything is late at once: it is named before what only seems to have ended the rollout.
    deadline = ran(lease.deadline_s, _DEADLINE)
    try:
        of_services = () if beside is None else (beside.ended(),)
        waits = (lease.ended(), standstill(), sandbox.exited(), lease.clock.expired(), deadline)
        ending = await first_of(*of_services, *waits)
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
