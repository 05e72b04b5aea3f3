"""Waiting that a cancel cannot cut short: for cleanup that must come to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which must be bounded in time.

    Cancelled once or often, it still waits until `work` is done and then raises CancelledError.
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
            task.exception()  # seen: the cancel goes first
        raise asyncio.CancelledError
    return task.result()
