"""A folder that appears under its name only when it is complete."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.errors import ConfigError, OutputError, os_error_as


def demand_free(path: Path, setting: str) -> None:
    """Raises ConfigError, which names the setting, if `path` exists and is not an empty folder."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{setting}: {path} already exists and is not overwritten; name another one")


@contextmanager
def new_folder(path: Path, setting: str) -> Iterator[Path]:
    """A folder to write into, which gets the name `path` when the block ends well; else nothing is left.

    Raises ConfigError, OutputError; both name the setting `setting`.
    """
    demand_free(path, setting)
    with os_error_as(ConfigError, f"{setting}: cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        yield folder
        demand_free(path, setting)  # somebody else may have written there meanwhile
        folder.chmod(0o777 & ~_umask())
        folder.rename(path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; make room, or set --{setting}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
