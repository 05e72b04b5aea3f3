"""System calls that make the root of a sandbox that may write to it, and the user namespace of its agent.

Runs in the keeper, whose mount namespace is its own: nothing made here outlives the keeper and its containers.
Only the standard library is imported.

    FOLDER/merged    what the sandbox sees: an overlay of
    FOLDER/written   a tmpfs of limited size, or an ext4 in a file that has no name any more, with `upper`, which
                     takes what is written, and over; in an ext4 also `reserve`, for `make_room`
    FOLDER/0, 1 ...  layers and image, read-only, where root makes it with the ids of the agent's namespace
"""

import ctypes
import errno
import fcntl
import os
import resource
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

# Both in a folder of the keeper's, where it has mounts of its own. The first is the root of all parents.
PARENT_ROOT, _DEVICES_FOLDER = "parent", "dev"
NEW_ROOT = "/run/channel"  # where the root of a child is put together: a parent has no channel there
_PARENT_PLACES = ("/proc", "/dev", "/sys", "/opt/sandbox", NEW_ROOT)
MERGED, WRITTEN, UPPER = "merged", "written", "upper"
_RESERVE, _RESERVED = "reserve", 64  # folders, each with a block of its own
OVERLAY_OPTIONS = "redirect_dir=nofollow,metacopy=off,index=off"

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND = 1, 2, 4, 8, 32, 0x1000
_MS_REC, _MS_SLAVE = 0x4000, 0x80000
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442  # the same for all architectures
_OPEN_TREE_CLONE, _AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE, _MOVE_MOUNT_F_EMPTY_PATH = 1, -100, 0x1000, 0x8000, 4
_FILES = 1 << 20  # more than a process has
_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE, _LO_FLAGS_AUTOCLEAR, _LOOP_ATTEMPTS = 0x4C82, 0x4C0A, 4, 64
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV, _MOUNT_ATTR_NOEXEC = 1, 2, 4, 8
_MOUNT_ATTR_IDMAP = 0x100000
# What a user namespace limits for all its users together, to what its maker had.
_COUNTED = (resource.RLIMIT_NPROC, resource.RLIMIT_SIGPENDING, resource.RLIMIT_MSGQUEUE, resource.RLIMIT_MEMLOCK)
_DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "core": "/proc/kcore",
    "ptmx": "pts/ptmx",
}
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]


class WritableRoot(NamedTuple):
    """`lowers`: folders, top first. `on_disk`: what is written goes to a file of FOLDER's disk. `owner`: the id,
    outside of the agent's namespace, that owns the root folder. `shifted`: `lowers` are to be shown with the ids
    of the agent's namespace, but for those with the numbers `own`, which have them."""

    lowers: Sequence[str]
    size_bytes: int
    inodes: int
    on_disk: bool
    owner: int
    shifted: bool
    own: Sequence[int] = ()


class AgentNamespace(NamedTuple):
    """`owner`: the uid that may enter it, for which the kernel counts what all its users have together. `maps`: as
    in /proc/PID/uid_map, of users and of groups. `processes`: most of all its users; None: they have no limits in
    common. `each`: limits of each of its users (a name of /proc/sys/user, a number)."""

    owner: int
    maps: Sequence[str]
    processes: int | None
    each: Sequence[tuple[str, int]] = ()


def leave_mounts() -> None:
    """From here on this process has mounts of its own: what it mounts is seen by nobody else. Raises OSError."""
    _demand(_libc.unshare(_CLONE_NEWNS), "a mount namespace")
    _mount("none", "/", None, _MS_REC | _MS_SLAVE)


@contextmanager
def user_namespace(agent: AgentNamespace) -> Iterator[int]:
    """A descriptor of a new user namespace, closed at the end. Raises OSError."""
    with ExitStack() as stack:
        with held_namespace(agent, stack) as path:
            namespace = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield namespace
        finally:
            os.close(namespace)


@contextmanager
def held_namespace(agent: AgentNamespace, over: ExitStack | None = None) -> Iterator[str]:
    """The path of a new user namespace, which a process holds until the end. `over`: waits for the end of that
    process, which takes milliseconds on a busy machine. Raises OSError."""
    ready, tell_ready = os.pipe()
    ending, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        _hold_namespace(agent, tell_ready, ending)
    with ExitStack() as stack:
        (over or stack).callback(_wait_for, pid)
        stack.callback(os.close, end)
        os.close(tell_ready)
        os.close(ending)
        with open(ready, "rb", 0) as told:
            if not told.read(1):
                raise OSError(0, "the kernel makes no user namespace (see /proc/sys/user/max_user_namespaces)")
        for name, text in zip(("uid_map", "gid_map"), agent.maps, strict=True):
            with open(f"/proc/{pid}/{name}", "w") as ids:
                ids.write(text)
        yield f"/proc/{pid}/ns/user"


def _wait_for(pid: int) -> None:
    with suppress(ChildProcessError):  # the keeper waits for all that end
        os.waitpid(pid, 0)


def _hold_namespace(agent: AgentNamespace, tell_ready: int, ending: int) -> NoReturn:
    """Owns the namespace, and with it the limit of its processes; ends when nobody can write to `ending`."""
    try:
        for first, last in pairwise((-1, *sorted((tell_ready, ending)), _FILES)):
            os.closerange(first + 1, last)
        if agent.processes is not None:
            resource.setrlimit(resource.RLIMIT_NPROC, (agent.processes, agent.processes))
        for limit in _COUNTED if agent.processes is None else ():
            with suppress(ValueError, OSError):  # a container's root may not
                resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        os.setresgid(agent.owner, agent.owner, agent.owner)
        os.setresuid(agent.owner, agent.owner, agent.owner)
        if _libc.unshare(_CLONE_NEWUSER) == 0:
            for name, most in agent.each:
                with open(f"/proc/sys/user/{name}", "w") as file:
                    file.write(str(most))
            os.write(tell_ready, b"x")
            os.close(tell_ready)
            os.read(ending, 1)
    finally:
        os._exit(0)


def make_root(folder: str, root: WritableRoot, namespace: int) -> None:
    """Mounts FOLDER/merged. `namespace`: the agent's. Raises OSError; then `remove_root` clears away the rest."""
    for name in (MERGED, WRITTEN, *map(str, range(len(root.lowers)))):
        os.mkdir(os.path.join(folder, name))
    written, upper = os.path.join(folder, WRITTEN), os.path.join(folder, WRITTEN, UPPER)
    if root.on_disk:
        _mount_file(os.path.join(folder, "disk"), written, root)
        for number in range(_RESERVED):
            os.makedirs(os.path.join(written, _RESERVE, str(number)))
    else:
        size = f"size={root.size_bytes},nr_inodes={root.inodes},mode=0755"
        _mount("tmpfs", written, "tmpfs", _MS_NOSUID | _MS_NODEV, size)
    os.mkdir(upper)
    os.chmod(upper, 0o755)  # noqa: S103 - the mode of the sandbox's root
    os.chown(upper, root.owner, root.owner)
    os.mkdir(os.path.join(written, "work"))
    # Mounted in any case: the sandbox can read where the folders are that the overlay is made of.
    lowers = [
        _lower(
            lower,
            os.path.join(folder, str(number)),
            namespace if root.shifted and number not in root.own else None,
        )
        for number, lower in enumerate(root.lowers)
    ]
    places = [f"lowerdir={':'.join(map(_escaped, lowers))}", f"upperdir={_escaped(upper)}"]
    places.append(f"workdir={_escaped(os.path.join(written, 'work'))}")
    own = [OVERLAY_OPTIONS, *([] if root.shifted else ["userxattr"])]
    _mount("overlay", os.path.join(folder, MERGED), "overlay", _MS_NOSUID | _MS_NODEV, ",".join((*places, *own)))
    for lower in lowers:  # the overlay has them by itself
        _libc.umount2(os.fsencode(lower), _MNT_DETACH | _UMOUNT_NOFOLLOW)


def limit_inodes(folder: str, count: int) -> None:
    """How many files there may be in FOLDER/written, where that is a tmpfs. Raises OSError."""
    _mount(
        "tmpfs", os.path.join(folder, WRITTEN), "tmpfs", _MS_REMOUNT | _MS_NOSUID | _MS_NODEV, f"nr_inodes={count}"
    )


def make_room(folder: str, inodes: int) -> None:
    """Lets some more files be made in FOLDER/written, however full an agent has left it: that must not decide
    whether it can be graded. `inodes`: how many there may be in a tmpfs. Idempotent. Raises OSError."""
    reserve = os.path.join(folder, WRITTEN, _RESERVE)
    if os.path.isdir(reserve):
        for number in range(_RESERVED):
            with suppress(FileNotFoundError):
                os.rmdir(os.path.join(reserve, str(number)))
    else:
        limit_inodes(folder, inodes)


def release_root(folder: str) -> None:
    """Nobody sees the root any more; what was written to it stays. Idempotent."""
    _libc.umount2(os.fsencode(os.path.join(folder, MERGED)), _MNT_DETACH | _UMOUNT_NOFOLLOW)


def show_written(folder: str) -> None:
    """Lets this user look at what was written: an agent that is root may have closed its root to all others."""
    os.chmod(os.path.join(folder, WRITTEN, UPPER), 0o755)  # noqa: S103 - as it was made


def remove_root(folder: str) -> None:
    """Frees what a sandbox wrote. Idempotent."""
    for name in (MERGED, WRITTEN):
        _libc.umount2(os.fsencode(os.path.join(folder, name)), _MNT_DETACH | _UMOUNT_NOFOLLOW)
    with suppress(OSError):
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                _libc.umount2(os.fsencode(entry.path), _MNT_DETACH | _UMOUNT_NOFOLLOW)


def _mount_file(file: str, target: str, root: WritableRoot) -> None:
    """Mounts an ext4 in a sparse file without a name. It is gone with its mount, as is its loop device."""
    options = ("-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "nodiscard", "-N", str(root.inodes * 9 // 10))
    opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.truncate(opened, root.size_bytes)
        status = os.spawnvp(os.P_WAIT, "mkfs.ext4", ["mkfs.ext4", *options, file])  # noqa: S606 - no shell is wanted
        if status != 0:
            raise OSError(0, f"mkfs.ext4 ended with {status} (it is in e2fsprogs)")
        os.unlink(file)
        device = _loop_device(opened)
    finally:
        os.close(opened)
    try:
        _mount(f"/proc/self/fd/{device}", target, "ext4", _MS_NOSUID | _MS_NODEV)
    finally:
        os.close(device)


def _loop_device(file: int) -> int:
    """The descriptor of one that shows `file` until nobody uses it any more. Raises OSError."""
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    config = struct.pack("=II52xI176x64x", file, 0, _LO_FLAGS_AUTOCLEAR)
    try:
        for attempts_left in reversed(range(_LOOP_ATTEMPTS)):
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            device = os.open(f"/dev/loop{number}", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, config)
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY or not attempts_left:  # another process was faster
                    raise OSError(error.errno, f"a loop device: {error.strerror}") from error
            else:
                return device
    finally:
        os.close(control)
    raise AssertionError("the last attempt raises")


def _lower(folder: str, target: str, namespace: int | None) -> str:
    """Mounts `folder` at `target`, which it returns; with the ids of the namespace, if there is one."""
    tree = detached(folder, 0 if namespace is None else _MOUNT_ATTR_RDONLY, namespace)
    try:
        moved = _libc.syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH)
        _demand(moved, f"a mount at {target}")
    finally:
        os.close(tree)
    return target


def sealed(folder: str) -> int:
    """A detached mount of `folder`, which nothing can be changed in or started from. Raises OSError."""
    return detached(folder, _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV | _MOUNT_ATTR_NOEXEC)


def image_root(folder: str, namespace: int | None) -> int:
    """A detached mount of an image, read-only, with the ids of the namespace, if any. Raises OSError."""
    return detached(folder, _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV, namespace)


def written_root(folder: str) -> int:
    """A detached mount of FOLDER/merged. Raises OSError."""
    return detached(os.path.join(folder, MERGED), _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV)


def detached(folder: str, attributes: int, namespace: int | None = None, *, whole: bool = False) -> int:
    """The descriptor of a mount of `folder` that is nowhere yet, with these attributes (`mount_setattr`), and with
    the ids of the namespace, if there is one. `whole`: with what is mounted in it. Raises OSError."""
    depth = _AT_RECURSIVE if whole else 0
    how = _OPEN_TREE_CLONE | os.O_CLOEXEC | depth
    tree: int = _libc.syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(folder), how)
    _demand(tree, f"a copy of the mount of {folder}")
    if not attributes:
        return tree
    if namespace is not None:
        attributes |= _MOUNT_ATTR_IDMAP
    told = struct.pack("=QQQQ", attributes, 0, 0, namespace or 0)
    try:
        changed = _libc.syscall(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH | depth, told, len(told))
        _demand(changed, f"other ids for {folder} (it takes Linux 5.19 and a file system like ext4 or xfs)")
    except OSError:
        os.close(tree)
        raise
    return tree


def make_parent_root(base: str) -> None:
    """BASE/PARENT_ROOT: folders to mount something at, and nothing else. Idempotent. Raises OSError."""
    os.makedirs(base, mode=0o711, exist_ok=True)
    if not os.path.ismount(base):
        _mount("tmpfs", base, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=64k,mode=0711")
        os.mkdir(os.path.join(base, _DEVICES_FOLDER))
        for place in _PARENT_PLACES:
            os.makedirs(os.path.join(base, PARENT_ROOT) + place)


def first_places(config: Mapping[str, Any]) -> list[str]:
    """Where something is mounted on the root itself. What lies in one of these mounts is made in it."""
    places = [NEW_ROOT, *(told["destination"] for told in config["mounts"])]
    return [place for place in places if not any(place.startswith(f"{other}/") for other in places)]


def make_places(root: str, places: Sequence[str]) -> None:
    """Folders to mount something at, where there are none. Raises OSError, also where one is or lies behind a
    link: a mount must be where it is looked for."""
    for place in places:
        at = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in place.strip("/").split("/"):
                with suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=at)
                inner = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
                os.close(at)
                at = inner
        except NotADirectoryError as error:
            raise OSError(error.errno, f"{place} is or lies behind a link or a file") from None
        finally:
            os.close(at)


def devices(base: str, places: Sequence[str]) -> int:
    """A detached mount for /dev with devices that no other sandbox has: their locks and watchers are their own.
    An ordinary user, who can make none, shows the machine's, as OCI runtimes do. `places`: folders in it. Raises
    OSError."""
    folder = os.path.join(base, _DEVICES_FOLDER)
    _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NOEXEC, "mode=755,size=65536")
    try:
        for name, (major, minor) in _DEVICES.items():
            path = os.path.join(folder, name)
            try:
                os.mknod(path, stat.S_IFCHR, os.makedev(major, minor))
                os.chmod(path, 0o666)  # noqa: S103 - as everywhere
            except PermissionError:
                os.mknod(path)
                _mount(f"/dev/{name}", path, None, _MS_BIND)
        for name, target in _LINKS.items():
            if name != "core" or os.path.exists(target):  # as runc does
                os.symlink(target, os.path.join(folder, name))
        for place in places:
            os.mkdir(os.path.join(folder, place))
        return detached(folder, _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NOEXEC, whole=True)
    finally:
        _libc.umount2(os.fsencode(folder), _MNT_DETACH | _UMOUNT_NOFOLLOW)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    kind_bytes = None if kind is None else kind.encode()
    done = _libc.mount(source.encode(), os.fsencode(target), kind_bytes, flags, os.fsencode(options))
    _demand(done, f"a mount of {kind or 'nothing'} at {target}")


def _escaped(path: str) -> str:
    """As overlayfs reads paths in its options."""
    return "".join(f"\\{letter}" if letter in "\\:," else letter for letter in path)


def _demand(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
