"""Reads images from files: what `docker save` writes, and the OCI layout as a folder or a tar file. Untrusted.

The formats: the OCI image specification, `image-layout.md` and `layer.md`, and moby's `docker save`.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol, cast

from orchestrator.errors import EnvironmentUnusable

_CONFIG_BYTES = 4 << 20
_IMAGE_BYTES = 32 << 30
_IMAGE_ENTRIES = 2_000_000
_PIECE_BYTES = 1 << 20
_INDEXES = 8  # an index may name another one
_PERMISSIONS = 0o755  # nothing in a sandbox may change who it is, or write into the image
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"


class Archive(AbstractContextManager["Archive"]):
    """An image in a file or folder. Raises EnvironmentUnusable, also in its methods, for anything that is none.

    `digest`: SHA-256 of its configuration, which names its layers: the id that Docker shows.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with ExitStack() as stack, _reading(path):
            self._files: _Files = _Folder(path) if path.is_dir() else stack.enter_context(_Tar(path))
            config, self._layers = _manifest(self._files)
            content = self._files.read(config)
            self.digest = hashlib.sha256(content).hexdigest()
            told = _object(json.loads(content))
            self.config: dict[str, Any] = dict(told.get("config") or {})
            self._layer_ids = [str(name) for name in _object(told["rootfs"])["diff_ids"]]
            self._stack = stack.pop_all()

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def unpack(self, folder: Path) -> int:
        """Writes the image's files into the empty `folder`. Returns their size in bytes.

        As root with their owners, else all are this user's. No set-uid files, no devices; nothing gets outside of
        `folder`, whatever names and links the layers hold.
        """
        with _reading(self._path):
            if len(self._layers) != len(self._layer_ids):
                raise ValueError("its configuration names other layers")
            directories: dict[str, tarfile.TarInfo] = {}
            room = _Room()
            for layer, layer_id in zip(self._layers, self._layer_ids, strict=True):
                with self._files.open(layer) as file, _uncompressed(file) as plain:
                    # What lies under the image's digest must be what the image's configuration names.
                    if f"sha256:{_hash(plain, room)}" != layer_id:
                        raise ValueError(f"the layer {layer} is not the one that its configuration names")
                    plain.seek(0)
                    _apply(plain, folder, directories, room)
            _close(folder, directories)
            return room.written


def unpack_root(path: Path, folder: Path) -> None:
    """Like `Archive.unpack`, from a tar of one root file system, as mmdebstrap writes it."""
    with _reading(path), path.open("rb") as file:
        directories: dict[str, tarfile.TarInfo] = {}
        _apply(file, folder, directories, _Room())
        _close(folder, directories)


class _Files(Protocol):
    def read(self, name: str) -> bytes:
        """A small file."""

    def open(self, name: str) -> IO[bytes]: ...


@dataclass
class _Folder:
    path: Path

    def open(self, name: str) -> IO[bytes]:
        place = self.path / name
        if not place.resolve().is_relative_to(self.path.resolve()):
            raise ValueError(f"{name} lies outside")
        if place.exists() and not place.is_file():  # a pipe would never end
            raise ValueError(f"{name} is no file")
        return place.open("rb")

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            return _small(file, name)


class _Tar(AbstractContextManager["_Tar"]):
    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_file():
            raise ValueError("it is neither a file nor a folder")
        self._tar = tarfile.open(path)  # noqa: SIM115 - closed by __exit__

    def __exit__(self, *exception: object) -> None:
        self._tar.close()

    def open(self, name: str) -> IO[bytes]:
        file = self._tar.extractfile(str(PurePosixPath(name)))
        if file is None:
            raise ValueError(f"{name} is no file")
        return file

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            return _small(file, name)


def _small(file: IO[bytes], name: str) -> bytes:
    content = file.read(_CONFIG_BYTES + 1)
    if len(content) > _CONFIG_BYTES:
        raise ValueError(f"{name} is too large")
    return content


def _manifest(files: _Files) -> tuple[str, list[str]]:
    """(the configuration's file, the layers' files, the lowest first)."""
    try:
        (image,) = map(_object, json.loads(files.read("manifest.json")))
        return str(image["Config"]), [str(layer) for layer in image["Layers"]]
    except (OSError, KeyError):  # no `docker save`
        pass
    manifests = _object(json.loads(files.read("index.json")))["manifests"]
    for _ in range(_INDEXES):
        if len(manifests) != 1:
            raise ValueError(f"it holds {len(manifests)} images, not one")
        manifest = _object(json.loads(files.read(_blob(manifests[0]))))
        if "manifests" not in manifest:
            return _blob(manifest["config"]), [_blob(layer) for layer in manifest["layers"]]
        manifests = manifest["manifests"]
    raise ValueError("its index leads from one to the next without end")


def _object(told: object) -> dict[str, Any]:
    if not isinstance(told, dict):
        raise TypeError(f"{type(told).__name__} in the place of an object")
    return told


def _blob(told: object) -> str:
    descriptor = _object(told)
    if str(descriptor.get("mediaType", "")).endswith("zstd"):
        raise ValueError("its layers are compressed with zstd: save it with gzip or uncompressed")
    algorithm, _, value = str(descriptor["digest"]).partition(":")
    return f"blobs/{algorithm}/{value}"


# ---------------------------------------------------------------- layers


class _Room:
    """What one image may still take. Raises ValueError when it is used up."""

    def __init__(self) -> None:
        self.read = self.written = self.entries = 0

    def use(self, *, read: int = 0, written: int = 0, entries: int = 0) -> None:
        self.read, self.written, self.entries = self.read + read, self.written + written, self.entries + entries
        if self.read > _IMAGE_BYTES or self.written > _IMAGE_BYTES or self.entries > _IMAGE_ENTRIES:
            raise ValueError(f"it has more than {_IMAGE_BYTES >> 30} GiB or {_IMAGE_ENTRIES} files")


class _Pieces(io.RawIOBase):
    """A file of which nobody may ask for much at a time: names in a tar's headers are read whole, however long."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _PIECE_BYTES:
            raise ValueError("a name in it is too long")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


@contextmanager
def _uncompressed(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """The layer's tar, plain or out of gzip."""
    magic = file.read(2)
    file.seek(0)
    if magic != b"\x1f\x8b":
        yield file
        return
    with gzip.GzipFile(fileobj=file) as plain:
        yield cast("IO[bytes]", plain)


def _hash(file: IO[bytes], room: _Room) -> str:
    """SHA-256 of all that is in the file."""
    digest = hashlib.sha256()
    while chunk := file.read(_PIECE_BYTES):
        room.use(read=len(chunk))
        digest.update(chunk)
    return digest.hexdigest()


def _apply(file: IO[bytes], folder: Path, directories: dict[str, tarfile.TarInfo], room: _Room) -> None:
    """Lays one layer, a plain tar, over what is in `folder`."""
    made: set[str] = set()  # by this layer: an opaque marker hides only what lies below
    with tarfile.open(fileobj=cast("IO[bytes]", _Pieces(file)), mode="r:") as tar:
        for entry in tar:
            room.use(entries=1)
            name = _inside(folder, entry.name)
            place = folder / name
            if name == ".":
                continue
            if place.name == _OPAQUE:
                for child in list(_children(place.parent)):
                    if str(child.relative_to(folder)) not in made:
                        _remove(child)
            elif place.name.startswith(_WHITEOUT):
                hidden = place.name.removeprefix(_WHITEOUT)
                if hidden in ("", ".", ".."):
                    raise ValueError(f"{entry.name} hides no file")
                _remove(place.with_name(hidden))
            elif entry.isreg() or entry.isdir() or entry.issym() or entry.islnk():
                if entry.issparse():
                    raise ValueError(f"{entry.name} is a sparse file")
                made |= {name, *map(str, PurePosixPath(name).parents)}
                room.use(written=entry.size if entry.isreg() else 0)
                _extract(tar, entry, folder, place)
                if entry.isdir():
                    directories[name] = entry


def _extract(tar: tarfile.TarFile, entry: tarfile.TarInfo, folder: Path, place: Path) -> None:
    """Writes one file, folder or link."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if not (entry.isdir() and place.is_dir() and not place.is_symlink()):
        _remove(place)
    if entry.isdir():
        place.mkdir(exist_ok=True)
    elif entry.issym():
        place.symlink_to(entry.linkname)
    elif entry.islnk():
        linked = folder / _inside(folder, entry.linkname)
        if linked.is_symlink() or not linked.is_file():
            raise ValueError(f"{entry.name} is a hard link to no file")
        place.hardlink_to(linked)
    else:
        content = tar.extractfile(entry)
        assert content is not None
        with place.open("xb") as file:
            shutil.copyfileobj(content, file, _PIECE_BYTES)
    if entry.islnk():
        return
    if os.geteuid() == 0:
        os.chown(place, entry.uid, entry.gid, follow_symlinks=False)
    if not entry.issym():
        # A folder stays open to its owner until the last layer is there.
        place.chmod((entry.mode & _PERMISSIONS) | (stat.S_IRWXU if entry.isdir() else 0))


def _close(folder: Path, directories: Mapping[str, tarfile.TarInfo]) -> None:
    """Gives folders their modes, at last, as they may be closed to writing, and their times, which the sandbox's
    packed modules are compared with."""
    for name, entry in sorted(directories.items(), reverse=True):
        place = folder / name
        if place.is_dir() and not place.is_symlink():
            place.chmod(entry.mode & _PERMISSIONS | stat.S_IRWXU)  # or its owner could not remove what is in it
            os.utime(place, (entry.mtime, entry.mtime))


def _inside(folder: Path, name: str) -> str:
    """The entry's name from `folder` on. Raises ValueError where it leads out, also through links of earlier
    entries."""
    plain = PurePosixPath(name.lstrip("/"))
    if ".." in plain.parts or not (folder / plain.parent).resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{name} lies outside")
    return str(plain)


def _children(place: Path) -> Iterator[Path]:
    if place.is_dir() and not place.is_symlink():
        yield from place.iterdir()


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        with suppress(FileNotFoundError):
            place.unlink()


class _reading(AbstractContextManager[None]):
    """Whatever is wrong with the image in this block is an EnvironmentUnusable."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, EnvironmentUnusable) or not isinstance(error, Exception):
            return
        if isinstance(error, OSError) and error.strerror:
            where = f" ({error.filename})" if error.filename not in (None, os.fspath(self._path)) else ""
            raise EnvironmentUnusable(f"image {self._path}: {error.strerror}{where}") from error
        text = " ".join(str(error).split())[:300] or type(error).__name__
        raise EnvironmentUnusable(
            f"image {self._path} is neither what `docker save` writes nor an OCI layout: {text}"
        ) from error
