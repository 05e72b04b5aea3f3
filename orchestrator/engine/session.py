"""A command's run from end to end: opens the engine and what is written, says what begins, and how to go on."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from orchestrator.engine.orchestrator import Orchestrator
from orchestrator.engine.run_json import describe, summary
from orchestrator.errors import CostReached, RunUnhealthy
from orchestrator.host.advice import is_new
from orchestrator.rules.waits import first_error
from orchestrator.run.directory import RunDirectory
from orchestrator.run.ending import ending
from orchestrator.run.files import RUN_FILE, record_of
from orchestrator.run.tally import Tally
from orchestrator.run.under_way import under_way_in
from orchestrator.terminal.signals import Stopped, stoppable


class Output(Protocol):
    """What a command writes to. `about`: what it adds to run.json."""

    @property
    def run(self) -> RunDirectory: ...

    @property
    def about(self) -> Mapping[str, object]: ...


O = TypeVar("O", bound=Output)  # noqa: E741


@dataclass(slots=True)
class Session:
    """`path`: the run directory. `command`: with `--env.resume` it goes on with the run; empty: nothing does.
    `tally`: of this run, earlier processes included. `after`: what is pushed on it runs when the sandboxes are
    gone; a second signal may cut it short."""

    path: Path
    say: Callable[[str], None]
    tally: Tally
    command: str = ""
    after: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def way_on(self) -> str:
        """The command that goes on with the run; empty: there is none."""
        return f"orchestrator {self.command} --env.resume {self.path}" if self.command else ""

    @asynccontextmanager
    async def opened(
        self,
        engine: AbstractAsyncContextManager[Orchestrator],
        output: Callable[[Orchestrator], AbstractContextManager[O]],
        tasks: str,
        notes: Callable[[], Sequence[str]] = tuple,
    ) -> AsyncIterator[tuple[Orchestrator, O]]:
        """Within this block the engine and its output are open, and everything is recorded. `tasks`: where they
        come from, for display; `notes`: what is to be said of them. Raises ConfigError, EnvironmentUnusable,
        RunLocked."""
        with ExitStack() as files:  # closed last: attempts that are cancelled on the way out are still recorded
            async with self.after, engine as orchestrator:
                gc.freeze()  # what is imported lives as long as the process, and slows no collection down
                observer, maker = orchestrator.observer, orchestrator.maker
                opened = files.enter_context(output(orchestrator))
                observer.notes += await asyncio.to_thread(notes)
                await describe(opened.run, maker, tasks, opened.about)
                observer.writer = opened.run
                files.enter_context(ending(self.path, self.tally, lambda: orchestrator.cut_short))
                for note in filter(is_new, observer.notes):
                    self.say(f"note: {note}")
                self.say(summary(maker))
                if maker.shared.costs.cost_limit is not None:
                    folders = [self.path, *(self.path / "evals").glob("step-*")]
                    under_way = [one for folder in folders for one in under_way_in(folder)]
                    maker.shared.costs.open(maker.split, self.tally, self._evaluations(), under_way)
                yield orchestrator, opened

    def _evaluations(self) -> list[Tally]:
        """Those that earlier processes of the run have made."""
        records = filter(None, map(record_of, (self.path / "evals").glob("step-*")))
        return [Tally.read(record, self.tally.prices) for record in records]

    async def until_stopped(
        self, work: Coroutine[Any, Any, int], drain: Callable[[], None], drain_timeout_s: float
    ) -> int:
        """The exit code of `work`, or 128 + n after a signal. Raises what ends the run, with the way on."""
        try:
            return await stoppable(_ungrouped(work), drain=drain, drain_timeout_s=drain_timeout_s)
        except Stopped as stopped:
            begun = f"go on with `{self.way_on}`" if (self.path / RUN_FILE).exists() else "nothing had begun"
            self.say(f"stopped by {stopped}" + (f"; {begun}" if self.command else ""))
            return stopped.exit_code
        except (CostReached, RunUnhealthy) as error:
            if not self.command:
                raise
            if isinstance(error, CostReached):
                raise CostReached(f"{error}: `{self.way_on} --env.max_cost MORE`") from error
            way_on = f"`{self.way_on}` goes on, and gets past tasks that are at fault alone"
            raise RunUnhealthy(f"{error}; {way_on}") from error


async def _ungrouped(work: Coroutine[Any, Any, int]) -> int:
    """The result of `work`, or the first error of a group that it raises."""
    try:
        return await work
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
