"""`python:MODULE:SCORER`: a scorer of the operator's own, in processes of its own with a time limit.

Whatever it does wrong (an exception, a hang, a crash, a result that is no score) is a ScorerError and
never a reward. A process serves one score after another, so that the scorer's imports are paid for
once; one that hung or died is replaced.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from orchestrator.errors import ConfigError, ScorerError
from orchestrator.scorers.correctness import correctness
from orchestrator.scorers.python_process import FLAG, LENGTH
from orchestrator.types import Ended, Record, RolloutPlan, Score

PROCESSES = 4
LOAD_LIMIT_S = 120.0
_MAX_REPLY_BYTES = 1 << 20


class PythonScorer:
    """A `Scorer`: at most PROCESSES scores at a time, each within `timeout_s`."""

    def __init__(self, spec: str, timeout_s: float) -> None:
        self._spec = spec
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(PROCESSES)
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()

    async def open(self) -> None:
        """Loads the scorer once. Raises ConfigError where it cannot be used."""
        self._idle.append(await self._start())

    async def score(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        """Raises ScorerError."""
        try:
            request = await asyncio.to_thread(pickle.dumps, (plan, record, ended))
        except Exception as error:  # metadata of a `python:` source may hold anything
            raise ScorerError(f"{self._spec}: the task cannot be handed over: {error}") from error
        async with self._slots:
            reply = await self._ask(request)
        if "error" in reply:
            raise ScorerError(str(reply["error"])[:600])
        parts = reply["parts"]
        if "correctness" not in parts and plan.task.answer is not None:
            # `evaluate` reports it for every scorer.
            parts["correctness"] = await asyncio.to_thread(correctness, plan.task, record, ended)
        return Score(reply["value"], parts)

    async def aclose(self) -> None:
        """Ends all processes. Idempotent."""
        for process in self._all:  # before anything is waited for: cancelled there, none is left
            process.kill()
        for process in list(self._all):
            await self._end(process)
        self._idle.clear()

    async def _ask(self, request: bytes) -> dict[str, Any]:
        try:
            process = self._idle.pop() if self._idle else await self._start()
        except ConfigError as error:
            raise ScorerError(str(error)) from error
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await process.ask(request)
        except TimeoutError:
            await self._end(process)
            raise ScorerError(f"{self._spec} gave no score within {self._timeout_s:g} s") from None
        except _Died as died:
            await self._end(process)
            raise ScorerError(f"{self._spec} ended its process: {died}") from None
        except BaseException:  # cancelled: what it would answer belongs to nobody
            await self._end(process)
            raise
        self._idle.append(process)
        return reply

    async def _start(self) -> _Process:
        process = await _Process.start(self._spec)
        self._all.add(process)
        try:
            async with asyncio.timeout(LOAD_LIMIT_S):
                hello = await process.reply()
        except TimeoutError:
            await self._end(process)
            raise ConfigError(f"{FLAG}: {self._spec} did not load within {LOAD_LIMIT_S:g} s") from None
        except _Died as died:
            await self._end(process)
            raise ConfigError(f"{FLAG}: {self._spec} cannot be loaded: its process ended: {died}") from None
        except BaseException:
            await self._end(process)
            raise
        if "error" in hello:
            await self._end(process)
            raise ConfigError(str(hello["error"]))
        return process

    async def _end(self, process: _Process) -> None:
        self._all.discard(process)
        await process.end()


class _Died(Exception):
    """The process is gone, or says what ours never does."""


class _Process:
    """One process that scores."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, spec: str) -> _Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "orchestrator.scorers.python_process", spec),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_REPLY_BYTES,
            start_new_session=True,  # ended with all it started; a ^C is the orchestrator's to handle
        )
        return cls(process)

    async def ask(self, request: bytes) -> dict[str, Any]:
        """Raises _Died."""
        assert self._process.stdin is not None
        with suppress(ConnectionError):  # reply() tells why
            self._process.stdin.write(LENGTH.pack(len(request)) + request)
            await self._process.stdin.drain()
        return await self.reply()

    async def reply(self) -> dict[str, Any]:
        """Raises _Died."""
        assert self._process.stdout is not None
        try:
            line = await self._process.stdout.readline()
            reply = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:  # too long, or no JSON
            raise _Died("it wrote to its reply channel") from None
        if reply is None:
            raise _Died(_how(await self._process.wait()))
        if not isinstance(reply, Mapping):
            raise _Died("it wrote to its reply channel")
        return dict(reply)

    async def end(self) -> None:
        """Idempotent."""
        self.kill()
        await self._process.wait()

    def kill(self) -> None:
        """With all it started. Idempotent."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
