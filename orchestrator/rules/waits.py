"""Ways of waiting: for cleanup that a cancel must not cut short, for the first of several results, for work that
would hold up everybody, and what became of several that were waited for together.

Some of them know a standstill: a time in which this process did not run (stopped, or without CPU time). Sandboxes,
services and clocks went on meanwhile, so what is late afterwards is nobody's doing.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from threading import Thread
from typing import Any, ParamSpec, TypeVar

from orchestrator.errors import SandboxLostError

STANDSTILL_S = 20.0  # shorter than the timeout of the sandbox' connection
# One thread, so that the event loop has one competitor for Python's lock, however many sandboxes ask for much.
_ASIDE = ThreadPoolExecutor(1, "aside")
P = ParamSpec("P")
T = TypeVar("T")


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which must be bounded in time.

    If cancelled, once or often, this still waits until `work` is done and then raises CancelledError.
    """
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        if not task.cancelled():
            task.exception()  # marked as retrieved; CancelledError takes precedence
        raise asyncio.CancelledError
    return task.result()


async def aside(work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """The result of `work`, done in a thread: for what takes milliseconds of the processor and comes from a
    sandbox. A cancel does not wait for it, so it must be bounded."""
    return await asyncio.wrap_future(_ASIDE.submit(work, *args, **named))


async def aside_if(long: bool, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """As `aside`; done at once where it is not `long`."""
    return await aside(work, *args, **named) if long else work(*args, **named)


def apart(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """The result of `work`, which begins now in a thread of this name. It may never return: neither a cancel nor
    the end of the process waits for it."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return asyncio.wrap_future(result)


async def first_of(*waits: Coroutine[Any, Any, Any]) -> Any:
    """The first result or exception; in a tie the earlier argument's. The others are cancelled and awaited."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error in the nested groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def standstill(longest_s: float = STANDSTILL_S) -> float:
    """Returns once this process did not run for `longest_s`; for how long it was.

    In `first_of` it wins over what was late for it.
    """
    loop, look_s = asyncio.get_running_loop(), longest_s / 10
    while True:
        before = loop.time()
        await asyncio.sleep(look_s)
        stood_s = loop.time() - before - look_s
        if stood_s > longest_s:
            return stood_s


def stood_still(seconds: float) -> SandboxLostError:
    """What ends the sandboxes that ran meanwhile."""
    return SandboxLostError(f"the orchestrator itself stood still for {seconds:.0f} s")


async def ran(seconds: float, result: T) -> T:
    """As `asyncio.sleep`, but of a standstill at most a sixtieth of `seconds` counts, or a second."""
    while seconds > 0:
        step_s = min(seconds, max(1.0, seconds / 60))
        await asyncio.sleep(step_s)
        seconds -= step_s
    return result


@asynccontextmanager
async def running_timeout(seconds: float) -> AsyncIterator[None]:
    """As `asyncio.timeout`, but of a standstill at most a tenth of `seconds` counts: what was waited for gets the
    rest."""
    loop, step_s = asyncio.get_running_loop(), min(1.0, seconds / 10)
    counting: asyncio.Handle
    async with asyncio.timeout(None) as limit:

        def count(left_s: float) -> None:
            nonlocal counting
            if left_s <= 0:
                limit.reschedule(loop.time())
            else:
                counting = loop.call_later(min(step_s, left_s), count, left_s - step_s)

        counting = loop.call_soon(count, seconds)
        try:
            yield
        finally:
            counting.cancel()
