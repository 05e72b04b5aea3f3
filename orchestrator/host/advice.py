"""Notes on this machine that are worth saying once, remembered in the user's state directory."""

import platform
from contextlib import suppress

from orchestrator.launch.fitting import RUNC
from orchestrator.run.proof import state_folder

_FILE = "advice-given"
_MOST_BYTES = 64 << 10


def is_new(note: str) -> bool:
    """Whether a note is to be printed. The one on runc's age is new once: from now on this user has been given it
    on this machine. Where nothing can be remembered, every note is new."""
    if not note.startswith(RUNC):
        return True
    folder = state_folder()
    line = f"{platform.node()}: {note}\n"
    with suppress(OSError, ValueError):  # another encoding
        if folder is None:
            return True
        path = folder / _FILE
        given = path.read_text("utf-8") if path.is_file() else ""
        if line in given.splitlines(keepends=True):
            return False
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(given[-_MOST_BYTES:] + line, "utf-8")
    return True
