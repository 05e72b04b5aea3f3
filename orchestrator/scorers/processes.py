"""The grading processes: a few, kept warm, with a time limit for each score.

Grading runs our code, reasoning_gym's or the operator's on text that the model wrote. In processes it slows
nothing else down, and can be ended at the limit: a process that hung or died is replaced. A failure is raised as
Ungraded; `control` decides whose fault it is. Time in which this process itself stood still does not count.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from orchestrator.errors import ConfigError, os_error_as
from orchestrator.rules.text import error_line
from orchestrator.rules.waits import running_timeout
from orchestrator.scorers.process import FLAG, LENGTH
from orchestrator.scorers.strategies import StrategyScorer, needed
from orchestrator.types import Ended, Record, RolloutPlan, Score

PROCESSES = 4
LOAD_LIMIT_S = 120.0
# How long to wait for an idle process before another is started: our strategies take milliseconds, a start longer.
PATIENCE_S = 2.0
MOST_LOST = 3  # processes that a batch may cost
_MAX_REPLY_BYTES = 1 << 20
_MAX_REASON = 600
# Environment variables for a process with one of our strategies. It works on the model's text, so it gets no keys.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR")
# The process gets our sys.path as an argument, so that PYTHONPATH is unchanged for programs that a scorer starts.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "from orchestrator.scorers.process import main; sys.exit(main())"
)


class Ungraded(Exception):
    """Grading failed. The text is one line."""


def packed(scorer: StrategyScorer | str, plan: RolloutPlan, record: Record, ended: Ended) -> bytes:
    """A rollout as a grading process of this scorer takes it. Raises Ungraded."""
    values = (plan, record) if isinstance(scorer, str) else needed(plan, record)
    try:
        return pickle.dumps((*values, ended))
    except Exception as error:  # metadata of a `python:` source may be unpicklable
        name = scorer if isinstance(scorer, str) else scorer.strategy
        raise Ungraded(f"{name}: the task cannot be handed over: {error_line(error, _MAX_REASON)}") from error


class GradingProcesses:
    """At most PROCESSES scores at a time, each within `timeout_s`, by one scorer: a strategy of ours, or one named
    `python:MODULE:NAME`."""

    def __init__(self, scorer: StrategyScorer | str, timeout_s: float) -> None:
        self.scorer = scorer
        self._name = scorer if isinstance(scorer, str) else scorer.strategy
        self._at = ""  # where the operator's is defined, once it is loaded
        self._timeout_s = timeout_s
        # The operator's may be slow: another process is started at once.
        self._patience_s = 0.0 if isinstance(scorer, str) else PATIENCE_S
        self._slots = asyncio.Semaphore(PROCESSES)
        self._idle: asyncio.LifoQueue[_Process] = asyncio.LifoQueue()
        self._all: set[_Process] = set()
        self._warming: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Loads the operator's scorer once; raises ConfigError if that fails. Ours is loaded in the background."""
        if isinstance(self.scorer, str):
            self._idle.put_nowait(await self._start())
        else:
            self._warming = asyncio.create_task(self._warm(), name="grading process")

    async def ask(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        """Raises Ungraded."""
        rollout = packed(self.scorer, plan, record, ended)
        async with self._slots:
            try:
                reply = await self._reply(rollout)
            except _Died:
                # It may have been killed for another reason: only a second death counts.
                try:
                    reply = await self._reply(rollout)
                except _Died as died:
                    raise Ungraded(f"{self._name} ended its process: {died}{self._at}") from None
        if "error" in reply:
            raise Ungraded(str(reply["error"])[:_MAX_REASON])
        return Score(reply["value"], reply["parts"])

    async def ask_batch(self, rollouts: Sequence[bytes]) -> list[Score | None]:
        """Scores of rollouts that were `packed`, in their order: far less work for each than by `ask`. None: it
        got no score here; `ask` says why. After a few that were slow or ended their process, the rest get none:
        one after the other they would take too long. Raises Ungraded if no process starts."""
        scores: list[Score | None] = []
        processes_lost = 0
        while len(scores) < len(rollouts):
            if processes_lost == MOST_LOST:
                return scores + [None] * (len(rollouts) - len(scores))
            try:
                async with self._slots, self._claimed() as process:
                    async for reply in process.replies(rollouts[len(scores) :], self._timeout_s):
                        score = None if "error" in reply else Score(reply["value"], reply["parts"])
                        scores.append(score)
            except (TimeoutError, _Died):
                scores.append(None)  # the one that was slow, or that the process died of
                processes_lost += 1
        return scores

    async def aclose(self) -> None:
        """Ends all processes. Idempotent."""
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.wait([self._warming])
        for process in list(self._all):
            await self._end(process)

    async def _reply(self, rollout: bytes) -> dict[str, Any]:
        """Raises _Died, Ungraded."""
        try:
            async with self._claimed() as process:
                (reply,) = [reply async for reply in process.replies((rollout,), self._timeout_s)]
                return reply
        except TimeoutError:
            raise Ungraded(f"{self._name} gave no score within {self._timeout_s:g} s{self._at}") from None

    @asynccontextmanager
    async def _claimed(self) -> AsyncIterator[_Process]:
        """A process within this block. Raises Ungraded if none starts."""
        try:
            process = await self._claim()
        except ConfigError as error:
            raise Ungraded(str(error)) from error
        try:
            yield process
        except BaseException:  # slow, died or cancelled: its answer must not go to the next request
            await self._end(process)
            raise
        self._idle.put_nowait(process)

    async def _claim(self) -> _Process:
        """An idle process; a new one if none becomes idle soon. Each caller holds a slot, so there are never more
        than PROCESSES. Raises ConfigError."""
        with suppress(asyncio.QueueEmpty):
            return self._idle.get_nowait()
        if self._all and self._patience_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._patience_s):
                    return await self._idle.get()
        return await self._start()

    async def _warm(self) -> None:
        """Starts the first process ahead. If that fails, the first score will fail with the reason."""
        with suppress(ConfigError):
            async with self._slots:
                self._idle.put_nowait(await self._start())

    async def _start(self) -> _Process:
        with os_error_as(ConfigError, f"{FLAG}: no process can be started to grade in"):
            process = await _Process.start(ours=not isinstance(self.scorer, str))
        self._all.add(process)
        try:
            async with running_timeout(LOAD_LIMIT_S):
                hello = await process.hello(self.scorer)
            if "error" in hello:
                raise ConfigError(str(hello["error"]))
            self._at = str(hello["at"])
        except BaseException as error:
            await self._end(process)
            if isinstance(error, TimeoutError):
                raise ConfigError(f"{FLAG}: {self._name} did not load within {LOAD_LIMIT_S:g} s") from None
            if isinstance(error, _Died):
                raise ConfigError(f"{FLAG}: {self._name} cannot be loaded: its process ended: {error}") from None
            raise
        return process

    async def _end(self, process: _Process) -> None:
        self._all.discard(process)
        await process.end()


class _Died(Exception):
    """The process has ended, or wrote something invalid."""


class _Process:
    """One grading process, at the other end of a socket."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, *, ours: bool) -> _Process:
        """Without asyncio's subprocesses: cancelled during a start, these wait for ever. Raises OSError."""
        environment = {name: value for name in _ENVIRONMENT if (value := os.environ.get(name)) is not None}
        mine, its = socket.socketpair()
        with its:
            process = subprocess.Popen(  # noqa: ASYNC220, S603 - takes milliseconds; our own interpreter
                (sys.executable, "-P", "-c", _PROGRAM, json.dumps([path or os.getcwd() for path in sys.path])),
                stdin=its.fileno(),
                stdout=its.fileno(),
                # Libraries may print warnings about the model's text.
                stderr=subprocess.DEVNULL if ours else None,
                env=environment if ours else None,
                start_new_session=True,  # its children can be ended with it; only the orchestrator gets a ^C
            )
        try:
            return cls(process, *await asyncio.open_connection(sock=mine, limit=_MAX_REPLY_BYTES))
        except BaseException:
            mine.close()
            process.kill()
            raise

    async def replies(self, rollouts: Sequence[bytes], timeout_s: float) -> AsyncIterator[dict[str, Any]]:
        """The reply for each of the rollouts, each within `timeout_s`. Raises TimeoutError, _Died."""
        async with running_timeout(timeout_s):
            await self._send(pickle.dumps(rollouts))
        for _ in rollouts:
            async with running_timeout(timeout_s):
                reply = await self._reply()
            yield reply

    async def hello(self, scorer: StrategyScorer | str) -> dict[str, Any]:
        """Hands the scorer over. The reply has an `error` if it cannot be loaded. Raises _Died."""
        await self._send(pickle.dumps(scorer))
        return await self._reply()

    async def _send(self, request: bytes) -> None:
        with suppress(ConnectionError):  # there will be no reply either
            self._writer.write(LENGTH.pack(len(request)) + request)
            await self._writer.drain()

    async def _reply(self) -> dict[str, Any]:
        """Raises _Died."""
        try:
            line = await self._reader.readline()
            reply = json.loads(line) if line.endswith(b"\n") else None
        except ConnectionError:
            reply = None
        except ValueError:  # too long, or no JSON
            raise _Died("it wrote to its reply channel") from None
        if reply is None:
            raise _Died(_how(await asyncio.to_thread(self._process.wait)))
        if not isinstance(reply, Mapping):
            raise _Died("it wrote to its reply channel")
        return dict(reply)

    async def end(self) -> None:
        """Idempotent."""
        self._writer.close()
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await asyncio.to_thread(self._process.wait)


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
