"""Reads images from files: what `docker save` writes, and the OCI layout as a folder or a tar file. Untrusted.

The formats: the OCI image specification, `image-layout.md` and `layer.md`, and moby's `docker save`. There are
tools for this. But umoci 0.4.7 and skopeo 1.9 set no bound to what an image unpacks to, make its devices and its
set-uid programs, and take 38 s for a folder 1,450 deep.
"""

import errno
import hashlib
import json
import math
import os
import re
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import IO, Any, cast

from orchestrator.errors import EnvironmentUnusable, ImageUnusable
from orchestrator.launch.image.facts import UNUSED, unfit
from orchestrator.launch.oci.layers import Layers, Room, lay
from orchestrator.launch.oci.tar import PIECE_BYTES, Frugal, Layer, entries, uncompressed
from orchestrator.launch.oci.tree import Outside, Tree
from orchestrator.rules.text import printable

_CONFIG_BYTES = 4 << 20
_DIGEST = re.compile("sha256:[0-9a-f]{64}")
_FILES = 10_000  # in the outer tar
_RATIO, _FREE_BYTES = 100, 256 << 20  # a small file may not unpack to more than one of them allows
_NAME_BYTES = 4096  # Linux' limit: a longer path can be opened by nobody
_INDEXES = 8  # an index may name another one
_PERMISSIONS = 0o755  # nothing in a sandbox may change who it is, or write into the image
# What the system says of a file that is not there or may not be read, and of names and sizes in an image.
_OF_THE_IMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EINVAL}
_OF_THE_IMAGE |= {errno.ELOOP, errno.ENAMETOOLONG, errno.EMLINK}


class Archive(AbstractContextManager["Archive"]):
    """An image in a file or folder. Raises ImageUnusable, also in its methods, if it is not an image, and
    EnvironmentUnusable where this machine fails.

    `digest`: SHA-256 of its configuration, which names its layers: the id that Docker shows. `config`: the parts
    of it that sandboxes use. `layer_ids`: of its layers' content, the lowest first. `stand_ins`: a lowest layer →
    those that it stands for, which `unpack` finds among `layers`.
    """

    def __init__(self, path: Path, stand_ins: Mapping[str, Sequence[str]] = MappingProxyType({})) -> None:
        self._path = path
        with ExitStack() as stack, _reading(path):
            self._files = _Folder(path) if path.is_dir() else stack.enter_context(_Tar(path))
            content, self._layers = _with_layers(*_manifest(self._files), stand_ins)
            self.digest = hashlib.sha256(content).hexdigest()
            data = _object(json.loads(content))
            self.config = _used(_object(data.get("config") or {}))
            self.layer_ids = _texts(_object(data["rootfs"])["diff_ids"])
            described = {"Os": data.get("os"), "Architecture": data.get("architecture")}
            if problem := unfit(os.fspath(path), {**described, "RootFS": {"Layers": self.layer_ids}}):
                raise ImageUnusable(problem)
            self._stack = stack.pop_all()

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def unpack(self, folder: Path, layers: Layers, draft: Path) -> int:
        """Puts the image's files into the empty `folder`, by way of `layers`. `draft`: where nothing is yet.
        Returns their size in bytes.

        As root with their owners, else all are this user's. No set-uid files, no devices, no extended attributes;
        nothing gets outside of `folder`, whatever names and links the layers hold.
        """
        with _reading(self._path), Tree(folder) as tree:
            if len(self._layers) != len(self.layer_ids):
                raise ValueError("its configuration names other layers")
            if not all(map(_DIGEST.fullmatch, self.layer_ids)):
                raise ValueError("its configuration names layers by no SHA-256")
            room = Room(sum(self._files.size(layer) for layer in set(self._layers) if layer))
            times: dict[str, float] = {}
            for layer, layer_id in zip(self._layers, self.layer_ids, strict=True):
                kept = layers.find(layer_id)
                if not layer:
                    if kept is None:
                        raise ValueError("the image that it was built on was removed meanwhile")
                    room.allow(layers.size(kept))
                elif kept is None:
                    with self._files.open(layer) as file, uncompressed(file) as plain:
                        kept = layers.keep(layer_id, Layer(plain, lambda size: room.use(read=size)), draft)
                lay(kept, tree, times, room)
            # At last, as each file in a folder changes it. The sandbox's packed modules are compared with them.
            for way, time_s in sorted(times.items()):
                try:
                    tree.enter(way.split("/"), make=False, links=False)
                except (Outside, FileNotFoundError):  # a later layer has put something else in its place
                    continue
                tree.change(time_s=time_s)
                room.use(tree)
            return room.written


# ---------------------------------------------------------------- files of an archive


class _Folder:
    def __init__(self, path: Path) -> None:
        self._path = path

    def size(self, name: str) -> int:
        return (self._path / name).stat().st_size

    def open(self, name: str) -> IO[bytes]:
        place = self._path / name
        if not place.resolve().is_relative_to(self._path.resolve()):
            raise ValueError(f"{name} lies outside")
        if place.exists() and not place.is_file():  # a pipe would never end
            raise ValueError(f"{name} is not a file")
        return place.open("rb")


class _Tar(AbstractContextManager["_Tar"]):
    """A tar file, perhaps compressed: then its content is kept in a temporary file meanwhile."""

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_file():  # a pipe would never end
            raise ValueError("it is neither a file nor a folder")
        with ExitStack() as stack:
            file: IO[bytes] = stack.enter_context(path.open("rb"))
            room = Room(path.stat().st_size)
            with uncompressed(file) as plain:
                if plain is not file:
                    file = stack.enter_context(tempfile.TemporaryFile())
                    while piece := plain.read(PIECE_BYTES):
                        room.use(read=len(piece))
                        file.write(piece)
                    file.seek(0)
            source = Frugal(file)
            self._tar = stack.enter_context(tarfile.open(fileobj=cast("IO[bytes]", source), mode="r:"))
            self._entries: dict[str, tarfile.TarInfo] = {}
            for number, entry in enumerate(entries(self._tar, source)):
                if number == _FILES:
                    raise ValueError(f"it holds more than {_FILES} files")
                self._entries[str(PurePosixPath(entry.name))] = entry
            source.left = math.inf
            self._stack = stack.pop_all()

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def size(self, name: str) -> int:
        return self._file(name).size

    def open(self, name: str) -> IO[bytes]:
        content = self._tar.extractfile(self._file(name))
        assert content is not None
        return content

    def _file(self, name: str) -> tarfile.TarInfo:
        """`docker save` writes a layer once, and links in the place of the others."""
        place = PurePosixPath(name)
        for _ in range(_INDEXES):
            entry = self._entries.get(os.path.normpath(place))
            if entry is None:
                raise KeyError(f"it has no file {name}")
            if entry.issym():
                place = PurePosixPath(place.parent, entry.linkname)
            elif entry.islnk():
                place = PurePosixPath(entry.linkname)
            elif entry.isreg() and not entry.issparse():
                return entry
            else:
                break
        raise ValueError(f"{name} is not a file")


def _small(files: _Folder | _Tar, name: str) -> bytes:
    with files.open(name) as file:
        content = file.read(_CONFIG_BYTES + 1)
    if len(content) > _CONFIG_BYTES:
        raise ValueError(f"{name} is too large")
    return content


def _manifest(files: _Folder | _Tar) -> tuple[bytes, list[str]]:
    """(the configuration, the layers' files, the lowest first)."""
    try:
        (image,) = map(_object, json.loads(_small(files, "manifest.json")))
        return _small(files, str(image["Config"])), _texts(image["Layers"])
    except (FileNotFoundError, KeyError):  # not `docker save`
        pass
    manifests = _object(json.loads(_small(files, "index.json")))["manifests"]
    for _ in range(_INDEXES):
        if len(manifests) != 1:
            raise ValueError(f"it holds {len(manifests)} images, not one")
        content = _small(files, _blob(manifests[0]))
        manifest = _object(json.loads(content))
        if "manifests" not in manifest:
            _demand_digest(content, manifests[0])
            config = _small(files, _blob(manifest["config"]))
            _demand_digest(config, manifest["config"])
            return config, [_blob(layer) for layer in manifest["layers"]]
        manifests = manifest["manifests"]
    raise ValueError("its index leads from one to the next without end")


def _with_layers(
    content: bytes, layers: list[str], stand_ins: Mapping[str, Sequence[str]]
) -> tuple[bytes, list[str]]:
    """The same where the lowest layer is none that stands in; else with those in its place: they have no files."""
    image = _object(json.loads(content))
    ids = _texts(_object(image["rootfs"])["diff_ids"]) if stand_ins else []
    if not ids or ids[0] not in stand_ins:
        return content, layers
    below = stand_ins[ids[0]]
    image["rootfs"]["diff_ids"] = [*below, *ids[1:]]
    return json.dumps(image).encode(), [*("" for _ in below), *layers[1:]]


def _object(data: object) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise TypeError(f"an object was expected, not a {type(data).__name__}")
    return data


def _texts(data: object) -> list[str]:
    if not isinstance(data, list) or not all(isinstance(text, str) for text in data):
        raise TypeError("a list of texts was expected")
    return data


def _used(config: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of Docker's `Config` that sandboxes use, of their right types."""
    labels = _object(config.get("Labels") or {})
    own = {name: config[name] for name in ("User", "WorkingDir") if config.get(name)}
    return {
        **{name: True for name in UNUSED if config.get(name)},  # to be told of
        "Serving": _serving(config),
        "Env": _texts(config.get("Env") or []),
        "Entrypoint": _texts(config.get("Entrypoint") or []),
        "Labels": dict(zip(labels, _texts(list(labels.values())), strict=True)),
        "Volumes": {place: {} for place in _object(config.get("Volumes") or {})},
        **dict(zip(own, _texts(list(own.values())), strict=True)),
    }


def _serving(config: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a service of it: nothing of it is used where an agent works, so an odd one refuses no image."""
    ports, check = config.get("ExposedPorts"), config.get("Healthcheck")
    check = check if isinstance(check, dict) else {}
    times = ("Interval", "Timeout", "StartPeriod", "StartInterval", "Retries")
    return {
        "Cmd": _words(config.get("Cmd")),
        "ExposedPorts": list(ports) if isinstance(ports, dict) else [],
        "Healthcheck": {
            "Test": _words(check.get("Test")),
            **{name: check[name] for name in times if isinstance(check.get(name), int)},
        },
    }


def _words(data: object) -> list[str]:
    return data if isinstance(data, list) and all(isinstance(word, str) for word in data) else []


def _blob(data: object) -> str:
    descriptor = _object(data)
    if str(descriptor.get("mediaType", "")).endswith("zstd"):
        raise ValueError("its layers are compressed with zstd: save it with gzip or uncompressed")
    algorithm, _, value = str(descriptor["digest"]).partition(":")
    return f"blobs/{algorithm}/{value}"


def _demand_digest(content: bytes, descriptor: Mapping[str, Any]) -> None:
    algorithm, _, value = str(descriptor["digest"]).partition(":")
    if algorithm not in ("sha256", "sha512") or hashlib.new(algorithm, content).hexdigest() != value:
        raise ValueError(f"what it holds as {descriptor['digest']} is something else")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever is wrong with the image in this block is an ImageUnusable, and a failure of the machine an
    EnvironmentUnusable."""
    try:
        yield
    except EnvironmentUnusable:
        raise
    except Exception as error:
        name = printable(os.fspath(path), "?")
        if isinstance(error, OSError) and error.strerror:
            where = f" ({error.filename})" if error.filename not in (None, os.fspath(path)) else ""
            reason = printable(error.strerror + where, "?")[:300]
        else:
            text = printable(" ".join(str(error).split()), "?")[:300] or type(error).__name__
            reason = f"it is neither what `docker save` writes nor an OCI layout: {text}"
        of_machine = isinstance(error, MemoryError) or (
            isinstance(error, OSError) and error.errno is not None and error.errno not in _OF_THE_IMAGE
        )
        raise (EnvironmentUnusable if of_machine else ImageUnusable)(f"image {name}: {reason}") from error
