"""Profiles of system calls as the kernel's program: run here by a small interpreter of it."""

from __future__ import annotations

import ctypes
import platform
import socket
import struct
from typing import Any

import pytest

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.hardening import seccomp_profile
from orchestrator.launch.oci import call_filter
from orchestrator.launch.oci.call_filter import compiled, encoded, load_libseccomp

ALLOW, EPERM, OTHER_ARCHITECTURE = 0x7FFF0000, 0x50001, 0
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


@pytest.fixture(autouse=True)
def library() -> ctypes.CDLL:
    try:
        return load_libseccomp()
    except EnvironmentUnusable as error:
        pytest.skip(str(error))


def answer(program: bytes, call: str, *arguments: int, architecture: int | None = None) -> int:
    """What the kernel would do with the call, as SECCOMP_RET_*."""
    number = load_libseccomp().seccomp_syscall_resolve_name(call.encode())
    values = (*arguments, *[0] * (6 - len(arguments)))
    own = ARCHITECTURES[platform.machine()]
    data = struct.pack("=iIQ6Q", number, own if architecture is None else architecture, 0, *values)
    steps = list(struct.iter_unpack("=HBBI", program))
    at = register = 0
    while True:
        code, met, unmet, value = steps[at]
        at += 1
        match code:
            case 0x20:
                register = struct.unpack_from("=I", data, value)[0]
            case 0x06:
                return value
            case 0x05:
                at += value
            case 0x54:
                register &= value
            case 0x15 | 0x25 | 0x35 | 0x45:
                holds = {0x15: register == value, 0x25: register > value, 0x35: register >= value}
                at += met if holds.get(code, bool(register & value)) else unmet
            case _:
                raise AssertionError(f"an instruction {code:#x}")


def test_a_sandboxs_profile_allows_and_refuses_what_it_says() -> None:
    program = compiled(seccomp_profile(allow_localhost_tcp=False))
    assert answer(program, "read") == ALLOW
    assert answer(program, "socket", socket.AF_UNIX, socket.SOCK_STREAM) == ALLOW
    for call in ("mount", "ptrace", "setns", "unshare", "bpf", "keyctl", "add_key", "io_uring_setup", "reboot"):
        assert answer(program, call) != ALLOW, call
    assert answer(program, "socket", socket.AF_INET, socket.SOCK_STREAM) != ALLOW
    assert answer(program, "read", architecture=0x40000003) != ALLOW, "calls of another architecture"


def test_arguments_are_compared_as_the_profile_says() -> None:
    program = compiled(seccomp_profile(allow_localhost_tcp=True))
    assert answer(program, "socket", socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) == ALLOW, "masked"
    assert answer(program, "socket", socket.AF_INET, socket.SOCK_DGRAM) != ALLOW
    writable = compiled(seccomp_profile(allow_localhost_tcp=False, writable_root=True))
    assert answer(writable, "setns", 3, 0x10000000) == ALLOW
    assert answer(writable, "setns", 3, 0x20000000) != ALLOW


def test_a_refusal_has_its_own_error_number() -> None:
    rules: list[dict[str, Any]] = [
        {"names": ["read", "no_such_call"], "action": "SCMP_ACT_ALLOW"},
        {"names": ["write"], "action": "SCMP_ACT_ERRNO", "errnoRet": 97},
    ]
    profile = {"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 1, "syscalls": rules}
    program = compiled(profile)
    assert [answer(program, name) for name in ("read", "write", "close")] == [ALLOW, 0x50000 | 97, EPERM]
    assert encoded(profile) == encoded(dict(profile))


def test_without_the_library_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_filter, "_LIBRARY", "libnowhere.so.9")
    load_libseccomp.cache_clear()
    try:
        with pytest.raises(EnvironmentUnusable, match="apt install libseccomp2"):
            load_libseccomp()
    finally:
        load_libseccomp.cache_clear()
