"""The processes that read a record, one for each CPU."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from orchestrator.errors import EnvironmentUnusable
from orchestrator.rescoring.decode import Asked, Decoded, How, Unreadable, decode
from orchestrator.run.line import CountedBadTask

MOST = 8
_GAVE_UP = "reading it ends the process that does, perhaps for memory"


class Decoders:
    """A pool of processes. A line that ends its process costs no other line."""

    def __init__(self, how: How, processes: int | None = None) -> None:
        self.processes = processes or max(1, min(MOST, len(os.sched_getaffinity(0))))
        self._how = how
        # Neither this program's threads nor its memory are forked, and libraries are imported once for all.
        self._context = multiprocessing.get_context("forkserver")
        ahead = ["orchestrator.rescoring.decode"] + ["orchestrator.completion.ahead"] * (how.tokenizer is not None)
        self._context.set_forkserver_preload(ahead)
        self._pool = self._new(self.processes)
        self._alone = asyncio.Lock()

    async def __aenter__(self) -> Decoders:
        """Begins one process. Raises EnvironmentUnusable if that cannot be, or lacks the tokenizer."""
        try:
            await self._in(self._pool, ())
        except BrokenProcessPool as error:
            raise EnvironmentUnusable("no process can be started to read the record in") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)

    async def decode(self, batch: Sequence[Asked]) -> list[Decoded | CountedBadTask | Unreadable]:
        """What the lines hold, in their order."""
        pool = self._pool
        try:
            return await self._in(pool, batch)
        except BrokenProcessPool:  # of one of these lines, or of another batch's
            if self._pool is pool:
                self._pool = self._new(self.processes)
            return [await self._decode_alone(asked) for asked in batch]

    async def _decode_alone(self, asked: Asked) -> Decoded | CountedBadTask | Unreadable:
        async with self._alone:
            pool = self._new(1)
            try:
                return (await self._in(pool, (asked,)))[0]
            except BrokenProcessPool:
                return Unreadable(_GAVE_UP)
            finally:
                await asyncio.to_thread(pool.shutdown)

    async def _in(
        self, pool: ProcessPoolExecutor, batch: Sequence[Asked]
    ) -> list[Decoded | CountedBadTask | Unreadable]:
        return await asyncio.get_running_loop().run_in_executor(pool, decode, self._how, batch)

    def _new(self, processes: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(processes, mp_context=self._context, initializer=_begin)


def _begin() -> None:
    """In each process. It does not outlive the program, is ended first if memory runs out, and leaves ^C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_program, daemon=True).start()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _end_with_program() -> None:
    """The kernel would tell of the fork server's end, which waits for that of its last process."""
    program = multiprocessing.parent_process()
    assert program is not None
    program.join()
    os.kill(os.getpid(), signal.SIGKILL)
