"""Standard streams that nobody has to listen to: a run outlives its terminal, its pipe and its log's disk."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, TextIO, cast


def outlive_listeners() -> None:
    """What stdout and stderr refuse is lost from now on, and raises nothing. For the start of a process.

    Descriptors that were closed are taken first: a file of the run in their place would get our lines.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # 0, 1, 2 stay open on nothing
        pass
    os.close(fd)
    sys.stdout = cast("TextIO", _Unheard(sys.stdout or open(os.devnull, "w")))  # noqa: SIM115
    sys.stderr = cast("TextIO", _Unheard(sys.stderr or open(os.devnull, "w")))  # noqa: SIM115


class _Unheard:
    """A text stream, but for its errors."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            self._give_up()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._give_up()

    def _give_up(self) -> None:
        """What is buffered goes nowhere: at its end Python would try again and change the exit code."""
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
