"""Reads tar files that may be hostile: in one pass, and never more at a time than a bounded piece."""

import bz2
import gzip
import hashlib
import io
import lzma
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from typing import IO, Any

PIECE_BYTES = 1 << 20
_HEADER_BYTES = 1 << 20  # of one entry: names, extended headers and maps of sparse files are read whole
_OPENERS: Mapping[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ": lzma.LZMAFile,
}
_ZSTD = b"\x28\xb5\x2f\xfd"


class Frugal(io.RawIOBase):
    """A file of which only `left` bytes may be read until that is set anew: tarfile reads the headers of an entry
    whole, however long they are."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.left: float = _HEADER_BYTES

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self.left:
            raise ValueError("a name in it is too long")
        self.left -= size
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


class Layer(io.RawIOBase):
    """A layer's content, which is read once, from its beginning on. `count` is told of the bytes that are read."""

    def __init__(self, file: IO[bytes], count: Callable[[int], None]) -> None:
        self._file, self._count = file, count
        self._hash = hashlib.sha256()
        self._offset = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def read(self, size: int = -1) -> bytes:
        content = self._file.read(size)
        self._offset += len(content)
        self._hash.update(content)
        self._count(len(content))
        return content

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence != os.SEEK_SET or offset < self._offset:
            raise ValueError("its entries are not one after the other")
        while self._offset < offset and self.read(min(offset - self._offset, PIECE_BYTES)):
            pass
        return self._offset

    def digest(self) -> str:
        """Of all that is in it."""
        while self.read(PIECE_BYTES):
            pass
        return f"sha256:{self._hash.hexdigest()}"


def uncompressed(file: IO[bytes]) -> AbstractContextManager[IO[bytes]]:
    """The content of a file that may be compressed."""
    magic = file.read(max(map(len, (*_OPENERS, _ZSTD))))
    file.seek(0)
    if magic.startswith(_ZSTD):
        raise ValueError("it is compressed with zstd: save it with gzip or uncompressed")
    opener = next((opener for start, opener in _OPENERS.items() if magic.startswith(start)), None)
    return nullcontext(file) if opener is None else closing(opener(file))


def entries(tar: tarfile.TarFile, source: Frugal) -> Iterator[tarfile.TarInfo]:
    """One after the other; none is kept. While one is looked at, its content can be read."""
    while (entry := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]
        if entry.size < 0:  # it would lead back
            raise ValueError(f"{entry.name} has no size")
        source.left = entry.size
        yield entry
        source.left = _HEADER_BYTES
