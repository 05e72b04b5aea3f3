"""Workspaces of tasks: each unpacked once into a folder that is named by its content, a layer of sandboxes.

layers/DIGEST/   what sandboxes see from `/` on: the folders down to the working directory, and in it the workspace
kept/DIGEST      the size of a layer that nobody can make again: what tests fetched; dated by its last use
drafts/          what becomes one
lock             shared by the runs that use any

A data set may be anybody's: nothing gets outside of a layer, whatever its names and links say, and sizes are
bounded. Everybody in the sandbox may write the files of a workspace, whoever the agent is. Their times are fixed:
rollouts print the same.
"""

import errno
import fcntl
import hashlib
import os
import secrets
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, cast

from orchestrator.errors import EnvironmentUnusable, LaunchError, os_error_as
from orchestrator.launch.base import SavedLayer
from orchestrator.launch.difference import Bounds, leads_out, write_tar
from orchestrator.launch.oci.tar import PIECE_BYTES, Frugal, Layer, entries, uncompressed
from orchestrator.launch.oci.tree import OPEN, Outside, Tree, remove
from orchestrator.launch.uses import BuiltImage
from orchestrator.rules.text import printable

MARK = "ORCHESTRATOR.mark"  # of a folder in a layer's tar: the attribute that it has
MAX_BYTES = 1 << 30
MAX_FILES = 100_000
_DEPTH = 64
_NAME_BYTES = 4096
_DIRECTORY_BYTES = 16 << 20  # of a zip file's list of files, which is read whole
_TIME_S = 946_684_800  # of all files: the year 2000
_READ_ONLY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Folders on the way have their attributes from the layer, not from the image.
_MODES = {"/tmp": 0o1777, "/var/tmp": 0o1777, "/root": 0o700}  # noqa: S108
_RESERVED = ("/proc", "/sys", "/dev", "/run/channel", "/attachments", "/opt/sandbox")  # something is mounted there
_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE)
_VERSION, _VERSION_READ_ONLY = b"1", b"1r"  # of what the digest says


class WorkspaceError(Exception):
    """It cannot be used. The text is one line, for the task's owner."""


class Workspaces:
    """`folder`: where they are; only this user may enter it. Methods block."""

    def __init__(self, folder: Path | None = None) -> None:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.folder = folder or Path(base) / "rollout-orchestrator" / "workspaces"
        self.layers = self.folder / "layers"
        self._lock: IO[bytes] | None = None
        self._layers: dict[tuple[Path, str, bool], Path] = {}  # a run takes each as it was at first

    def layer(self, source: Path, cwd: str, *, writable: bool = True) -> Path:
        """The layer with this folder or archive at `cwd`; nobody removes it until `close`. `writable`: for every
        user, not for root alone. Raises WorkspaceError, EnvironmentUnusable."""
        way = _way(cwd)
        if not way or any(cwd == place or cwd.startswith(f"{place}/") for place in _RESERVED):
            raise WorkspaceError(f"nothing can be laid at {cwd}: set `cwd`")
        key = (source, cwd, writable)
        if key not in self._layers:
            with self._room():
                self._hold()
                self._layers[key] = self._made(source, way, 0o777 if writable else 0o755)
        return self._layers[key]

    def keep(self, fill: Callable[[Path], SavedLayer]) -> SavedLayer:
        """A layer that stays until `remove_kept`. `fill` gets an empty folder. Raises EnvironmentUnusable, and
        what `fill` raises but OSError."""
        with self._room(), ExitStack() as stack:
            self._hold()
            root = self._draft(stack) / "layer"
            root.mkdir()
            saved = fill(root)
            (note := self._note(saved.digest)).parent.mkdir(exist_ok=True)
            note.write_text(str(saved.size_bytes))  # first: nobody would remove a layer that had none
            self._keep(root, self.layers / saved.digest)
        return saved

    def named(self, digest: str) -> Path:
        """The layer that was kept under this name. Raises WorkspaceError if it is gone, EnvironmentUnusable."""
        if self.missing([digest]):
            raise WorkspaceError(
                "what they fetched when they were checked is not on this machine: run check-tasks again here"
            )
        with self._room():
            self._note(digest).touch()
        return self.layers / digest

    def missing(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those that are no layers here. Nobody removes the others until `close`. Raises EnvironmentUnusable."""
        with self._room():
            self._hold()
            return tuple(name for name in names if not (self.layers / name).is_dir())

    def take(self, name: str, packed: Path) -> None:
        """Takes a layer that another machine of the run has, as a tar of it. Raises LaunchError."""
        ours: dict[str, Any] = {"uname": "", "gname": "", "deep": False}
        if os.geteuid() != 0:  # else owners are those of a grader's layer
            ours |= {"uid": os.getuid(), "gid": os.getgid()}
        with os_error_as(LaunchError, f"no room for a layer in {self.folder}"), ExitStack() as stack:
            draft = self._draft(stack)
            with tarfile.open(packed) as tar:
                tar.extractall(draft / "layer", filter=lambda entry, _: entry.replace(**ours))  # noqa: S202 - ours
                for entry in tar:
                    if mark := entry.pax_headers.get(MARK):
                        os.setxattr(draft / "layer" / entry.name, mark, b"y")
            self._keep(draft / "layer", self.layers / name)

    def close(self) -> None:
        """Its layers may be removed. Idempotent."""
        self._layers.clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def remove_unused(self) -> int:
        """Removes all layers but those that are kept, unless a run uses any. Returns how many."""
        with self._alone() as alone:
            layers = [layer for layer in self.layers.glob("*") if not self._note(layer.name).exists()]
            for folder in (*layers, *(self.folder / "drafts").glob("*")) if alone else ():
                remove(folder)
        return len(layers) if alone else 0

    def kept(self) -> list[BuiltImage]:
        """The layers that are kept, as what takes room."""
        notes = [*self._note("").glob("*")]
        return [BuiltImage(note.name, "", note.stat().st_mtime, int(note.read_text() or 0)) for note in notes]

    def remove_kept(self, layers: Sequence[BuiltImage]) -> int:
        """Removes these, unless a run uses any. Returns how many."""
        with self._alone() as alone:
            for layer in layers if alone else ():
                remove(self.layers / layer.tag)
                self._note(layer.tag).unlink()
        return len(layers) if alone else 0

    # ------------------------------------------------------------ one layer

    def _made(self, source: Path, way: Sequence[str], most: int) -> Path:
        with _reading(source):
            version = _VERSION if most == 0o777 else _VERSION_READ_ONLY
            digest = hashlib.sha256(b"\0".join((version, *map(os.fsencode, way), b"")))
            _feed(source, digest)
        place = self.layers / digest.hexdigest()
        if place.exists():
            return place
        with ExitStack() as stack:
            draft = self._draft(stack)
            root = draft / "layer"
            root.mkdir()
            with _reading(source), Tree(root) as tree:
                tree.change(OPEN)
                _make_way(tree, way, most)
                _unpack(source, draft / "content.tar", _Target(tree, way, most))
            _date(root)
            self._keep(root, place)
        return place

    def _note(self, digest: str) -> Path:
        return self.folder / "kept" / digest

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Whether no run uses any layer, or will within this block."""
        if not self.folder.exists():
            yield False
            return
        with self._opened_lock() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def _draft(self, stack: ExitStack) -> Path:
        """A new folder, which `stack` removes."""
        draft = self.folder / "drafts" / secrets.token_hex(8)
        draft.mkdir(parents=True)
        stack.callback(remove, draft)
        return draft

    def _keep(self, root: Path, place: Path) -> None:
        place.parent.mkdir(exist_ok=True)
        try:
            root.rename(place)
        except OSError:
            if not place.exists():  # else another process was faster
                raise

    def _hold(self) -> None:
        if self._lock is None:
            lock = self._opened_lock()
            fcntl.flock(lock, fcntl.LOCK_SH)
            self._lock = lock

    def _opened_lock(self) -> IO[bytes]:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        return (self.folder / "lock").open("ab")

    @contextmanager
    def _room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EnvironmentUnusable(f"no room for a workspace in {self.folder}: {error.strerror}") from error


class _Target:
    """The working directory in a layer, and what may still be written there."""

    def __init__(self, tree: Tree, way: Sequence[str], most: int) -> None:
        self._tree, self._most = tree, most  # the latter: permissions that anything may have
        self._top = list(way)
        self._bytes, self._files = MAX_BYTES, MAX_FILES

    def use(self, size: int) -> None:
        """Raises ValueError if there is no room for so many bytes more."""
        self._bytes -= size
        if self._bytes < 0 or self._files < self._tree.new_folders:
            raise ValueError(f"it has more than {MAX_BYTES >> 30} GiB or {MAX_FILES} files")

    def write(self, name: str, mode: int, content: IO[bytes] | None = None, link: str | None = None) -> None:
        """A file with this content, a link that leads there, else a folder. `mode`: who may read and run it is
        decided by the owner's bits. Raises ValueError."""
        way = _way(name)
        self._files -= 1
        self.use(0)
        if not way:
            return
        self._tree.enter([*self._top, *way[:-1]], links=False)
        mode = mode & 0o100 | (0o600 if content is not None else 0o700)
        mode = (mode | mode >> 3 | mode >> 6) & self._most
        if content is None and link is None:
            if self._tree.kind(way[-1])[0] not in (0, stat.S_IFDIR):
                raise Outside("it is there twice")
            self._tree.folder(way[-1], mode)
            return
        self._remove(way)  # a later entry of the same name counts
        if link is not None:
            if leads_out(link, "/".join(("", *way[:-1], ""))):
                raise ValueError(f"the link {name} leads out of it")
            self._tree.link(way[-1], link)
        elif content is not None:
            with open(self._tree.file(way[-1], mode), "wb") as file:
                while piece := content.read(PIECE_BYTES):
                    self.use(len(piece))
                    file.write(piece)

    def second_name(self, name: str, first: str) -> None:
        """Another name of a file. Raises ValueError."""
        way = _way(name)
        self._files -= 1
        self.use(0)
        self._tree.enter([*self._top, *way[:-1]], links=False)
        self._remove(way)
        self._tree.second_name(way[-1], [*self._top, *_way(first)])

    def _remove(self, way: Sequence[str]) -> None:
        """What becomes something else than a folder."""
        place = "/".join(("", *self._top, *way))
        if any(f"{other}/".startswith(f"{place}/") for other in _RESERVED):
            raise ValueError(f"{place} must be a folder: sandboxes have files of their own there")
        self._tree.remove(way[-1])


def _feed(source: Path, digest: Any) -> None:
    """Hashes an archive's bytes, or a folder's content. Raises OSError, ValueError."""
    if source.is_dir():
        _write_folder(source, cast("IO[bytes]", _Hashing(digest)))
        return
    with _opened(source) as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)


class _Hashing:
    def __init__(self, digest: Any) -> None:
        self._digest = digest

    def write(self, content: bytes) -> int:
        self._digest.update(content)
        return len(content)


def _write_folder(source: Path, file: IO[bytes]) -> None:
    """Raises ValueError for what no workspace may hold."""
    bounds = Bounds(entries=MAX_FILES, size_bytes=MAX_BYTES, depth=_DEPTH)
    opened = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        left_out = {why: count for why, count in write_tar(opened, file, bounds).items() if why != "set_id"}
    finally:
        os.close(opened)
    if left_out:
        what = ", ".join(f"{why} {count}" for why, count in left_out.items())
        raise ValueError(f"it holds what no workspace may: {what} (as devices, odd names and links that lead out)")


def _unpack(source: Path, content: Path, target: _Target) -> None:
    """`content`: a place for a file. Raises OSError, ValueError."""
    if source.is_dir():
        with content.open("wb") as file:
            _write_folder(source, file)
        source = content
    with _opened(source) as file:
        if file.read(4) == b"PK\3\4":
            _unpack_zip(file, target)
        else:
            file.seek(0)
            _unpack_tar(file, target)


def _opened(source: Path) -> IO[bytes]:
    file = open(os.open(source, _READ_ONLY), "rb")  # noqa: SIM115 - the caller's
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError("it is neither a folder nor a file")
    return file


def _unpack_tar(file: IO[bytes], target: _Target) -> None:
    with uncompressed(file) as plain:
        source = Frugal(cast("IO[bytes]", Layer(plain, lambda size: None)))
        with tarfile.open(fileobj=cast("IO[bytes]", source), mode="r:") as tar:
            for entry in entries(tar, source):
                if entry.issym():
                    target.write(entry.name, 0, link=entry.linkname)
                elif entry.islnk():
                    target.second_name(entry.name, entry.linkname)
                elif entry.isdir():
                    target.write(entry.name, entry.mode)
                elif entry.isreg() and not entry.issparse():
                    target.write(entry.name, entry.mode, tar.extractfile(entry))
                else:
                    raise ValueError(f"{entry.name} is no file, folder or link")


def _unpack_zip(file: IO[bytes], target: _Target) -> None:
    _demand_short_directory(file)
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            mode = entry.external_attr >> 16
            if entry.is_dir():
                target.write(entry.filename, mode)
                continue
            if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"{entry.filename} is compressed in an unusual way")
            with archive.open(entry) as content:
                if stat.S_ISLNK(mode):
                    target.write(entry.filename, 0, link=content.read(_NAME_BYTES).decode())
                elif stat.S_IFMT(mode) in (0, stat.S_IFREG):
                    target.write(entry.filename, mode, content)
                else:
                    raise ValueError(f"{entry.filename} is no file, folder or link")


def _demand_short_directory(file: IO[bytes]) -> None:
    """`zipfile` reads the list of files whole, into objects of ten times its size."""
    file.seek(-min(os.fstat(file.fileno()).st_size, (1 << 16) + 42), os.SEEK_END)
    tail = file.read()
    end = len(tail) - 22 if tail[-22:-18] == b"PK\5\6" and tail.endswith(b"\0\0") else tail.rfind(b"PK\5\6")
    if end < 0 or tail[max(0, end - 20) : end].startswith(b"PK\6\7"):
        raise ValueError("it is no zip file, or one in the form for very large ones: make it a tar file")
    if int.from_bytes(tail[end + 12 : end + 16], "little") > _DIRECTORY_BYTES:
        raise ValueError(f"it has more than {MAX_FILES} files")


def _way(name: str) -> list[str]:
    way = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in way or "\0" in name:
        raise ValueError(f"{name} lies outside")
    if len(way) > _DEPTH or len(os.fsencode(name)) > _NAME_BYTES:
        raise ValueError("a name in it is too long or lies too deep")
    return way


def _make_way(tree: Tree, way: Sequence[str], mode: int) -> None:
    """The folders down to the working directory, which has this mode."""
    for depth in range(1, len(way) + 1):
        tree.enter(way[:depth], links=False)
        tree.change(mode if depth == len(way) else _MODES.get("/" + "/".join(way[:depth]), OPEN))


def _date(root: Path) -> None:
    for folder, _, names in os.walk(root, topdown=False):
        for name in (*names, ""):
            os.utime(os.path.join(folder, name), (_TIME_S, _TIME_S), follow_symlinks=False)


@contextmanager
def _reading(source: Path) -> Iterator[None]:
    """Whatever is wrong with the workspace in this block is a WorkspaceError."""
    try:
        yield
    except OSError as error:
        if error.errno in _OF_THE_MACHINE:
            raise
        raise WorkspaceError(f"{printable(source.name, '?')}: {error.strerror}") from error
    except Exception as error:
        text = printable(" ".join(str(error).split()), "?")[:300] or type(error).__name__
        raise WorkspaceError(f"{printable(source.name, '?')}: {text}") from error
