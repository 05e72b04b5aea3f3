"""Which images of tasks' Dockerfiles live runs use, so that `cleanup` does not remove them between two sandboxes.

One file for each run, locked while it lives: the images' ids, a line each.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import IO

from orchestrator.errors import EnvironmentUnusable


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "rollout-orchestrator" / "uses"


class Uses:
    """Those of this run. The file comes with the first image."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def add(self, image: str) -> None:
        """Blocks. Raises EnvironmentUnusable."""
        try:
            if self._file is None:
                _folder().mkdir(mode=0o700, parents=True, exist_ok=True)
                draft = _folder() / f".{secrets.token_hex(8)}"
                self._file = draft.open("x")
                fcntl.flock(self._file, fcntl.LOCK_SH)
                draft.rename(_folder() / draft.name[1:])  # others see it from now on, and it is locked
            self._file.write(f"{image}\n")
            self._file.flush()
        except OSError as error:
            raise EnvironmentUnusable(f"no room in {_folder()}: {error.strerror}") from error

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            self._file.close()


def images_in_use() -> set[str]:
    """The ids of the images that live runs of this user use. Files of dead ones are removed."""
    images: set[str] = set()
    for path in _folder().glob("[!.]*"):
        with suppress(FileNotFoundError), path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                images |= set(file.read().split())
            else:
                path.unlink()
    return images
