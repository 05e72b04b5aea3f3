"""Finds the OCI runtime's program, and the options that it needs beside those of all runtimes."""

import os
import shutil
import subprocess

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.names import is_gvisor

USUAL = ("runc", "crun")
# What runtimes need to know: where programs are, and where a user's own control groups are managed. No keys.
_HANDED_DOWN = ("PATH", "HOME", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS", "TMPDIR")
# runc, a program in Go that ends at once, has no use for more. gVisor's lives as long as its sandbox.
_SHORT_LIVED = {"GOMAXPROCS": "1"}
_FLAGS_S = 20.0
_FOR_ROOT = ("/usr/local/sbin", "/usr/sbin", "/sbin")  # not on every user's PATH


def find_oci_runtime(name: str) -> str:
    """The path of the program `name`, which may be a path itself. Raises EnvironmentUnusable."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), *_FOR_ROOT))
    # What names a folder is no name to look for, and is kept whole: cleaning up may run in another folder.
    program = shutil.which(os.path.abspath(os.path.expanduser(name)) if "/" in name else name, path=path)
    if program is None:
        raise EnvironmentUnusable(
            f"there is no OCI runtime {name} on this machine: install {' or '.join(USUAL)} (`apt install runc`), "
            "or name another with --env.oci_runtime"
        )
    return os.path.abspath(program)


def environment(program: str) -> dict[str, str]:
    """The variables that the runtime gets."""
    handed_down = {name: os.environ[name] for name in _HANDED_DOWN if name in os.environ}
    return handed_down if is_gvisor(program) else {**handed_down, **_SHORT_LIVED}


def own_options(program: str) -> list[str]:
    """Without them a sandbox of gVisor could not reach its socket. Blocks. Raises EnvironmentUnusable."""
    if not is_gvisor(program):
        return []
    try:
        usage = subprocess.run([program, "flags"], capture_output=True, timeout=_FLAGS_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentUnusable(f"the OCI runtime {program} does not start: {error}") from error
    newer = b"-host-uds value" in usage.stdout + usage.stderr
    return ["--network=none", "--host-uds=open" if newer else "--fsgofer-host-uds"]
