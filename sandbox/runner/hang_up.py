"""Tells whether the other end of a connection was closed."""

from __future__ import annotations

import select
import socket


def hung_up(connection: socket.socket) -> bool:
    """Whether the other end was closed. Does not wait."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))
