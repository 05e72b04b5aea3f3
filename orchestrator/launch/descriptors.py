"""Raises the limit of open files to what live sandboxes need in this process."""

from __future__ import annotations

import resource

_PER_SANDBOX = 6  # five were measured: server sockets, tether, connection to the endpoint
_OURS = 256


def make_room(sandboxes: int) -> str | None:
    """Raises this process' soft limit of open files for so many sandboxes. Returns what to do if the hard limit
    is too low. Many systems begin with 1,024, enough for about 120 sandboxes."""
    wanted = _OURS + _PER_SANDBOX * sandboxes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return None
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == wanted:
        return None
    return (
        f"{sandboxes} sandboxes may need {wanted} open files and this process may have {allowed}: "
        f"raise the hard limit (ulimit -Hn {wanted}) or set --env.max_concurrent_sandboxes lower"
    )
