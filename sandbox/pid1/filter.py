"""A filter of system calls on top of the sandbox's: no namespace is entered any more.

Where the agent may be root, pid 1's children enter the agent's user namespace. What they become there must not be
able to enter another one.
"""

import ctypes
import os
import struct

_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_SETNS = {"x86_64": 308, "aarch64": 268}
_LOAD_NUMBER, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K
_ALLOW, _EPERM = 0x7FFF0000, 0x00050001
libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def refuse_namespaces() -> None:
    """For this process and all that come from it. Calls of another architecture end the thread by the sandbox's
    own filter. Raises OSError."""
    setns = _SETNS[os.uname().machine]
    steps = ((_LOAD_NUMBER, 0, 0, 0), (_EQUAL, 0, 1, setns), (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW))
    code = b"".join(struct.pack("=HBBI", *step) for step in steps)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(_Program(len(steps), code)), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")
