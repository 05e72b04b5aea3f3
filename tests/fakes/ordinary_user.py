"""An ordinary user of this machine for as long as a test runs: with a home, subordinate ids, and on demand control
groups of its own. The user exists in a mount namespace only; the machine's own files stay as they are."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.fakes.runs import ROOT

NAME, USER = "ordinary", 61_234
SUBORDINATE = "200000:65536"
_HIERARCHIES = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids", "systemd")
_CONTROLLERS = ("cpu", "memory", "pids")
_HANDED_ON = ("cgroup.procs", "cgroup.threads", "cgroup.subtree_control")  # cgroups(7), "Delegation"
_CGROUPS = Path("/sys/fs/cgroup")


def why_not(*, delegated: bool = False) -> str | None:
    """Why there can be none here; None: there can."""
    if os.geteuid() != 0:
        return "making a user takes root"
    missing = [name for name in ("unshare", "setpriv", "newuidmap", "mount") if shutil.which(name) is None]
    if missing:
        return f"there is no {missing[0]}"
    if delegated and not _unified() and not all((_CGROUPS / name).is_dir() for name in _HIERARCHIES):
        return "the control groups here are neither v1 nor v2 alone"
    return None


@contextmanager
def ordinary_user(*, delegated: bool) -> Iterator[OrdinaryUser]:
    """`delegated`: control groups of its own are this user's to change."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="home", dir="/tmp")))
        for name, line in (
            ("passwd", f"{NAME}:x:{USER}:{USER}::{home}:/bin/sh"),
            ("subuid", f"{NAME}:{SUBORDINATE}"),
            ("subgid", f"{NAME}:{SUBORDINATE}"),
        ):
            there = Path("/etc", name)
            (home / name).write_text((there.read_text() if there.exists() else "") + line + "\n")
            if not there.exists():  # a place to mount on
                there.touch()
        groups = stack.enter_context(_control_groups()) if delegated else []
        os.chown(home, USER, USER)
        yield OrdinaryUser(home, groups)


class OrdinaryUser:
    """`home` is its home and temporary folder."""

    def __init__(self, home: Path, groups: list[Path]) -> None:
        self.home = home
        self._groups = groups

    def command(self, *argv: str, **environ: str) -> list[str]:
        """Runs `argv` as this user, with this Python and source tree."""
        given = {
            "HOME": str(self.home),
            "TMPDIR": str(self.home),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}",
            "PYTHONDONTWRITEBYTECODE": "1",
            **environ,
        }
        lines = ["set -e", *(f"echo $$ > {group}/cgroup.procs" for group in self._groups)]
        lines += [f"mount --bind {self.home}/{name} /etc/{name}" for name in ("passwd", "subuid", "subgid")]
        lines += self._reachable(Path(sys.base_prefix))
        wanted = [*(f"{name}={value}" for name, value in given.items()), *argv]
        identity = f"--reuid={USER} --regid={USER} --clear-groups --inh-caps=-all"
        lines.append(f"exec setpriv {identity} env -i {shlex.join(wanted)}")
        return ["unshare", "--mount", "sh", "-c", "\n".join(lines)]

    def _reachable(self, folder: Path) -> list[str]:
        """Commands that show `folder` where it is though it lies in a folder that is closed to others."""
        closed = [parent for parent in reversed(folder.parents) if not parent.stat().st_mode & 1]
        if not closed:
            return []
        return [
            f"mkdir -p {self.home}/kept",
            f"mount --bind {folder} {self.home}/kept",
            f"mount -t tmpfs -o mode=755 tmpfs {closed[0]}",
            f"mkdir -p {folder}",
            f"mount --bind {self.home}/kept {folder}",
        ]


def _unified() -> bool:
    """There is cgroup v2 alone."""
    return (_CGROUPS / "cgroup.controllers").exists()


@contextmanager
def _control_groups() -> Iterator[list[Path]]:
    """Those that the user's first process goes into."""
    top: list[Path] = []
    try:
        yield _delegate_unified(top) if _unified() else _delegate_hierarchies(top)
    finally:
        for group in top:
            for folder, _, _ in os.walk(group, topdown=False):
                with suppress(OSError):
                    os.rmdir(folder)


def _delegate_unified(top: list[Path]) -> list[Path]:
    """One group of the root's, its limits handed on, with a group for the user's own processes in it: a group with
    processes cannot have groups with limits below it."""
    group = _CGROUPS / f"ordinary-{secrets.token_hex(4)}"
    own = group / "own"
    handed_on = " ".join(f"+{name}" for name in _CONTROLLERS)
    (_CGROUPS / "cgroup.subtree_control").write_text(handed_on)
    group.mkdir()
    top.append(group)
    (group / "cgroup.subtree_control").write_text(handed_on)
    own.mkdir()
    for folder in (group, own):
        for path in (folder, *(folder / name for name in _HANDED_ON)):
            os.chown(path, USER, USER)
    return [own]


def _delegate_hierarchies(top: list[Path]) -> list[Path]:
    """One in each hierarchy, below this process' own."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    for name in _HIERARCHIES:
        parent = _CGROUPS / name / own.get(name, own.get(f"name={name}", "/")).lstrip("/")
        group = parent / f"ordinary-{secrets.token_hex(4)}"
        group.mkdir()
        top.append(group)
        if name == "cpuset":
            for file in ("cpuset.cpus", "cpuset.mems"):
                (group / file).write_text((parent / file).read_text())
        for path in (group, *group.iterdir()):
            os.chown(path, USER, USER)
    return top
