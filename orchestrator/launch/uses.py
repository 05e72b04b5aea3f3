"""Images of tasks' Dockerfiles: which of them live runs use, and which of the others are not worth their room.

A run that builds has one file, locked while it lives: the ids of the images that it uses, a line each.
"""

import fcntl
import os
import secrets
from collections.abc import Iterable, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from orchestrator.errors import EnvironmentUnusable


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "rollout-orchestrator" / "uses"


class Uses:
    """Of this run, from now until `close`. Blocks. Raises EnvironmentUnusable."""

    def __init__(self) -> None:
        try:
            _folder().mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = _folder() / f".{secrets.token_hex(8)}"
            self._file: IO[str] = draft.open("x")
            fcntl.flock(self._file, fcntl.LOCK_SH)
            draft.rename(_folder() / draft.name[1:])  # others see it from now on, and it is locked
        except OSError as error:
            raise EnvironmentUnusable(f"no room in {_folder()}: {error.strerror}") from error

    def add(self, image: str) -> None:
        """Blocks. Raises EnvironmentUnusable."""
        try:
            self._file.write(f"{image}\n")
            self._file.flush()
        except OSError as error:
            raise EnvironmentUnusable(f"no room in {_folder()}: {error.strerror}") from error

    def close(self) -> None:
        """Idempotent."""
        self._file.close()


def images_in_use() -> set[str] | None:
    """The ids of the images that live runs of this user use; None: no run that builds lives. Files of dead runs
    are removed. Blocks."""
    images, live = set[str](), False
    for path in _folder().glob("[!.]*"):
        with suppress(FileNotFoundError), path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                images |= set(file.read().split())
                live = True
            else:
                path.unlink()
    return images if live else None


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """`tag`: its name. `used_at`: Unix time of its last use."""

    tag: str
    image_id: str
    used_at: float
    size_bytes: int


def unwanted(
    images: Iterable[BuiltImage], *, used_before: float, keep_bytes: int | None, in_use: Set[str]
) -> list[BuiltImage]:
    """Those that were last used before a time, and as many more as it takes for the others to have `keep_bytes`
    together; the longest unused first, and none that is in use."""
    images = sorted(images, key=lambda image: image.used_at)
    left, out = sum(image.size_bytes for image in images), []
    for image in images:
        too_much = keep_bytes is not None and left > keep_bytes
        if image.image_id not in in_use and (too_much or image.used_at < used_before):
            out.append(image)
            left -= image.size_bytes
    return out
