"""Images without an Engine: each unpacked once into a folder named by its digest, below the user's cache.

images/DIGEST/rootfs/   its files, which sandboxes mount read-only
images/DIGEST/image.json   its configuration; written last
names/NAME   a link to the image's folder
bases/NAME.tar   a root file system that images are built on
drafts/   what will be an image, locked by the process that makes it
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.hardening import MIN_MEMORY_BYTES, writable_places
from orchestrator.launch.names import CHANNEL_MOUNT, is_path
from orchestrator.launch.oci.archive import Archive
from orchestrator.launch.oci.bundle import Root
from orchestrator.launch.uids import UidPair

ROOT = "rootfs"  # an image's files, in its folder
_MOUNT_POINTS = ("/proc", "/dev", "/sys", CHANNEL_MOUNT)
_HOSTS = "127.0.0.1 localhost\n::1 localhost\n"


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An unpacked image. `config`: Docker's `Config`, with Env, Entrypoint, Labels, Volumes."""

    digest: str
    folder: Path
    config: Mapping[str, Any]
    size_bytes: int

    @property
    def root(self) -> Root:
        """What it gives a sandbox."""
        return Root(
            self.folder / ROOT, tuple(self.config.get("Env") or ()), tuple(self.config.get("Entrypoint") or ())
        )


class ImageStore:
    """`folder`: where the images are. Methods block, for as long as another process unpacks an image."""

    def __init__(self, folder: Path | None = None) -> None:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.folder = folder or Path(base) / "rollout-orchestrator" / "oci"

    def find(self, name: str) -> StoredImage | None:
        """The image of this name, or in the file or folder of this path; None: it is not in the store."""
        if is_path(name):
            with Archive(Path(name).expanduser()) as archive:
                return self._stored(self._image(archive.digest))
        return self._stored(self._name(name))

    def put(self, archive: Path, name: str | None = None) -> StoredImage:
        """Unpacks an image unless it is there, and calls it `name`. Raises EnvironmentUnusable."""
        with Archive(archive) as found, self._room(), self._alone():
            place = self._image(found.digest)
            if self._stored(place) is None:
                with self._held_draft() as draft:
                    (root := draft / ROOT).mkdir()
                    self._place(draft, place, found.config, found.unpack(root))
            return self._called(place, name)

    @contextmanager
    def draft(self) -> Iterator[Path]:
        """An empty folder beside the images. It is removed at the end, unless it was kept as an image. An OSError
        in the block is an EnvironmentUnusable."""
        with self._room(), ExitStack() as stack:
            with self._alone():
                draft = stack.enter_context(self._held_draft())
            yield draft

    def keep(self, draft: Path, digest: str, config: Mapping[str, Any], size_bytes: int, name: str) -> StoredImage:
        """Makes a draft, with the image's files in ROOT and nothing beside them, an image that is called `name`.
        `digest` says what is in it: an image that is there already stays. Raises OSError, EnvironmentUnusable."""
        with self._alone():
            place = self._image(digest)
            if self._stored(place) is None:
                self._place(draft, place, config, size_bytes)
            return self._called(place, name)

    def base(self, name: str) -> Path:
        """Where the tar of the root file system `name`, which images are built on, is kept."""
        return self.folder / "bases" / f"{quote(name, safe='')}.tar"

    @contextmanager
    def using(self, image: StoredImage) -> Iterator[None]:
        """Within this block, and while this process lives, nobody removes the image. Raises EnvironmentUnusable if
        somebody just has."""
        try:
            file = (image.folder / "image.json").open("rb")
        except OSError as error:
            raise EnvironmentUnusable(f"the image {image.digest[:12]} was removed meanwhile: try again") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                there = os.fstat(file.fileno()).st_nlink > 0
            except BlockingIOError:
                there = False
            if not there:
                raise EnvironmentUnusable(f"the image {image.digest[:12]} was removed meanwhile: try again")
            yield

    def remove_unused(self) -> int:
        """Removes images without a name that nobody uses, and what killed processes left. Returns how many."""
        if not self.folder.exists():
            return 0
        with self._alone():
            named = {place.resolve() for place in self._entries("names")}
            left = [folder for folder in self._entries("images") if folder.resolve() not in named]
            return sum(self._removed(folder) for folder in (*left, *self._entries("drafts")))

    # ------------------------------------------------------------ places

    def _image(self, digest: str) -> Path:
        return self.folder / "images" / digest

    def _name(self, name: str) -> Path:
        return self.folder / "names" / quote(name, safe="").replace(".", "%2E")

    def _entries(self, part: str) -> list[Path]:
        try:
            return list((self.folder / part).iterdir())
        except OSError:
            return []

    def _stored(self, place: Path) -> StoredImage | None:
        try:
            told = json.loads((place / "image.json").read_bytes())
            return StoredImage(
                place.resolve().name, place.resolve(), dict(told["config"]), int(told["size_bytes"])
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    # ------------------------------------------------------------ changes

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Within this block no other process puts or removes images. Raises OSError."""
        (images := self.folder / "images").mkdir(parents=True, exist_ok=True)
        with _locked(images, fcntl.LOCK_EX):
            yield

    @contextmanager
    def _room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EnvironmentUnusable(f"no room for an image in {self.folder}: {error.strerror}") from error

    @contextmanager
    def _held_draft(self) -> Iterator[Path]:
        """Begin it alone: until it is locked, it looks like that of a killed process."""
        draft = self.folder / "drafts" / secrets.token_hex(8)
        draft.mkdir(parents=True)
        try:
            with _locked(draft, fcntl.LOCK_EX):
                yield draft
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _place(self, draft: Path, place: Path, config: Mapping[str, Any], size_bytes: int) -> None:
        _complete(draft / ROOT)
        (draft / "image.json").write_text(json.dumps({"config": config, "size_bytes": size_bytes}))
        if place.exists():  # half removed
            shutil.rmtree(place)
        draft.rename(place)

    def _called(self, place: Path, name: str | None) -> StoredImage:
        if name is not None:
            self._call(place, name)
        image = self._stored(place)
        assert image is not None, "nobody else changes the store"
        return image

    def _call(self, place: Path, name: str) -> None:
        link = self._name(name)
        link.parent.mkdir(parents=True, exist_ok=True)
        draft = link.with_name(f".{secrets.token_hex(8)}")
        draft.symlink_to(place)
        draft.replace(link)

    def _removed(self, folder: Path) -> bool:
        told = folder / "image.json"
        try:
            with _locked(told if told.exists() else folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
                told.unlink(missing_ok=True)  # now it cannot be found any more
                shutil.rmtree(folder)
        except OSError:  # somebody uses it
            return False
        return True


@contextmanager
def _locked(place: Path, how: int) -> Iterator[None]:
    """`place`: a file or a folder. Raises OSError."""
    opened = os.open(place, os.O_RDONLY)
    try:
        fcntl.flock(opened, how)
        yield
    finally:
        os.close(opened)


def _complete(root: Path) -> None:
    """Adds what sandboxes need and an image may lack: places to mount on, and what `localhost` is."""
    root.chmod(0o755)  # whatever this process' umask is: every user of a sandbox passes here
    for target in _MOUNT_POINTS:
        inside(root, target).mkdir(parents=True, exist_ok=True)
    for place in writable_places(MIN_MEMORY_BYTES, UidPair(0, 0)):
        point = inside(root, place.target)
        point.mkdir(parents=True, exist_ok=True)
        point.chmod(place.mode)  # runc gives a tmpfs the mode of the folder below it
    hosts = inside(root, "/etc/hosts")
    if not (hosts.is_file() and hosts.stat().st_size):
        hosts.parent.mkdir(exist_ok=True)
        hosts.write_text(_HOSTS)


def inside(root: Path, target: str) -> Path:
    """The place of the image's `target`. Raises EnvironmentUnusable where links lead elsewhere."""
    place = root.resolve() / target.lstrip("/")
    if place.resolve() != place:
        raise EnvironmentUnusable(
            f"the image's {target} is or lies behind a link: sandboxes need the place itself"
        )
    return place
