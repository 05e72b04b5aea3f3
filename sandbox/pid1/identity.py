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

from sandbox.pid1.users import enter, stay, take_identity
from sandbox.types import AgentUser, Box

WORKER_NICE = 10
WORKER_OOM_SCORE = 1000

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522
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
        take_identity(box.identities.runner_uid, box.identities.channel_gid)
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
        take_identity(box.identities.worker_uid, box.identities.worker_uid)
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


def _enter(agent: AgentUser, workspace: Path) -> None:
    """Goes from the identity that owns the agent's user namespace into it, for good. There, root has all
    capabilities, over nothing but what belongs to the namespace; another user has none."""
    enter(agent.namespace)
    if agent.uid and workspace.exists() and workspace.stat().st_uid != agent.uid:
        os.chown(workspace, agent.uid, agent.gid)
    stay(agent.uid, agent.gid)


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
