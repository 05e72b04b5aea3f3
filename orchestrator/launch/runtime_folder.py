"""The runtime of sandboxes as a folder of this machine: what our image has at RUNTIME_MOUNT, unpacked once.

    STORE/runtimes/DIGEST/            named by its content; every sandbox mounts it read-only
    STORE/runtimes/context-CONTEXT    a link to the one that is made of these sources

`image build` fills it. A launcher that finds none takes it out of an image that was built of these sources. All
this blocks.
"""

import errno
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.image.context import BuildContext, context_root
from orchestrator.launch.names import LABEL_RUNTIME, RUNTIME_MOUNT
from orchestrator.launch.oci.store import ImageStore

NOT_HERE = "the runtime of sandboxes is not here: run `orchestrator image build{}`"  # with which options
_LINK = "context-"
_KEPT_S = 30 * 86_400.0  # one of other sources that nobody used for so long


@dataclass(frozen=True, slots=True)
class RuntimeFolder:
    """`digest`: SHA-256 of all names, contents, links and modes in it."""

    digest: str
    path: Path


def our_context() -> str:
    """The digest of what this installation makes the runtime of. Raises EnvironmentUnusable."""
    return BuildContext.read(context_root()).digest


def find_runtime(store: ImageStore) -> RuntimeFolder | None:
    """The one of this installation's sources; None: it is not there."""
    link = _folder(store) / f"{_LINK}{our_context()}"
    try:
        place = link.resolve(strict=True)
        os.utime(place)
    except OSError:
        return None
    return RuntimeFolder(place.name, place)


def put_runtime(store: ImageStore, fill: Callable[[Path], None]) -> RuntimeFolder:
    """`fill` makes the folder. It appears complete or not at all. Raises EnvironmentUnusable."""
    with store.draft() as draft:
        fill(made := draft / "runtime")
        place = _folder(store) / (digest := _digest(made))
        place.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            made.rename(place)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # it is there
                raise
        (link := draft / "link").symlink_to(digest)
        link.replace(place.parent / f"{_LINK}{our_context()}")
    return RuntimeFolder(digest, place)


def stored_runtime(store: ImageStore) -> RuntimeFolder:
    """That of this installation, if need be out of an image in the store. Raises EnvironmentUnusable."""
    if (folder := find_runtime(store)) is not None:
        return folder
    context = our_context()
    for image in store.images():
        if (image.config.get("Labels") or {}).get(LABEL_RUNTIME) == context:
            return put_runtime(store, partial(_copy, image.root / RUNTIME_MOUNT.lstrip("/")))
    raise EnvironmentUnusable(NOT_HERE.format(" --oci"))


def remove_old_runtimes(store: ImageStore) -> int:
    """Removes those of other sources that were not used lately. Returns how many."""
    ours, count = find_runtime(store), 0
    with suppress(OSError):
        for place in _folder(store).iterdir():
            if place.is_symlink():
                if not place.exists():
                    place.unlink()
            elif place != (ours and ours.path) and place.stat().st_mtime < time.time() - _KEPT_S:
                shutil.rmtree(place)
                count += 1
    return count


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, symlinks=True)


def _folder(store: ImageStore) -> Path:
    return store.folder / "runtimes"


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name, path in sorted(_entries(folder)):
        mode = path.lstat().st_mode
        digest.update(f"{name}\0{stat.S_IFMT(mode) | mode & 0o111}\0".encode("utf-8", "surrogateescape"))
        if path.is_symlink():
            digest.update(os.fsencode(os.readlink(path)))
        elif stat.S_ISREG(mode):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _entries(folder: Path) -> Iterator[tuple[str, Path]]:
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            yield str(path.relative_to(folder)), path
