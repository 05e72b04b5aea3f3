"""Finds the control groups of a container, and the kernel's files about them: v1, v2, or both together."""

import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A process' group in one hierarchy. `controllers`: of v1, separated by commas; empty for v2. `own`: the path
    of the container's own group, without groups made below it; None: it has none."""

    controllers: str
    own: str | None

    def has(self, controller: str) -> bool:
        """Whether this hierarchy is v1's with that controller."""
        return controller in self.controllers.split(",")


def control_groups(pid: int, container: str, proc: Path = PROC) -> list[ControlGroup]:
    """Those of the process `pid` in a container whose groups are named after `container`. Raises OSError."""
    lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    fields = [line.split(":", 2)[1:] for line in lines if line.count(":") >= 2]
    return [ControlGroup(names, _own(path, container)) for names, path in fields]


def groups_beside_ours(name: str, proc: Path = PROC) -> list[ControlGroup]:
    """Those that a container of this name has, or would have, whatever has become of its processes."""
    lines = (proc / "self" / "cgroup").read_text().splitlines()
    fields = [line.split(":", 2)[1:] for line in lines if line.count(":") >= 2]
    folders = [beside(own) if not names and len(fields) == 1 else own for names, own in fields]
    return [
        ControlGroup(names, posixpath.join(folder, name).lstrip("/"))
        for (names, _), folder in zip(fields, folders, strict=True)
    ]


def group_files(
    groups: list[ControlGroup], controller: str, v1_name: str, v2_name: str, cgroups: Path = CGROUPS
) -> Iterator[Path]:
    """Those files of the container's own groups that can be seen here."""
    for group in groups:
        if group.own is None or ".." in group.own.split("/"):  # the latter: in another namespace than ours
            continue
        files: list[str] = []
        if not group.controllers:
            files = [f"{cgroups}/{group.own}/{v2_name}", f"{cgroups}/unified/{group.own}/{v2_name}"]
        elif group.has(controller):
            files = [f"{cgroups}/{mounted}/{group.own}/{v1_name}" for mounted in (controller, group.controllers)]
        yield from (Path(file) for file in files if os.path.isfile(file))


def beside(own: str) -> str:
    """Where a process in the group `own` of cgroup v2 has the groups of its containers: in the one above, as a
    group with processes cannot have groups with limits below it."""
    return posixpath.dirname(own)


def path_beside_ours(name: str, proc: Path = PROC) -> str:
    """What to call a container's group, to have it beside this process' own. With v1 it is the name: each
    hierarchy has its place, and the runtime finds it. With v2 alone it is the path: to crun, a name is a place in
    the root."""
    fields = [line.split(":", 2)[1:] for line in (proc / "self" / "cgroup").read_text().splitlines()]
    match fields:
        case [["", own]]:
            return posixpath.join(beside(own), name)
    return name


def _own(path: str, container: str) -> str | None:
    parts = path.split("/")
    stems = (part.removesuffix(".scope") for part in parts)
    named = (place for place, stem in enumerate(stems) if stem == container or stem.endswith(f"-{container}"))
    place = next(named, None)
    return None if place is None else "/".join(parts[: place + 1]).lstrip("/")
