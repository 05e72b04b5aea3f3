"""Checks disk space, and the folder for sockets and temporary files."""

import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from orchestrator.doctor.finding import Finding, fail, ok, warn
from orchestrator.errors import ConfigError, EnvironmentUnusable
from orchestrator.launch.channels import Channels, longest_socket, socket_fits
from orchestrator.run.groups import check_writable

GIB = 1 << 30
ENOUGH_BYTES = 5 * GIB  # the image is 0.2 GiB; a rollout's record some hundred kilobytes
LEAST_BYTES = GIB // 4
ENOUGH_INODES = 100_000  # the image has some ten thousand files, a container some dozen
LEAST_INODES = 1_000


def check_run_directory(folder: Path) -> Iterator[Finding]:
    """Checks the folder that runs are written to."""
    try:
        check_writable(folder)
    except ConfigError as error:
        yield fail("output", str(error))
        return
    yield check_room("output", folder, "set --env.run_dir to a larger disk, or make room")


def check_room(
    what: str, folder: Path, cure: str, *, enough: int = ENOUGH_BYTES, least: int = LEAST_BYTES
) -> Finding:
    """Checks the free space on the disk of `folder`, which need not exist yet. `enough`, `least`: in bytes."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        disk = os.statvfs(place)
    except OSError as error:
        return warn(what, f"{folder}: the free space is unknown ({error.strerror})")
    free, inodes = disk.f_bavail * disk.f_frsize, disk.f_favail if disk.f_files else math.inf  # inf: btrfs
    few = f" and {inodes} inodes" if inodes < ENOUGH_INODES else ""
    text = f"{free / GIB:.1f} GiB{few} free for {folder}"
    if free < least or inodes < LEAST_INODES:
        return fail(what, f"{text}: {cure}")
    return warn(what, f"{text}, little for a long run: {cure}") if few or free < enough else ok(what, text)


def check_temporary() -> Iterator[Finding]:
    """Checks TMPDIR: sockets work in it, and their paths are short enough for the kernel."""
    folder = Path(tempfile.gettempdir())
    try:
        Channels("doctor").close()
    except EnvironmentUnusable as error:
        yield fail("TMPDIR", str(error))
        return
    setting = os.environ.get("TMPDIR")
    if setting and Path(setting) != folder:
        yield warn("TMPDIR", f"{setting} cannot be written: {folder} is used instead")
    length = len(os.fsencode(longest_socket(folder)))
    if socket_fits(folder):
        yield ok("TMPDIR", f"{folder}, socket paths of {length} bytes")
    else:
        yield warn(
            "TMPDIR", f"{folder} makes socket paths of {length} bytes, too long: sockets go to /tmp instead"
        )
