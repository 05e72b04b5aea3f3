"""`orchestrator replay RUN_DIR`: recorded completions through live sandboxes, compared with the record."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.engine.executor import Executor, failure_of
from orchestrator.engine.orchestrator import Orchestrator
from orchestrator.engine.session import Session
from orchestrator.errors import ConfigError
from orchestrator.host.base import Hosts
from orchestrator.rules.observer import Observer
from orchestrator.rules.redact import Secret
from orchestrator.rules.text import printable
from orchestrator.run.directory import RunDirectory
from orchestrator.run.files import ROLLOUTS_FILE, read_description, record_of
from orchestrator.run.line import RecordedAttempt
from orchestrator.run.output import run_directory_path
from orchestrator.run.prompts import Prompts
from orchestrator.run.replay import Replayable, attempt_of, differences, plan_of
from orchestrator.run.tally import Tally
from orchestrator.settings.config import Config
from orchestrator.settings.egress import REPLAY
from orchestrator.settings.endpoint import OpenAISettings
from orchestrator.tasks.split import tasks_of
from orchestrator.tools.mcp.recorded import recorded_servers
from orchestrator.tools.recorded import RecordedCalls, RecordedTool
from orchestrator.types import BadTask, Task

EXIT_DIFFERENT = 1


def run(config: Config, run_dir: Path, rollout: str | None, report: bool) -> int:
    """0: every rollout came out as recorded; 1: one did not, or broke; 128 + n after a signal."""
    recorded = Replayable.read(record_of(run_dir) or run_dir / ROLLOUTS_FILE, rollout)
    tasks = _tasks(config, run_dir, recorded)
    prompts = Prompts()
    try:
        return asyncio.run(_run(_replaying(config, run_dir, recorded), recorded, tasks, prompts))
    finally:
        for line in prompts.table if report else ():
            _print(line)


def _replaying(config: Config, path: Path, recorded: Replayable) -> Config:
    """The run's settings with its recording as endpoint. Web tools and those of MCP servers are offered if the run
    had them, and answer from the record: offering the first takes a key, which is never sent."""
    recording = config.openai[0]
    server = OpenAISettings(
        base_url=f"replay:{path}", model_name=recording.model_name, startup_timeout=recording.startup_timeout
    )
    key = Secret("recorded") if recorded.web_tools else Secret()
    env = replace(config.env, mcp_servers=recorded_servers(read_description(path).get("agent")))
    if recorded.crossings:  # nothing leaves: what the outside answered then is answered from the record
        env = replace(env, egress=(f"{REPLAY}{path}",))
    return replace(config, env=env, openai=(server,), tavily_api_key=key)


def _tasks(config: Config, path: Path, recorded: Replayable) -> dict[str, Task]:
    """The recording's tasks that the data set still has. Raises ConfigError where it has none."""
    source = tasks_of(config.env, read_description(path))
    tasks = {name: task for name, task in source.named(recorded.tasks).items() if isinstance(task, Task)}
    if not tasks:
        raise ConfigError(f"none of the run's tasks is in {source.name}; name the data set with --env.dataset")
    return tasks


@dataclass(frozen=True, slots=True)
class _Output:
    run: RunDirectory
    about: Mapping[str, object]


async def _run(config: Config, recorded: Replayable, tasks: dict[str, Task], prompts: Prompts) -> int:
    env = config.env
    path = run_directory_path(env)
    counts: Counter[str] = Counter()
    tally = Tally()
    orchestrator = Orchestrator(config, Observer(listeners=[tally], say=_print))
    session = Session(path, _print, tally)

    @contextmanager
    def open_output(_: Orchestrator) -> Iterator[_Output]:
        with closing(RunDirectory(path, fsync=env.fsync)) as run:
            yield _Output(run, {"command": "replay", "of": str(recorded.path.parent)})

    async def work() -> int:
        async with session.opened(orchestrator, open_output, env.dataset) as (engine, _):
            calls = RecordedCalls(recorded.calls, recorded.call)
            tools = {name: RecordedTool(name, t, calls) for name, t in engine.hosts.tools.items()}
            executor = engine.maker.executor(tools=tools)
            fitting = await _built(engine, await _fitting(engine, tasks))
            await play(recorded.attempts(), fitting, engine.hosts, executor, config, counts, prompts)
        return 0 if counts["same"] == len(recorded.places) else EXIT_DIFFERENT

    try:
        return await session.until_stopped(work(), orchestrator.drain, env.drain_timeout)
    finally:
        rest = f", {counts['without task']} without their task" if counts["without task"] else ""
        _print(
            f"{counts['same']} of {len(recorded.places)} rollouts as recorded, {counts['different']} different, "
            f"{counts['broken']} broken{rest}; {path}"
        )


async def _fitting(engine: Orchestrator, tasks: dict[str, Task]) -> dict[str, Task]:
    """The tasks, by id, without those that no sandbox is made for now."""
    fitting = await asyncio.to_thread(lambda: [engine.maker.fitting(task) for task in tasks.values()])
    for task in fitting:
        if isinstance(task, BadTask):
            _print(f"{task.task_id}: {task.reason}")
    return {task.task_id: task for task in fitting if isinstance(task, Task)}


async def _built(engine: Orchestrator, tasks: dict[str, Task]) -> dict[str, Task]:
    """The tasks with their images, without those that no sandbox can be made of any more."""
    futures = [asyncio.wrap_future(engine.shared.built(task)) for task in tasks.values() if task.has_own_sandbox]
    images = {task.task_id: task for task in await asyncio.gather(*futures)}
    for task in images.values():
        if isinstance(task, BadTask):
            _print(f"{task.task_id}: {task.reason}")
    return {name: task for name, old in tasks.items() if isinstance(task := images.get(name, old), Task)}


async def play(
    attempts: Iterator[RecordedAttempt],
    tasks: dict[str, Task],
    hosts: Hosts,
    executor: Executor,
    config: Config,
    counts: Counter[str],
    prompts: Prompts,
) -> None:
    """Plays recorded attempts until none are left, or the run is being stopped: as many at a time as the hosts
    have room for, which may change. Raises an exception group."""
    playing = 1

    async def some() -> None:
        nonlocal playing
        for then in attempts:
            if playing < hosts.capacity:
                playing += 1
                tg.create_task(some())
            if not await _played(then, tasks.get(then.task_id), executor, config, counts, prompts):
                return

    async with asyncio.TaskGroup() as tg:
        tg.create_task(some())


async def _played(
    then: RecordedAttempt,
    task: Task | None,
    executor: Executor,
    config: Config,
    counts: Counter[str],
    prompts: Prompts,
) -> bool:
    """Plays one attempt. False: the run is being stopped."""
    if task is None:
        counts["without task"] += 1
        _say(then, "not played: its task is not in the data set")
        return True
    results = await executor.execute(plan_of(then, task, config.sandbox_spec(task)))
    if results is None:
        return False
    failure = failure_of(results[-1])
    if failure is not None and failure.name != "record_error":
        counts["broken"] += 1
        _say(then, f"broke: {failure.name}: {failure.reason}")
        return True
    prompts.compare(then, attempt_of(results[-1]).record)
    unlike = differences(then, results[-1])
    counts["different" if unlike else "same"] += 1
    _say(then, f"differs: {'; '.join(unlike)}" if unlike else f"same, {then.outcome.name}")
    return True


def _say(then: RecordedAttempt, text: str) -> None:
    _print(f"{then.rollout_id}  {then.task_id[:28]:<28}  {text}")


def _print(text: str) -> None:
    print(printable(text), flush=True)
