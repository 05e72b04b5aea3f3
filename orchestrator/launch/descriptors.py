"""Raises the limit of open files to what live sandboxes need in this process."""

import resource

_PER_SANDBOX = 6  # five were measured: server sockets, tether, connection to the endpoint
_OURS = 256


def make_room(sandboxes: int) -> str | None:
    """Raises this process' soft limit of open files for so many sandboxes. Returns what to do if the hard limit
    is too low. Many systems begin with 1,024, enough for about 120 sandboxes."""
    need = _OURS + _PER_SANDBOX * sandboxes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return None
    limit = need if hard == resource.RLIM_INFINITY else min(need, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit == need:
        return None
    return (
        f"{sandboxes} sandboxes may need {need} open files and this process may have {limit}: "
        f"raise the hard limit (ulimit -Hn {need}) or set --env.max_concurrent_sandboxes lower"
    )
