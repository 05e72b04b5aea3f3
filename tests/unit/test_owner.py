from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.launch.owner import Owner, this_process
from tests.fakes.runs import ROOT

ENVIRON = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}


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
    assert Owner.parse(str(this_process())) == this_process()
    assert Owner.parse("fe80::1:12:34") == Owner("fe80::1", 12, 34)


@pytest.mark.parametrize("text", ["", "host", "host:1", "host:x:1", ":1:2", "host:1:-2", "3f9a61b20c55"])
def test_other_labels_are_nobodys(text: str) -> None:
    assert Owner.parse(text) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace takes root")
def test_a_process_of_another_pid_namespace_is_not_taken_for_dead() -> None:
    """Its number means another process there, or none."""
    look = "import sys; from orchestrator.launch.owner import Owner; print(Owner.parse(sys.argv[1]).is_dead)"
    unshared = ["unshare", "--pid", "--fork", "--mount-proc"]
    told = [sys.executable, "-c", look, str(this_process())]
    for wrapper in ([], unshared):
        ended = subprocess.run([*wrapper, *told], capture_output=True, text=True, check=True, env=ENVIRON)
        assert ended.stdout == "False\n"
    name = "from orchestrator.launch.owner import this_process; print(this_process())"
    inside = [*unshared, sys.executable, "-c", name]
    ended = subprocess.run(inside, capture_output=True, text=True, check=True, env=ENVIRON)
    theirs = Owner.parse(ended.stdout.strip())
    assert theirs is not None
    assert not theirs.is_of_this_host
    assert not theirs.is_dead
