"""Which users of this machine the users inside a container are, where an ordinary user makes it.

Inside, root is this user; all others are subordinate ids that /etc/subuid and /etc/subgid give it. So the two
identities of a sandbox are as far apart as ever. Root needs no such namespace, and has none.
"""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.uids import LAST_UID

_ETC, _PROC_SYS = Path("/etc"), Path("/proc/sys")
_WRITERS = ("newuidmap", "newgidmap")  # they write the maps for an ordinary user


Mapping = dict[str, int]  # a range of ids, as the OCI runtime specification writes it


class UserNamespace(NamedTuple):
    """All users and groups that exist in a container."""

    users: list[Mapping]
    groups: list[Mapping]


def user_namespace(*, etc: Path = _ETC, proc_sys: Path = _PROC_SYS) -> UserNamespace | None:
    """This user's; None: it is root. Raises EnvironmentUnusable, which says what to do."""
    user = os.geteuid()
    if user == 0:
        return None
    for name, least in (("user/max_user_namespaces", 1), ("kernel/unprivileged_userns_clone", 1)):
        if (value := _number(proc_sys / name)) is not None and value < least:
            raise EnvironmentUnusable(f"the kernel lets no ordinary user make containers here (sysctl {name})")
    if missing := [name for name in _WRITERS if shutil.which(name) is None]:
        raise EnvironmentUnusable(f"there is no {missing[0]} on this machine: install uidmap (or shadow-utils)")
    return UserNamespace(_ranges(etc / "subuid", user, os.geteuid()), _ranges(etc / "subgid", user, os.getegid()))


def _ranges(file: Path, user: int, own: int) -> list[Mapping]:
    """Id 0 is `own`; the others are subordinate ids of `user`. Raises EnvironmentUnusable: they are too few."""
    ranges, inside = [id_range(0, own, 1)], 1
    for outside, size in _subordinate(file, user):
        ranges.append(id_range(inside, outside, size))
        inside += size
    if inside <= LAST_UID:
        kind = "subuids" if file.name == "subuid" else "subgids"
        raise EnvironmentUnusable(
            f"{file} gives this user {inside - 1} ids, and {LAST_UID} are needed: "
            f"sudo usermod --add-{kind} 100000-165535 {_name(user)}"
        )
    return ranges


def id_range(inside: int, outside: int, size: int) -> Mapping:
    """`size` ids from `inside` on, in the container, are those from `outside` on."""
    return {"containerID": inside, "hostID": outside, "size": size}


def _subordinate(file: Path, user: int) -> Iterator[tuple[int, int]]:
    """(first id, how many) of each line that is about the user, by name or number."""
    try:
        lines = file.read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        who, first, size = (*line.split(":"), "", "", "")[:3]
        if who in (_name(user), str(user)) and first.isdecimal() and size.isdecimal():
            yield int(first), int(size)


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
