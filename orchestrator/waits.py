"""Ways of waiting: for cleanup that a cancel must not cut short, for the first of several results, and what became
of several that were waited for together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

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
