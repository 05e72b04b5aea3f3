"""What a sandbox hangs on: a socket that listens as long as its orchestrator wants it to live.

Pid 1 of the sandbox connects once; nobody accepts, nothing is ever sent. The kernel hangs up when the
listener closes: when the sandbox' block is left, and when this process ends in whatever way, `kill -9`
included. So a sandbox that nobody could remove ends by itself, a step that never ends included.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.launch.names import TETHER_NAME


@contextmanager
def tether(directory: Path) -> Iterator[None]:
    """Holds the sandbox whose channel is `directory`. Raises OSError."""
    path = directory / TETHER_NAME
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(path))
        # Pid 1 may be another user here (user namespaces); the directories above keep everybody else away.
        path.chmod(0o666)
        listening.listen(1)
        yield
