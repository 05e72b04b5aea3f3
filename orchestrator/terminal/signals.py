"""SIGTERM, SIGINT, SIGHUP: drain, then stop; a second signal stops at once."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Time for cleanup. What is left then, the next run or `orchestrator cleanup` removes.
CLEANUP_S = 30.0
HASTY_CLEANUP_S = 10.0  # a loaded Engine takes seconds to remove some dozen containers


class Stopped(Exception):
    """A signal ended the run. `exit_code` is 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


async def stoppable(main: Coroutine[Any, Any, T], *, drain: Callable[[], None], drain_timeout_s: float) -> T:
    """Runs `main`. The first signal calls `drain` and gives it `drain_timeout_s` to end by itself, then
    cancels it; its clean-up runs in both cases. Raises Stopped.

    A second signal cancels at once, a third ends the process. If something hangs, such as a thread, which cannot
    be cancelled, the process is ended after CLEANUP_S or HASTY_CLEANUP_S.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main)
    received: list[int] = []

    def on_signal(number: int) -> None:
        received.append(number)
        code = 128 + received[0]
        match len(received):
            case 1:
                drain()
                loop.call_later(drain_timeout_s, task.cancel)
                _end_process_in(drain_timeout_s + CLEANUP_S, code)
            case 2:
                task.cancel()
                _end_process_in(HASTY_CLEANUP_S, code)
            case _:
                os._exit(code)

    # nohup ignores SIGHUP: then it stays ignored.
    handled = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    for number in handled:
        loop.add_signal_handler(number, on_signal, number)
    try:
        result = await task
    except asyncio.CancelledError:
        if received:
            raise Stopped(received[0]) from None
        raise
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
    if received:
        raise Stopped(received[0])
    return result


def _end_process_in(seconds: float, code: int) -> None:
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
