"""The work behind an OrchestratorEnv: the engine, opened once, and a feed that delivers its groups.

All groups share one executor: `max_concurrent_sandboxes` bounds them together. What the finished rollouts of a
cancelled group sampled is kept until the group comes again.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from orchestrator.atropos.feed import Feed
from orchestrator.atropos.kept import Kept
from orchestrator.atropos.policy_service import policy_service
from orchestrator.atropos.position import Checkpoints, Ledger, Position, read_position, write_position
from orchestrator.atropos.prompt_size import demand_prompt_room
from orchestrator.atropos.run_api import Registration, RunApi, Trainer
from orchestrator.atropos.stream import Item, TaskStream
from orchestrator.atropos.terms import check_servable, name_of, terms_of, total
from orchestrator.atropos.tracking import Metrics, SandboxTime, Tracking
from orchestrator.completion.base import Tokenizer
from orchestrator.engine.executor import Executor
from orchestrator.engine.groups import open_groups
from orchestrator.engine.orchestrator import Orchestrator
from orchestrator.engine.run_json import no_sampled_ids
from orchestrator.engine.session import Session
from orchestrator.errors import ConfigError
from orchestrator.evaluation.evaluate import evaluate
from orchestrator.report import leave_report
from orchestrator.rules.observer import Observer
from orchestrator.rules.waits import uninterrupted
from orchestrator.run.files import report_beside
from orchestrator.run.output import OpenRun, open_run, run_directory_path
from orchestrator.run.prices import Prices
from orchestrator.run.tally import Tally
from orchestrator.settings.config import Config
from orchestrator.tasks.base import Source
from orchestrator.tasks.no_tasks import tasks_to_train
from orchestrator.tasks.split import evaluation_tasks
from orchestrator.terminal.closing import closing_table
from orchestrator.terminal.progress import PlainProgress
from orchestrator.types import BadTask

EXIT_INCOMPLETE = 1
POSITION_FILE = "position.json"
Groups = Sequence[Mapping[str, Any]]
_SHOWN = ("eval/accuracy", "eval/score_mean", "eval/tasks", "eval/samples_missing")


@dataclass(slots=True)
class _Work:
    """What there is while the environment is open. A trainer's checkpoint may replace the stream."""

    engine: Orchestrator
    tasks: Source
    ledger: Ledger
    stream: TaskStream
    executor: Executor


class Service:
    """Owned by one environment, which passes in methods of its own: `make` an item's groups, `evaluate`, `log`."""

    def __init__(
        self,
        config: Config,
        *,
        make: Callable[[Item], Awaitable[Groups]],
        evaluate: Callable[[], Awaitable[Mapping[str, float] | None]],
        log: Callable[[dict[str, Any]], Awaitable[None]],
        evaluates: bool,
    ) -> None:
        self.config = config
        self.step = 0
        self.registered_name = ""
        self.metrics = Metrics(kept_completions=max(s.rolling_buffer_length for s in config.openai))
        self.tally = Tally(Prices.of(config.openai, config.env), all_segments=bool(config.env.all_segments))
        self.progress = PlainProgress(None, self.tally)
        self.tracking = Tracking(config.env.use_wandb, Path("wandb"), self.progress.say)
        self.sandbox_time = SandboxTime()
        self._make, self._evaluate, self._log, self._evaluates = make, evaluate, log, evaluates
        self._tasks: Source | None = None
        self._engine: Orchestrator | None = None  # open, or being opened
        self._work: _Work | None = None
        self._output: OpenRun | None = None
        self._feed: Feed | None = None
        self._checkpoints: Checkpoints | None = None
        self._kept = Kept()
        self._bad: set[int] = set()  # numbers of bad tasks that earlier processes have reported
        self._observer = Observer(listeners=[self.sandbox_time, self._kept, self.metrics], say=self.progress.say)
        self._saving = asyncio.Lock()
        self._report: object = None  # where it is, or why there is none
        self._no_sampled_ids = ""  # what there is in their place, and why
        self._sent = 0  # groups delivered since the last log to wandb
        self._longest: int | None = None  # tokens of the longest line the trainer takes; None: it sets no limit

    # ------------------------------------------------------------ opening

    async def open(self, *, training: bool = False) -> None:
        """Opens the engine and the tasks. With `training`, `env.token_source auto` means `exact`."""
        config = self.config
        if training and config.env.token_source == "auto":
            config = replace(config, env=replace(config.env, token_source="exact"))  # noqa: S106 - no password
        if config.env.ensure_scores_are_not_same and config.env.zero_variance == "keep":
            config = replace(config, env=replace(config.env, zero_variance="drop"))
        tasks = self._read_tasks()
        engine = self._engine = Orchestrator(config, self._observer)
        await engine.__aenter__()
        ledger = Ledger(Position(engine.shared.seed, tasks.name))
        stream, executor = self._stream_of(tasks, ledger, engine), engine.maker.executor(self._kept)
        self._work = _Work(engine, tasks, ledger, stream, executor)

    def _read_tasks(self) -> Source:
        """Raises ConfigError if there is none."""
        self._tasks = self._tasks or tasks_to_train(self.config.env)
        return self._tasks

    async def close(self) -> None:
        """Idempotent."""
        (engine, self._engine), self._work = (self._engine, None), None
        if engine is not None:
            await engine.__aexit__(None, None, None)
        await self.tracking.close()

    @asynccontextmanager
    async def opened(self, *, training: bool = False) -> AsyncIterator[Orchestrator]:
        """`open`, and `close` on any exit."""
        try:
            await self.open(training=training)
            yield self.work.engine
        finally:
            await self.close()

    @property
    def work(self) -> _Work:
        """Raises RuntimeError unless it is open."""
        if self._work is None:
            raise RuntimeError("the environment is not set up: await setup() first")
        return self._work

    # ------------------------------------------------------------ serve

    async def serve(self) -> int:
        """Feeds the trainer until total_steps groups are delivered, or a signal. Raises what ends a run."""
        env = self.config.env
        check_servable(self.config.env)
        path = run_directory_path(env)
        self.tracking.directory = self._observer.run_path = path
        session = Session(path, self.progress.say, self.tally, "serve")
        try:
            return await session.until_stopped(self._serve(session), self._drain, env.drain_timeout)
        finally:
            if self._feed is not None:
                closing_table(self.tally, self._rows(self._feed, path), wanted=total(self.config.env))

    async def _serve(self, session: Session) -> int:
        tasks = self._read_tasks()
        async with (
            aiohttp.ClientSession() as http,
            session.opened(self.opened(training=True), self._open_output, tasks.name, tasks.notes) as (engine, _),
        ):
            work = self.work
            session.after.push_async_callback(self._leave_report, engine.hosts.tokenizer)
            self._check_prompt(engine.config.env.max_token_length, "env.max_token_length")
            self._no_sampled_ids = no_sampled_ids(engine.hosts)
            api = RunApi(self.config.env.rollout_server_url, http)
            evaluates = self._evaluates or self.config.env.eval_split is not None
            terms = terms_of(
                engine.config.env,
                servers=len(engine.config.openai),
                sandboxes=engine.hosts.capacity,
                evaluates=evaluates,
            )
            feed = self._feed = Feed(api, self, lambda: work.stream, work.ledger, terms, self.progress.say)
            work.executor.settled = feed.wake
            engine.shared.drained.append(feed.drain)
            if engine.stopping:
                feed.drain()
            try:
                async with self._policy_service(engine):
                    # Sandboxes are kept warm while groups are still to be begun; then for rollouts that wait.
                    with engine.hosts.following(
                        lambda: math.inf if feed.begins_more else work.executor.waiting, feed.wake
                    ):
                        await feed.run()
            finally:
                await uninterrupted(self.saved())
            cost_limit = engine.shared.costs.cost_limit
            if cost_limit is not None and cost_limit.is_empty and not feed.finished:
                raise cost_limit.reached
            return 0 if terms.total is None or feed.finished else EXIT_INCOMPLETE

    async def _leave_report(self, tokenizer: Tokenizer | None) -> None:
        if (output := self._output) is not None:
            html = report_beside(output.groups.path)
            self._report = await leave_report(output.run.path, output.groups.path, html, tokenizer=tokenizer)

    @contextmanager
    def _open_output(self, engine: Orchestrator) -> Iterator[OpenRun]:
        path = self._observer.run_path
        assert path is not None
        with open_run(engine.config.env, path, self.tally, engine.maker.group_format) as output:
            self._output = output
            if self.config.env.resume is not None:
                self._resume(path, output)
            self._observer.listeners[:0] = [self.tally, self.progress]
            yield output

    def _policy_service(self, engine: Orchestrator) -> AbstractAsyncContextManager[None]:
        address = self.config.env.policy_address
        return nullcontext() if address is None else policy_service(address, engine.policy, self.progress.say)

    def _drain(self) -> None:
        if self._engine is not None:
            self._engine.drain()

    def _resume(self, run_path: Path, output: OpenRun) -> None:
        """Goes on behind the last delivered group. Groups that were written and not delivered come first."""
        position = read_position(run_path / POSITION_FILE)
        if position is not None:
            self._go_to(position)
        self._kept.read(output, self.work.ledger.is_done)
        self._bad |= output.earlier.bad
        for number in output.earlier.bad:
            self.work.ledger.drop(number)

    # ------------------------------------------------------------ groups

    async def groups(self, item: Item) -> list[dict[str, Any]]:
        """One item's groups in Atropos' form; none where the group policy drops it. Raises Unfinished after drain.

        While serving, an item's group is kept until the feed has it: if a subclass' method is cancelled, the item
        comes again, and its group is neither made nor counted twice.
        """
        maker = self.work.engine.maker
        if (group := self._kept.made.get(item.number)) is None:
            longest, worker_timeout = self._longest, maker.config.env.worker_timeout
            group = await maker.make(
                item.task,
                item.number,
                item.epoch,
                self.work.executor,
                longest_s=worker_timeout if worker_timeout > 0 else math.inf,
                longest_tokens=longest,
            )
            made = max((len(m.trajectory.tokens_T) for m in group.members_G), default=0)
            if group.dropped is None and longest is not None and made > longest:  # made for an earlier trainer
                group = replace(group, dropped=f"a line has {made} tokens, the trainer takes {longest}")
            self._kept.made[item.number] = group
        lines = [] if group.dropped is not None else await asyncio.to_thread(maker.group_format.groups, group)
        if self._feed is None:
            await self._over(item.number)
        return lines

    async def _over(self, number: int, because: str | None = None) -> None:
        """Counts a group that does not come again, as dropped where a reason is given."""
        await self.work.engine.maker.settle(number)  # of a group that a subclass made
        group = self._kept.forget(number)
        if group is None:  # made by a subclass alone
            return
        if because is not None and group.dropped is None:
            group = replace(group, dropped=because)
        await uninterrupted(self._observer.group(group))

    def _go_to(self, position: Position) -> None:
        """Begins the task stream at `position`."""
        work = self.work
        work.engine.shared.seed = position.seed
        work.ledger.begin(position)
        work.stream = self._stream_of(work.tasks, work.ledger, work.engine)

    def _stream_of(self, tasks: Source, ledger: Ledger, engine: Orchestrator) -> TaskStream:
        async def bad_task(task: BadTask, number: int) -> None:
            await self._observer.bad_task(task, number)
            ledger.drop(number)

        maker, is_bad = engine.maker, self._bad.__contains__
        return TaskStream(tasks, ledger.is_done, bad_task, maker.fitting, engine.shared.built, is_bad, maker.pools)

    # ------------------------------------------------------------ what the feed calls

    def has_room(self, share: float) -> bool:
        """As `Maker.has_room`."""
        assert self._feed is not None
        work = self.work
        most = open_groups(self.config.env, work.engine.maker.hosts.capacity)
        return self._feed.under_way < most and work.executor.has_room(share)

    def begin(self, item: Item) -> None:
        """As `Maker.begin`."""
        rollouts = self.work.engine.maker.begun_at_once(self.config.env.group_size)
        self.work.executor.begin(item.number, rollouts)

    async def make(self, item: Item) -> Groups:
        """As `Maker.make`, through the methods that a subclass may override."""
        try:
            if (written := self._kept.written.get(item.number)) is not None:
                return written
            groups = await self._make(item)
            if not groups:
                await self._over(item.number, "postprocess_histories returned no group")
            return [_named(group, item.number) for group in groups]
        finally:
            self.work.executor.end(item.number)

    async def keep(self, item: Item, groups: Groups) -> None:
        """Writes the groups, once, as they will be delivered, and counts them."""
        if self._kept.written.pop(item.number, None) is None and self._output is not None:
            await self._output.groups.append_lines(groups)
        await self._over(item.number)

    async def given_up(self, item: Item) -> None:
        """As `Maker.given_up`."""
        await self.work.engine.maker.settle(item.number)

    async def saved(self) -> None:
        """Writes the position to the run directory and to the trainer's checkpoints. Raises OutputError."""
        async with self._saving:
            position = self.work.ledger.delivered_position(self.step)
            await uninterrupted(asyncio.to_thread(self._write_position, position))

    async def registered(self, registration: Registration, trainer: Trainer) -> None:
        """Adopts this trainer's limits and checkpoint directory. Raises ConfigError where it cannot be served."""
        first = not self.registered_name
        self.registered_name, self.step = registration.name, registration.step
        env = self.config.env
        # Rollouts end at the longest line that the trainer takes, instead of being thrown away by it.
        self._longest = None if trainer.max_token_len is None else max(trainer.max_token_len - 1, 16)
        if trainer.max_token_len is not None and trainer.max_token_len <= env.max_token_length:
            limit = trainer.max_token_len - 1
            self._check_prompt(limit, "the trainer's max_token_len")
            self.progress.say(f"note: lines end at {limit} tokens, below the trainer's {trainer.max_token_len}")
        if registration.checkpoint_dir and registration.checkpoint_interval > 0:
            self._checkpoints = Checkpoints(registration.checkpoint_dir, name_of(self.config.env), fsync=env.fsync)
            if first and env.resume is None:
                await self._go_on(self._checkpoints, registration.step)
        if self.tracking.wanted:
            await self._open_tracking()

    async def _go_on(self, checkpoints: Checkpoints, step: int) -> None:
        assert self._feed is not None
        waiting = await self._feed.connection.api.waiting()
        position = await asyncio.to_thread(checkpoints.load, step, same_trainer=waiting > 0)
        if position is None:
            if step > 0:
                self.progress.say(
                    f"note: no checkpoint for step {step} in {checkpoints.folder}: begins at the first task"
                )
            return
        if self.config.env.curriculum != "none":
            raise ConfigError(
                f"env.curriculum: the checkpoint in {checkpoints.folder} has no results to choose by: go on with "
                "--env.resume RUN_DIR, or leave the curriculum out"
            )
        seed = self.config.env.seed
        if position.dataset != self.work.ledger.begun.dataset or (seed is not None and seed != position.seed):
            raise ConfigError(
                f"the checkpoint in {checkpoints.folder} is of {position.dataset} with seed {position.seed}; set "
                f"these, or another --env.wandb_name than {name_of(self.config.env)}"
            )
        self._go_to(position)
        self.progress.say(f"goes on at task {position.following}, where step {position.step} was")

    async def stepped(self, step: int) -> None:
        """Logs to wandb, if enough groups were delivered since the last log."""
        self.step = step
        if self._sent >= self.config.env.min_items_sent_before_logging:
            self._sent = 0
            await self._log({})

    async def checkpoint(self, step: int) -> None:
        """As `save_checkpoint`, off the event loop."""
        if self._checkpoints is not None:
            async with self._saving:
                await uninterrupted(asyncio.to_thread(self._checkpoints.save, step, *self._positions(step)))

    def save_checkpoint(self, step: int) -> None:
        """Raises OutputError."""
        if self._checkpoints is not None:
            self._checkpoints.save(step, *self._positions(step))

    def _positions(self, step: int) -> tuple[Position, Position]:
        """What the trainer has taken, and what was delivered."""
        ledger = self.work.ledger
        return ledger.taken_position(step), ledger.delivered_position(self.step)

    async def delivered(self, item: Item) -> None:
        self._sent += 1

    async def evaluate(self, step: int) -> None:
        """Runs the environment's evaluation and logs its metrics to wandb."""
        metrics = await self._evaluate()
        if metrics:
            shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if name in _SHOWN)
            self.progress.say(f"evaluation at step {step}: {shown or f'{len(metrics)} metrics'}")
            await self._log(dict(metrics))

    async def evaluate_now(self) -> Mapping[str, float]:
        """The evaluation tasks, under the same sandbox budget, recorded beside the run. Empty when drained."""
        run = self._output.run.path if self._output is not None else run_directory_path(self.config.env)
        evaluation = await evaluate(
            self.work.engine, evaluation_tasks(self.config.env), run / "evals" / f"step-{self.step:06d}"
        )
        return evaluation.metrics() if evaluation is not None else {}

    def _write_position(self, position: Position) -> None:
        if self._output is not None:
            path = self._output.run.path / POSITION_FILE
            write_position(path, position, fsync=self.config.env.fsync)
        if self._checkpoints is not None:
            self._checkpoints.save_latest(position)

    # ------------------------------------------------------------ for people

    def metrics_now(self) -> dict[str, float]:
        """Metrics since the last log, and the state of the feed."""
        metrics = self.metrics.taken()
        metrics["sandbox/seconds_thrown_away_total"] = self.sandbox_time.thrown_away_s
        if (feed := self._feed) is not None:
            metrics["serve/groups_delivered_total"] = feed.ledger.groups
            metrics["serve/groups_cancelled_total"] = feed.cancelled
            metrics["serve/groups_waiting"] = feed.queued
            metrics["serve/groups_under_way"] = feed.under_way
        return metrics

    async def _open_tracking(self) -> None:
        assert self._feed is not None
        group, project = await self._feed.connection.api.wandb()
        name = f"{name_of(self.config.env)}-{self.registered_name}"
        self.tracking.open(
            name=name, project=project or "rollouts", group=group, config=self.config.public()["env"]
        )

    def _check_prompt(self, limit: int, label: str) -> None:
        def advice(least: int) -> str:
            has = f"{limit} tokens are fewer than the agent's system prompt has, {least}"
            return f"{label}: {has}; set it to {least + 2048} or more"

        demand_prompt_room(self.work.engine, limit, advice)

    def _rows(self, feed: Feed, run_path: Path) -> list[tuple[str, object]]:
        ledger = feed.ledger
        trouble = [
            f"{count} {what}"
            for count, what in (
                (feed.refused, "refused"),
                (ledger.lost, "lost with the run-api"),
                (feed.delivery.uncertain, "perhaps not arrived"),
                (feed.unsent, "written but not delivered"),
            )
            if count
        ]
        rows: list[tuple[str, object]] = [
            ("delivered", ", ".join([f"{ledger.delivered} groups; the trainer is at step {self.step}", *trouble])),
            (
                "cancelled",
                f"{feed.cancelled} groups came again; "
                f"{self.sandbox_time.thrown_away_s:.1f} s of sandboxes thrown away",
            ),
        ]
        if self._output is not None:
            rows.append(("groups file", self._output.groups.path))
        if self._no_sampled_ids:
            rows.append(("token ids", self._no_sampled_ids))
        if self._report is not None:
            rows.append(("report", self._report))
        return [*rows, ("run directory", run_path)]


def _named(group: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """The group with rollout ids, without which its file cannot be read again: a subclass may leave them out."""
    facts = group.get("overrides") or [None] * len(group["tokens"])
    if all(fact and "rollout_id" in fact for fact in facts):
        return group
    name = {"rollout_id": f"g{number:06d}"}
    return {**group, "overrides": [{**name, **(fact or {})} for fact in facts]}
