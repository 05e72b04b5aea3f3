"""The host's side of the sandboxes' sockets: one directory of the run, one inside it per sandbox.

Paths end up in /proc/self/mountinfo of the sandbox, so nothing in them has a meaning.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from orchestrator.errors import LaunchError
from orchestrator.launch.names import SOCKET_NAME
from orchestrator.launch.owner import this_process
from orchestrator.launch.tether import tether

PREFIX = "orchestrator-"
DRAFT_PREFIX = f"{PREFIX}new-"
OWNER_FILE = "owner"
_MAX_SOCKET_PATH_BYTES = 100  # the kernel takes 107; some libraries less
_NAME_BYTES = 6  # 8 characters


def make_owned_directory(run: str, parent: Path) -> Path:
    """A new directory that only we can enter, and that the reaper knows to be this process'.

    Its name has no meaning; only while it does not hold its owner's name it bears it.
    """
    name = secrets.token_hex(4)
    draft = parent / _draft_name(name)
    draft.mkdir(mode=0o700)
    (draft / OWNER_FILE).write_text(json.dumps({"owner": str(this_process()), "run": run}))
    return draft.rename(parent / f"{PREFIX}{name}")


def remove_owned_directory(directory: Path) -> Path | None:
    """With all that is in it; where it is now, if something resists.

    Its owner file is gone before it is, so it bears the name of who removes it: whoever is killed in the middle
    leaves a directory that the reaper knows.
    """
    if not directory.name.startswith(DRAFT_PREFIX):
        try:
            directory = directory.rename(directory.with_name(_draft_name(directory.name.removeprefix(PREFIX))))
        except OSError:  # somebody else removes it, or it cannot be removed
            return directory if directory.exists() else None
    shutil.rmtree(directory, ignore_errors=True)
    return directory if directory.exists() else None


def _draft_name(name: str) -> str:
    owner = this_process()
    return f"{DRAFT_PREFIX}{owner.pid}-{owner.started}-{name}"


class Channels:
    """Where the sandboxes of one run find their sockets. Closing removes it all; idempotent."""

    def __init__(self, run: str, parent: Path | None = None) -> None:
        self.root = make_owned_directory(run, parent or _parent())

    def __enter__(self) -> Channels:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        remove_owned_directory(self.root)

    @contextmanager
    def directory(self) -> Iterator[Path]:
        """A directory for one sandbox's sockets, which it can enter but not list or write.

        A sandbox that still hangs on it when the block is left ends by itself. Raises LaunchError.
        """
        path = self.root / secrets.token_urlsafe(_NAME_BYTES)
        with ExitStack() as stack:
            try:
                path.mkdir()
                stack.callback(shutil.rmtree, path, ignore_errors=True)
                path.chmod(0o711)
                stack.enter_context(tether(path))
            except OSError as error:
                raise LaunchError(f"no place for a sandbox's socket in {self.root}: {error.strerror}") from error
            yield path


def _parent() -> Path:
    """TMPDIR, unless a socket's path below it would be too long for the kernel."""
    parent = Path(tempfile.gettempdir())
    return parent if socket_fits(parent) else Path("/tmp")  # noqa: S108


def socket_fits(parent: Path) -> bool:
    """Whether sockets can have their path below `parent`."""
    return len(os.fsencode(longest_socket(parent))) < _MAX_SOCKET_PATH_BYTES


def longest_socket(parent: Path) -> Path:
    """As long as the path of any sandbox's socket below `parent`."""
    return parent / f"{PREFIX}{'x' * 8}" / ("x" * 8) / SOCKET_NAME
