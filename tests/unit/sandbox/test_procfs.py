"""What the kernel tells about ourselves and our children."""

from __future__ import annotations

import os
import subprocess

from sandbox import procfs
from sandbox.pid1.confinement import confinement


def test_own_limits_are_read() -> None:
    told = confinement()
    assert told.seccomp_mode in (0, 1, 2)
    assert "lo" in told.network_interfaces
    assert told.capability_bounding_set >= 0
    assert told.process_id == os.getpid()
    assert "null" in told.devices
    assert {mount.target for mount in told.mounts} >= {"/", "/proc"}
    assert all(limit.value >= 0 for limit in told.limits)


def test_descendants_are_found_but_for_one_branch() -> None:
    shell, processes = "sleep 60 & echo started; wait", procfs.Processes()
    with (
        subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE) as one,
        subprocess.Popen(["sleep", "60"]) as other,
    ):
        assert one.stdout is not None
        one.stdout.readline()
        try:
            below = processes.below(os.getpid(), but_not=other.pid)
            assert one.pid in below
            assert other.pid not in below
            assert len(processes.below(one.pid, but_not=0)) == 1
            assert {one.pid, os.getpid()} <= set(processes.of(os.getuid()))
        finally:
            for pid in processes.below(one.pid, but_not=0):
                os.kill(pid, 9)
            one.kill()
            other.kill()


def test_memory_kills_are_a_count_or_unknown() -> None:
    count = procfs.memory_kills()
    assert count is None or count >= 0
