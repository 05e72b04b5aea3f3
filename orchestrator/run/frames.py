"""Compressed lines: zstd frames of a few lines each. `zstdcat` gives the plain file.

A frame is flushed after each line, so a killed writer loses one line at most. The lines of a frame share what they
repeat, which halves the file; they are few, so that any line can be read without the rest of the file. The format
is that of RFC 8878. No checksums are written: a frame without one can be closed wherever a line ends, which mends
what a killed writer left.

A file may come from anybody. It is unpacked block by block, each at most 128 KiB, so nothing it says fills the
memory.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

if sys.version_info >= (3, 14):
    from compression.zstd import ZstdCompressor, ZstdDecompressor, ZstdError
else:
    from backports.zstd import ZstdCompressor, ZstdDecompressor, ZstdError

SUFFIX = ".zst"
END = b"\x01\x00\x00"  # an empty last block: closes a frame
NO_LINE = b"no line: this part of the file is damaged"
UNCLOSED = b"no line: the file ends in the middle of a frame"
_LEVEL = 3
_LINES = 16  # of a frame that is written
_FRAME_BYTES = 4 << 20  # of text: a longer frame is closed earlier
_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPED = range(0x184D2A50, 0x184D2A60)  # magic numbers of frames without data
_MOST_TIMES, _MOST_MORE = (
    1000,
    256 << 10,
)  # the longest text of a frame: this many times its size, plus these bytes
INDEX_BITS = 24
_CHUNK_BYTES = 1 << 20
_BLOCK_BYTES = 128 << 10  # what the format allows
_EMPTY_BLOCKS = 100  # in a row: zeros, which a loss of power leaves, look like them
_RLE = 1  # the kind of a block


@dataclass(frozen=True, slots=True)
class PackedLine:
    """A line, or at last what stands behind the last newline; where that is nothing and the frame is not closed,
    UNCLOSED. `place` is its frame's offset and its number in the frame, as one number that grows along the file.

    `start`, `end`: bytes of the file; `exact`: they are, and the file can be cut there, as in frames of ours.
    """

    frame: int
    index: int
    text: bytes
    start: int
    end: int
    exact: bool = True

    @property
    def place(self) -> int:
        return place_of(self.frame, self.index)

    @property
    def following(self) -> int:
        """The place of the next line."""
        return place_of(self.frame, self.index + 1)


@dataclass(frozen=True, slots=True)
class PackedEnd:
    """Where the complete lines of a file end: behind the line `last`, at `offset` bytes. `closed`: so does a
    frame. `place`: of the line that would follow."""

    last: PackedLine | None
    offset: int
    closed: bool

    @property
    def is_exact(self) -> bool:
        """Whether the file can be cut there."""
        return self.last is None or self.closed or self.last.exact

    @property
    def place(self) -> int:
        return self.last.following if self.last is not None and not self.closed else place_of(self.offset)


def place_of(frame: int, index: int = 0) -> int:
    """A place in a compressed file."""
    return frame << INDEX_BITS | index


def is_compressed(path: Path) -> bool:
    """Whether lines of this file are compressed: its name says it."""
    return path.suffix == SUFFIX


class Packer:
    """Packs the lines that are appended to one file."""

    def __init__(self) -> None:
        self._frame: ZstdCompressor | None = None
        self._lines = self._bytes = 0  # in the frame
        self._unclosed = False  # the file ends in a frame that is given up

    def packed(self, lines: list[bytes]) -> bytes:
        """What to append for these lines."""
        made = bytearray(END if self._unclosed else b"")
        self._unclosed = False
        for line in lines:
            frame = self._frame = self._frame or ZstdCompressor(level=_LEVEL)
            self._lines += 1
            self._bytes += len(line)
            if self._lines < _LINES and self._bytes < _FRAME_BYTES:
                made += frame.compress(line, ZstdCompressor.FLUSH_BLOCK)
            else:
                made += frame.compress(line, ZstdCompressor.FLUSH_FRAME)
                self._begin()
        return bytes(made)

    def closed(self) -> bytes:
        """What to append at the end."""
        made = END if self._unclosed or self._frame is not None else b""
        self._begin()
        self._unclosed = False
        return made

    @property
    def is_open(self) -> bool:
        """Whether the file ends in an open frame."""
        return self._unclosed or self._frame is not None

    def lost(self, *, was_open: bool) -> None:
        """What was packed last is not in the file. `was_open`: as the file was before."""
        self._begin()
        self._unclosed = was_open

    def _begin(self) -> None:
        self._frame, self._lines, self._bytes = None, 0, 0


def squeezed(text: bytes) -> bytes:
    """A text as one frame, of no file."""
    return ZstdCompressor(level=1).compress(text, ZstdCompressor.FLUSH_FRAME)


def unsqueezed(frame: bytes) -> bytes:
    """The inverse of `squeezed`. Raises ZstdError."""
    return ZstdDecompressor().decompress(frame)


def lines_from(file: BinaryIO, limit: int, place: int = 0) -> Iterator[PackedLine]:
    """Every line from `place` on. A line over `limit` bytes is a NO_LINE, and so is a damaged part, behind which
    it goes on with the next frame. Raises OSError."""
    offset, first = place >> INDEX_BITS, place & ((1 << INDEX_BITS) - 1)
    while True:
        frame = _Frame(file, offset, limit)
        for line in frame.lines():
            if line.index >= first:
                yield line
        if frame.end is None:
            return
        offset, first = frame.end, 0


def line_at(file: BinaryIO, limit: int, place: int) -> bytes:
    """The line at `place`; empty if there is none. Raises OSError."""
    frame = _Frame(file, place >> INDEX_BITS, limit)
    wanted = place & ((1 << INDEX_BITS) - 1)
    return next((line.text for line in frame.lines() if line.index == wanted), b"")


def packed_end(file: BinaryIO, limit: int, before: int | None = None) -> PackedEnd:
    """Where the complete lines end, or those before a place; damaged parts at the end are none. Reads the whole
    file. Raises OSError."""
    end, offset = PackedEnd(None, 0, closed=True), 0
    while True:
        frame, damaged = _Frame(file, offset, limit), False
        last: PackedLine | None = None
        for line in frame.lines():
            if before is not None and line.place >= before:
                return end if last is None else PackedEnd(last, last.end, closed=False)
            if line.text.endswith(b"\n") and not line.text.startswith(NO_LINE):
                last = line
            else:
                damaged = True
        complete = frame.end is not None and not damaged
        if last is not None:
            end = PackedEnd(last, frame.end if complete and frame.end else last.end, closed=complete)
        elif complete and frame.end is not None and end.closed and end.offset == offset:
            end = PackedEnd(end.last, frame.end, closed=True)
        if frame.end is None:
            return end
        offset = frame.end


def next_frame(file: BinaryIO, behind: int) -> int:
    """Where the first frame begins behind this offset, or the file ends. Raises OSError."""
    offset = behind + 1
    while True:
        chunk = os.pread(file.fileno(), _CHUNK_BYTES, offset)
        if (place := chunk.find(_MAGIC)) >= 0:
            return offset + place
        if len(chunk) < len(_MAGIC):
            return offset + len(chunk)
        offset += len(chunk) - len(_MAGIC) + 1


class _Frame:
    """One frame of a file. When its lines are read, `end` is where the next one begins; None: the file ends."""

    def __init__(self, file: BinaryIO, offset: int, limit: int) -> None:
        self.end: int | None = None
        self._begun = False  # something of it is there
        self._file, self._offset, self._limit = file, offset, limit

    def lines(self) -> Iterator[PackedLine]:
        index, start, end, pending, too_long = 0, self._offset, self._offset, bytearray(), False
        try:
            for text, end in self._pieces():
                *complete, rest = text.split(b"\n")
                for number, part in enumerate(complete, 1):
                    pending += part
                    line = NO_LINE if too_long or len(pending) > self._limit else bytes(pending)
                    exact = number == len(complete) == 1 and not rest
                    yield PackedLine(self._offset, index, line + b"\n", start, end, exact)
                    index, start, too_long = index + 1, end, False
                    pending.clear()
                pending += rest
                if len(pending) > self._limit:
                    too_long = True
                    pending.clear()
        except (ZstdError, _Damaged):
            yield PackedLine(self._offset, index, NO_LINE + b"\n", start, end)
            # Nothing is read twice, so a file made for it takes no longer than others.
            self.end = next_frame(self._file, max(self._offset, self._file.tell() - 1))
            return
        if pending or too_long:
            yield PackedLine(self._offset, index, NO_LINE if too_long else bytes(pending), start, end)
        elif self.end is None and self._begun:
            yield PackedLine(self._offset, index, UNCLOSED, start, end)

    def _pieces(self) -> Iterator[tuple[bytes, int]]:
        """(text of a block, where the block ends). Raises ZstdError, _Damaged."""
        file = self._file
        file.seek(self._offset)
        head = file.read(5)
        self._begun = bool(head)
        if not head or _is_cut(head, 5):
            return
        if int.from_bytes(head[:4], "little") in _SKIPPED:
            size = int.from_bytes(head[4:] + file.read(3), "little")
            self.end = file.seek(size, os.SEEK_CUR)
            return
        if not head.startswith(_MAGIC):
            raise _Damaged
        kinds = head[4]
        single, summed = kinds >> 5 & 1, kinds >> 2 & 1
        size_bytes = (single, 2, 4, 8)[kinds >> 6]
        rest = file.read(1 - single + (0, 1, 2, 4)[kinds & 3] + size_bytes)
        unpacker, offset = ZstdDecompressor(), self._offset + 5 + len(rest)
        unpacker.decompress(head + rest)
        last, empty, text_bytes = False, 0, 0
        while not last:
            head = file.read(3)
            if len(head) < 3:
                return
            header = int.from_bytes(head, "little")
            last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
            empty = empty + 1 if size == 0 else 0
            if size > _BLOCK_BYTES or empty > _EMPTY_BLOCKS:
                raise _Damaged
            block = file.read(1 if kind == _RLE else size)
            if len(block) < (1 if kind == _RLE else size):
                return
            offset += 3 + len(block)
            total = b""
            if last and summed:
                total = file.read(4)
                offset += 4
            text = unpacker.decompress(head + block + total)
            text_bytes += len(text)
            if text_bytes > _MOST_TIMES * (offset - self._offset) + _MOST_MORE:
                raise _Damaged
            if last:
                self.end = offset
            yield text, offset


class _Damaged(Exception):
    """No frame begins here."""


def _is_cut(head: bytes, size: int) -> bool:
    """Whether a frame begins here that the end of the file cuts short."""
    return len(head) < size and (_MAGIC.startswith(head[:4]) or head.startswith(_MAGIC))
