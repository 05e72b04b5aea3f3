"""Lines that are compressed one by one: each is a zstd frame, and the frames follow each other.

So a killed writer loses one line at most, each line can be read alone, and `zstdcat` gives the plain file. A file
may come from anybody: what a frame unpacks to is bounded, whatever it says of itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

if sys.version_info >= (3, 14):
    from compression.zstd import CompressionParameter, ZstdCompressor, ZstdDecompressor, ZstdError
else:
    from backports.zstd import CompressionParameter, ZstdCompressor, ZstdDecompressor, ZstdError

SUFFIX = ".zst"
_LEVEL = 9
_MAGIC = b"\x28\xb5\x2f\xfd"
_CHUNK_BYTES = 1 << 16
_BROKEN = b"no whole zstd frame"
_PARAMETERS: dict[int, int] = {
    CompressionParameter.compression_level: _LEVEL,
    CompressionParameter.checksum_flag: 1,
}


@dataclass(frozen=True, slots=True)
class Frame:
    """The frame from `offset` to `end`, in bytes of the file. `whole`: all of it is there, intact, and no longer
    than the limit. `text`: what it unpacks to; of a frame that is not whole, words that no reader takes for a line.
    """

    offset: int
    end: int
    text: bytes
    whole: bool


def is_compressed(path: Path) -> bool:
    """Whether lines of this file are compressed: its name says it."""
    return path.suffix == SUFFIX


def compressed(line: bytes) -> bytes:
    """The frame of one line."""
    packer = ZstdCompressor(options=_PARAMETERS)
    return packer.compress(line, ZstdCompressor.FLUSH_FRAME)


def frames(file: BinaryIO, limit: int, offset: int = 0) -> Iterator[Frame]:
    """All frames from `offset` on. What stands between a broken frame and the next one is one more frame, which is
    not whole. Raises OSError."""
    while (frame := frame_at(file, limit, offset)) is not None:
        yield frame
        offset = frame.end


def frame_at(file: BinaryIO, limit: int, offset: int) -> Frame | None:
    """The frame that begins at `offset`; None where the file ends. Raises OSError."""
    unpacker, text, read = ZstdDecompressor(), bytearray(), offset
    file.seek(offset)
    try:
        while not unpacker.eof:
            packed = file.read(_CHUNK_BYTES) if unpacker.needs_input else b""
            if unpacker.needs_input and not packed:
                return Frame(offset, read, _BROKEN, whole=False) if read > offset else None
            read += len(packed)
            text += unpacker.decompress(packed, max_length=_CHUNK_BYTES)
            if len(text) > limit:
                raise ZstdError("longer than any line")
    except ZstdError:
        return Frame(offset, next_frame(file, offset), _BROKEN, whole=False)
    return Frame(offset, read - len(unpacker.unused_data), bytes(text), whole=True)


def whole_end(path: Path, limit: int) -> int:
    """Where the last whole frame ends. Reads the whole file. Raises OSError."""
    end = 0
    with path.open("rb") as file:
        for frame in frames(file, limit):
            end = frame.end if frame.whole else end
    return end


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
