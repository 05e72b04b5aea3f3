"""Runs a program as root of a new user namespace of an ordinary user: `python enter.py USERS GROUPS PROGRAM ...`.

USERS and GROUPS: ranges of ids as `newuidmap` takes them, "INSIDE OUTSIDE SIZE ...". The keeper runs so, and with
it the OCI runtime: both can mount there, and their containers need no user namespace of their own. Only the
standard library is imported.
"""

import ctypes
import os
import sys
from typing import NoReturn

_CLONE_NEWUSER = 0x10000000
_WRITERS = ("newuidmap", "newgidmap")  # they may write maps of subordinate ids
_EXIT_FAILED = 1


def main(ranges: list[str], command: list[str]) -> NoReturn:
    """Becomes `command`, or ends with a line that says why not."""
    ready, tell_ready = os.pipe()
    parent = os.getpid()
    writer = os.fork()
    if writer == 0:
        os.close(tell_ready)
        if not os.read(ready, 1):
            os._exit(_EXIT_FAILED)
        for program, ids in zip(_WRITERS, ranges, strict=True):
            argv = [program, str(parent), *ids.split()]
            if (status := os.spawnvp(os.P_WAIT, program, argv)) != 0:  # noqa: S606 - no shell is wanted
                print(f"{program} ended with {status}", file=sys.stderr, flush=True)
                os._exit(_EXIT_FAILED)
        os._exit(0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUSER) != 0:
        sys.exit(f"the kernel makes no user namespace: {os.strerror(ctypes.get_errno())}")
    os.write(tell_ready, b"x")
    if os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) != 0:
        sys.exit(_EXIT_FAILED)
    os.close(ready)
    os.close(tell_ready)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.execv(command[0], command)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main(sys.argv[1:3], sys.argv[3:])
