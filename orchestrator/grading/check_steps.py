"""Checks a task of several steps: as `check` does one of one. Each step's solution is run over all that those
before it have left, and each step is graded. Cheats are tried in the first step, and stay for the others; nobody
does anything in these.

What only a network could fetch is not tried to be fetched, and what a step leaves running has ended by the next.
The task's services go on.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from shlex import quote

from orchestrator.errors import RolloutError, SandboxLostError, ScorerError
from orchestrator.grading.check import (
    LEAST_S,
    POLICY_S,
    SOLVE,
    TIMES_SOLUTION,
    TRIES,
    Unhealthy,
    demand_healthy,
    finding,
    fresh_services,
    outputs_of,
    scope_of,
    seen,
    takeovers_of,
)
from orchestrator.grading.grade import SANDBOX_FAILED, end_of, grade
from orchestrator.grading.panel import CURES, policies
from orchestrator.grading.scope import outermost
from orchestrator.grading.steps import of_step, shortfall, total
from orchestrator.launch.base import Command, Launcher, State
from orchestrator.launch.names import WORKSPACE_DIR
from orchestrator.rules.waits import first_error
from orchestrator.types import Checked, Difference, Grade, SandboxSpec, StepGrade, Task, TaskCheck

STEP_FILES = "/step-files"
_NO_SETUP = 97  # the exit code of a step that cannot begin
_SANDBOX_TRIES = 2


class StepsChecker:
    """Of one task. `solutions`, `files`: layers with each step's solution and files; None: it has none. The others
    as of a TaskChecker."""

    def __init__(
        self,
        task: Task,
        content: str,
        spec: SandboxSpec,
        launcher: Launcher,
        score: Callable[[Grade, Checked], float],
        *,
        solutions: Sequence[str | None],
        files: Sequence[str | None],
        library: str | None,
        solve_s: float,
    ) -> None:
        self._task, self._content, self._spec = task, content, replace(spec, preload=())
        self._launcher, self._score = launcher, score
        self._solutions, self._files, self._library, self._solve_s = solutions, files, library, solve_s
        self._checked = [Checked()] * len(task.steps)
        self._differences: list[list[Difference]] = [[] for _ in task.steps]
        self._last = ""  # why the last grade is not what it should be

    async def check(self) -> TaskCheck:
        """Raises RolloutError where it is this machine that fails."""
        began = time.monotonic()
        try:
            found = await self._check()
        except Unhealthy as error:
            found = TaskCheck(self._content, failures=(str(error),))
        duration_s = round(time.monotonic() - began, 1)
        return replace(found, checked=self._checked[0], steps=tuple(self._checked), duration_s=duration_s)

    async def _check(self) -> TaskCheck:
        found, steps = TaskCheck(self._content), self._task.steps
        if lacking := [step.name for step, one in zip(steps, self._solutions, strict=True) if one is None]:
            return replace(found, failures=(f"step {lacking[0]} has no solution/solve.sh",))
        solved: list[float | None] = []
        while len(solved) < TRIES and set(solved) <= {1.0}:
            solved.append(self._reward(await self._played([SOLVE] * len(steps), learns=True)))
        found = replace(found, solution=tuple(solved))
        if solved[-1] != 1:
            why = f": {self._last}" if self._last else ""
            return replace(found, failures=(f"its own solutions get {solved[-1]}, and must get 1{why}",))
        no_op = [self._reward(await self._played([":"] * len(steps))) for _ in range(TRIES)]
        found = replace(found, no_op=tuple(no_op))
        if set(no_op) != {0.0}:
            return replace(found, failures=(f"an untouched sandbox gets {no_op[-1]}, and must get 0",))
        left = [one for differences in self._differences for one in outputs_of(differences[-1])]
        cheats = policies(left, self._task.cwd or WORKSPACE_DIR, library=self._library is not None)
        found = replace(found, panel=await self._cheated(cheats))
        failures = [
            f"{name} gets {found.panel[name]:g}, and must get 0{CURES.get(name, '')}" for name in found.winners
        ]
        failures += [f"{name} breaks its grading" for name, reward in found.panel.items() if reward is None]
        return replace(found, failures=tuple(failures))

    async def _cheated(self, cheats: Mapping[str, str]) -> dict[str, float | None]:
        """Raises RolloutError."""
        idle = [":"] * (len(self._task.steps) - 1)
        try:
            async with asyncio.TaskGroup() as group:
                plays = {
                    name: group.create_task(self._played([script, *idle], cheats=True), name=name)
                    for name, script in cheats.items()
                }
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        return {name: self._reward(play.result()) for name, play in plays.items()}

    # ------------------------------------------------------------ one try

    async def _played(self, scripts: Sequence[str], *, learns: bool = False, cheats: bool = False) -> Grade:
        """The grade of what these leave, one in each step. Raises RolloutError, Unhealthy."""
        for tries_left in reversed(range(_SANDBOX_TRIES)):
            try:
                async with AsyncExitStack() as stack:
                    return await self._once(scripts, stack, learns=learns, cheats=cheats)
            except RolloutError:
                if not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")

    async def _once(self, scripts: Sequence[str], stack: AsyncExitStack, *, learns: bool, cheats: bool) -> Grade:
        beside = await stack.enter_async_context(fresh_services(self._task, self._spec, self._launcher))
        left: State | None = None
        graded: tuple[StepGrade, ...] = ()
        for number, (step, script) in enumerate(zip(self._task.steps, scripts, strict=True)):
            command = finding(self._command(number, script), beside)
            box = await stack.enter_async_context(self._launcher.run(self._spec, command, left))
            end = await end_of(box, command)
            try:
                demand_healthy(end)
                if end.error or end.status == _NO_SETUP:
                    why = end.error or "its setup.sh or healthcheck fails"
                    raise Unhealthy(f"step {step.name} cannot begin: {why}")
            except Unhealthy:
                if not (cheats and graded):
                    raise
                break  # the cheat has broken it, and gets nothing for it
            left = State((box, *(() if left is None else left.sandboxes)))
            if learns:
                self._differences[number].append(await box.changes() or Difference())
                self._learn(number)
            task = self._known(number, cheats=cheats)
            one = await grade(task, self._spec, self._launcher, left.sandboxes, copied=True, beside=beside)
            if learns and one.source:
                self._checked[number] = seen(self._checked[number], one)
            graded += (of_step(self._task, number, one),)
            if shortfall(self._task, graded):
                break
        return total(self._task, graded)

    def _command(self, number: int, script: str) -> Command:
        """The step's set-up as in a rollout, and what is done then."""
        task, step = self._task, self._task.steps[number]
        files, layers = self._files[number], [self._solutions[number], self._files[number], self._library]
        lines = [f"cp -R {STEP_FILES}/. . || exit {_NO_SETUP}"] if files is not None else []
        lines += [f"{{ {step.setup.command}; }} || exit {_NO_SETUP}"] if step.setup is not None else []
        if (check := step.healthcheck) is not None:
            tries = f"n=$((n+1)); [ $n -lt {check.retries} ] || exit {_NO_SETUP}; sleep {check.interval_s:g}"
            lines.append(f"n=0; until /bin/sh -c {quote(check.command)}; do {tries}; done")
        return Command(
            ("/bin/sh", "-c", "\n".join((*lines, script))),
            self._solve_s if script == SOLVE else POLICY_S,
            task.cwd or WORKSPACE_DIR,
            {**task.environment, **step.grader.solution_environment},
            programs=(SOLVE,),
            layers=tuple(layer for layer in layers if layer is not None),
            healthcheck=task.healthcheck,
        )

    def _known(self, number: int, *, cheats: bool) -> Task:
        task = self._task.at(number)
        assert task.grader is not None
        checked, grader = self._checked[number], replace(task.grader, checked=self._checked[number])
        if cheats:
            usual_s = TIMES_SOLUTION * (checked.duration_s or 0.0)
            grader = replace(grader, timeout_s=min(grader.timeout_s, max(LEAST_S, usual_s)))
        return replace(task, grader=grader)

    def _learn(self, number: int) -> None:
        """The scope of a step is that of all that its solution and those before it have left, in all tries."""
        seen = [one for differences in self._differences[: number + 1] for one in differences]
        scopes = [scope_of(one) for one in seen]
        scope = None if None in scopes else outermost(path for paths in scopes for path in paths or ())
        takeovers = tuple(sorted({path for one in seen for path in takeovers_of(one)}))
        self._checked[number] = replace(self._checked[number], scope=scope, takeovers=takeovers)

    def _reward(self, graded: Grade) -> float | None:
        """None: there is none. Raises SandboxLostError where that is this machine's doing."""
        if SANDBOX_FAILED in graded.fault:
            raise SandboxLostError(graded.fault)
        try:
            return self._score(graded, self._checked[-1])
        except ScorerError as error:
            self._last = self._last or str(error)
            return None
