"""Puts the task's files where model-written code can read but not change them."""

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from rollout_api.v1 import sandbox_pb2 as pb

from sandbox.errors import EpisodeCrashed

_MAX_NAME_BYTES = 255


def receive_attachments(
    responses: Iterable[pb.ParkResponse], files: Sequence[pb.AttachmentFile], directory: Path
) -> tuple[Path, ...]:
    """Writes the chunks that follow an assignment, up to Start. Raises EpisodeCrashed."""
    written = [0] * len(files)
    try:
        with ExitStack() as stack:
            places = tuple(_place(file.name, directory) for file in files)
            opened = [stack.enter_context(_create(place)) for place in places]
            for response in responses:
                match response.WhichOneof("item"):
                    case "chunk":
                        index, content = response.chunk.index, response.chunk.content
                        if index >= len(files) or written[index] + len(content) > files[index].size_bytes:
                            raise EpisodeCrashed("an attachment is longer than announced")
                        written[index] += opened[index].write(content)
                    case "start":
                        break
                    case other:
                        raise EpisodeCrashed(f"unexpected {other} among the attachments")
            else:
                raise EpisodeCrashed("the assignment ended before its start")
    except OSError as error:
        raise EpisodeCrashed(f"cannot write an attachment: {error.strerror}") from error
    if written != [file.size_bytes for file in files]:
        raise EpisodeCrashed("an attachment is shorter than announced")
    return places


def _place(name: str, directory: Path) -> Path:
    fits = 0 < len(name.encode("utf-8", "surrogatepass")) <= _MAX_NAME_BYTES
    if not fits or name in (".", "..") or "/" in name or "\0" in name:
        raise EpisodeCrashed(f"an attachment cannot be called {name[:80]!r}")
    return directory / name


def _create(place: Path) -> BinaryIO:
    fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o444)
    os.fchmod(fd, 0o444)  # whatever the umask
    return open(fd, "wb")
