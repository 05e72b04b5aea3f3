"""The tether: a listening socket that is open as long as the orchestrator wants the sandbox to live.

Pid 1 of the sandbox connects once. The connection is never accepted, and nothing is sent. The kernel hangs up when
the listener closes: when the sandbox' block is left, and when this process ends in any way, `kill -9` included. So
a sandbox that could not be removed ends itself, even in the middle of an endless step.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.launch.names import TETHER_NAME


@contextmanager
def tether(directory: Path) -> Iterator[None]:
    """Keeps the tether of the sandbox whose channel is `directory` open. Raises OSError."""
    path = directory / TETHER_NAME
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(path))
        # With user namespaces, pid 1 is another user here. The directories above keep other users out.
        path.chmod(0o666)
        listening.listen(1)
        yield
