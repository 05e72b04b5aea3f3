"""Directories of ours can be told to be ours from the first moment on."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch import channels, reaper
from orchestrator.launch.channels import (
    DRAFT_PREFIX,
    MOUNTS,
    OWNER_FILE,
    Channels,
    file_system,
    make_owned_directory,
)
from orchestrator.launch.owner import this_process
from orchestrator.launch.reaper import reap_directories

ME = this_process()
ROOT = Path(__file__).parents[2]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place the reaper looks at."""
    monkeypatch.setattr(reaper.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(reaper, "Path", lambda *parts: tmp_path if parts == ("/tmp",) else Path(*parts))
    return tmp_path


def test_directory_is_private_and_its_name_says_nothing(tmp_path: Path) -> None:
    directory = make_owned_directory("run", tmp_path)
    assert [directory] == list(tmp_path.iterdir())
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert str(os.getpid()) not in directory.name.removeprefix("orchestrator-")
    assert str(ME) in (directory / OWNER_FILE).read_text()


def test_directories_of_the_living_stay(temporary: Path) -> None:
    with Channels("run", temporary):
        (temporary / f"{DRAFT_PREFIX}{ME.pid}-{ME.started}-00000000").mkdir()
        assert reap_directories().directories == 0
    assert len(list(temporary.iterdir())) == 1


@pytest.mark.parametrize("owner_file", [None, "", '{"owner": "ha'], ids=["none", "empty", "torn"])
def test_directory_whose_maker_died_at_once_is_removed(temporary: Path, owner_file: str | None) -> None:
    draft = temporary / f"{DRAFT_PREFIX}{ME.pid}-{ME.started - 1}-00000000"
    draft.mkdir()
    if owner_file is not None:
        (draft / OWNER_FILE).write_text(owner_file)
    assert reap_directories().directories == 1
    assert not draft.exists()


@pytest.mark.parametrize("name", ["orchestrator-foreign", f"{DRAFT_PREFIX}x-y-z", f"{DRAFT_PREFIX}1", "other"])
def test_directories_that_are_not_ours_stay(temporary: Path, name: str) -> None:
    (temporary / name).mkdir()
    assert reap_directories().directories == 0
    assert (temporary / name).exists()


DYING = """
import os, shutil, sys
from pathlib import Path
from orchestrator.launch import channels
directory = channels.make_owned_directory("run", Path(sys.argv[1]))
def die(path, **_):
    (path / channels.OWNER_FILE).unlink()
    os.kill(os.getpid(), 9)
shutil.rmtree = die
channels.remove_owned_directory(directory)
"""


def test_directory_whose_owner_died_while_removing_it_is_removed(temporary: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", DYING, str(temporary)], cwd=ROOT, check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = temporary.iterdir()
    assert list(left.iterdir()) == [], "not even its owner's name is in it any more"
    assert reap_directories().directories == 1
    assert list(temporary.iterdir()) == []


# ---------------------------------------------------------------- where sockets do not work


def mounted(path: Path, kind: str) -> str:
    """A mountinfo in which the file system of `path` is of this kind, below a name with a space."""
    device = path.stat().st_dev
    return (
        "22 27 0:0 / /proc rw,relatime - proc proc rw\n"
        f"90 27 {os.major(device)}:{os.minor(device)} / /my\\040files rw shared:4 master:1 - {kind} server:/x rw\n"
        "91 27 0:1 / /nfs rw,relatime - nfs4 server:/y rw\n"
    )


def test_the_kernel_tells_the_file_system() -> None:
    mounts = MOUNTS.read_text()
    assert file_system(Path("/proc/self"), mounts) == "proc"
    assert file_system(Path("/dev/shm"), mounts) == "tmpfs"


def test_a_subvolume_has_a_device_that_is_not_listed(tmp_path: Path) -> None:
    other = "\n".join(mounted(tmp_path, "nfs4").splitlines()[::2])
    assert file_system(tmp_path, other) == ""


@pytest.fixture
def on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets all of `tmp_path` be on a file system of this kind."""

    def put(kind: str) -> None:
        file = tmp_path / "mounts"
        file.write_text(mounted(tmp_path, kind))
        monkeypatch.setattr(channels, "MOUNTS", file)

    return put


@pytest.mark.parametrize(
    "kind",
    [
        *("nfs", "nfs4", "cifs", "smb3", "ceph", "fuse.ceph-fuse", "lustre", "gpfs", "beegfs", "afs"),
        *("glusterfs", "fuse.glusterfs", "fuse.sshfs"),
    ],
)
def test_no_socket_is_put_on_a_network_file_system(tmp_path: Path, on: Callable[[str], None], kind: str) -> None:
    on(kind)
    with pytest.raises(EnvironmentUnusable) as refused:
        Channels("run", tmp_path)
    told = str(refused.value)
    assert f"{tmp_path} is on a network file system ({kind})" in told
    assert "set TMPDIR" in told
    assert "\n" not in told
    assert not list(tmp_path.glob("orchestrator-*")), "nothing was made there"


@pytest.mark.parametrize(
    "kind",
    ["overlay", "fuse.fuse-overlayfs", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "9p", "virtiofs", "fuse", "newfs"],
)
def test_what_is_not_known_to_fail_is_tried(tmp_path: Path, on: Callable[[str], None], kind: str) -> None:
    on(kind)
    with Channels("run", tmp_path) as made, made.directory():
        assert sorted(path.name for path in made.root.iterdir() if path.is_file()) == [OWNER_FILE]


@pytest.mark.parametrize(("owner", "call"), [(socket.socket, "bind"), (socket.socket, "connect"), (Path, "chmod")])
def test_a_folder_in_which_a_socket_fails_is_refused_at_once_and_left_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, call: str
) -> None:
    """As 9p and virtiofs do with some of their servers."""

    def fails(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(owner, call, fails)
    with pytest.raises(EnvironmentUnusable, match=r"\(Operation not supported\); set TMPDIR"):
        Channels("run", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnusable, match=f"works in {tmp_path}/absent .No such file"):
        Channels("run", tmp_path / "absent")
