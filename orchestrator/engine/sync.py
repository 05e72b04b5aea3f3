"""The orchestrator for programs without an event loop, such as most trainers.

with SyncOrchestrator(config) as orchestrator:
    rows = orchestrator.rollouts(tasks)
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from time import monotonic
from typing import Any, Generic, TypeVar

from orchestrator.completion.callback import Sampler
from orchestrator.engine.orchestrator import Orchestrator
from orchestrator.rules.observer import Observer
from orchestrator.rules.waits import uninterrupted
from orchestrator.run.rows import Row
from orchestrator.settings.config import Config
from orchestrator.types import BadTask, Task

T = TypeVar("T")
LOOK_S = 0.5  # a signal that comes just before a wait does not end it: Python looks for it when the wait is over
CLOSED = "the orchestrator is closed: make a new one"


class SyncOrchestrator:
    """An `Orchestrator` on an event loop of its own, in a thread of its own. Every method may be called from any
    thread, several at a time.

    It opens on entry or with the first call, and keeps its sandboxes warm between calls. It is closed on exit, by
    `close`, or when the interpreter ends. `observer` and `sampler` as for `Orchestrator`; they are called in that
    thread.
    """

    def __init__(
        self, config: Config, observer: Observer | None = None, *, sampler: Sampler | None = None
    ) -> None:
        self.orchestrator = Orchestrator(config, observer, sampler=sampler)
        self._lock = threading.RLock()  # a signal's handler may close it while its own thread opens it
        self._opening: _LoopThread | None = None
        self._loop: _LoopThread | None = None
        self._closed = False

    @property
    def config(self) -> Config:
        return self.orchestrator.config

    def __enter__(self) -> SyncOrchestrator:
        """As `open`."""
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Checks and opens everything, if that is not done. Raises EnvironmentUnusable, ConfigError; RuntimeError
        after `close`, or if `drain` or `close` cancels it."""
        with self._lock:
            if self._closed:
                raise RuntimeError(CLOSED)
            if self._loop is not None:
                return
            loop = self._opening = _LoopThread()
            try:
                loop.run(self.orchestrator.__aenter__())
            except BaseException:
                loop.stop()
                raise
            finally:
                self._opening = None
            self._loop = loop
            _open.add(self)

    def serve(self, version: str, model: str | None = None) -> None:
        """The endpoint has the weights of this version from now on, by the name `model` if it is given. As
        `Policy.serve`: to be called before the endpoint goes on sampling."""
        self.run(lambda: self.orchestrator.policy.serve(version, model))

    def rollouts(
        self, tasks: Iterable[Task | BadTask], *, epoch: int | None = None, group_size: int | None = None
    ) -> list[Row]:
        """As `Orchestrator.rollouts`, and returns when all of them are over.

        If the waiting thread is interrupted (Ctrl-C), the rollouts are cancelled and their sandboxes removed
        before the interruption goes on."""
        return self.run(lambda: self.orchestrator.rollouts(tasks, epoch=epoch, group_size=group_size))

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of a coroutine that uses `self.orchestrator`, run on its loop. Raises what it raises."""
        return self._opened().run(work())

    def begin(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Call[T]:
        """As `run`, but returns as soon as the work is begun."""
        return self._opened().begin(work())

    def _opened(self) -> _LoopThread:
        self.open()
        loop = self._loop
        if loop is None:
            raise RuntimeError(CLOSED)
        return loop

    async def awaited(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """As `run`, for a caller with an event loop of its own, which goes on meanwhile. If the caller is
        cancelled, `work` is cancelled and ends first."""
        if self._loop is None:
            await asyncio.to_thread(self.open)
        return await self.begin(work).awaited()

    def drain(self) -> None:
        """Nothing is begun any more, and calls under way return as soon as their running rollouts have ended. An
        opening is cancelled."""
        if (loop := self._loop or self._opening) is not None:
            loop.call(self.orchestrator.drain)

    def close(self) -> None:
        """Cancels what is under way, removes the sandboxes and ends the thread. Idempotent."""
        if (opening := self._opening) is not None:
            opening.cancel_all()
        with self._lock:
            self._closed = True
            loop, self._loop = self._loop, None
        _open.discard(self)
        if loop is not None and loop.is_here:
            try:
                loop.cancel_all()
                loop.run(self.orchestrator.__aexit__(None, None, None))
            finally:
                loop.stop()


class Call(Generic[T]):
    """Work under way on an orchestrator's loop. Its methods may be called from any other thread. `running` holds
    the task that does the work, until it ends."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], running: set[asyncio.Task[Any]]
    ) -> None:
        self._loop = loop
        self._work = work
        self._running = running
        self._future: Future[T] = Future()
        loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._work)
        self._running.add(self._task)
        self._task.add_done_callback(self._hand_over)

    def result(self, timeout_s: float | None = None) -> T:
        """Waits until the work is over. Raises TimeoutError if that takes longer than `timeout_s`, and what the
        work raises; RuntimeError if it was cancelled."""
        until = None if timeout_s is None else monotonic() + timeout_s
        while not self._future.done():
            left_s = LOOK_S if until is None else min(LOOK_S, until - monotonic())
            if left_s <= 0:
                raise TimeoutError(f"not over after {timeout_s} s")
            wait((self._future,), left_s)
        return self._future.result()

    def cancel(self) -> None:
        """Cancels the work and waits for its end. Does nothing if it is over."""
        if not self._future.done():
            self._end()
            self._future.exception()  # waits

    async def awaited(self) -> T:
        """As `result`, for a caller with an event loop of its own, which goes on meanwhile. If the caller is
        cancelled, the work is cancelled and ends first."""
        result = asyncio.wrap_future(self._future)
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            self._end()
            await uninterrupted(asyncio.wait([result]))
            result.exception()  # marked as retrieved
            raise

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(lambda: self._task.cancel())

    def _hand_over(self, task: asyncio.Task[T]) -> None:
        self._running.discard(task)
        if task.cancelled():
            self._future.set_exception(
                RuntimeError("the orchestrator was closed during the call, or drained before it was open")
            )
        elif (error := task.exception()) is not None:
            self._future.set_exception(error)
        else:
            self._future.set_result(task.result())


class _LoopThread:
    """An event loop that runs in a daemon thread until `stop`."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._running: set[asyncio.Task[Any]] = set()
        self._beginning = threading.RLock()  # a signal's handler may begin work while its thread does
        self._stopped = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="orchestrator", daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether the thread is in this process: a forked child has the object without it."""
        return self._process == os.getpid()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. If the waiting thread is interrupted, `work` is cancelled and ends first."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("called from the orchestrator's own thread, which this would block")
        return _waited(self.begin(work))

    def begin(self, work: Coroutine[Any, Any, T]) -> Call[T]:
        try:
            if not self.is_here:
                raise RuntimeError("opened before this process was forked: make an orchestrator in here")
            with self._beginning:
                if self._stopped:
                    raise _Stopped(CLOSED)
                return Call(self._loop, work, self._running)
        except RuntimeError:
            work.close()
            raise

    def call(self, function: Callable[[], None]) -> None:
        """Calls `function` on the loop, and returns when it has returned. Once stopped, it is not called."""

        async def called() -> None:
            function()

        with suppress(_Stopped):
            self.run(called())

    def cancel_all(self) -> None:
        """Cancels all that `run` was given, and waits for it."""
        with suppress(_Stopped):
            self.run(self._cancelled())

    async def _cancelled(self) -> None:
        others = self._running - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def stop(self) -> None:
        """Cancels what is left and ends the thread. To be called once."""

        async def ended() -> None:
            await self._cancelled()
            await self._loop.shutdown_asyncgens()

        with self._beginning:  # what begins later would be waited for in vain
            self._stopped = True
            call = Call(self._loop, ended(), self._running)
        _waited(call)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Stopped(RuntimeError):
    """The loop takes no more work."""


def _waited(call: Call[T]) -> T:
    """Its result. If the waiting thread is interrupted, the work is cancelled and ends first."""
    try:
        return call.result()
    except BaseException:
        call.cancel()
        raise


_open: set[SyncOrchestrator] = set()


def _close_all() -> None:
    for orchestrator in list(_open):
        orchestrator.close()


# `atexit` is too late: by then no thread pool takes work, and sandboxes are removed in threads. Those who have
# thread pools themselves, as concurrent.futures has, end them from here.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]
