"""`env.agent program:PATH`: a Python file, or a folder with a `__main__.py`, that is sent into the sandbox."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from orchestrator.agents.equipment import ProgramFile
from orchestrator.errors import ConfigError, os_error_as

MAIN = "__main__.py"
MAX_FILES = 256
MAX_BYTES = 4 << 20
_SKIPPED = frozenset({"__pycache__", ".git", ".venv"})


def read_program(path: Path) -> tuple[ProgramFile, ...]:
    """The program's files; a single file becomes `__main__.py`. Raises ConfigError."""
    with os_error_as(ConfigError, f"env.agent: cannot read {path}"):
        if path.is_file():
            files = [(MAIN, path)]
        elif (path / MAIN).is_file():
            files = list(_files(path))
        else:
            raise ConfigError(f"env.agent: {path} is neither a Python file nor a folder with a {MAIN}")
        if len(files) > MAX_FILES:
            raise ConfigError(f"env.agent: {path} has more than {MAX_FILES} files")
        if sum(place.stat().st_size for _, place in files) > MAX_BYTES:
            raise ConfigError(f"env.agent: {path} is larger than {MAX_BYTES >> 20} MiB in all")
        return tuple(ProgramFile(name, place.read_bytes()) for name, place in files)


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """(path below the folder, place) of regular files, sorted. Links are left out."""
    for directory, below, names in os.walk(folder):
        below[:] = sorted(name for name in below if name not in _SKIPPED)
        for name in sorted(names):
            place = Path(directory) / name
            if stat.S_ISREG(place.lstat().st_mode):
                yield place.relative_to(folder).as_posix(), place
