"""Guards the standard streams: failing writes end no run, and no text controls the terminal.

A run goes on without its terminal, its pipe or space for its log. Text from endpoints, models and data sets
reaches a terminal as plain text, whichever code prints it.
"""

import logging
import os
import re
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

from orchestrator.rules.text import printable, printable_lines

_MOVES = re.compile(r"\n*(?:\x1b\[A)*")  # what tqdm writes to move to the line of a bar


def guard_streams() -> None:
    """From now on, failing writes to stdout and stderr raise nothing, and all text is made printable. For the
    start of a process.

    Closed standard descriptors are opened on /dev/null first: else a file of the run could get their number, and
    our lines.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # 0, 1 and 2 stay open
        pass
    os.close(fd)
    sys.stdout = cast("TextIO", _Plain(sys.stdout or open(os.devnull, "w")))  # noqa: SIM115
    sys.stderr = cast("TextIO", _Plain(sys.stderr or open(os.devnull, "w")))  # noqa: SIM115
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_OneLine())


def unfiltered(stream: TextIO) -> TextIO:
    """`stream` without the filter, for a writer that makes texts printable itself."""
    return cast("TextIO", stream.beneath) if isinstance(stream, _Plain) else stream


class _Unheard:
    """A text stream that swallows its errors."""

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
        """Sends buffered text to /dev/null: otherwise Python would try again at exit and change the exit code."""
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


class _Plain(_Unheard):
    """Also makes lines printable. Libraries can still draw progress bars."""

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
    """One line per message: text quoted in it cannot look like another log line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))
