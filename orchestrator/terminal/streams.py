"""Standard streams that nobody has to listen to, and that nothing steers.

A run outlives its terminal, its pipe and its log's disk; what endpoints, models and data sets say reaches a
terminal as plain text, whoever prints it.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

from orchestrator.text import printable, printable_lines

_MOVES = re.compile(r"\n*(?:\x1b\[A)*")  # what tqdm writes alone, to come to the line of a bar


def guard_streams() -> None:
    """What stdout and stderr refuse is lost from now on, and raises nothing; what they take is made printable,
    whoever writes it. For the start of a process.

    Descriptors that were closed are taken first: a file of the run in their place would get our lines.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # 0, 1, 2 stay open on nothing
        pass
    os.close(fd)
    sys.stdout = cast("TextIO", _Plain(sys.stdout or open(os.devnull, "w")))  # noqa: SIM115
    sys.stderr = cast("TextIO", _Plain(sys.stderr or open(os.devnull, "w")))  # noqa: SIM115
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_OneLine())


def unfiltered(stream: TextIO) -> TextIO:
    """`stream` for who writes escape sequences of our own, and makes printable what is between them."""
    return cast("TextIO", stream.beneath) if isinstance(stream, _Plain) else stream


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


class _Plain(_Unheard):
    """The same, of printable lines; but libraries may draw their progress bars."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.beneath = _Unheard(stream)

    def write(self, text: str) -> int:
        plain = text if _MOVES.fullmatch(text) else printable_lines(text.removeprefix("\r"))
        super().write("\r" + plain if text.startswith("\r") else plain)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)


class _OneLine(logging.Formatter):
    """A message quotes what others said: no line of it looks like one of ours."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))
