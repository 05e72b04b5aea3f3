"""SIGTERM, SIGINT, SIGHUP: drain, then stop; a second signal stops at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(Exception):
    """A signal ended the run. `exit_code` is 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


async def stoppable(main: Coroutine[Any, Any, T], *, drain: Callable[[], None], drain_timeout_s: float) -> T:
    """Runs `main`. The first signal calls `drain` and gives it `drain_timeout_s` to end by itself, then
    cancels it; its clean-up runs in both cases. Raises Stopped. A second signal ends the process."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main)
    received: list[int] = []

    def on_signal(number: int) -> None:
        received.append(number)
        if len(received) > 1:
            # At once, as asked: what is left is found by its labels at the next start.
            os._exit(128 + received[0])
        drain()
        loop.call_later(drain_timeout_s, task.cancel)

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        result = await task
    except asyncio.CancelledError:
        if received:
            raise Stopped(received[0]) from None
        raise
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
    if received:
        raise Stopped(received[0])
    return result
