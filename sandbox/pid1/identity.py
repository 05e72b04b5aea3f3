"""Turns a freshly forked process into the runner or the code worker.

Kernel calls only, in the order the kernel needs: limits before the uid; the death signal and dumpability
after it, because changing the uid resets both. Neither identity keeps a capability over what is outside of the
agent's user namespace.
"""

import contextlib
import ctypes
import os
import resource
import signal
import struct
from pathlib import Path

from sandbox.pid1.filter import refuse_namespaces
from sandbox.types import AgentUser, Box, Identities

WORKER_NICE = 10
WORKER_OOM_SCORE = 1000

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522
_CLONE_NEWUSER = 0x10000000
_libc = ctypes.CDLL(None, use_errno=True)


def become_supervisor() -> None:
    """Makes the worker's orphans this process' children, as in a container they are pid 1's anyway."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def become_runner(box: Box) -> None:
    """Takes the identity that owns the channel. The worker cannot read its memory and environment."""
    supervisor = os.getppid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if box.agent is not None:
        os.close(box.agent.namespace)
    if box.identities is not None:
        _take_identity(box.identities.runner_uid, box.identities.channel_gid)
    _drop_capabilities()
    _prctl(_PR_SET_DUMPABLE, 0)
    _die_with(supervisor)


def become_worker(box: Box) -> None:
    """Takes the identity of model-written code: first to be killed for memory, scheduled behind the runner."""
    supervisor = os.getppid()
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(WORKER_NICE)
    os.umask(0o022)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if box.identities is not None:
        # Counted per uid, so only for a uid of the worker's own. It leaves the supervisor room below the
        # container's limit: a fork bomb cannot keep it from wiping the worker.
        resource.setrlimit(resource.RLIMIT_NPROC, (box.worker_processes, box.worker_processes))
        _take_identity(box.identities.worker_uid, box.identities.worker_uid)
    if box.agent is not None:
        _enter(box.agent, box.workspace)
    else:
        _drop_capabilities()
    # As after any exec: /proc/self belongs to the worker's uid.
    _prctl(_PR_SET_DUMPABLE, 1)
    # As whom the agent is: if it is root, nobody else may find the way. Some kernels (gVisor's) have no such file;
    # then the kernel picks whom to kill by size alone.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(WORKER_OOM_SCORE))
    _die_with(supervisor)


def kill_everything_of_worker(identities: Identities) -> None:
    """Kills every process of the worker's uid. For a forked child, which ends here.

    A signal is allowed where the sender's real or effective uid equals the target's real or saved uid. Only the
    killer's effective uid is the worker's: it reaches all of the worker's processes, and none of them can stop
    it. So it is with all processes of the agent's user namespace, as that uid owns it: who has the owner's
    effective uid outside has all capabilities over it. Its other uids are the number of the channel's group, which
    is no process' uid; were they 0, `kill(-1)` would reach root's processes too.
    """
    status = 1
    try:
        os.setgroups([])
        os.setresuid(identities.channel_gid, identities.worker_uid, identities.channel_gid)
        os.kill(-1, signal.SIGKILL)
        status = 0
    finally:
        os._exit(status)


def _take_identity(uid: int, gid: int) -> None:
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def _enter(agent: AgentUser, workspace: Path) -> None:
    """Goes from the identity that owns the agent's user namespace into it, for good. There, root has all
    capabilities, over nothing but what belongs to the namespace; another user has none."""
    if _libc.setns(agent.namespace, _CLONE_NEWUSER) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(agent.namespace)
    _take_identity(0, 0)
    if agent.uid and workspace.exists() and workspace.stat().st_uid != agent.uid:
        os.chown(workspace, agent.uid, agent.gid)
    _take_identity(agent.uid, agent.gid)
    refuse_namespaces()


def _drop_capabilities() -> None:
    """Empties the effective, permitted and inheritable sets; the ambient set follows them."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    if _libc.capset(header, bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _die_with(supervisor: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # the supervisor died before the line above took effect
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
