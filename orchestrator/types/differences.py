"""What an agent changed of its sandbox's root."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

ChangeKind = Literal["added", "changed", "removed"]
# Why something is not among the changes: it is a device, a pipe or a socket; its name is no text, or marks what a
# layer removes; it is a link that leads out; a file too large for what is left of the bytes; too deep a folder.
# `unreadable`: this user may not open it. `more`: nobody looked. `set_id`: the file is there, without this bit.
LeftOut = Literal["device", "pipe", "socket", "name", "link", "size", "depth", "unreadable", "more", "set_id"]


@dataclass(frozen=True, slots=True)
class Change:
    """One file, link or folder. `path`: absolute, in the sandbox; of folders it ends with `/`. `mode`: its
    permissions. Of what was removed, size and mode are 0.

    A folder that was removed and made again is there twice, as `removed` with all that was in it, and as `added`.
    `diff`: from the image's text to this one, in unified form; None: it is no text, or too long.
    """

    path: str
    kind: ChangeKind
    size_bytes: int = 0
    mode: int = 0
    diff: str | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """Of a sandbox's root to what it was at the start; made of what model-written code left: untrusted.

    `changes`: the first ones, in the order of their paths, folder by folder. `count`, `size_bytes`: of all.
    `left_out`: how many are not counted there, by the reason.
    """

    changes: tuple[Change, ...] = ()
    count: int = 0
    size_bytes: int = 0
    left_out: Mapping[LeftOut, int] = field(default_factory=dict)
