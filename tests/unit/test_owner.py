from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.launch.owner import Owner, owner_label, this_process


def test_living_process_owns_and_a_dead_one_does_not() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        me = this_process()
        started = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
        owner = Owner(me.host, child.pid, started)
        assert not owner.is_dead
    finally:
        child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert owner.is_dead, "a zombie owns nothing"
    child.wait()
    assert owner.is_dead


def test_pid_that_was_given_to_a_later_process_is_another_owner() -> None:
    me = this_process()
    assert not me.is_dead
    assert Owner(me.host, me.pid, me.started - 1).is_dead


def test_process_of_another_host_is_never_known_to_be_dead() -> None:
    assert not Owner("elsewhere.example", 2**22 + 1, 1).is_dead


def test_label_reads_back() -> None:
    assert Owner.parse(owner_label()) == this_process()
    assert Owner.parse("fe80::1:12:34") == Owner("fe80::1", 12, 34)


@pytest.mark.parametrize("text", ["", "host", "host:1", "host:x:1", ":1:2", "host:1:-2", "3f9a61b20c55"])
def test_other_labels_are_nobodys(text: str) -> None:
    assert Owner.parse(text) is None
