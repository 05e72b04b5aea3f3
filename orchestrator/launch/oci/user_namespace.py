"""Which users of this machine the users inside of containers are, where an ordinary user makes them.

All are subordinate ids that /etc/subuid and /etc/subgid give this user: so the two identities of a sandbox are as
far apart as ever. This user itself, who owns the files of images, is AGENT_ID: root for an agent that may write to
its root. Root needs no such namespace, and has none.
"""

import os
import pwd
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.uids import LAST_UID, RANGE_IDS

_ETC, _PROC_SYS = Path("/etc"), Path("/proc/sys")
_WRITERS = ("newuidmap", "newgidmap")  # they write the maps for an ordinary user
_ENTER = Path(__file__).with_name("enter.py")
AGENT_ID = LAST_UID + 1
_NOBODY = RANGE_IDS - 2


Mapping = dict[str, int]  # a range of ids, as the OCI runtime specification writes it


class UserNamespace(NamedTuple):
    """All users and groups that exist in containers of an ordinary user."""

    users: list[Mapping]
    groups: list[Mapping]

    @property
    def agent_maps(self) -> tuple[str, str]:
        """As in /proc/PID/uid_map and gid_map: which of them an agent may become, from its root on, and nobody."""
        return _agent_map(self.users), _agent_map(self.groups)

    def entered_by(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command`, which begins with a path, as root of such a namespace."""
        maps = [" ".join(str(number) for part in ids for number in part.values()) for ids in self]
        return [sys.executable, "-I", "-S", str(_ENTER), *maps, *command]


def _agent_map(ranges: list[Mapping]) -> str:
    """A line for each of the ranges from AGENT_ID on: the kernel takes no line that spans two of them."""
    lines = []
    for first, _, size in (ids.values() for ids in ranges if ids["containerID"] >= AGENT_ID):
        inside = first - AGENT_ID
        if ids_left := min(size, RANGE_IDS - inside) if inside < RANGE_IDS else 0:
            lines.append((inside, first, ids_left))
    inside, first, size = lines[-1]
    if inside + size <= _NOBODY and len(lines) > 1:
        lines[-1:] = [(inside, first, size - 1)] if size > 1 else []
        lines.append((_NOBODY, first + size - 1, 1))
    return "\n".join(" ".join(map(str, line)) for line in lines)


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
    """AGENT_ID is `own`; the others are subordinate ids of `user`. Raises EnvironmentUnusable for too few."""
    ranges: list[Mapping] = []
    inside = 0
    for outside, size in _subordinate(file, user):
        below = min(size, max(0, AGENT_ID - inside))
        for first, count in ((outside, below), (outside + below, size - below)):
            if inside == AGENT_ID:
                ranges.append(id_range(AGENT_ID, own, 1))
                inside += 1
            if count:
                ranges.append(id_range(inside, first, count))
                inside += count
    if inside < AGENT_ID:
        kind = "subuids" if file.name == "subuid" else "subgids"
        raise EnvironmentUnusable(
            f"{file} gives this user {inside} ids, and {AGENT_ID} are needed: "
            f"sudo usermod --add-{kind} 100000-165535 {_name(user)}"
        )
    return ranges if inside > AGENT_ID else [*ranges, id_range(AGENT_ID, own, 1)]


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
