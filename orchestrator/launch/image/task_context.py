"""The build context of a task's Dockerfile: the folder it lies in, read without following a link, as one tar.

It is the same for the same content: names in order, one time for all, owner root, the modes 755 and 644. So its
digest stands for the content, whenever and by whomever the folder was copied.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import os
import posixpath
import re
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from docker.utils.build import PatternMatcher

from orchestrator.errors import BuildError
from orchestrator.launch.image.dockerfile import Dockerfile
from orchestrator.rules.text import printable

IGNORE_FILE = ".dockerignore"
REWRITTEN = ".dockerfile.orchestrator"  # the Dockerfile that is carried out, beside the context's own
MAX_BYTES, MAX_FILES, MAX_DEPTH = 1 << 30, 20_000, 64
_MAX_TEXT_BYTES, _MAX_PATTERNS = 1 << 20, 1_000
_TIME = 946_684_800  # 2000-01-01: ZIP files, which packages of Python are, know no time before 1980
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_STARS, _QUICK_STARS = re.compile(r"\*+"), 2
_CURE = f"leave it out by a line in {IGNORE_FILE}"


@dataclass(frozen=True, slots=True)
class TaskContext:
    """`digest`: SHA-256 of the Dockerfile and all that its build can read."""

    dockerfile: Dockerfile
    digest: str

    @classmethod
    def pack(cls, path: Path, out: IO[bytes], rewritten: Callable[[Dockerfile], str]) -> TaskContext:
        """Writes the folder of the Dockerfile `path` to `out`, with the text to carry out, and rewinds it. Blocks.
        Raises BuildError for what is not to be built, OSError where `out` takes no more."""
        folder = Path(os.path.realpath(path.parent))
        text, ignored = _text(folder, path.name), _text(folder, IGNORE_FILE)
        if text is None:
            raise BuildError(f"its {path.name} is not there any more")
        dockerfile = Dockerfile.parse(text)
        patterns = [line for line in map(str.strip, (ignored or "").splitlines()) if line and line[0] != "#"]
        if len(patterns) > _MAX_PATTERNS:
            raise BuildError(f"its {IGNORE_FILE} has more than {_MAX_PATTERNS} lines")
        matcher = _matcher(patterns)
        # As Docker's client does: neither the rewritten file nor a file to ignore it by is part of the context.
        ours = {
            IGNORE_FILE: _bytes(f"{IGNORE_FILE if ignored is None else ignored}\n{REWRITTEN}\n"),
            REWRITTEN: _bytes(rewritten(dockerfile)),
        }
        with tarfile.open(fileobj=out, mode="w") as tar:
            packed = _Packed(tar, _bytes(f"{text}\0{ignored}\0"))
            for name, place in _entries(folder, matcher):
                if name not in ours:
                    packed.add(name, place)
            digest = packed.digest.hexdigest()
            for name, content in ours.items():
                packed.put(name, stat.S_IFREG, len(content), io.BytesIO(content))
        out.seek(0)
        return cls(dockerfile, digest)


class _Packed:
    """Entries of the tar, counted and digested."""

    def __init__(self, tar: tarfile.TarFile, first: bytes) -> None:
        self.digest = hashlib.sha256(first)
        self._tar = tar
        self._bytes = self._entries = 0

    def add(self, name: str, place: int) -> None:
        """What is called `name` in the context and lies in the folder `place`."""
        own_name, shown = posixpath.basename(name), printable(name, "?")[:100]
        with _reading(shown):
            mode = os.stat(own_name, dir_fd=place, follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                target = os.readlink(own_name, dir_fd=place)
                way = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
                if target.startswith("/") or way.split("/")[0] == "..":
                    raise BuildError(f"its build context has a link that leads out of it, {shown}: {_CURE}")
                self.put(name, mode, target=target)
            elif stat.S_ISDIR(mode):
                self.put(name, mode)
            elif stat.S_ISREG(mode):
                with open(os.open(own_name, _FILE, dir_fd=place), "rb") as file:
                    status = os.fstat(file.fileno())
                    if not stat.S_ISREG(status.st_mode):
                        raise BuildError(f"its build context changes while it is read: {shown}")
                    self.put(name, status.st_mode, status.st_size, file)
            else:
                raise BuildError(f"its build context has no file, folder or link called {shown}: {_CURE}")

    def put(self, name: str, mode: int, size: int = 0, content: IO[bytes] | None = None, target: str = "") -> None:
        self._bytes, self._entries = self._bytes + size, self._entries + 1
        if self._bytes > MAX_BYTES or self._entries > MAX_FILES:
            raise BuildError(
                f"its build context has more than {MAX_BYTES >> 20} MiB or {MAX_FILES} files: leave out what the "
                f"build does not need by lines in {IGNORE_FILE}"
            )
        entry = tarfile.TarInfo(name)
        entry.type = {stat.S_IFDIR: tarfile.DIRTYPE, stat.S_IFLNK: tarfile.SYMTYPE}.get(
            stat.S_IFMT(mode), tarfile.REGTYPE
        )
        entry.mode = 0o755 if mode & stat.S_IXUSR or entry.isdir() else 0o644
        entry.size, entry.mtime, entry.linkname = size, _TIME, target
        head = (name, entry.type.decode(), f"{entry.mode:o}", str(size), target, "")
        self.digest.update(_bytes("\0".join(head)))
        self._tar.addfile(entry, None if content is None else cast("IO[bytes]", _Digested(content, self.digest)))


class _Digested:
    """A file whose content is digested as it is read."""

    def __init__(self, file: IO[bytes], digest: hashlib._Hash) -> None:
        self._file, self._digest = file, digest

    def read(self, size: int = -1) -> bytes:
        piece = self._file.read(size)
        self._digest.update(piece)
        return piece


def _matcher(patterns: list[str]) -> PatternMatcher:
    """Raises BuildError for a line that nobody understands, or that cannot be matched in little time."""
    matcher = PatternMatcher(patterns)
    for pattern in matcher.patterns:
        text = pattern.cleaned_pattern
        its_line = f"its {IGNORE_FILE} has the line {printable(text, '?')[:100]}"
        try:
            if len(_STARS.findall(text)) > _QUICK_STARS:
                if any("**" in part and part != "**" for part in text.split("/")):
                    raise BuildError(f"{its_line}, with too many `*`: write `**` between `/` alone")
                vars(pattern)["match"] = _quick_match(text.lower())
            pattern.match("")
        except re.error as error:
            raise BuildError(f"{its_line}, which is not understood: {error.msg}") from error
    return matcher


def _quick_match(pattern: str) -> Callable[[str], bool]:
    """Part by part, as the time of the matcher's own grows with the length of names to the power of stars."""
    parts = pattern.split("/")
    parts += ["*"] if parts[-1] == "**" else []  # at the end it stands for something
    fits = [None if part == "**" else re.compile(fnmatch.translate(part)).match for part in parts]

    def onward(places: set[int]) -> set[int]:
        for place, fit in enumerate(fits):
            if fit is None and place in places:  # it may stand for nothing
                places.add(place + 1)
        return places

    def match(path: str) -> bool:
        places = onward({0})
        for name in path.lower().split("/"):
            left = [(place, fits[place]) for place in places if place < len(fits)]
            places = onward({place + (fit is not None) for place, fit in left if fit is None or fit(name)})
        return len(fits) in places

    return match


def _entries(folder: Path, matcher: PatternMatcher) -> Iterator[tuple[str, int]]:
    """(name, descriptor of its folder) of all that is not ignored, in order, folders before what is in them."""
    exceptions = any(pattern.exclusion for pattern in matcher.patterns[:-1])  # the last one is the matcher's own

    def refuse(error: OSError) -> None:
        raise BuildError(f"its build context cannot be read: {error.strerror}") from error

    for top, folders, files, place in os.fwalk(folder, onerror=refuse):
        way = os.path.relpath(top, folder)
        if way.count("/") >= MAX_DEPTH:
            raise BuildError(f"its build context is more than {MAX_DEPTH} folders deep: {_CURE}")
        names = {name: name if way == "." else f"{way}/{name}" for name in (*folders, *files)}
        ignored = {name for name in names if matcher.matches(names[name])}  # type: ignore[arg-type]
        # Of an ignored folder something may be excepted.
        folders[:] = sorted(name for name in folders if exceptions or name not in ignored)
        for name in sorted(names.keys() - ignored):
            yield names[name], place


def _text(folder: Path, name: str) -> str | None:
    """None: there is no such file. Raises BuildError."""
    with _reading(name):
        try:
            opened = os.open(folder / name, _FILE)
        except FileNotFoundError:
            return None
        with open(opened, "rb") as file:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise BuildError(f"its {name} is not a file")
            content = file.read(_MAX_TEXT_BYTES + 1)
    if len(content) > _MAX_TEXT_BYTES:
        raise BuildError(f"its {name} has more than {_MAX_TEXT_BYTES >> 20} MiB")
    return content.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """An OSError of the file `name` is a BuildError; one of the tar stays one: no file name comes with it."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise
        why = error.strerror or "it changes meanwhile"
        raise BuildError(f"its build context cannot be read: {name}: {why}") from error
