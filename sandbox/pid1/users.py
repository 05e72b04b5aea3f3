"""Who a process of a sandbox is: kernel calls alone, for a program that starts with few imports."""

import posix

from sandbox.pid1.filter import libc, refuse_namespaces

_CLONE_NEWUSER = 0x10000000
_SIGKILL = 9  # `signal` takes as long to import as all the rest


def take_identity(uid: int, gid: int) -> None:
    """For good, unless it has a capability to take another one."""
    posix.setgroups([])
    posix.setresgid(gid, gid, gid)
    posix.setresuid(uid, uid, uid)


def enter(namespace: int) -> None:
    """Becomes root of the user namespace of this descriptor, which it closes: with all capabilities over nothing
    but what belongs to the namespace. The caller has the identity that owns it. Raises OSError."""
    libc("setns", namespace, _CLONE_NEWUSER)
    posix.close(namespace)
    take_identity(0, 0)


def stay(uid: int, gid: int) -> None:
    """Becomes this user of the namespace that was entered, and enters no other one."""
    take_identity(uid, gid)
    refuse_namespaces()


def kill_everything_of(worker_uid: int, channel_gid: int) -> None:
    """Kills every process of the worker's uid. For a forked child, which ends here.

    A signal is allowed where the sender's real or effective uid equals the target's real or saved uid. Only the
    killer's effective uid is the worker's: it reaches all of the worker's processes, and none of them can stop
    it. So it is with all processes of the agent's user namespace, as that uid owns it: who has the owner's
    effective uid outside has all capabilities over it. Its other uids are the number of the channel's group, which
    is no process' uid; were they 0, `kill(-1)` would reach root's processes too.
    """
    status = 1
    try:
        posix.setgroups([])
        posix.setresuid(channel_gid, worker_uid, channel_gid)
        posix.kill(-1, _SIGKILL)
        status = 0
    finally:
        posix._exit(status)
