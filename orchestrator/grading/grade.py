"""Grades the state of a sandbox: in another one, sealed in the same way, where the agent never was.

the agent's sandbox ── ended ──► its state, in scope ─┐ a layer
                                                      ▼
tests ── a layer on top ──►  a sandbox without agent, model, tools and channel: one command, or one run for each
                             case ── ended ──► what it wrote, read from outside ──► Grade
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from orchestrator.errors import RolloutError, SandboxLostError
from orchestrator.grading.cases import case_results
from orchestrator.grading.left_behind import LeftBehind, TooLarge
from orchestrator.grading.reports import test_results
from orchestrator.grading.rewards import FILES, REWARD, Rewards, read_rewards
from orchestrator.grading.scope import InScope, in_scope
from orchestrator.launch.base import Command, CommandEnd, CommandSandbox, Launcher, State, StatefulSandbox
from orchestrator.launch.names import WORKSPACE_DIR
from orchestrator.launch.workspaces import Workspaces
from orchestrator.rules.text import valid
from orchestrator.services.life import Services
from orchestrator.services.state import handed_on
from orchestrator.types import Grade, Grader, SandboxSpec, Task, TestResult

log = logging.getLogger(__name__)

TESTS = "/tests"
TEST_SCRIPT = f"{TESTS}/test.sh"
SANDBOX_FAILED = "the grader's sandbox failed"  # begins a fault of this machine
LEFT_RUNNING, NOT_THE_TESTS = "processes were left running", "was written, which the task's own tests do not write"
CASES = "cases"  # the share of them that passed
# Where the tests have all that they fetch already: so they ask no network, which there is none of.
_FETCHED = {"PIP_NO_INDEX": "1", "UV_OFFLINE": "1"}
_SHARE_OF_LIMIT = 3  # a solution that takes a third of the time leaves no doubt about who ran out of it
MARGIN_S = 60.0  # for start and end of the sandbox
_TRIES = 2
_LOG_BYTES = 64 << 10
_SHOWN_CHARS = 4000


async def grade(
    task: Task,
    spec: SandboxSpec,
    launcher: Launcher,
    left: tuple[StatefulSandbox, ...] = (),
    *,
    copied: bool = False,
    beside: Services | None = None,
) -> Grade:
    """Grades what is left in these sandboxes, as of a `State`; none: the untouched image. They are ended first,
    and their state is used up. `copied`: they have ended or stand still, and a copy is graded. `spec`: of the
    task's. The task's `grader.tests` is the folder of a layer. A failure of this machine is a `fault`, too. On any
    exit, cancellation included, the sandbox that grades is removed; `state` stays. `beside`: services that the
    agent had, which go on: they are asked for their state, and a grader that has no sandbox of another kind finds
    them."""
    assert task.grader is not None
    grader, scope = task.grader, in_scope(task.grader)
    for tries_left in reversed(range(_TRIES)):
        try:
            for box in () if copied else left:
                await _killed(box)
            async with AsyncExitStack() as stack:
                states = await _collected(task, grader, spec, launcher, State(left, copied=copied), stack)
                graded = State(states, scope.kept, scope.dropped, scope.merged, copied)
                command, trouble = await _asking(task, grader, command_of(task, grader), beside, stack)
                of = grading_spec(spec, grader)
                found = await _graded(command, grader, scope, of, launcher, graded)
                return replace(found, flags=(*found.flags, *trouble))
        except RolloutError as error:
            if not tries_left:
                return Grade(fault=f"{SANDBOX_FAILED}: {error}", scope=scope.scope, kept=scope.paths)
            log.warning("task %s is graded again: %s", task.task_id, error)
    raise AssertionError("the last try returns")


async def _killed(state: StatefulSandbox) -> None:
    """Raises SandboxLostError."""
    try:
        async with asyncio.timeout(MARGIN_S):
            await state.kill()
    except TimeoutError:
        raise SandboxLostError(f"the agent's sandbox did not end in {MARGIN_S:g} s") from None


async def _collected(
    task: Task,
    grader: Grader,
    spec: SandboxSpec,
    launcher: Launcher,
    left: State,
    stack: AsyncExitStack,
) -> tuple[StatefulSandbox, ...]:
    """The sandboxes whose states are graded, top first: one for each command that collects something, over all
    that the agent left, and the agent's. Whether a command fails is for the tests to find. Raises RolloutError."""
    states = left.sandboxes
    for collect in (one for one in grader.collect if not one.service):
        command = Command(
            ("/bin/sh", "-c", collect.command),
            collect.timeout_s,
            task.cwd or WORKSPACE_DIR,
            task.environment,
            healthcheck=task.healthcheck,
        )
        user = spec.user if collect.user is None else collect.user
        over = replace(left, sandboxes=states) if states else None
        box = await stack.enter_async_context(launcher.run(replace(spec, user=user, preload=()), command, over))
        await end_of(box, command)
        states = (box, *states)
    return states


def with_tests(task: Task, workspaces: Workspaces) -> Task:
    """The task, its grader's tests and what they need in folders that are layers. Blocks. Raises WorkspaceError,
    EnvironmentUnusable."""

    def laid(folder: str | None) -> str | None:
        return None if folder is None else str(workspaces.layer(Path(folder), TESTS, writable=False))

    def with_layers(grader: Grader) -> Grader:
        grader = replace(grader, tests=laid(grader.tests), shared_tests=laid(grader.shared_tests))
        if grader.checked is not None and grader.checked.layer is not None:
            needed = str(workspaces.named(grader.checked.layer))
            grader = replace(grader, checked=replace(grader.checked, layer=needed))
        return grader

    return task.with_graders(with_layers)


def grading_spec(spec: SandboxSpec, grader: Grader) -> SandboxSpec:
    """Of the sandbox that grades."""
    user = spec.user if grader.user is None else grader.user
    if grader.image is None or grader.image == spec.image:
        return replace(spec, user=user, preload=())
    return replace(spec, image=grader.image, layers=(), user=grader.user, preload=())


async def _asking(
    task: Task, grader: Grader, command: Command, beside: Services | None, stack: AsyncExitStack
) -> tuple[Command, list[str]]:
    """The command with what services hand on to it, and what went wrong, for people. Raises RolloutError."""
    if beside is None or task.hosts is None:
        return command, []
    place = Path(task.hosts).parents[1] / "drafts"
    layers, trouble = await handed_on(grader, beside, place, stack)
    is_as_agents = grader.image is None and grader.declared is None
    ways = beside.ways if is_as_agents else ()
    return replace(command, layers=(*command.layers, *layers), ways=ways), trouble


async def _graded(
    command: Command,
    grader: Grader,
    scope: InScope,
    spec: SandboxSpec,
    launcher: Launcher,
    state: State,
) -> Grade:
    """Raises RolloutError."""
    async with launcher.run(spec, command, state if state.sandboxes else None) as box:
        end = await end_of(box, command)
        cpu_s = await box.cpu_s()
        read = await asyncio.to_thread(read_grade, box, grader, end)
    return replace(read, scope=scope.scope, kept=scope.paths, duration_s=end.duration_s, cpu_s=cpu_s)


async def end_of(box: CommandSandbox, command: Command) -> CommandEnd:
    """How its command ended. Raises SandboxLostError."""
    timeout_s = command.longest_s + MARGIN_S
    try:
        async with asyncio.timeout(timeout_s):
            return await box.command_end()
    except TimeoutError:
        raise SandboxLostError(f"the sandbox of a command did not end in {timeout_s:g} s") from None


def command_of(task: Task, grader: Grader) -> Command:
    """What grades it, as it is run."""
    checked = grader.checked
    cwd = grader.cwd or task.cwd or WORKSPACE_DIR
    layers = (grader.tests, grader.shared_tests, None if checked is None else checked.layer)
    fetched = {} if checked is None or checked.layer is None else _FETCHED
    environment: Mapping[str, str] = {**fetched, **task.environment, **grader.environment}
    common = Command(
        argv=(TEST_SCRIPT,) if grader.kind == "harbor" else grader.command,
        timeout_s=grader.timeout_s,
        cwd=cwd,
        environment=environment,
        layers=tuple(folder for folder in layers if folder is not None),
        healthcheck=grader.healthcheck,
    )
    if grader.kind == "harbor":
        return replace(common, programs=(TEST_SCRIPT,))
    if grader.kind == "io":
        inputs = tuple((case.arguments, case.stdin) for case in grader.cases)
        return replace(common, inputs=inputs, timeout_s=grader.timeout_s / max(1, len(inputs)))
    return common


def read_grade(box: CommandSandbox, grader: Grader, end: CommandEnd) -> Grade:
    """What the sandbox left. Blocks. Raises SandboxLostError."""
    try:
        return _read(box, grader, end)
    except OSError as error:
        raise SandboxLostError(f"what a grader left cannot be read: {error.strerror}") from error


def _read(box: CommandSandbox, grader: Grader, end: CommandEnd) -> Grade:
    with box.written() as top, LeftBehind(top) as left:
        stdout, stderr = (log_of(left, f"test-{name}.txt") for name in ("stdout", "stderr"))
        flags = [f"{end.left} {LEFT_RUNNING}"] if end.left else []
        flags += [f"while it was graded, {end.unhealthy}"] if end.unhealthy else []
        if grader.kind == "io":
            tests = case_results(left, grader.cases)
            rewards = Rewards(_of_cases(tests), CASES)
        else:
            tests = test_results(left, stdout)
            rewards = _rewards(grader, end, left, flags)
    if end.error:
        rewards = Rewards(fault=f"the grader cannot be started: {end.error}")
    if rewards.fault and _is_policys(grader, end):
        flags.append(f"{rewards.fault}, but with the task's own solution it does not come to that")
        rewards = Rewards({REWARD: 0.0})
    return Grade(
        rewards.values,
        rewards.fault,
        rewards.source,
        tests=tests,
        flags=tuple(flags),
        stdout=stdout[-_SHOWN_CHARS:],
        stderr=stderr[-_SHOWN_CHARS:],
    )


def _rewards(grader: Grader, end: CommandEnd, left: LeftBehind, flags: list[str]) -> Rewards:
    """Of what ended in its time."""
    if end.status is None:
        return Rewards(fault=f"the grader did not end within {grader.timeout_s:g} s")
    if grader.kind == "command":
        return Rewards({REWARD: float(end.status == 0)}, "exit")
    usual = "" if grader.checked is None else grader.checked.source
    if usual not in FILES:
        return read_rewards(left)
    others = sorted({*FILES} & {*left.names()} - {usual})
    flags += [f"{other} {NOT_THE_TESTS}" for other in others]
    return read_rewards(left, (usual,))


def _is_policys(grader: Grader, end: CommandEnd) -> bool:
    """Whether it is known that it is not the grader's doing that there is no reward."""
    checked = grader.checked
    if checked is None or not checked.source:
        return False
    if end.status is None and not end.error:
        return checked.duration_s is not None and checked.duration_s * _SHARE_OF_LIMIT <= grader.timeout_s
    return True


def _of_cases(tests: tuple[TestResult, ...]) -> dict[str, float]:
    passed = sum(test.outcome == "passed" for test in tests)
    return {REWARD: float(passed == len(tests)), CASES: passed / max(1, len(tests))}


def log_of(left: LeftBehind, name: str) -> str:
    """What a command printed, of its files of LOGS."""
    try:
        return valid((left.read(name, _LOG_BYTES) or b"").decode("utf-8", "replace"))
    except TooLarge:  # pid 1 writes no more: something else did
        return ""
