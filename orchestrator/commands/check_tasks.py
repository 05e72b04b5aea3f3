"""`orchestrator check-tasks SOURCE`: whether tasks can be solved, and not be cheated, before one trains on them.

No model is needed: each task's own solution, nothing at all, and a panel of cheating policies are carried out in
sandboxes, and graded as rollouts are. What is found is kept beside the tasks: the same command goes on where it
was stopped, and looks again only at tasks that have changed.
"""

import asyncio
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from json import dumps
from pathlib import Path

from orchestrator.commands.process import EXIT_INCOMPLETE
from orchestrator.engine.builds import Builds
from orchestrator.engine.hosts_file import with_hosts
from orchestrator.engine.task_needs import why_unfit
from orchestrator.errors import ConfigError, EnvironmentUnusable, ImageUnusable, RolloutError
from orchestrator.grading.check import SOLUTION, TaskChecker
from orchestrator.grading.check_steps import STEP_FILES, StepsChecker
from orchestrator.grading.dry_run import DryRuns
from orchestrator.grading.grade import with_tests
from orchestrator.grading.measured import checks_answer
from orchestrator.grading.panel import PLANTED, compiled
from orchestrator.launch.base import Launcher
from orchestrator.launch.image.site import Site
from orchestrator.launch.make import make_launcher
from orchestrator.launch.names import WORKSPACE_DIR
from orchestrator.launch.workspaces import WorkspaceError, Workspaces
from orchestrator.rules.text import printable
from orchestrator.rules.waits import first_error
from orchestrator.scorers.grader import GraderScorer
from orchestrator.settings.config import Config
from orchestrator.tasks.base import Source
from orchestrator.tasks.checks import check_of, checks_file, read_checks, write_checks
from orchestrator.tasks.content import content_of
from orchestrator.tasks.split import training_tasks
from orchestrator.terminal.bar import bar
from orchestrator.terminal.checks import print_checks
from orchestrator.terminal.signals import Stopped, stoppable
from orchestrator.types import BadTask, SandboxSpec, Task, TaskCheck, TaskFile

_SAVING = 20  # times as long is worked as it takes to save


def run(config: Config, source: str, again: bool = False, json: bool = False) -> int:
    """0: every task passed; 1: some did not; 128 + n after a signal. Raises ConfigError, EnvironmentUnusable."""
    if config.env.launcher not in ("auto", "oci"):
        raise ConfigError(f"env.launcher: check-tasks needs oci, as grading does, not {config.env.launcher}")
    file = checks_file(source)
    if file is None:
        raise ConfigError(f"SOURCE: what is found is kept beside the tasks: harbor:, jsonl: or csv:, not {source}")
    config = replace(config, env=replace(config.env, dataset=source, launcher="oci", sandbox_root="writable"))
    checking = _Checking(config, training_tasks(config.env), file, again=again)
    try:
        asyncio.run(stoppable(checking.work(), drain=lambda: None, drain_timeout_s=0))
    except Stopped as stopped:
        print(f"stopped by {stopped}; the same command goes on", file=sys.stderr, flush=True)
        return stopped.exit_code
    finally:
        checking.report(json=json)
    return 0 if checking.all_passed else EXIT_INCOMPLETE


@dataclass
class _Checking:
    """`earlier`: how many were checked before. `found`: of the tasks that there are, in their order; a text: why
    it could not be checked."""

    config: Config
    source: Source
    file: Path
    again: bool
    earlier: int = 0
    found: dict[str, TaskCheck | str] = field(default_factory=dict)
    saved: Path | None = None

    def __post_init__(self) -> None:
        self._checks, self._new = read_checks(self.file), dict[str, TaskCheck]()
        self._next_save_s = 0.0
        self._unsaved = False
        self._library: Path | None = None
        self._dry_runs: DryRuns | None = None
        self._workspaces = Workspaces()

    @property
    def all_passed(self) -> bool:
        passed = [isinstance(one, TaskCheck) and not one.failures for one in self.found.values()]
        return bool(passed) and all(passed)

    def report(self, *, json: bool) -> None:
        if not self.found:
            return
        if json:
            print(dumps(checks_answer(self.source.name, self.found, self.saved), indent=2))
        print_checks(self.found, self.earlier, self.saved, sys.stderr if json else sys.stdout)

    async def work(self) -> None:
        """Raises ConfigError, EnvironmentUnusable."""
        rows = await asyncio.to_thread(list, self.source)
        if not rows:
            raise ConfigError(f"SOURCE: {self.source.name} has no tasks")
        for note in await asyncio.to_thread(self.source.notes):
            print(printable(f"note: {note}"), file=sys.stderr, flush=True)
        left = list(await asyncio.to_thread(self._unknown, rows))
        try:
            if left:
                await self._check_all(left)
        finally:
            self._workspaces.close()
            if self._unsaved:
                self._save()
            order = [row.task_id for row in rows]
            self.found = {name: self.found[name] for name in dict.fromkeys(order) if name in self.found}

    def _unknown(self, rows: list[Task | BadTask]) -> Iterator[Task]:
        """The tasks that have to be checked; of the others it is known what they are."""
        for row in rows:
            if isinstance(row, BadTask):
                self.found.setdefault(row.task_id, row.reason)
            elif row.grader is None:
                self.found[row.task_id] = "it has no grader"
            elif (check := check_of(row, self._checks)) is not None and not self._counts_no_more(check):
                self.found[row.task_id] = check
                self.earlier += 1
            else:
                yield row

    def _counts_no_more(self, check: TaskCheck) -> bool:
        """What its tests fetched may be gone, and what they lacked may be allowed now."""
        allowed, done = self.config.env.grader_network, check.dry_run
        if check.failures and allowed and (done is None or {*done.allowed} != {*allowed}):
            return True
        layers = [one.layer for one in (check.checked, *check.steps) if one.layer is not None]
        return self.again or bool(self._workspaces.missing(layers))

    async def _check_all(self, tasks: list[Task]) -> None:
        async with AsyncExitStack() as stack:
            launcher = await stack.enter_async_context(_launcher(self.config))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="planted-")))
            if hosts := self.config.env.grader_network:
                _say(f"tests that need a network get one dry run with {', '.join(hosts)} (env.grader_network)")
                site = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="site-")))
                self._dry_runs = await asyncio.to_thread(DryRuns, hosts, self._workspaces, Site.of(), site)
            if await asyncio.to_thread(compiled, folder):
                self._library = await asyncio.to_thread(self._workspaces.layer, folder, PLANTED, writable=False)

            async def why_no_image(spec: SandboxSpec) -> str | None:
                try:
                    await launcher.check_image(spec)
                except ImageUnusable as error:
                    return str(error)
                return None

            builds = Builds(self.config.env, self.config.sandbox_spec, why_no_image, _say)
            stack.push_async_callback(builds.aclose)
            advance = stack.enter_context(bar(len(tasks), "tasks", sys.stderr))
            waiting = iter(tasks)

            async def one_after_the_other() -> None:
                for task in waiting:
                    await self._check(task, builds, launcher)
                    advance(1)

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(len(tasks), self.config.env.max_concurrent_sandboxes)):
                        group.create_task(one_after_the_other())
            except BaseExceptionGroup as errors:
                raise first_error(errors) from errors

    async def _check(self, task: Task, builds: Builds, launcher: Launcher) -> None:
        try:
            content = await asyncio.to_thread(content_of, task)
            built = await asyncio.wrap_future(builds.begin(task))
            if isinstance(built, BadTask):
                self.found[task.task_id] = built.reason
                return
            checker = await asyncio.to_thread(self._checker, built, content, launcher)
            check = checker if isinstance(checker, str) else await checker.check()
        except (RolloutError, WorkspaceError, OSError) as error:
            self.found[task.task_id] = f"it could not be checked: {error}"
            return
        self.found[task.task_id] = check
        if isinstance(check, TaskCheck):
            self._new[task.task_id], self._unsaved = check, True
            if time.monotonic() >= self._next_save_s:
                self._save()

    def _checker(self, task: Task, content: str, launcher: Launcher) -> TaskChecker | StepsChecker | str:
        """A text: why the task cannot be checked. Blocks. Raises WorkspaceError, EnvironmentUnusable."""
        config, laid = self.config, self._workspaces
        if reason := why_unfit(task, config.env, config.sandbox_spec(task)):
            return reason
        assert task.grader is not None
        if task.workspace is not None:
            task = replace(task, workspace=str(laid.layer(Path(task.workspace), task.cwd or WORKSPACE_DIR)))

        def solves(solution: str | None) -> str | None:
            return None if solution is None else str(laid.layer(Path(solution), SOLUTION, writable=False))

        score = GraderScorer(config.env.reward_key).reward
        library = None if self._library is None else str(self._library)
        solve_s = task.limits.get("rollout_timeout", config.env.rollout_timeout)
        task = with_hosts(task, laid)
        laid_out, spec = with_tests(task, laid), config.sandbox_spec(task)
        if task.steps:
            return StepsChecker(
                laid_out,
                content,
                spec,
                launcher,
                score,
                solutions=[solves(step.grader.solution) for step in task.steps],
                files=[_files(step.files, laid) for step in task.steps],
                library=library,
                solve_s=solve_s,
            )
        return TaskChecker(
            laid_out,
            content,
            spec,
            launcher,
            score,
            solution=solves(task.graders[0].solution),
            library=library,
            solve_s=solve_s,
            dry_runs=self._dry_runs,
        )

    def _save(self) -> None:
        began = time.monotonic()
        # What another one found meanwhile stays.
        self.saved = write_checks(self.file, {**read_checks(self.file), **self._new})
        self._unsaved = False
        self._next_save_s = time.monotonic() + _SAVING * (time.monotonic() - began)


def _files(files: Sequence[TaskFile], laid: Workspaces) -> str | None:
    """A layer with the files of a step; None: it has none. Blocks. Raises WorkspaceError, EnvironmentUnusable,
    OSError."""
    if not files:
        return None
    with tempfile.TemporaryDirectory(prefix="step-") as folder:
        for file in files:
            place = Path(folder, file.path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.content)
            place.chmod(0o755 if file.executable else 0o644)
        return str(laid.layer(Path(folder), STEP_FILES, writable=False))


@asynccontextmanager
async def _launcher(config: Config) -> AsyncIterator[Launcher]:
    """Raises EnvironmentUnusable."""
    env = config.env
    launcher = make_launcher(
        "oci",
        secrets.token_hex(8),
        max_sandboxes=env.max_concurrent_sandboxes,
        waived=frozenset(env.waive_hardening),
        allow_localhost_tcp=env.allow_localhost_tcp,
        oci_runtime=env.oci_runtime,
        start=env.start,
        advise=_say,
    )
    try:
        try:
            await launcher.check(config.sandbox_spec())
        except RolloutError as error:
            raise EnvironmentUnusable(str(error)) from error
        yield launcher
    finally:
        await launcher.aclose()


def _say(line: str) -> None:
    print(printable(f"note: {line}"), file=sys.stderr, flush=True)
