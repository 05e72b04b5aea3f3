"""Checks a task before anyone trains on it: its own solution must get 1 and an untouched sandbox 0, each time, and
no cheating policy more than doing nothing does. All of them are graded as rollouts are.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace

from orchestrator.errors import RolloutError, SandboxLostError, ScorerError
from orchestrator.grading.dry_run import DryRuns
from orchestrator.grading.grade import (
    LEFT_RUNNING,
    NOT_THE_TESTS,
    SANDBOX_FAILED,
    command_of,
    end_of,
    grade,
    grading_spec,
    log_of,
    read_grade,
)
from orchestrator.grading.left_behind import LeftBehind
from orchestrator.grading.panel import CURES, Output, delivered, policies
from orchestrator.grading.scope import holds_nothing, in_scope, is_takeover, outermost
from orchestrator.launch.base import Command, CommandEnd, CommandSandbox, Launcher
from orchestrator.launch.names import WORKSPACE_DIR
from orchestrator.rules.text import printable
from orchestrator.rules.waits import first_error
from orchestrator.services.life import Services, Unready, services
from orchestrator.types import Change, Checked, Difference, DryRun, Grade, Grader, SandboxSpec, Task, TaskCheck

SOLUTION = "/solution"
SOLVE = f"{SOLUTION}/solve.sh"
TRIES = 3
_SANDBOX_TRIES = 2
POLICY_S = 60.0  # a script of the panel; it needs less than a second
_MOST_OUTPUTS = 50  # of a solution, that the panel plants something in
# The limit of grading a cheat: what hangs is to end. Above 3 times the solution's own, that is the policy's doing.
TIMES_SOLUTION, LEAST_S = 5, 10.0
_OURS = (f"{SOLUTION}/", "/tests/", "/logs/", "/planted")
_BYTECODE = re.compile(r"/__pycache__/|\.pyc$")
_SHOWN_CHARS = 300
_NETWORK = re.compile(
    r"could not resolve|temporary failure (?:in name resolution|resolving)|name or service not known"
    r"|network is unreachable|dns error|bad address|failed to establish a new connection|no address associated"
    r"|no matching distribution found",
    re.IGNORECASE,
)
_LIVE = f'{SOLVE} > /dev/null 2>&1 < /dev/null; cd "$1" && shift && exec "$@"'


class Unhealthy(Exception):
    """The task's healthcheck fails in a sandbox of its own image; `str(error)` says how."""


class TaskChecker:
    """Of one task. `task`: its tests are laid into a layer. `score`: of a grade; raises ScorerError. `solution`,
    `library`: layers with the task's solution and with what the panel preloads; None: there is none. `solve_s`:
    the most that the solution may take. `dry_runs`: None: nothing has a network."""

    def __init__(
        self,
        task: Task,
        content: str,
        spec: SandboxSpec,
        launcher: Launcher,
        score: Callable[[Grade, Checked], float],
        *,
        solution: str | None,
        library: str | None,
        solve_s: float,
        dry_runs: DryRuns | None = None,
    ) -> None:
        assert task.grader is not None
        self._task, self._grader, self._content = task, task.grader, content
        self._spec, self._launcher, self._score = replace(spec, preload=()), launcher, score
        self._solution, self._library, self._solve_s = solution, library, solve_s
        self._dry_runs = dry_runs
        self._dry_run: DryRun | None = None
        self._layer: str | None = None  # where the one that it made is
        self._checked = Checked()
        self._differences: list[Difference] = []
        self._set_up: frozenset[Change] = frozenset()  # by the task's healthcheck
        self._last = ""  # why the last grade is not what it should be
        self._solving = ""  # how the solution ended, if it failed
        self._no_start = ""  # why a command could not be started
        self._untouched = Grade()  # of a sandbox in which nothing was done
        self._unseen: set[str] = set()  # policies of the panel that left nothing in scope

    async def check(self) -> TaskCheck:
        """Raises RolloutError where it is this machine that fails: nothing is known of the task then."""
        began = time.monotonic()
        try:
            found = await self._check()
        except Unhealthy as error:
            found = TaskCheck(self._content, failures=(str(error),))
        duration_s = round(time.monotonic() - began, 1)
        return replace(found, checked=self._checked, dry_run=self._dry_run, duration_s=duration_s)

    async def _check(self) -> TaskCheck:
        found = TaskCheck(self._content)
        if self._solution is None:
            return replace(found, failures=("it has no solution/solve.sh: nobody knows whether it can be solved",))
        if self._task.healthcheck is not None:
            self._set_up = await self._changed_by_healthcheck()
        grades = await self._solved(self._solution)
        if self._reward(grades[-1]) != 1 and self._dry_runs is not None and self._grader.kind != "io":
            await self._fetch(self._dry_runs)
            grades = await self._solved(self._solution)
        found = replace(found, solution=tuple(map(self._reward, grades)))
        if found.solution[-1] != 1:
            return await self._unsolved(found, grades[-1])
        for solved in grades:
            self._checked = seen(self._checked, solved)
        task = self._known(self._grader)
        no_op = [await self._graded(task) for _ in range(TRIES)]
        found = replace(found, no_op=tuple(no_op))
        if set(no_op) != {0.0}:
            why = f": {self._last}" if None in no_op else ""
            return replace(found, failures=(f"an untouched sandbox gets {_shown(no_op)}, and must get 0{why}",))
        return await self._cheated(found, grades[-1])

    # ------------------------------------------------------------ the solution

    async def _solved(self, solution: str) -> list[Grade]:
        """The grades of its tries; the last is the first that does not get 1. Where the files that the task names
        are not enough for it, all that is in scope is graded."""
        grades: list[Grade] = []
        for named_suffice in (True, False) if self._grader.named else (False,):
            self._checked = replace(self._checked, named_suffice=named_suffice)
            self._last = self._solving = self._no_start = ""
            grades = []
            while len(grades) < TRIES and not (grades and self._reward(grades[-1]) != 1):
                grades.append(await self._played(self._solve(solution), self._task, learns=True))
            if self._reward(grades[-1]) == 1:
                break
        return grades

    async def _fetch(self, dry_runs: DryRuns) -> None:
        """Lets the tests fetch what they need. Raises RolloutError."""
        work = {path for one in self._differences for path in _work(one)}
        self._dry_run = await dry_runs.of(self._task, self._spec, self._launcher, work)
        if (name := self._dry_run.layer) is not None:
            self._layer = await asyncio.to_thread(dry_runs.place, name)
        self._checked = replace(self._checked, layer=name)

    def _solve(self, solution: str) -> Command:
        task, grader = self._task, self._grader
        environment = {**task.environment, **grader.solution_environment}
        place = task.cwd or WORKSPACE_DIR
        command = Command((SOLVE,), self._solve_s, place, environment, programs=(SOLVE,), layers=(solution,))
        return replace(command, healthcheck=task.healthcheck)

    async def _changed_by_healthcheck(self) -> frozenset[Change]:
        """Before anybody works there: none of it is the solution's."""
        nothing = self._script("exit 0")
        async with (
            self._services() as beside,
            self._launcher.run(self._spec, finding(nothing, beside)) as box,
        ):
            demand_healthy(await end_of(box, nothing))
            return frozenset((await box.changes() or Difference()).changes)

    async def _unsolved(self, found: TaskCheck, graded: Grade) -> TaskCheck:
        assert self._solution is not None
        printed = f"{graded.stdout}\n{graded.stderr}"
        why = [self._no_start or self._solving, self._last, _one_line(graded.stdout or graded.stderr)]
        live, tries = None, list(found.solution)
        if 1 not in tries:
            live = await self._live(self._solution)
        # Where chance decides, the live try may have been the lucky one: more fresh tries tell it from a service.
        while live == 1 and 1 not in tries and len(tries) < TRIES:
            tries.append(self._reward(await self._played(self._solve(self._solution), self._task)))
        found = replace(found, solution=tuple(tries), live=live)
        failure = f"its own solution gets {_shown(tries)}, and must get 1"
        if 1 in tries:
            failure += " each time: its tests or its solution must not depend on chance or time"
        failure += "".join(f"; {one}" for one in why if one)
        if lack := _NETWORK.search(f"{self._solving}\n{printed}"):
            failure = f"it needs a network, to be solved or graded ({lack[0]}): {failure}"
            failure += "" if self._dry_run else "; --env.grader_network lets its tests fetch once what they need"
        failure += _of_dry_run(self._dry_run)
        if live == 1 and 1 not in tries:
            failure = "it needs a service left running: its own solution gets 1 only where that still runs"
        return replace(found, failures=(failure,))

    async def _live(self, solution: str) -> float | None:
        """The reward where the tests are run beside all that the solution left running, in its own sandbox."""
        task, grader = self._known(self._grader), self._grader
        assert task.grader is not None
        command = command_of(task, task.grader)
        if grader.kind == "io" or grader.image is not None or self._task.services:
            return None
        both = replace(
            command,
            argv=("/bin/sh", "-c", _LIVE, "sh", command.cwd, *command.argv),
            cwd=self._task.cwd or WORKSPACE_DIR,
            environment={**command.environment, **grader.solution_environment},
            programs=(*command.programs, SOLVE),
            layers=(*command.layers, solution),
            timeout_s=command.timeout_s + self._solve_s,
        )
        async with self._launcher.run(grading_spec(self._spec, grader), both) as box:
            end = await end_of(box, both)
            return self._reward(await asyncio.to_thread(read_grade, box, grader, end))

    def _learn(self, difference: Difference) -> None:
        """The scope is that of all tries: names may be drawn anew in each."""
        changes = tuple(change for change in difference.changes if change not in self._set_up)
        less = len(difference.changes) - len(changes)
        difference = replace(difference, changes=changes, count=difference.count - less)
        self._differences.append(difference)
        scopes = [scope_of(one) for one in self._differences]
        whole = None in scopes
        takeovers = {path for one in self._differences for path in takeovers_of(one)}
        scope = None if whole else outermost(path for paths in scopes for path in paths or ())
        self._checked = replace(self._checked, scope=scope, takeovers=tuple(sorted(takeovers)))

    # ------------------------------------------------------------ the panel

    async def _cheated(self, found: TaskCheck, solved: Grade) -> TaskCheck:
        outputs = outputs_of(self._differences[-1])
        scripts = policies(outputs, self._task.cwd or WORKSPACE_DIR, library=self._library is not None)
        usual_s = self._checked.duration_s or 0.0
        limit_s = min(self._grader.timeout_s, max(LEAST_S, TIMES_SOLUTION * usual_s))
        task = self._known(replace(self._grader, timeout_s=limit_s))
        rewards = await self._rewards(scripts, task)
        if self._no_start:
            return replace(found, failures=(f"the panel could not be tried: {self._no_start}",))
        found = replace(found, panel=rewards, unseen=tuple(sorted(self._unseen)))
        if script := delivered(outputs):
            graded = await self._played(self._script(script), task)
            reward = self._reward(graded)
            runs = (reward or 0) > found.floor or _has_run(graded, solved)
            found = replace(found, delivered=reward, runs_delivered=runs)
        failures = tuple(
            f"{name} gets {found.panel[name]:g}, and must get 0{CURES.get(name, '')}" for name in found.winners
        )
        failures += tuple(f"{name} breaks its grading" for name, reward in rewards.items() if reward is None)
        warnings = [] if self._library is not None else ["no library was preloaded: there is no C compiler here"]
        if found.runs_delivered:
            gets = (
                "writes its own reward" if (found.delivered or 0) > found.floor else "could write its own reward"
            )
            warnings.append(f"delivered code runs beside the tests and {gets}")
        if self._grader.named and not self._checked.named_suffice:
            warnings.append("its artifacts are not all of its work: its solution needs more to be graded")
        if self._checked.scope is None and self._grader.declared is None and not self._checked.named_suffice:
            warnings.append("its solution changes too much for a scope of its own: the whole state is graded")
        return replace(found, failures=failures, warnings=tuple(warnings))

    async def _rewards(self, scripts: Mapping[str, str], task: Task) -> dict[str, float | None]:
        """At a time, as far as there is room for sandboxes. Raises RolloutError."""
        try:
            async with asyncio.TaskGroup() as group:
                plays = {
                    name: group.create_task(self._cheat(name, script, task), name=name)
                    for name, script in scripts.items()
                }
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        return {name: play.result() for name, play in plays.items()}

    async def _cheat(self, name: str, script: str, task: Task) -> float | None:
        graded = await self._played(self._script(script), task, cheats=True)
        if graded is self._untouched:
            self._unseen.add(name)
        return self._reward(graded)

    def _script(self, script: str) -> Command:
        layers = () if self._library is None else (self._library,)
        argv = ("/bin/sh", "-c", script)
        place, environment = self._task.cwd or WORKSPACE_DIR, dict(self._task.environment)
        return Command(argv, POLICY_S, place, environment, layers=layers, healthcheck=self._task.healthcheck)

    # ------------------------------------------------------------ one try

    def _known(self, grader: Grader) -> Task:
        return replace(self._task, grader=replace(grader, checked=replace(self._checked, layer=self._layer)))

    async def _played(self, command: Command, task: Task, *, learns: bool = False, cheats: bool = False) -> Grade:
        """The grade of what the command leaves in a sandbox. `cheats`: where none of that would be graded, the
        grade is that of an untouched sandbox. Raises RolloutError."""
        for tries_left in reversed(range(_SANDBOX_TRIES)):
            try:
                async with (
                    self._services() as beside,
                    self._launcher.run(self._spec, finding(command, beside)) as box,
                ):
                    end = await end_of(box, command)
                    demand_healthy(end)
                    if end.error:
                        self._no_start = f"{command.argv[0]} cannot be run: {end.error}"
                    if learns:
                        self._learn(await box.changes() or Difference())
                        task = self._known(self._grader)
                        self._solving = await asyncio.to_thread(_words, box, end)
                    if cheats and await self._leaves_nothing(box, task):
                        return self._untouched
                    return await grade(task, self._spec, self._launcher, (box,), beside=beside)
            except RolloutError:
                if not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")

    async def _leaves_nothing(self, box: CommandSandbox, task: Task) -> bool:
        """Whether its grading is that of an untouched sandbox, for certain."""
        assert task.grader is not None
        if task.grader.collect or task.services:  # they see what is out of scope, too
            return False
        difference = await box.changes()
        return difference is not None and holds_nothing(in_scope(task.grader), difference)

    async def _graded(self, task: Task) -> float | None:
        async with self._services() as beside:
            self._untouched = await grade(task, self._spec, self._launcher, beside=beside)
            return self._reward(self._untouched)

    def _services(self) -> AbstractAsyncContextManager[Services | None]:
        return fresh_services(self._task, self._spec, self._launcher)

    def _reward(self, graded: Grade) -> float | None:
        """None: there is none. Raises SandboxLostError where that is this machine's doing."""
        if graded.fault.startswith(SANDBOX_FAILED):
            raise SandboxLostError(graded.fault)
        try:
            return self._score(graded, self._checked)
        except ScorerError as error:
            self._last = self._last or str(error)
            return None


def seen(checked: Checked, grade: Grade) -> Checked:
    """With one grade more of the task's own solution."""
    rewards = {name for name, value in grade.rewards.items() if 0 <= value <= 1}
    return replace(
        checked,
        source=grade.source,
        rewards=tuple(sorted(rewards & {*checked.rewards} if checked.source else rewards)),
        duration_s=max(grade.duration_s, checked.duration_s or 0.0),
    )


@asynccontextmanager
async def fresh_services(task: Task, spec: SandboxSpec, launcher: Launcher) -> AsyncIterator[Services | None]:
    """Those of one try; None: the task has none. Raises Unhealthy, RolloutError."""
    async with AsyncExitStack() as stack:
        beside = None
        if task.services:
            try:
                beside = await stack.enter_async_context(services(task, spec, launcher))
            except Unready as error:
                raise Unhealthy(str(error)) from None
        yield beside


def demand_healthy(end: CommandEnd) -> None:
    """Raises Unhealthy."""
    if end.unhealthy:
        raise Unhealthy(end.unhealthy)


def scope_of(difference: Difference) -> tuple[str, ...] | None:
    """The folders in which a solution leaves its work: of each file the nearest that the image has, or, in `/`,
    the file or folder itself. None: it is not known, as there is too much."""
    if difference.count > len(difference.changes):
        return None
    return outermost(path.rpartition("/")[0] or path for path in _work(difference))


def _work(difference: Difference) -> Iterator[str]:
    """What a solution leaves: files, or the outermost folders that it made for them."""
    new = {change.path for change in difference.changes if change.kind == "added" and change.path.endswith("/")}
    for change in _own(difference):
        path = change.path.rstrip("/")
        folder = path.rpartition("/")[0]
        while folder and f"{folder}/" in new:
            path, folder = folder, folder.rpartition("/")[0]
        yield path


def takeovers_of(difference: Difference) -> tuple[str, ...]:
    """What a solution changes although it could take the tests over, and the folders on the way there."""
    paths = set()
    for change in _own(difference):
        parts = change.path.strip("/").split("/")
        ways = ["/" + "/".join(parts[:depth]) + "/" for depth in range(1, len(parts))]
        paths |= {way for way in (*ways, change.path) if is_takeover(way)} if is_takeover(change.path) else set()
    return tuple(sorted(paths))


def _own(difference: Difference) -> list[Change]:
    """Without what any command leaves: of folders that were there only the mode can have changed, and Python's
    bytecode would take over the next Python that is run."""
    return [
        change
        for change in difference.changes
        if not change.path.startswith(_OURS)
        and not (change.kind == "changed" and change.path.endswith("/"))
        and not _BYTECODE.search(change.path)
    ]


def outputs_of(difference: Difference) -> list[Output]:
    files = [one for one in _own(difference) if one.kind != "removed" and not one.path.endswith("/")]
    return [Output(one.path, bool(one.mode & 0o111)) for one in files[:_MOST_OUTPUTS]]


def _words(box: CommandSandbox, end: CommandEnd) -> str:
    """How a solution ended, and the last that it printed; empty: well. Blocks. Raises SandboxLostError."""
    if end.status == 0:
        return ""
    with box.written() as top, LeftBehind(top) as left:
        printed = log_of(left, "test-stderr.txt") or log_of(left, "test-stdout.txt")
    how = "did not end in its time" if end.status is None else f"ended with {end.status}"
    return f"solve.sh {how}{printed and f': {_one_line(printed)}'}"


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))[-_SHOWN_CHARS:]


def _of_dry_run(done: DryRun | None) -> str:
    """What the owner should know of it where it did not help."""
    if done is None:
        return ""
    if done.error:
        return f"; its tests were run once with a network, but {done.error}"
    if done.refused:
        return f"; its tests asked in vain for {', '.join(map(printable, done.refused))} (env.grader_network)"
    return "; its tests were run once with a network before"


def _has_run(graded: Grade, solved: Grade) -> bool:
    """Whether there are traces of delivered programs that stay and write rewards."""
    more = set(graded.flags) - set(solved.flags)
    return any(LEFT_RUNNING in flag or NOT_THE_TESTS in flag for flag in more)


def _shown(rewards: Sequence[float | None]) -> str:
    return ", ".join(dict.fromkeys("no reward" if one is None else f"{one:g}" for one in rewards))


def finding(command: Command, beside: Services | None) -> Command:
    """The same where services are found as the agent finds them."""
    return command if beside is None else replace(command, ways=beside.ways)
