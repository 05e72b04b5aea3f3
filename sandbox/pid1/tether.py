"""A connection from pid 1 to its orchestrator that hangs up when the orchestrator has ended."""

from __future__ import annotations

import socket
from pathlib import Path


class TetherLost(Exception):
    """There is no orchestrator."""


class Tether:
    """poll() finds it readable when the orchestrator is gone. No child may keep it open."""

    def __init__(self, path: Path) -> None:
        """Raises TetherLost."""
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._line.connect(str(path))
        except OSError as error:
            self._line.close()
            raise TetherLost(f"no orchestrator holds this sandbox at {path}: {error.strerror}") from error

    def fileno(self) -> int:
        return self._line.fileno()

    def close(self) -> None:
        """Idempotent."""
        self._line.close()
