"""Signs of life while a completion is sampled, as DeepSeek's API sends them: empty lines before an answer,
comments in a stream. Clients give up when they hear nothing, many after 30 or 60 seconds."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

BEAT_S = 5.0


@contextmanager
def beats(send: Callable[[], None]) -> Iterator[None]:
    """Within the block another thread calls `send` every BEAT_S, until the client hangs up."""
    over = threading.Event()

    def beat() -> None:
        with suppress(OSError):
            while not over.wait(BEAT_S):
                send()

    thread = threading.Thread(target=beat, name="beats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
