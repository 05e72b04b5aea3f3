"""Signs of life while a completion is sampled, as DeepSeek's API sends them: empty lines before an answer,
comments in a stream. Clients give up when they hear nothing, many after 30 or 60 seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

BEAT_S = 5.0


class Beats:
    """Within the block `send` is called every BEAT_S by another thread. A client that hung up hears none."""

    def __init__(self, send: Callable[[], None]) -> None:
        self._send = send
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="beats", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            try:
                self._send()
            except OSError:
                return
