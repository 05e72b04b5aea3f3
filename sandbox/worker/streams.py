"""Standard output and error of the steps: open, in UTF-8 and unbuffered, whatever an earlier step did to them.

The runner reads one pipe. Its end here has three descriptors: 1 and 2, which the code may redirect or close, and a
spare one. What the code prints is written at once, so that a kill loses none of it, and each print as a whole, so
that threads and child processes do not tear each other's lines.
Runs inside the worker, so it looks builtins up in its own copy (see `sandbox.worker.worker`).
"""

import builtins
import fcntl
import gc
import io
import os
import select
import sys
import weakref
from typing import Any

globals()["__builtins__"] = dict(vars(builtins))

SPARE_FD = 5
_STANDARD = (1, 2)
_MAX_VALUES = 100  # of a print that is made one text; longer ones are written piece by piece, as Python does
_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
_TEXT = {"encoding": "utf-8", "errors": "backslashreplace", "newline": None, "write_through": True}

_os_write, _dup2, _fcntl, _fstat, _listdir = os.write, os.dup2, fcntl.fcntl, os.fstat, os.listdir
_F_GETFD, _FD_CLOEXEC = fcntl.F_GETFD, fcntl.FD_CLOEXEC
_poll, _POLLOUT = select.poll, select.POLLOUT
_all_objects, _ref = gc.get_objects, weakref.ref
_print = builtins.print


class Streams:
    """The two streams. They stay the same objects, so that a log handler of an earlier step still writes."""

    def __init__(self) -> None:
        self._raw = {fd: _Descriptor(fd) for fd in _STANDARD}
        self._text = {fd: _Text(self._raw[fd], **_TEXT) for fd in _STANDARD}  # type: ignore[arg-type]
        self._descriptors: frozenset[str] = frozenset()  # descriptors that have been looked at
        self._writers: list[weakref.ref[Any]] = []  # the code's own writers to the output

    def open(self) -> None:
        """Makes the streams, their descriptors and `print` what they are at the start of a program."""
        # The code's own streams go first: the last reference to one of them may close a descriptor.
        sys.stdout = sys.__stdout__ = self._text[1]  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = self._text[2]  # type: ignore[misc]
        builtins.print = print_
        for fd in _STANDARD:
            _put_back(fd)
            if not _is_sound(self._text[fd]):
                self._raw[fd].__init__(fd)  # type: ignore[misc]
                self._text[fd].__init__(self._raw[fd], **_TEXT)  # type: ignore[misc]
            vars(self._text[fd]).clear()

    def flush(self) -> None:
        """Writes what lies in the streams, and in those that the code made of them."""
        for stream in (sys.stdout, sys.stderr, *self._text.values(), *self._own()):
            try:
                stream.flush()
            except BaseException:  # noqa: S112  the code may have made anything of a stream
                continue

    def say(self, text: str) -> None:
        """Prints a text of the harness."""
        _write(SPARE_FD, text.encode("utf-8", "backslashreplace"))

    def _own(self) -> list[Any]:
        """The code's own writers to the output, text before the bytes below it."""
        before, layers = self._descriptors, self._text.values()
        try:
            self._descriptors = frozenset(_listdir("/proc/self/fd"))
        except OSError:  # the code holds as many files as it may
            self._descriptors = frozenset()
        # All objects are looked through only if there may be new ones.
        if any(layer.touched for layer in layers) or any(_is_output(int(fd)) for fd in self._descriptors - before):
            for layer in layers:
                layer.touched = False
            self._writers = [
                _ref(writer) for writer in _all_objects() if type(writer) in _WRITERS and _writes_output(writer)
            ]
        writers = [writer for writer in [ref() for ref in self._writers] if writer is not None]
        return sorted(writers, key=lambda writer: type(writer) is not io.TextIOWrapper)


class _Descriptor(io.FileIO):
    """Writes all it is given to a descriptor, at once. Never closed: streams around it come and go."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "w", closefd=False)

    def write(self, content: Any) -> int:
        """To the spare descriptor if the code's own file or pipe has taken the number."""
        return _write(_place(self.fileno()), content)

    def close(self) -> None:
        """Does nothing."""


class _Text(io.TextIOWrapper):
    """Notices that the code reaches for what lies below it."""

    touched = False

    @property
    def buffer(self) -> Any:
        self.touched = True
        return super().buffer

    def detach(self) -> Any:
        self.touched = True
        return super().detach()

    def fileno(self) -> int:
        self.touched = True
        return super().fileno()


def print_(*values: object, sep: Any = " ", end: Any = "\n", file: Any = None, flush: bool = False) -> None:
    """Prints the values to a stream, or to sys.stdout by default."""
    if len(values) <= _MAX_VALUES and isinstance(sep, str) and isinstance(end, str):
        _print(sep.join([str(value) for value in values]) + end, end="", file=file, flush=flush)
    else:
        _print(*values, sep=sep, end=end, file=file, flush=flush)


# The code sees them as Python's own.
for _own, _name, _module in (
    (print_, "print", "builtins"),
    (_Text, "TextIOWrapper", "_io"),
    (_Descriptor, "FileIO", "_io"),
):
    _own.__name__ = _own.__qualname__ = _name
    _own.__module__ = _module


def _write(fd: int, content: Any) -> int:
    """All of it, also where the code has made the pipe one that does not wait."""
    rest = memoryview(content).cast("B")
    size = len(rest)
    while rest:
        try:
            rest = rest[_os_write(fd, rest) :]
        except BlockingIOError:
            poll = _poll()
            poll.register(fd, _POLLOUT)
            poll.poll()
    return size


def _place(fd: int) -> int:
    """Where to write for this standard descriptor.

    Python closes the files that it opens on exec, and leaves open what `dup2` has put in a standard place: so a
    redirection is told from a file that took the number of a closed descriptor by chance.
    """
    try:
        is_taken = _fcntl(fd, _F_GETFD) & _FD_CLOEXEC
    except OSError:
        _dup2(SPARE_FD, fd)
        return fd
    return SPARE_FD if is_taken else fd


def _put_back(fd: int) -> None:
    """Ends a redirection of an earlier step, and opens what it closed."""
    if _place(fd) == fd and not _is_output(fd):
        _dup2(SPARE_FD, fd)


def _is_output(fd: int) -> bool:
    try:
        one, other = _fstat(fd), _fstat(SPARE_FD)
    except OSError:
        return False
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def _is_sound(stream: Any) -> bool:
    try:
        return not stream.closed and all(getattr(stream, name) == value for name, value in _TEXT.items())
    except (ValueError, AttributeError):  # detached
        return False


def _writes_output(stream: Any) -> bool:
    try:
        return not stream.closed and stream.writable() and _is_output(stream.fileno())
    except Exception:  # detached, or of the code's own making below
        return False
