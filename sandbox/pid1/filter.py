"""A filter of system calls on top of the sandbox's: no namespace is entered any more.

Where the agent may be root, pid 1's children enter the agent's user namespace. What they become there must not be
able to enter another one.
"""

import posix
import sys
from _ctypes import (
    FUNCFLAG_CDECL,
    FUNCFLAG_USE_ERRNO,
    CFuncPtr,
    Structure,
    _SimpleCData,
    byref,
    dlopen,
    dlsym,
    get_errno,
)

_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_SETNS = {"x86_64": 308, "aarch64": 268}
_LOAD_NUMBER, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K
_ALLOW, _EPERM = 0x7FFF0000, 0x00050001
_STEP_BYTES = 8  # struct sock_filter
_loaded = dlopen(None, 0)  # type: ignore[arg-type]


# As in `ctypes`, of which the rest would be a third of a grader's start.
class _Function(CFuncPtr):
    _flags_ = FUNCFLAG_CDECL | FUNCFLAG_USE_ERRNO


class _Short(_SimpleCData):  # type: ignore[type-arg]
    _type_ = "H"


class _Bytes(_SimpleCData):  # type: ignore[type-arg]
    _type_ = "z"


class _Program(Structure):
    """struct sock_fprog"""

    _fields_ = (("length", _Short), ("instructions", _Bytes))


def libc(name: str, *arguments: object) -> int:
    """Calls a function of the C library that returns no number below 0. Raises OSError if it does."""
    number: int = _Function(dlsym(_loaded, name))(*arguments)
    if number < 0:
        called = f"{name} {arguments[0]}" if name == "syscall" else name
        raise OSError(error := get_errno(), f"{called}: {posix.strerror(error)}")
    return number


def filter_calls(code: bytes) -> None:
    """By this program of the kernel's, for this process and all that come from it. Raises OSError."""
    libc("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, byref(_Program(len(code) // _STEP_BYTES, code)), 0, 0)


def refuse_namespaces() -> None:
    """For this process and all that come from it. Calls of another architecture end the thread by the sandbox's
    own filter. Raises OSError."""
    setns = _SETNS[posix.uname().machine]
    steps = ((_LOAD_NUMBER, 0, 0, 0), (_EQUAL, 0, 1, setns), (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW))
    code = b"".join(
        operation.to_bytes(2, sys.byteorder) + bytes((met, unmet)) + value.to_bytes(4, sys.byteorder)
        for operation, met, unmet, value in steps
    )
    filter_calls(code)
