"""The layers of images, each unpacked once: images share their files, as hard links. Untrusted, as `archive` is.

layers/ID/entries.jsonl   what a layer holds, in order; written last
layers/ID/NUMBER          the content of its entry NUMBER, a file, with its mode and owner

Turned down: an overlay of layers, which each sandbox would have to mount, and a copy of each image.
"""

import errno
import json
import os
import shutil
import stat
import tarfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, NamedTuple, cast

from orchestrator.launch.oci.tar import PIECE_BYTES, Frugal, Layer, entries
from orchestrator.launch.oci.tree import Outside, Tree, remove

_IMAGE_BYTES = 32 << 30
_IMAGE_ENTRIES = 2_000_000
_MOVES = 16 * _IMAGE_ENTRIES  # from folder to folder: deep names in a bad order cost time, not room
_RATIO, _FREE_BYTES = 100, 256 << 20  # a small file may not unpack to more than one of them allows
_NAME_BYTES = 4096  # Linux' limit: a longer path can be opened by nobody
_PERMISSIONS = 0o755  # nothing in a sandbox may change who it is, or write into the image
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_ENTRIES = "entries.jsonl"
_FILE, _FOLDER, _LINK, _SECOND_NAME = "file", "folder", "link", "second name"
_CANNOT_LINK = {errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP}  # too often (65,000 times in ext4), or never


class Room:
    """What one image, stored in `size` bytes, may still take. Raises ValueError when it is used up."""

    def __init__(self, size: int) -> None:
        self._bytes = max(_FREE_BYTES, _RATIO * size)
        self.read = self.written = self.entries = 0

    def allow(self, size: int) -> None:
        """For a layer that is there already: it is no part of what is unpacked."""
        self._bytes += size

    def use(self, tree: Tree | None = None, *, read: int = 0, written: int = 0, entries: int = 0) -> None:
        self.read, self.written, self.entries = self.read + read, self.written + written, self.entries + entries
        folders, moves = (0, 0) if tree is None else (tree.new_folders, tree.moves)
        most = max(self.read, self.written)
        if most > _IMAGE_BYTES or self.entries + folders > _IMAGE_ENTRIES or moves > _MOVES:
            raise ValueError(f"it has more than {_IMAGE_BYTES >> 30} GiB or {_IMAGE_ENTRIES} files")
        if most > self._bytes:
            raise ValueError(f"it unpacks to more than {_RATIO} times its size: save it uncompressed")


class Layers:
    """`folder`: where they are. Nobody else changes them meanwhile. Methods block, and raise OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, layer_id: str) -> Path | None:
        place = self._folder / layer_id.removeprefix("sha256:")
        return place if (place / _ENTRIES).is_file() else None

    def size(self, layer: Path) -> int:
        """The bytes of the files in it."""
        with os.scandir(layer) as files:
            return sum(file.stat(follow_symlinks=False).st_size for file in files)

    def keep(self, layer_id: str, content: Layer, draft: Path) -> Path:
        """Unpacks a layer into the new folder `draft`, and takes that. Raises ValueError if it is hostile, or not
        the layer of this id: what lies under an image's digest must be what the image's configuration names."""
        draft.mkdir(mode=0o700)
        with (draft / _ENTRIES).open("w") as listed:
            for number, (entry, file) in enumerate(_of_tar(content)):
                listed.write(json.dumps(entry) + "\n")
                if file is not None:
                    _write(draft / str(number), entry, file)
        if (is_id := content.digest()) != layer_id:
            raise ValueError(f"a layer is {is_id}, not {layer_id} as its configuration says")
        place = self._folder / layer_id.removeprefix("sha256:")
        self._folder.mkdir(mode=0o700, exist_ok=True)
        remove(place)  # half removed
        draft.rename(place)
        return place

    def remove_all_but(self, used: Collection[str]) -> None:
        """`used`: the ids of layers that images are made of."""
        names = {layer_id.removeprefix("sha256:") for layer_id in used}
        for place in self._folder.iterdir() if self._folder.exists() else ():
            if place.name not in names:
                (place / _ENTRIES).unlink(missing_ok=True)  # now it cannot be found any more
                remove(place)


class _Entry(NamedTuple):
    kind: str
    name: str
    target: str
    mode: int
    uid: int
    gid: int
    time_s: float

    @property
    def owner(self) -> tuple[int, int] | None:
        return (self.uid, self.gid) if os.geteuid() == 0 else None


def _of_tar(content: Layer) -> Iterator[tuple[_Entry, IO[bytes] | None]]:
    """A layer's entries, with what files hold."""
    source = Frugal(cast("IO[bytes]", content))
    with tarfile.open(fileobj=cast("IO[bytes]", source), mode="r:") as tar:
        for count, entry in enumerate(entries(tar, source), 1):
            if count > _IMAGE_ENTRIES:
                raise ValueError(f"a layer has more than {_IMAGE_ENTRIES} files")
            if entry.issparse():
                raise ValueError(f"{entry.name}: it is a sparse file")
            kinds = {
                entry.isreg(): _FILE,
                entry.isdir(): _FOLDER,
                entry.issym(): _LINK,
                entry.islnk(): _SECOND_NAME,
            }
            mode = entry.mode & _PERMISSIONS
            listed = _Entry(
                kinds.get(True, ""), entry.name, entry.linkname, mode, entry.uid, entry.gid, entry.mtime
            )
            yield listed, tar.extractfile(entry) if entry.isreg() else None


def _write(place: Path, entry: _Entry, content: IO[bytes]) -> None:
    with place.open("xb") as file:
        if entry.owner is not None:
            os.fchown(file.fileno(), *entry.owner)
        os.fchmod(file.fileno(), entry.mode)
        shutil.copyfileobj(content, file, PIECE_BYTES)


# ---------------------------------------------------------------- images of layers


def lay(layer: Path, tree: Tree, times: dict[str, float], room: Room) -> None:
    """Lays a layer over what is in the tree. `times`: of folders, by their names without links. Raises ValueError,
    OSError."""
    own_names: set[str] = set()  # by this layer: an opaque marker hides only what lies below
    with (layer / _ENTRIES).open() as listed:
        for number, line in enumerate(listed):
            room.use(entries=1)
            entry = _Entry(*json.loads(line))
            way = _way(entry.name)
            if not way:
                continue
            name = way[-1]
            try:
                folder = tree.enter(way[:-1])
                if name == _OPAQUE:
                    for other in tree.names():
                        if f"{folder}/{other}" not in own_names:
                            tree.remove(other)
                elif name.startswith(_WHITEOUT):
                    hidden = name.removeprefix(_WHITEOUT)
                    if hidden in ("", ".", ".."):
                        raise Outside("it hides no file")
                    tree.remove(hidden)
                elif entry.kind:
                    room.use(written=_lay_entry(entry, layer / str(number), tree, name))
                    place = f"{folder}/{name}"
                    if entry.kind == _FOLDER:
                        times[place.lstrip("/")] = entry.time_s
                    while place and place not in own_names:
                        own_names.add(place)
                        place = place.rpartition("/")[0]
            except Outside as error:
                raise ValueError(f"{entry.name}: {error}") from error
            room.use(tree)


def _lay_entry(entry: _Entry, content: Path, tree: Tree, name: str) -> int:
    """Puts one file, folder or link into the folder where `tree` stands. Returns a file's bytes."""
    if not (entry.kind == _FOLDER and tree.kind(name)[0] == stat.S_IFDIR):
        tree.remove(name)
    if entry.kind == _FOLDER:
        tree.folder(name, entry.mode | stat.S_IRWXU, entry.owner)  # or its owner could not remove what is in it
    elif entry.kind == _LINK:
        tree.link(name, entry.target, entry.owner)
    elif entry.kind == _SECOND_NAME:
        tree.second_name(name, _way(entry.target))
    else:
        try:
            return tree.share(name, content)
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
        with content.open("rb") as file, open(tree.file(name, entry.mode, entry.owner), "wb") as copied:
            shutil.copyfileobj(file, copied, PIECE_BYTES)
            return file.tell()
    return 0


def _way(name: str) -> list[str]:
    """The parts of an entry's name. Raises ValueError where it leads out."""
    way = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in way:
        raise ValueError(f"{name} lies outside")
    if len(os.fsencode(name)) > _NAME_BYTES:
        raise ValueError("a name in it is too long")
    return way
