"""Images without an Engine: each unpacked once into a folder named by its digest, below the user's cache.

images/DIGEST/rootfs/   its files, which sandboxes mount read-only
images/DIGEST/image.json   its configuration; written last
layers/   what images are made of, see `layers`
names/NAME   a link to the image's folder
bases/NAME.tar   a root file system that images are built on
drafts/   what will be an image, locked by the process that makes it
runtimes/   see `launch/runtime_folder`
"""

import fcntl
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, unquote

from orchestrator.errors import EnvironmentUnusable, ImageUnusable
from orchestrator.launch.hardening import CHANNEL_PLACE, writable_places
from orchestrator.launch.image.site import CA_PLACE
from orchestrator.launch.names import RUNTIME_MOUNT, TASK_REPOSITORY, is_path
from orchestrator.launch.oci.archive import Archive
from orchestrator.launch.oci.buildah import remove_build
from orchestrator.launch.oci.layers import Layers
from orchestrator.launch.oci.tree import OPEN, Outside, Tree, remove
from orchestrator.launch.uids import UidPair
from orchestrator.launch.uses import BuiltImage
from orchestrator.types import MIN_MEMORY_BYTES

_ID = re.compile("sha256:([0-9a-f]{64})")
ROOT = "rootfs"  # an image's files, in its folder
_MOUNT_POINTS = ("/proc", "/dev", "/sys", RUNTIME_MOUNT)
_LEFT_BY_BUILDERS = ("hostname", "resolv.conf")  # in /etc: empty files, on which they have mounted theirs
_HOSTS = "127.0.0.1 localhost\n::1 localhost\n"
_MACHINE_ID = f"{'0' * 31}1\n"  # the same in all sandboxes, so that what a program derives from it is


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An unpacked image. `config`: Docker's `Config`, with Env, Entrypoint, Labels, Volumes. `layers`: the ids of
    those that it shares its files with."""

    digest: str
    folder: Path
    config: Mapping[str, Any]
    size_bytes: int
    layers: tuple[str, ...] = ()

    @property
    def root(self) -> Path:
        """Its files."""
        return self.folder / ROOT


class ImageStore:
    """`folder`: where the images are; only this user may enter it. Methods block, for as long as another process
    unpacks an image."""

    def __init__(self, folder: Path | None = None) -> None:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.folder = folder or Path(base) / "rollout-orchestrator" / "oci"
        self._layers = Layers(self.folder / "layers")

    def find(self, name: str) -> StoredImage | None:
        """The image of this name or id, or in the file or folder of this path; None: it is not in the store."""
        if is_path(name):
            with Archive(Path(name).expanduser()) as archive:
                return self._read(self._image(archive.digest))
        if match := _ID.fullmatch(name):
            return self._read(self._image(match[1]))
        return self._read(self._name(name))

    def use(self, image: StoredImage) -> None:
        """Notes that the image is used now, for `remove_unused`. Blocks. Raises EnvironmentUnusable."""
        with self._room():
            os.utime(image.folder / "image.json")

    def put(
        self,
        archive: Path,
        name: str | None = None,
        stand_ins: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> StoredImage:
        """Unpacks an image unless it is there, and calls it `name`. `stand_ins`: as `Archive` has them, of images
        that are in use. Raises EnvironmentUnusable."""
        with Archive(archive, stand_ins) as source, self._room(), self._alone():
            place = self._image(source.digest)
            found = self._read(place)
            if found is not None and "Serving" not in found.config:  # put there by an earlier version
                note = {**json.loads((place / "image.json").read_bytes()), "config": source.config}
                (place / "image.draft").write_text(json.dumps(note))
                (place / "image.draft").rename(place / "image.json")
            if found is None:
                with self._held_draft() as draft:
                    (draft / ROOT).mkdir()
                    size_bytes = source.unpack(draft / ROOT, self._layers, draft / "layer")
                    _complete(draft / ROOT)
                    note = {"config": source.config, "size_bytes": size_bytes, "layers": source.layer_ids}
                    (draft / "image.json").write_text(json.dumps(note))
                    remove(place)  # half removed
                    draft.rename(place)
            if name is not None:
                self._call(place, name)
            image = self._read(place)
            assert image is not None, "nobody else changes the store"
            return image

    def images(self) -> list[StoredImage]:
        """All of them."""
        return [image for folder in self._entries("images") if (image := self._read(folder)) is not None]

    @contextmanager
    def draft(self) -> Iterator[Path]:
        """An empty folder beside the images, which is removed at the end. An OSError in the block is an
        EnvironmentUnusable."""
        with self._room(), ExitStack() as stack:
            with self._alone():
                draft = stack.enter_context(self._held_draft())
            yield draft

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
            in_use = {place.resolve() for place in self._entries("names")}
            leftovers = [folder for folder in self._entries("images") if folder.resolve() not in in_use]
            count = sum(self._try_removal(folder) for folder in (*leftovers, *self._entries("drafts")))
            self._remove_layers()
        return count

    def built(self) -> list[BuiltImage]:
        """The images of tasks' Dockerfiles."""
        named = ((unquote(place.name), place) for place in self._entries("names"))
        return [
            BuiltImage(tag, f"sha256:{image.digest}", (place / "image.json").stat().st_mtime, image.size_bytes)
            for tag, place in named
            if tag.startswith(f"{TASK_REPOSITORY}:") and (image := self._read(place)) is not None
        ]

    def remove(self, images: Sequence[BuiltImage]) -> int:
        """Removes those that nobody uses. Returns how many."""
        if not images:
            return 0
        count = 0
        with self._alone():
            for image in images:
                if self._try_removal(self._image(image.image_id.removeprefix("sha256:"))):
                    self._name(image.tag).unlink()
                    count += 1
            self._remove_layers()
        return count

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

    def _read(self, place: Path) -> StoredImage | None:
        try:
            note = json.loads((place / "image.json").read_bytes())
            layers = tuple(note.get("layers", ()))
            folder = place.resolve()
            return StoredImage(folder.name, folder, dict(note["config"]), int(note["size_bytes"]), layers)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    # ------------------------------------------------------------ changes

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Within this block no other process puts or removes images. Raises OSError."""
        for folder in (self.folder, images := self.folder / "images"):
            _make_private(folder)
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
        _make_private(draft)
        try:
            with _locked(draft, fcntl.LOCK_EX):
                yield draft
        finally:
            if draft.exists():  # it did not become an image
                with suppress(OSError):
                    _remove(draft)

    def _call(self, place: Path, name: str) -> None:
        link = self._name(name)
        _make_private(link.parent)
        draft = link.with_name(f".{secrets.token_hex(8)}")
        draft.symlink_to(place)
        draft.replace(link)

    def _remove_layers(self) -> None:
        """Those that no image is made of."""
        self._layers.remove_all_but({layer for image in self.images() for layer in image.layers})

    def _try_removal(self, folder: Path) -> bool:
        note = folder / "image.json"
        try:
            with _locked(note if note.exists() else folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
                note.unlink(missing_ok=True)  # now it cannot be found any more
                _remove(folder)
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


def _make_private(folder: Path) -> None:
    """Makes a folder that only this user may enter, whatever the umask is, and closes one that is there."""
    for place in (*reversed(folder.parents), folder):
        if not place.exists():
            place.mkdir(mode=0o700, exist_ok=True)
            place.chmod(0o700)
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)


def _remove(folder: Path) -> None:
    """Raises OSError."""
    remove_build(folder)
    remove(folder)


def _complete(root: Path) -> None:
    """Adds what sandboxes need and an image may lack: places to mount on, and what `localhost` is. Raises
    ImageUnusable."""
    points = dict.fromkeys(_MOUNT_POINTS, None) | {
        # runc gives a tmpfs the mode of the folder below it
        place.target: place.mode
        for place in (*writable_places(MIN_MEMORY_BYTES, UidPair(0, 0)), CHANNEL_PLACE)
    }
    with Tree(root) as tree:
        tree.change(OPEN)  # every user of a sandbox passes here
        if tree.kind(CA_PLACE[1:]) == (stat.S_IFREG, 0):  # left by buildah, as those in /etc
            tree.remove(CA_PLACE[1:])
        for target, mode in points.items():
            with _demanding(target):
                tree.enter(target.strip("/").split("/"), links=False)
                tree.change(mode)
        with _demanding("/etc/hosts"):
            tree.enter(["etc"], links=False)
            kind, size = tree.kind("hosts")
            if kind == stat.S_IFLNK:
                raise Outside
            if kind != stat.S_IFREG or not size:
                _write(tree, "hosts", _HOSTS)
            if tree.kind("machine-id")[0] in (0, stat.S_IFREG):
                _write(tree, "machine-id", _MACHINE_ID)
            for name in _LEFT_BY_BUILDERS:
                if tree.kind(name) == (stat.S_IFREG, 0):
                    tree.remove(name)


def _write(tree: Tree, name: str, text: str) -> None:
    tree.remove(name)
    with open(tree.file(name, 0o644), "w") as file:
        file.write(text)


@contextmanager
def _demanding(target: str) -> Iterator[None]:
    try:
        yield
    except Outside:
        raise ImageUnusable(
            f"the image's {target} is or lies behind a link or a file: sandboxes need the place itself"
        ) from None
