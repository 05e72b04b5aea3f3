"""Mends files of lines whose writer ended suddenly. Nothing is thrown away: it is moved aside."""

import os
import shutil
from pathlib import Path
from typing import BinaryIO

from orchestrator.errors import ConfigError, os_error_as
from orchestrator.run.frames import END, NO_LINE, UNCLOSED, PackedEnd, Packer, is_compressed, lines_from, place_of
from orchestrator.run.lines import CHUNK_BYTES, MAX_LINE_BYTES, is_json, last_whole, line_start, sync_folder


def set_torn_end_aside(path: Path) -> int:
    """Moves an unfinished end, left by a killed writer, to `<path>.torn`. Returns its size in bytes.

    That is everything after the last newline, and a last line that is no JSON: after a power loss a line may
    have its length but not its content. A missing file has no such end. Raises ConfigError.
    """
    try:
        if is_compressed(path):
            return _set_packed_end_aside(path)
        with path.open("rb") as file:
            end = _whole_end(file.fileno())
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    return set_end_aside(path, end)


def set_end_aside(path: Path, start: int) -> int:
    """Moves everything from offset `start` on to `<path>.torn`. Returns its size in bytes. Raises ConfigError."""
    with os_error_as(ConfigError, f"cannot repair {path}"):
        if is_compressed(path):
            return _set_packed_end_aside(path, start)
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if start == size:
                return 0
            with Path(f"{path}.torn").open("ab") as aside:
                file.seek(start)
                shutil.copyfileobj(file, aside, CHUNK_BYTES)
                if os.pread(file.fileno(), 1, size - 1) != b"\n":
                    aside.write(b"\n")
                aside.flush()
                os.fsync(aside.fileno())
            file.truncate(start)
            return size - start


def _whole_end(fd: int) -> int:
    """Offset after the last complete line."""
    end = line_start(fd, os.fstat(fd).st_size)
    if end == 0:
        return 0
    start = line_start(fd, end - 1)
    return end if is_json(os.pread(fd, min(end - start, MAX_LINE_BYTES + 1), start)) else start


def _set_packed_end_aside(path: Path, before: int | None = None) -> int:
    """Moves what stands behind the complete lines aside, unpacked where it can be, and closes their frame. Returns
    how many bytes the file lost. Raises OSError."""
    with path.open("r+b") as file:
        end, size = last_whole(file, before), os.fstat(file.fileno()).st_size
        if size > end.offset or not end.is_exact:
            _keep_aside(file, path, end)
        if not end.is_exact:
            _pack_again(file, path, end)
            return size - path.stat().st_size
        file.truncate(end.offset)
        if not end.closed:
            file.seek(end.offset)
            file.write(END)
    return size - end.offset


def _keep_aside(file: BinaryIO, path: Path, end: PackedEnd) -> None:
    """What can be unpacked goes to `<path>.torn`, and if there is damage, the bytes as they are to `.damaged`."""
    rest = [line.text for line in lines_from(file, MAX_LINE_BYTES, end.place) if line.text != UNCLOSED]
    unpacked = b"".join(text for text in rest if not text.startswith(NO_LINE))
    if unpacked:
        with Path(f"{path}.torn").open("ab") as aside:
            aside.write(unpacked if unpacked.endswith(b"\n") else unpacked + b"\n")
            aside.flush()
            os.fsync(aside.fileno())
    if len(unpacked) != sum(map(len, rest)) or not rest:
        with Path(f"{path}.damaged").open("ab") as raw:
            file.seek(end.offset)
            shutil.copyfileobj(file, raw, CHUNK_BYTES)
            raw.flush()
            os.fsync(raw.fileno())


def _pack_again(file: BinaryIO, path: Path, end: PackedEnd) -> None:
    """Ends a file behind a line at which it cannot be cut, as another program has packed it: the lines of that
    frame are packed anew. The file is replaced whole."""
    assert end.last is not None
    first, packer = place_of(end.last.frame), Packer()
    draft = path.with_name(path.name + ".part")
    with draft.open("wb") as whole:
        file.seek(0)
        left = end.last.frame
        while left and (chunk := file.read(min(left, CHUNK_BYTES))):
            whole.write(chunk)
            left -= len(chunk)
        for line in lines_from(file, MAX_LINE_BYTES, first):
            if line.place > end.last.place:
                break
            whole.write(packer.packed([line.text]))
        whole.write(packer.closed())
        whole.flush()
        os.fsync(whole.fileno())
    draft.replace(path)
    sync_folder(path.parent)
