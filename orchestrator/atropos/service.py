"""The service behind an OrchestratorEnv: opens its work, and answers the feed that delivers its groups.

`work` makes the groups, `position_files` says where to go on.
"""

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from orchestrator.atropos.closing import feed_metrics, feed_rows
from orchestrator.atropos.delivery import Groups
from orchestrator.atropos.feed import Feed
from orchestrator.atropos.kept import Kept
from orchestrator.atropos.policy_service import policy_service
from orchestrator.atropos.position import Position
from orchestrator.atropos.position_files import Checkpoints, PositionFiles, read_position
from orchestrator.atropos.prompt_size import demand_prompt_room
from orchestrator.atropos.run_api import Registration, RunApi, Trainer
from orchestrator.atropos.stream import Item
from orchestrator.atropos.terms import check_servable, name_of, terms_of, total
from orchestrator.atropos.tracking import Metrics, SandboxTime, Tracking
from orchestrator.atropos.work import Work
from orchestrator.completion.base import Tokenizer
from orchestrator.engine.orchestrator import Orchestrator
from orchestrator.engine.run_json import no_sampled_ids
from orchestrator.engine.session import Session
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

EXIT_INCOMPLETE = 1
_SHOWN = ("eval/accuracy", "eval/score_mean", "eval/tasks", "eval/samples_missing")


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
        self._work: Work | None = None
        self._output: OpenRun | None = None
        self._feed: Feed | None = None
        self._positions = PositionFiles(fsync=config.env.fsync)
        self._kept = Kept()
        self._observer = Observer(listeners=[self.sandbox_time, self._kept, self.metrics], say=self.progress.say)
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
        self._work = Work(engine, tasks, self._kept, self._observer)

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
    def work(self) -> Work:
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
            self._output, self._positions.run = output, output.run.path
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
        position = read_position(run_path / PositionFiles.NAME)
        if position is not None:
            self.work.go_to(position)
        self._kept.read(output, self.work.ledger.is_done)
        for number in output.earlier.bad:
            self.work.ledger.drop(number)

    # ------------------------------------------------------------ groups

    async def groups(self, item: Item) -> list[dict[str, Any]]:
        """One item's groups in Atropos' form; none where the group policy drops it. Raises Unfinished after drain.

        While serving, an item's group is kept until the feed has it: if a subclass' method is cancelled, the item
        comes again, and its group is neither made nor counted twice.
        """
        lines = await self.work.groups(item, self._longest)
        if self._feed is None:
            await self.work.over(item.number)
        return lines

    # ------------------------------------------------------------ what the feed calls

    def has_room(self, share: float) -> bool:
        """As `Maker.has_room`."""
        assert self._feed is not None
        return self.work.has_room(self._feed.under_way, share)

    def begin(self, item: Item) -> None:
        """As `Maker.begin`."""
        self.work.begin(item)

    async def make(self, item: Item) -> Groups:
        """As `Maker.make`, through the methods that a subclass may override."""
        return await self.work.make(item, self._make)

    async def keep(self, item: Item, groups: Groups) -> None:
        """Writes the groups, once, as they will be delivered, and counts them."""
        if self._kept.written.pop(item.number, None) is None and self._output is not None:
            await self._output.groups.append_lines(groups)
        await self.work.over(item.number)

    async def given_up(self, item: Item) -> None:
        """As `Maker.given_up`."""
        await self.work.engine.maker.settle(item.number)

    async def saved(self) -> None:
        """Writes the position to the run directory and to the trainer's checkpoints. Raises OutputError."""
        await self._positions.save(lambda: self.work.ledger.delivered_position(self.step))

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
            checkpoints = Checkpoints(registration.checkpoint_dir, name_of(env), fsync=env.fsync)
            self._positions.checkpoints = checkpoints
            if first and env.resume is None:
                await self._go_on(checkpoints, registration.step)
        if self.tracking.wanted:
            await self._open_tracking()

    async def _go_on(self, checkpoints: Checkpoints, step: int) -> None:
        assert self._feed is not None
        env, waiting = self.config.env, await self._feed.connection.api.waiting()
        chooses, dataset = env.curriculum != "none", self.work.ledger.begun.dataset
        same = waiting > 0
        position = await checkpoints.load_fitting(step, dataset, env.seed, same_trainer=same, chooses=chooses)
        if position is not None:
            self.work.go_to(position)
            self.progress.say(f"goes on at task {position.following}, where step {position.step} was")
        elif step > 0:
            folder = checkpoints.folder
            self.progress.say(f"note: no checkpoint for step {step} in {folder}: begins at the first task")

    async def stepped(self, step: int) -> None:
        """Logs to wandb, if enough groups were delivered since the last log."""
        self.step = step
        if self._sent >= self.config.env.min_items_sent_before_logging:
            self._sent = 0
            await self._log({})

    async def checkpoint(self, step: int) -> None:
        """As `save_checkpoint`, off the event loop."""
        await self._positions.checkpoint(step, lambda: self._taken_and_delivered(step))

    def save_checkpoint(self, step: int) -> None:
        """Raises OutputError."""
        if (checkpoints := self._positions.checkpoints) is not None:
            checkpoints.save(step, *self._taken_and_delivered(step))

    def _taken_and_delivered(self, step: int) -> tuple[Position, Position]:
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

    # ------------------------------------------------------------ for people

    def metrics_now(self) -> dict[str, float]:
        """Metrics since the last log, and the state of the feed."""
        metrics = self.metrics.taken()
        metrics["sandbox/seconds_thrown_away_total"] = self.sandbox_time.thrown_away_s
        return metrics if self._feed is None else metrics | feed_metrics(self._feed)

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
        rows = feed_rows(feed, self.step, self.sandbox_time.thrown_away_s)
        if self._output is not None:
            rows.append(("groups file", self._output.groups.path))
        if self._no_sampled_ids:
            rows.append(("token ids", self._no_sampled_ids))
        if self._report is not None:
            rows.append(("report", self._report))
        return [*rows, ("run directory", run_path)]
