"""What the keeper makes of what a parent tells, and of one that tells nothing."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from orchestrator.launch.oci import forking, parent_line
from orchestrator.launch.oci.forking import Fork
from orchestrator.launch.oci.keeper import Keeper
from orchestrator.launch.oci.kept import Container
from orchestrator.launch.oci.parent_line import ParentLine

START, PARENT_START = 7, 3
BROKEN = 70 << 8


class Told:
    """A keeper with a parent that is this test, and one sandbox that is asked of it."""

    def __init__(self, folder: Path) -> None:
        self.ours, theirs = socket.socketpair()
        self.ours.settimeout(10)
        self.keeper = Keeper(theirs, ["/no/such/runtime", "--root", str(folder / "state")])
        self.running = subprocess.Popen(["sleep", "60"])
        parent = self.keeper.containers["parent"] = Container()
        parent.call, parent.pid = PARENT_START, self.running.pid
        parent.forks = ParentLine()
        self.parent = socket.socket(fileno=parent.forks.theirs)
        self.parent.setblocking(False)
        self.keeper.selector.register(
            parent.forks, selectors.EVENT_READ, lambda: self.keeper.forking._hear(parent, "parent")
        )
        self.folder = folder
        self.box, self.sealed = self.asked_for("box", START)

    def asked_for(self, name: str, call: int) -> tuple[Container, int]:
        """A sandbox that is starting, and where it says that it is sealed."""
        box = self.keeper.containers[name] = Container(starting=True)
        box.call, box.fork = call, Fork("parent", str(self.folder))
        box.fork.sealed, sealed = os.pipe2(os.O_NONBLOCK)
        self.keeper.selector.register(
            box.fork.sealed, selectors.EVENT_READ, lambda: self.keeper.forking._hear_sealed(box, name)
        )
        return box, sealed

    def say(self, *descriptors: int, **message: Any) -> None:
        socket.send_fds(self.parent, [json.dumps(message).encode()], descriptors)

    def request(self) -> str | None:
        """The next sandbox that the parent is asked for; None: for no other by now."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self.parent, 1 << 16, 64)
        except BlockingIOError:
            return None
        for number in descriptors:
            os.close(number)
        name: str = json.loads(message)["fork"]
        return name

    def hear(self) -> list[dict[str, Any]]:
        """What the keeper tells after it has read all that the parent said: its line first."""
        while ready := self.keeper.selector.select(0):
            key = min(ready, key=lambda it: not isinstance(it[0].fileobj, ParentLine))[0]
            key.data()
        self.keeper.forking.look()
        with closing(self.ours.dup()) as line:
            line.setblocking(False)
            try:
                return [json.loads(each) for each in line.recv(1 << 16).splitlines()]
            except BlockingIOError:
                return []

    def is_late(self) -> None:
        self.box.fork.due_s = time.monotonic()
        assert self.hear() == []


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    made = Told(tmp_path)
    yield made
    made.running.kill()
    made.running.wait()


def ended_process() -> int:
    """Of a process that has ended and was waited for."""
    process = subprocess.Popen(["true"])
    number = os.pidfd_open(process.pid)
    process.wait()
    return number


def test_a_child_that_ends_before_its_number_is_read_fails_its_start(told: Told) -> None:
    os.close(told.sealed)
    told.say(ended_process(), forked="box", process=5)
    told.say(ended=5, status=BROKEN)
    assert told.hear() == [{"call": START, "error": "it ended with 70"}]
    assert not told.box.starting, "it can be removed"


def test_one_that_was_sealed_before_has_started_and_ended(told: Told) -> None:
    os.write(told.sealed, b"\n")
    os.close(told.sealed)
    told.say(ended_process(), forked="box", process=5)
    told.say(ended=5, status=3 << 8)
    assert told.hear() == [{"call": START, "pid": 0}, {"ended": "box", "status": 3 << 8, "said": ""}]


def test_ends_that_the_keeper_is_late_to_hear_are_told_of_their_own_sandboxes(told: Told) -> None:
    _, other_sealed = told.asked_for("other", START + 1)
    for name, process, sealed in (("box", 5, told.sealed), ("other", 6, other_sealed)):
        os.write(sealed, b"\n")
        os.close(sealed)
        told.say(ended_process(), forked=name, process=process)
    told.say(ended=6, status=6 << 8)
    told.say(ended=5, status=5 << 8)
    ends = {each["ended"]: each["status"] >> 8 for each in told.hear() if "ended" in each}
    assert ends == {"box": 5, "other": 6}


def test_a_parent_that_is_late_has_few_requests_and_holds_up_nobody(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its line holds some hundred: the keeper would wait for it, and it for the keeper, to read the ends."""
    monkeypatch.setattr(forking.Forking, "_trees", lambda *given: {})
    (told.folder / "state").mkdir()
    (told.folder / "config.json").write_text('{"linux": {"resources": {}}, "mounts": []}')
    started_s = time.monotonic()
    for number in range(400):
        start = {"start": f"box{number}", "bundle": str(told.folder), "from": "parent"}
        told.keeper._start({"call": 100 + number, **start})
    assert time.monotonic() - started_s < parent_line.ASKING_S
    assert [told.request() for _ in range(5)] == ["box0", "box1", "box2", "box3", None]
    told.say(refused="box0", why="no room")
    told.keeper._remove(8, "box4")
    assert {"call": 100, "error": "no room"} in (heard := told.hear())
    assert [each for each in heard if each["call"] in (104, 8)] == [
        {"call": 104, "error": "it is not wanted any more"},
        {"call": 8, "existed": True},
    ]
    assert [told.request(), told.request()] == ["box5", None]


def test_a_start_that_takes_too_long_ends_that_sandbox_alone(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent_line, "_number", lambda pidfd: 1)
    with subprocess.Popen(["sleep", "60"]) as process:
        told.say(os.pidfd_open(process.pid), forked="box", process=5)
        assert told.hear() == []
        told.is_late()
        assert process.wait(10) == -signal.SIGKILL
    assert told.running.poll() is None
    os.close(told.sealed)
    told.say(ended=5, status=signal.SIGKILL)
    assert told.hear() == [{"call": START, "error": "it ended with -9"}]


def test_one_whose_number_cannot_be_written_down_is_ended(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent_line, "_number", lambda pidfd: 1)
    told.box.fork.bundle = "/no/such/folder"
    with subprocess.Popen(["sleep", "60"]) as process:
        os.write(told.sealed, b"\n")
        os.close(told.sealed)
        told.say(os.pidfd_open(process.pid), forked="box", process=5)
        error = "no file for its process id: No such file or directory"
        assert told.hear() == [{"call": START, "error": error}]
        assert process.wait(10) == -signal.SIGKILL


def test_one_whose_removal_was_asked_for_while_it_started_is_ended(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parent_line, "_number", lambda pidfd: 1)
    told.keeper._remove(8, "box")
    with subprocess.Popen(["sleep", "60"]) as process:
        os.write(told.sealed, b"\n")
        os.close(told.sealed)
        told.say(os.pidfd_open(process.pid), forked="box", process=5)
        assert told.hear() == [{"call": START, "pid": 1}]
        assert process.wait(10) == -signal.SIGKILL


def test_one_that_is_sealed_is_not_removed_before_it_is_known_which_process_it_is(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parent_line, "_number", lambda pidfd: 1)
    with subprocess.Popen(["sleep", "60"]) as process:
        os.write(told.sealed, b"\n")
        assert told.hear() == []
        told.keeper._remove(8, "box")
        assert told.hear() == []
        told.say(os.pidfd_open(process.pid), forked="box", process=5)
        assert told.hear() == [{"call": START, "pid": 1}]
        assert process.wait(10) == -signal.SIGKILL


def test_what_a_parent_has_told_while_nobody_listened_counts(told: Told) -> None:
    os.close(told.sealed)
    told.say(ended_process(), forked="box", process=5)
    told.say(ended=5, status=BROKEN)
    told.box.fork.is_seen_ended, told.box.fork.due_s = True, time.monotonic()
    told.keeper.forking.look()
    assert told.hear() == [{"call": START, "error": "it ended with 70"}]
    assert told.running.poll() is None


@pytest.mark.parametrize("is_forked", [False, True])
def test_a_parent_that_tells_nothing_is_ended(told: Told, is_forked: bool) -> None:
    if is_forked:
        os.close(told.sealed)
        told.say(ended_process(), forked="box", process=5)
    assert told.hear() == []
    told.is_late()
    if is_forked:
        assert told.running.poll() is None, "it has a while to tell"
        told.is_late()
    assert told.running.wait(10) == -signal.SIGKILL
    told.parent.close()
    told.keeper.ended("parent", signal.SIGKILL)
    assert {"call": START, "error": "its parent has ended"} in told.hear()


def test_the_end_of_what_is_killed_is_awaited_for_a_bounded_time(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parent_line, "_number", lambda pidfd: 1)
    os.write(told.sealed, b"\n")
    told.say(ended_process(), forked="box", process=5)
    assert told.hear() == [{"call": START, "pid": 1}]
    told.keeper.kill("box")
    assert told.keeper.forking.due_s() < time.monotonic() + 60
    told.is_late()
    told.is_late()
    assert told.running.wait(10) == -signal.SIGKILL


def test_a_parent_that_ends_before_it_is_ready_is_told_of_at_once(told: Told) -> None:
    told.parent.close()
    told.keeper.ended("parent", BROKEN)
    assert {"call": PARENT_START, "error": "it ended before it was ready"} in told.hear()


def test_a_parent_that_is_ready_before_the_runtime_has_ended_is_told_of_when_it_has_a_number(told: Told) -> None:
    parent = told.keeper.containers["parent"]
    pid, parent.pid = parent.pid, 0
    told.say(ready=100)
    assert told.hear() == []
    parent.pid = pid
    told.keeper.forking.answer_if_there(parent)
    assert told.hear() == [{"call": PARENT_START, "pid": pid}]
