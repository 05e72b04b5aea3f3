"""What a process that was forked from a parent does to be sealed: it carries out the configuration of a bundle, as
an OCI runtime would for a process that it starts.

The process is root of the parent's user namespace and pid 1 of its own processes. Each part must succeed; pid 1
then reads what became of it (`pid1.confinement`), as in any other sandbox. Only calls of the kernel are made.
"""

import base64
import errno
import fcntl
import json
import os
import resource
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sandbox.pid1.filter import filter_calls, libc

FILTER = "sandbox.filter"  # the annotation with the filter of system calls, compiled, in base64
OWNER = "sandbox.owner"  # that with a uid of this sandbox alone
MOST_BYTES = 1 << 20
_ROOT = "/run/channel"  # where the new one is made; a parent has no channel there
_RUNTIME = "/opt/sandbox"

_NEW = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x40000000  # mounts, groups, host name, IPC, network
_NEW_USERS = 0x10000000
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_PROGRAMS, _REMOUNT, _BIND, _REC = 1, 2, 4, 8, 32, 4096, 16384
_PRIVATE = 1 << 18
_FLAGS = {
    "ro": _READ_ONLY,
    "nosuid": _NO_SUID,
    "nodev": _NO_DEVICES,
    "noexec": _NO_PROGRAMS,
    "bind": _BIND,
    "relatime": 1 << 21,
    "strictatime": 1 << 24,
}
_DETACH = 2
_OPEN_TREE, _MOVE_MOUNT, _OPENAT2 = 428, 429, 437  # the same for all architectures
_RESOLVE_IN_ROOT = 0x10
_CLONE_TREE, _HERE, _EMPTY_FROM, _FOLLOW_TO = 1, -100, 4, 0x10
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_KEYCTL, _JOIN_SESSION_KEYRING = {"x86_64": 250, "aarch64": 219}, 1
_BOUNDING_DROP, _NO_NEW_PRIVILEGES, _AMBIENT, _CLEAR_ALL = 24, 38, 47, 4
_NAMESPACE, _FREE = 3, 64  # where a program finds its agent's namespace; a number above all descriptors here
_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITIES = {"CAP_SETGID": 6, "CAP_SETUID": 7}
_UP, _GET_FLAGS, _SET_FLAGS = 1, 0x8913, 0x8914  # of a network interface


@dataclass(frozen=True, slots=True)
class Request:
    """One sandbox. `agent`: for one that has a user namespace for its agent: the uid that owns it, its maps (as in
    /proc/PID/uid_map, of users and of groups), and the most processes of all its users.

    Of descriptors there are, in this order: the bundle's configuration, where the sandbox prints, what to write to
    when it is sealed, a detached mount for each of the places `trees`, and the file of processes of each control
    group.
    """

    name: str
    agent: Mapping[str, Any] | None
    trees: tuple[str, ...]
    descriptors: list[int]

    @property
    def configuration(self) -> int:
        return self.descriptors[0]

    @property
    def output(self) -> int:
        return self.descriptors[1]

    @property
    def sealed(self) -> int:
        return self.descriptors[2]

    @property
    def mounts(self) -> dict[str, int]:
        """By place."""
        return dict(zip(self.trees, self.descriptors[3:], strict=False))

    @property
    def groups(self) -> list[int]:
        return self.descriptors[3 + len(self.trees) :]


def enter(request: Request) -> list[str]:
    """The command line of the program that is to run here. Raises OSError where a part cannot be had; then nothing
    has been run.

    No descriptor is left but the usual three, none of which is shared with the parent, and that of the agent's
    namespace.
    """
    os.dup2(request.output, 1)
    os.dup2(request.output, 2)
    try:
        for group in request.groups:
            os.write(group, b"0")  # the right to was checked when the keeper opened it
    except OSError as error:
        raise OSError(error.errno, f"a control group: {error.strerror}") from None
    config = json.loads(os.pread(request.configuration, MOST_BYTES, 0))
    process, linux = config["process"], config["linux"]
    leave_namespaces(_NEW)
    os.setsid()
    # The kernel counts keys for the real user, and lets one have 200: all siblings together would have them.
    os.setresuid(int(config["annotations"][OWNER]), 0, 0)
    libc("syscall", _KEYCTL[os.uname().machine], _JOIN_SESSION_KEYRING, None)
    os.setresuid(0, 0, 0)
    socket.sethostname(config["hostname"])
    _raise_loopback()
    make_root(config, request.mounts)
    for name, value in (linux.get("sysctl") or {}).items():
        _write(f"/proc/sys/{name.replace('.', '/')}", value)
    _close_paths(linux)
    for limit in process["rlimits"]:
        resource.setrlimit(getattr(resource, limit["type"]), (limit["soft"], limit["hard"]))
    _write("/proc/self/oom_score_adj", str(process["oomScoreAdj"]))
    agent = -1 if request.agent is None else _agent_namespace(**request.agent)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    sealed = fcntl.fcntl(request.sealed, fcntl.F_DUPFD_CLOEXEC, _FREE)
    if agent >= 0:
        os.dup2(agent, _NAMESPACE)
        os.set_inheritable(_NAMESPACE, True)
    os.closerange(_NAMESPACE + (agent >= 0), sealed)
    os.closerange(sealed + 1, 1 << 20)
    os.environ.clear()  # a rooted parent has its programs' variables
    os.environ.update([("HOME", "/"), *(entry.split("=", 1) for entry in process["env"])])
    _give_up(process["capabilities"]["bounding"])
    libc("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if FILTER in (notes := config.get("annotations") or {}):  # pid 1 and the launcher look whether there is one
        filter_calls(base64.b64decode(notes[FILTER]))
    os.write(sealed, b"\n")
    os.close(sealed)
    arguments: list[str] = process["args"]
    return arguments


def leave_namespaces(kinds: int) -> None:
    """For new ones. Raises OSError."""
    try:
        libc("unshare", kinds)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        what = "the kernel makes no more namespaces (see max_pid_namespaces and the like in /proc/sys/user)"
        raise OSError(error.errno, what) from None


def make_root(config: Mapping[str, Any], trees: Mapping[str, int]) -> None:
    """What the keeper handed over, with the mounts of this sandbox; of the parent's, the runtime alone."""
    _mount(None, "/", None, _REC | _PRIVATE)
    runtime = libc("syscall", _OPEN_TREE, _HERE, _RUNTIME.encode(), _CLONE_TREE | os.O_CLOEXEC)
    _move(trees["/"], _ROOT)
    root = os.open(_ROOT, os.O_PATH | os.O_DIRECTORY)
    for told in config["mounts"]:
        target, kind, options = told["destination"], told["type"], told["options"]
        tree = runtime if target == _RUNTIME else trees.get(target, -1)
        flags = sum(_FLAGS.get(option, 0) for option in options)
        if kind == "cgroup":
            _mount_groups(root, target, flags)
        elif tree < 0:
            data = ",".join(option for option in options if option not in _FLAGS)
            _mount(kind, _place(root, target), kind, flags, data)
        else:
            _move(tree, _place(root, target))
            if kind == "bind":
                _mount(None, _place(root, target), None, flags | _REMOUNT | _BIND)
    os.chdir(_ROOT)
    libc("syscall", _PIVOT_ROOT[os.uname().machine], b".", b".")
    libc("umount2", b".", _DETACH)
    os.chdir("/")


def _place(root: int, target: str) -> str:
    """A path to the folder `target` as a process with that root finds it, whatever links an agent or an image has
    put there. It is made where there is none."""
    at, names = root, target.strip("/").split("/")
    for count, name in enumerate(names, 1):
        try:
            following = _open_in(root, "/".join(names[:count]))
        except FileNotFoundError:
            os.mkdir(name, 0o755, dir_fd=at)
            following = _open_in(root, "/".join(names[:count]))
        at = following
    return f"/proc/self/fd/{at}"


def _open_in(root: int, path: str) -> int:
    how = struct.pack("=QQQ", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT)
    return libc("syscall", _OPENAT2, root, os.fsencode(path), how, len(how))


def _agent_namespace(owner: int, maps: Sequence[str], processes: int) -> int:
    """A descriptor of a new user namespace, below this one. A process of the owner's makes it, which ends."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
            os.setresgid(owner, owner, owner)
            os.setresuid(owner, owner, owner)
            libc("unshare", _NEW_USERS)
            socket.send_fds(theirs, [b"x"], [os.open("/proc/self/ns/user", os.O_RDONLY)])
            theirs.recv(1)
        finally:
            os._exit(0)
    theirs.close()
    with ours:
        message, namespaces, _, _ = socket.recv_fds(ours, 1, 1)
        if not message:
            raise OSError(0, "the kernel makes no user namespace (see /proc/sys/user/max_user_namespaces)")
        for name, text in zip(("uid_map", "gid_map"), maps, strict=True):
            _write(f"/proc/{pid}/{name}", text)
    os.waitpid(pid, 0)
    (namespace,) = namespaces
    return namespace


def _mount_groups(root: int, target: str, flags: int) -> None:
    """The hierarchies that this process has a group of its own in: all of v2, or each of v1."""
    with open("/proc/self/cgroup") as file:
        kinds = [line.split(":")[1] for line in file]
    if kinds == [""]:
        _mount("cgroup", _place(root, target), "cgroup2", flags)
        return
    _mount("tmpfs", _place(root, target), "tmpfs", flags & ~_READ_ONLY, "mode=755,size=65536")
    place = _place(root, target)
    for kind in kinds:
        if not kind or kind.startswith("name="):
            continue
        os.mkdir(f"{place}/{kind}")
        _mount("cgroup", f"{place}/{kind}", "cgroup", flags, kind)
        for name in kind.split(",") if "," in kind else ():
            os.symlink(kind, f"{place}/{name}")
    _mount(None, place, None, flags | _REMOUNT | _BIND)


def _close_paths(linux: Mapping[str, Any]) -> None:
    """Those that show the machine are hidden, and those that change it are made read-only, where they exist."""
    for path in linux["maskedPaths"]:
        if os.path.isdir(path):
            _mount("tmpfs", path, "tmpfs", _READ_ONLY)
        elif os.path.exists(path):
            _mount("/dev/null", path, None, _BIND)
    for path in linux["readonlyPaths"]:
        if os.path.exists(path):
            _mount(path, path, None, _BIND | _REC)
            _mount(None, path, None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES | _NO_PROGRAMS)


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, _GET_FLAGS, asked), 16)
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))


def _give_up(kept: Sequence[str]) -> None:
    """All capabilities but these, for good."""
    numbers = {_CAPABILITIES[name] for name in kept}
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    for number in range(last + 1):
        if number not in numbers:
            libc("prctl", _BOUNDING_DROP, number, 0, 0, 0)
    libc("prctl", _AMBIENT, _CLEAR_ALL, 0, 0, 0)
    bits = sum(1 << number for number in numbers)
    libc("capset", struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), struct.pack("=6I", bits, bits, 0, 0, 0, 0))


def _move(tree: int, target: str) -> None:
    libc("syscall", _MOVE_MOUNT, tree, b"", _HERE, target.encode(), _EMPTY_FROM | _FOLLOW_TO)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    try:
        libc("mount", source and source.encode(), target.encode(), kind and kind.encode(), flags, data.encode())
    except OSError as error:
        what = f"a mount of {kind or source or 'nothing new'} at {target}: {os.strerror(error.errno or 0)}"
        raise OSError(error.errno, what) from None


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
