"""The grading processes: a few, kept warm, with a time limit for each score.

Grading runs our code, reasoning_gym's or the operator's on text that the model wrote. In processes it slows
nothing else down, and can be ended at the limit: a process that hung or died is replaced. A failure is raised as
Ungraded; `control` decides whose fault it is.
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
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.scorers.process import FLAG, LENGTH
from orchestrator.scorers.strategies import StrategyScorer, needed
from orchestrator.text import told
from orchestrator.types import Ended, Record, RolloutPlan, Score

PROCESSES = 4
LOAD_LIMIT_S = 120.0
# How long to wait for an idle process before another is started: our strategies take milliseconds, a start longer.
PATIENCE_S = 2.0
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


class GradingProcesses:
    """At most PROCESSES scores at a time, each within `timeout_s`, by one scorer: a strategy of ours, or one named
    `python:MODULE:NAME`."""

    def __init__(self, scorer: StrategyScorer | str, timeout_s: float) -> None:
        self._scorer = scorer
        self._name = scorer if isinstance(scorer, str) else scorer.strategy
        self._timeout_s = timeout_s
        # The operator's may be slow: another process is started at once.
        self._patience_s = 0.0 if isinstance(scorer, str) else PATIENCE_S
        self._slots = asyncio.Semaphore(PROCESSES)
        self._idle: asyncio.LifoQueue[_Process] = asyncio.LifoQueue()
        self._all: set[_Process] = set()
        self._warming: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Loads the operator's scorer once; raises ConfigError if that fails. Ours is loaded in the background."""
        if isinstance(self._scorer, str):
            self._idle.put_nowait(await self._start())
        else:
            self._warming = asyncio.create_task(self._warm(), name="grading process")

    async def ask(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        """Raises Ungraded."""
        given = (plan, record) if isinstance(self._scorer, str) else needed(plan, record)
        try:
            request = pickle.dumps((*given, ended))
        except Exception as error:  # metadata of a `python:` source may be unpicklable
            raise Ungraded(f"{self._name}: the task cannot be handed over: {told(error, _MAX_REASON)}") from error
        async with self._slots:
            try:
                reply = await self._asked(request)
            except _Died:
                # It may have been killed for another reason: only a second death counts.
                try:
                    reply = await self._asked(request)
                except _Died as died:
                    raise Ungraded(f"{self._name} ended its process: {died}") from None
        if "error" in reply:
            raise Ungraded(str(reply["error"])[:_MAX_REASON])
        return Score(reply["value"], reply["parts"])

    async def aclose(self) -> None:
        """Ends all processes. Idempotent."""
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.wait([self._warming])
        for process in list(self._all):
            await self._end(process)

    async def _asked(self, request: bytes) -> dict[str, Any]:
        """Raises _Died, Ungraded."""
        try:
            process = await self._claim()
        except ConfigError as error:
            raise Ungraded(str(error)) from error
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await process.ask(request)
        except BaseException as error:  # slow, died or cancelled: its answer must not go to the next request
            await self._end(process)
            if isinstance(error, TimeoutError):
                raise Ungraded(f"{self._name} gave no score within {self._timeout_s:g} s") from None
            raise
        self._idle.put_nowait(process)
        return reply

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
        try:
            process = await _Process.start(ours=not isinstance(self._scorer, str))
        except OSError as error:
            raise ConfigError(f"{FLAG}: no process can be started to grade in: {error.strerror}") from error
        self._all.add(process)
        try:
            async with asyncio.timeout(LOAD_LIMIT_S):
                hello = await process.ask(pickle.dumps(self._scorer))
            if "error" in hello:
                raise ConfigError(str(hello["error"]))
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

    async def ask(self, request: bytes) -> dict[str, Any]:
        """Raises _Died."""
        try:
            self._writer.write(LENGTH.pack(len(request)) + request)
            await self._writer.drain()
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
