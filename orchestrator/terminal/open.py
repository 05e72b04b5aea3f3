"""Opens the view of a running run that fits where its lines go."""

import os
import sys
from typing import TextIO

from orchestrator.run.tally import Tally
from orchestrator.terminal.progress import PlainProgress


def open_progress(wanted: int | None, tally: Tally, stream: TextIO | None = None) -> PlainProgress:
    """The view that fits `stream`, as a context manager."""
    stream = stream or sys.stderr
    if not stream.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return PlainProgress(wanted, tally, stream)
    from orchestrator.terminal.live import LiveProgress

    return LiveProgress(wanted, tally, stream)
