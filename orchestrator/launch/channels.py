"""The host's side of the sandboxes' sockets: one directory per run, in it one per sandbox.

The sandbox can read these paths in /proc/self/mountinfo, so their names are random.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from orchestrator.errors import EnvironmentUnusable, LaunchError
from orchestrator.launch.names import SOCKET_NAME, TETHER_NAME
from orchestrator.launch.owner import this_process

PREFIX = "orchestrator-"
DRAFT_PREFIX = f"{PREFIX}new-"
OWNER_FILE = "owner"
MOUNTS = Path("/proc/self/mountinfo")
# A socket can often be made there, and is lost when server or cache forget its file: a trial proves nothing.
# What is not named here is tried. So are 9p and virtiofs: sockets work with some of their servers only.
_NETWORK_FILE_SYSTEMS = frozenset(
    (
        *("afs", "beegfs", "ceph", "ceph-fuse", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4"),
        *("orangefs", "smb2", "smb3", "smbfs", "sshfs"),
    )
)
_MAX_SOCKET_PATH_BYTES = 100  # the kernel takes 107; some libraries less
_NAME_BYTES = 6  # 8 characters


def make_owned_directory(run: str, parent: Path) -> Path:
    """A new directory that only this user can enter. Its owner file tells the reaper which process made it.

    Until the owner file is written, the owner is part of the directory's name. Then the name is random.
    """
    name = secrets.token_hex(4)
    draft = parent / _draft_name(name)
    draft.mkdir(mode=0o700)
    (draft / OWNER_FILE).write_text(json.dumps({"owner": str(this_process()), "run": run}))
    return draft.rename(parent / f"{PREFIX}{name}")


def remove_owned_directory(directory: Path) -> Path | None:
    """Removes the directory with all its content. Returns its present path if something could not be removed.

    It is renamed first: its name then holds this process, as the owner file is deleted before the directory is.
    So if this process is killed meanwhile, the reaper still recognizes the directory.
    """
    if not directory.name.startswith(DRAFT_PREFIX):
        try:
            directory = directory.rename(directory.with_name(_draft_name(directory.name.removeprefix(PREFIX))))
        except OSError:  # another process removes it, or it cannot be removed
            return directory if directory.exists() else None
    shutil.rmtree(directory, ignore_errors=True)
    return directory if directory.exists() else None


def _draft_name(name: str) -> str:
    owner = this_process()
    return f"{DRAFT_PREFIX}{owner.pid}-{owner.started}-{name}"


class Channels:
    """The directory with the sockets of one run's sandboxes. Closing removes it; idempotent.

    Raises EnvironmentUnusable where sockets do not work.
    """

    def __init__(self, run: str, parent: Path | None = None) -> None:
        if parent is None:  # TMPDIR, unless a socket's path below it would be too long for the kernel
            parent = Path(tempfile.gettempdir())
            parent = parent if socket_fits(parent) else Path("/tmp")  # noqa: S108
        with ExitStack() as stack:
            try:
                kind = file_system(parent, MOUNTS.read_text(errors="replace"))
                if kind.removeprefix("fuse.") in _NETWORK_FILE_SYSTEMS:
                    raise EnvironmentUnusable(
                        f"{parent} is on a network file system ({kind}), where the sockets of sandboxes do not "
                        "work; set TMPDIR to a folder on a local disk"
                    )
                self.root = make_owned_directory(run, parent)
                stack.callback(self.close)
                # Does once what a sandbox will do.
                with tether(self.root), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as pid_1:
                    pid_1.connect(str(self.root / TETHER_NAME))
                (self.root / TETHER_NAME).unlink()
            except OSError as error:
                raise EnvironmentUnusable(
                    f"no socket of a sandbox works in {parent} ({error.strerror or error}); set TMPDIR to a "
                    "folder of yours on a local disk"
                ) from error
            stack.pop_all()

    def __enter__(self) -> Channels:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        remove_owned_directory(self.root)

    @contextmanager
    def directory(self) -> Iterator[Path]:
        """A directory for one sandbox's sockets. The sandbox can enter it but not list or write it.

        When the block is left the tether in it closes, and a sandbox that still runs ends itself. Raises
        LaunchError.
        """
        path = self.root / secrets.token_urlsafe(_NAME_BYTES)
        with ExitStack() as stack:
            try:
                path.mkdir()
                stack.callback(shutil.rmtree, path, ignore_errors=True)
                path.chmod(0o711)
                stack.enter_context(tether(path))
            except OSError as error:
                raise LaunchError(
                    f"no place for a sandbox's socket in {self.root}: {error.strerror or error}"
                ) from error
            yield path


@contextmanager
def tether(directory: Path) -> Iterator[None]:
    """Keeps a socket listening in the channel `directory` as long as its sandbox is to live. Raises OSError.

    Pid 1 of the sandbox connects once. The connection is never accepted, and nothing is sent. The kernel hangs up
    when the listener closes: when the sandbox' block is left, and when this process ends in any way, `kill -9`
    included. So a sandbox that could not be removed ends itself, even in the middle of an endless step.
    """
    path = directory / TETHER_NAME
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(path))
        # With user namespaces, pid 1 is another user here. The directories above keep other users out.
        path.chmod(0o666)
        listening.listen(1)
        yield


def file_system(path: Path, mounts: str) -> str:
    """The type of the file system that `path` is on; empty: unknown. `mounts`: the text of MOUNTS. Raises OSError.

    Found by its device: paths in `mounts` may be hidden by other mounts. Subvolumes of btrfs have devices that are
    not in `mounts`.
    """
    device = path.stat().st_dev
    for line in mounts.splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == f"{os.major(device)}:{os.minor(device)}":
            return source.split()[0]
    return ""


def socket_fits(parent: Path) -> bool:
    """Whether the paths of sockets below `parent` are short enough for the kernel."""
    return len(os.fsencode(longest_socket(parent))) < _MAX_SOCKET_PATH_BYTES


def longest_socket(parent: Path) -> Path:
    """A path as long as that of any sandbox's socket below `parent`."""
    return parent / f"{PREFIX}{'x' * 8}" / ("x" * 8) / SOCKET_NAME
