"""A profile of system calls as the program that the kernel runs: by libseccomp, as OCI runtimes do it."""

import base64
import ctypes
import json
import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from orchestrator.errors import EnvironmentUnusable

FILTER, OWNER = "sandbox.filter", "sandbox.owner"  # annotations of a bundle, as `sandbox/boot/entering` knows them
_LIBRARY = "libseccomp.so.2"
_ACTIONS = {
    "SCMP_ACT_ALLOW": 0x7FFF0000,
    "SCMP_ACT_ERRNO": 0x00050000,
    "SCMP_ACT_KILL_THREAD": 0,
    "SCMP_ACT_KILL": 0,
    "SCMP_ACT_KILL_PROCESS": 0x80000000,
}
_EPERM = 1
_COMPARISONS = {f"SCMP_CMP_{name}": number for number, name in enumerate(("NE", "LT", "LE", "EQ", "GE", "GT"), 1)}
_COMPARISONS["SCMP_CMP_MASKED_EQ"] = 7
_NO_SUCH_CALL = -1


class _Argument(ctypes.Structure):
    """struct scmp_arg_cmp"""

    _fields_ = (
        *(("number", ctypes.c_uint), ("comparison", ctypes.c_int)),
        *(("value", ctypes.c_uint64), ("second", ctypes.c_uint64)),
    )


def encoded(profile: Mapping[str, Any]) -> str:
    """`compiled`, as a text. Raises EnvironmentUnusable."""
    return _encoded(json.dumps(profile))


@lru_cache(maxsize=8)
def _encoded(profile: str) -> str:
    return base64.b64encode(compiled(json.loads(profile))).decode()


@lru_cache(maxsize=1)
def load_libseccomp() -> ctypes.CDLL:
    """The library of this machine. Raises EnvironmentUnusable."""
    try:
        library = ctypes.CDLL(_LIBRARY, use_errno=True)
    except OSError as error:
        raise EnvironmentUnusable("env.start fork needs libseccomp (`apt install libseccomp2`)") from error
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = [ctypes.c_uint32]
    library.seccomp_rule_add_array.argtypes = [
        *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(_Argument)),
    ]
    library.seccomp_export_bpf.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.seccomp_release.argtypes = [ctypes.c_void_p]
    return library


def compiled(profile: Mapping[str, Any]) -> bytes:
    """The instructions, for this machine's architecture alone. `profile`: as the OCI runtime specification has it.
    Calls that this machine's kernel has under no name are left out: then the default holds. Raises
    EnvironmentUnusable."""
    library = load_libseccomp()
    made = library.seccomp_init(_action(profile["defaultAction"], profile.get("defaultErrnoRet")))
    if not made:
        raise EnvironmentUnusable(f"{_LIBRARY} makes no filter of system calls")
    try:
        for rule in profile["syscalls"]:
            action = _action(rule["action"], rule.get("errnoRet"))
            arguments = [
                _Argument(told["index"], _COMPARISONS[told["op"]], told["value"], told.get("valueTwo", 0))
                for told in rule.get("args") or ()
            ]
            array = (_Argument * len(arguments))(*arguments)
            for name in rule["names"]:
                number = library.seccomp_syscall_resolve_name(name.encode())
                if number == _NO_SUCH_CALL:
                    continue
                if (error := library.seccomp_rule_add_array(made, action, number, len(arguments), array)) < 0:
                    raise EnvironmentUnusable(f"{_LIBRARY} takes no rule for {name}: {os.strerror(-error)}")
        return _exported(library, made)
    finally:
        library.seccomp_release(made)


def _exported(library: ctypes.CDLL, made: int) -> bytes:
    memory = os.memfd_create("filter", os.MFD_CLOEXEC)
    try:
        if (error := library.seccomp_export_bpf(made, memory)) < 0:
            raise EnvironmentUnusable(f"{_LIBRARY} exports no filter: {os.strerror(-error)}")
        os.lseek(memory, 0, os.SEEK_SET)
        return os.read(memory, 1 << 20)
    finally:
        os.close(memory)


def _action(name: str, number: int | None) -> int:
    action = _ACTIONS[name]
    return action | (_EPERM if number is None else number) if name == "SCMP_ACT_ERRNO" else action
