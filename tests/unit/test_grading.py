"""What a grader left, read by somebody who trusts none of it; what of an agent's state it gets."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.errors import SandboxLostError, ScorerError
from orchestrator.grading import grade
from orchestrator.grading.cases import case_results
from orchestrator.grading.left_behind import LeftBehind
from orchestrator.grading.reports import test_results as results_of
from orchestrator.grading.rewards import read_rewards
from orchestrator.grading.scope import MERGED, InScope, holds_nothing, in_scope, is_takeover, outermost
from orchestrator.launch.base import Command, CommandEnd
from orchestrator.launch.oci.commands import command_end
from orchestrator.scorers.grader import GraderScorer
from orchestrator.types import Case, Change, Checked, Difference, Grade, Grader, Healthcheck
from orchestrator.types import TestResult as Result
from orchestrator.types.differences import LeftOut
from tests.fakes.plans import a_record


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    (folder := tmp_path / "logs" / "verifier").mkdir(parents=True)
    return folder


@pytest.fixture
def left(logs: Path) -> Iterator[LeftBehind]:
    top = os.open(logs.parents[1], os.O_RDONLY)
    with LeftBehind(top) as made:
        yield made
    os.close(top)


def read(logs: Path) -> LeftBehind:
    return LeftBehind(os.open(logs.parents[1], os.O_RDONLY))


# ---------------------------------------------------------------- rewards


@pytest.mark.parametrize(
    ("files", "values", "source"),
    [
        ({"reward.txt": "1\n"}, {"reward": 1.0}, "reward.txt"),
        ({"reward.txt": "0", "reward.json": "0.5"}, {"reward": 0.5}, "reward.json"),
        ({"reward.json": '{"a": 1, "b": -2.5}'}, {"a": 1.0, "b": -2.5}, "reward.json"),
    ],
)
def test_rewards_are_read(
    logs: Path, left: LeftBehind, files: dict[str, str], values: dict[str, float], source: str
) -> None:
    for name, text in files.items():
        (logs / name).write_text(text)
    rewards = read_rewards(left)
    assert (rewards.values, rewards.source, rewards.fault) == (values, source, "")


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("reward.txt", b"", "could not convert"),
        ("reward.txt", b"nan", "finite"),
        ("reward.txt", b"inf", "finite"),
        ("reward.txt", b"\xff1", "utf-8"),
        ("reward.txt", b"1" * 70_000, "more than 65536 bytes"),
        ("reward.json", b'{"reward": NaN}', "finite"),
        ("reward.json", b'{"reward": 1e999}', "finite"),
        ("reward.json", b'{"reward": true}', "not bool"),
        ("reward.json", b'{"reward": "1"}', "not str"),
        ("reward.json", b"{}", "0 rewards"),
        ("reward.json", b"[1]", "not list"),
        ("reward.json", b"[" * 60_000, "holds no rewards"),
        ("reward.json", b"9" * 5000, "holds no rewards"),
    ],
)
def test_a_file_without_rewards_is_a_fault(
    logs: Path, left: LeftBehind, name: str, content: bytes, why: str
) -> None:
    (logs / name).write_bytes(content)
    rewards = read_rewards(left)
    assert rewards.values == {}
    assert why in rewards.fault


def test_no_link_is_followed_and_no_pipe_waited_for(logs: Path, left: LeftBehind) -> None:
    (logs / "elsewhere").write_text("1")
    (logs / "reward.json").symlink_to("elsewhere")
    os.mkfifo(logs / "reward.txt")
    assert read_rewards(left).fault == "the grader wrote no reward file"


def test_a_link_in_a_folders_place_is_not_followed(logs: Path) -> None:
    (logs / "reward.txt").write_text("1")
    logs.rename(other := logs.parents[1] / "other")
    logs.symlink_to(other)
    assert read_rewards(read(logs)).fault == "the grader wrote no reward file"


def test_a_reward_that_this_machine_cannot_read_is_not_one_that_is_not_there(logs: Path, left: LeftBehind) -> None:
    (logs / "reward.txt").write_text("1")
    top = os.open(logs.parents[1], os.O_RDONLY)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.dup(top))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))  # no descriptor is left
    try:
        for read in (lambda: read_rewards(left), lambda: LeftBehind(top)):
            with pytest.raises(OSError, match="Too many open files"):
                read()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(top)
    assert read_rewards(left).values == {"reward": 1.0}


# ---------------------------------------------------------------- reports

JUNIT = """<?xml version="1.0"?><testsuites><testsuite name="s">
<testcase classname="t" name="a"/>
<testcase classname="t" name="b"><failure message="no">trace</failure></testcase>
<testcase classname="t" name="c"><skipped/></testcase></testsuite></testsuites>"""
_TESTS = '{"name": "a", "status": "passed"}, {"name": "b", "status": "failed", "message": "no"}'
CTRF = '{"results": {"tests": [' + _TESTS + "]}}"
PYTEST = """\x1b[32mtests/t.py::a PASSED    [ 50%]\x1b[0m
tests/t.py::b[1 - 2] FAILED [100%]
=== short test summary info ===
PASSED tests/t.py::a
FAILED tests/t.py::b[1 - 2] - assert 1 == 2
"""


@pytest.mark.parametrize(
    ("name", "text"), [("junit.xml", JUNIT), ("ctrf.json", CTRF), ("nothing.json", "{}"), ("bad.xml", "<a")]
)
def test_reports_are_read(logs: Path, left: LeftBehind, name: str, text: str) -> None:
    (logs / name).write_text(text)
    results = results_of(left, PYTEST)
    assert [result.outcome for result in results][:2] == ["passed", "failed"]
    assert results[1].detail in ("no", "assert 1 == 2")


def test_a_report_with_entities_is_left_alone(logs: Path, left: LeftBehind) -> None:
    bomb = '<!DOCTYPE a [<!ENTITY b "bb">]><testsuite><testcase name="&b;"/></testsuite>'
    (logs / "junit.xml").write_text(bomb)
    assert results_of(left, "") == ()


def test_reports_are_bounded(logs: Path, left: LeftBehind) -> None:
    (logs / "junit.xml").write_text("<t>" + '<testcase name="x"/>' * 2000 + "</t>")
    assert len(results_of(left, "")) == 500
    (logs / "junit.xml").write_text("x" * (5 << 20))
    assert results_of(left, "") == ()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.xml", '<t><testcase name="x"/>' + "<a></a>" * 500_000 + "</t>"),
        ("a.json", CTRF[:-1] + ', "more": [' + "{}," * 1_000_000 + "{}]}"),
        ("printed", "PASSED " + "a::" * 20_000 + " x"),
        ("printed", "a::" * 20_000 + " x"),
        ("printed", "PASSED " + "a::" * 5_000 + "[" + "]" * 45_000 + " x"),
    ],
)
def test_hostile_reports_cost_little_time(logs: Path, left: LeftBehind, name: str, text: str) -> None:
    (logs / name).write_text(text)
    begun = time.process_time()
    assert results_of(left, text if name == "printed" else "") == ()
    assert time.process_time() - begun < 0.5


# ---------------------------------------------------------------- cases


def test_cases_are_compared_but_for_white_space_at_the_ends(logs: Path, left: LeftBehind) -> None:
    cases = [Case(expected=text) for text in ("5", "a\nb", "5", "5", "5", "5", "5")]
    records = [(0, b"5 \r\n\n"), (0, b"a\n b"), (3, b"5"), (-9, b"5"), (-1002, b""), (-1001, b"")]
    written = [b"%d %d %d\n" % (n, status, len(text)) + text for n, (status, text) in enumerate(records)]
    (logs / "outputs").write_bytes(b"".join(written))
    results = case_results(left, cases)
    assert [result.outcome for result in results] == ["passed", "failed", "failed", "failed", *["error"] * 3]
    assert results[2].detail == "it ended with exit code 3"
    assert results[6].detail == "it did not end in its time"


@pytest.mark.parametrize("content", [b"", b"0 0 5\n", b"x" * 100, b"0 0 1\n50 0 99999999\n5"])
def test_a_torn_record_of_cases_passes_none(logs: Path, left: LeftBehind, content: bytes) -> None:
    (logs / "outputs").write_bytes(content)
    assert {result.outcome for result in case_results(left, [Case(expected="6")] * 2)} <= {"failed", "error"}


# ---------------------------------------------------------------- scope

TAKEOVERS = (
    *("/usr/bin/bash", "/usr/local/bin/pytest", "/bin", "/lib64", "/usr/lib/evil.so", "/usr", "/etc"),
    *(
        "/etc/ld.so.preload",
        "/etc/profile",
        "/etc/profile.d/x.sh",
        "/etc/cron.d/x",
        "/etc/python3.11/sitecustomize.py",
    ),
    *("/root/.bashrc", "/home/me/.gitconfig", "/root/.local/bin/env", "/root/.local/lib/python3.11/x.pth"),
    *(
        "/conftest.py",
        "/pytest.ini",
        "/setup.cfg",
        "/app/sub/conftest.py",
        "/app/sitecustomize.py",
        "/opt/x/a.pth",
        "/app/a\nb/conftest.py",
    ),
    *("/usr/local/lib/python3.11/site-packages/pytest/__init__.py", "/opt/v/lib/site-packages/_pytest/runner.py"),
    *("/tests", "/tests/x", "/logs/verifier/reward.txt", "/solution/", "/usr/local/lib/python3.11"),
)
ORDINARY = (
    *("/app/calc.py", "/app/pytest.ini", "/etc/hosts", "/etc/app.conf", "/root/result.txt", "/root/.config/app"),
    *("/usr/local/lib/python3.11/site-packages/numpy/x.py", "/usr/share/x", "/testsuite", "/var/log/x", "/tmp/a"),
    *("/usr/local/lib/python3.11/", "/usr/", "/etc/", "/binary", "/library/x", "/app/bin/tool"),
)


@pytest.mark.parametrize("path", TAKEOVERS)
def test_what_could_take_tests_over_is_known(path: str) -> None:
    assert is_takeover(path)


@pytest.mark.parametrize("path", ORDINARY)
def test_ordinary_work_is_left_alone(path: str) -> None:
    assert not is_takeover(path)


def test_what_is_declared_goes_before_what_is_known_of_the_solution() -> None:
    checked = Checked(scope=("/app", "/app/sub", "/srv/"))
    both = in_scope(Grader("harbor", declared=("/a/b", "/a/b/c", "/logs/artifacts", "/tests/x"), checked=checked))
    assert (both.scope, both.kept, both.dropped) == ("declared", ("/a/b", "/logs/artifacts"), "")
    known = in_scope(Grader("harbor", checked=checked))
    assert (known.scope, known.kept) == ("solution", ("/app", "/srv"))
    neither = in_scope(Grader("harbor"))
    assert (neither.scope, neither.kept, neither.merged, neither.paths) == ("whole", None, MERGED, ("/",))


def test_what_is_only_named_is_the_scope_if_the_solution_needs_no_more() -> None:
    grader = Grader("harbor", named=("/app/out", "/logs/artifacts"))
    assert in_scope(grader).scope == "whole", "nobody has tried"
    learned = Checked(scope=("/app",), takeovers=("/usr/local/bin/tool",))
    assert in_scope(replace(grader, checked=learned)).kept == ("/app",)
    narrow = in_scope(replace(grader, checked=replace(learned, named_suffice=True)))
    assert (narrow.scope, narrow.kept) == ("declared", ("/app/out", "/logs/artifacts"))
    assert re.match(narrow.dropped, "/usr/local/bin/pytest")
    assert not re.match(narrow.dropped, "/usr/local/bin/tool")


@pytest.mark.parametrize(
    ("paths", "left_out", "kept", "nothing"),
    [
        (("/tmp/x", "/etc/", "/apple"), {}, ("/app",), True),
        (("/logs/", "/logs/artifacts/", "/logs/verifier/x"), {}, ("/app", "/logs/artifacts"), True),
        (("/logs/", "/logs/artifacts/", "/logs/artifacts/x"), {}, ("/app", "/logs/artifacts"), False),
        (("/logs",), {}, ("/app", "/logs/artifacts"), False),  # a link in its place
        (("/app/a/x",), {}, ("/app",), False),
        (("/app/",), {}, ("/app/out",), False),  # a folder above it was made anew, say
        (("/tmp/x",), {"pipe": 1}, ("/app",), False),
        (("/tmp/x",), {}, None, False),
    ],
)
def test_a_state_without_anything_in_scope_is_known_for_certain(
    paths: tuple[str, ...], left_out: dict[LeftOut, int], kept: tuple[str, ...] | None, nothing: bool
) -> None:
    difference = Difference(tuple(Change(path, "added") for path in paths), len(paths), 0, left_out)
    assert holds_nothing(InScope("solution", kept, ""), difference) is nothing
    assert not holds_nothing(InScope("solution", kept, ""), replace(difference, count=len(paths) + 1))


def test_what_the_solution_needs_is_spared_and_nothing_else() -> None:
    spared = in_scope(Grader("harbor", checked=Checked(takeovers=("/etc/profile", "/tests/x")))).dropped
    dropped = [path for path in ("/etc/profile", "/etc/profile.d/x", "/tests/x") if re.match(spared, path)]
    assert dropped == ["/etc/profile.d/x", "/tests/x"]


def test_the_root_as_a_folder_of_the_solution_is_the_whole() -> None:
    assert in_scope(Grader("harbor", checked=Checked(scope=("/", "/app")))).scope == "whole"
    assert outermost(["/"]) == ()


# ---------------------------------------------------------------- scores


@pytest.mark.parametrize(
    ("key", "grade", "value"),
    [
        (None, Grade({"reward": 1.0, "x": 0.5}, source="reward.json"), 1.0),
        ("x", Grade({"reward": 1.0, "x": 0.5}, source="reward.json"), 0.5),
        (None, Grade({"only": 0.25}, source="reward.json"), 0.25),
        ("x", Grade({"reward": 0.0}), 0.0),
    ],
)
def test_the_score_is_the_reward_of_that_name_and_all_are_parts(
    key: str | None, grade: Grade, value: float
) -> None:
    score = GraderScorer(key).measure(a_record(grade=grade))
    assert (score.value, score.parts) == (value, dict(grade.rewards))


@pytest.mark.parametrize("key", [None, "reward"])
@pytest.mark.parametrize("rewards", [{"reward": 7.0}, {"reward": -1.0}, {"a": 1.0, "b": 1.0}])
def test_a_reward_that_the_solution_gets_is_0_where_it_is_lost(key: str | None, rewards: dict[str, float]) -> None:
    """Else a policy could have a bad rollout drawn again, by what it leaves for the tests to run."""
    record = a_record(grade=Grade(rewards, source="reward.json"))
    assert GraderScorer(key).measure(record, Checked(source="reward.json", rewards=("reward",))).value == 0.0
    with pytest.raises(ScorerError):
        GraderScorer("other").measure(record, Checked(source="reward.json", rewards=("reward",)))
    with pytest.raises(ScorerError):
        GraderScorer(key).measure(record, Checked(source="reward.json"))


@pytest.mark.parametrize(
    ("grade", "why"),
    [
        (None, "not graded"),
        (Grade(fault="it broke"), "it broke"),
        (Grade({"a": 1.0, "b": 1.0}, source="reward.json"), "gave no reward 'reward', but 'a', 'b'"),
        (Grade({"reward": 7.0}, source="reward.txt"), "7, not from 0 to 1"),
    ],
)
def test_without_a_reward_there_is_no_score(grade: Grade | None, why: str) -> None:
    with pytest.raises(ScorerError, match=re.escape(why)):
        GraderScorer().measure(a_record(grade=grade))


def test_the_end_of_a_command_is_the_last_line_that_says_it() -> None:
    end = command_end("ended 0 0 0 1\nwarning\nended 3 2 0 1500\n")
    assert end is not None
    assert (end.status, end.left, end.error, end.duration_s) == (3, 2, "", 1.5)
    assert command_end("Traceback") is None
    failed, late = command_end("ended -1001 0 2 0"), command_end("ended -1002 0 0 9")
    assert failed is not None
    assert failed.error == "No such file or directory"
    assert late is not None
    assert late.status is None


def test_names_of_results_are_bounded_text(logs: Path, left: LeftBehind) -> None:
    (logs / "a.json").write_text('{"results": {"tests": [{"name": "\\ud800' + "x" * 999 + '", "status": "odd"}]}}')
    (result,) = results_of(left, "")
    assert isinstance(result, Result)
    assert len(result.name.encode()) < 400
    assert result.outcome == "error"


async def test_a_command_may_take_what_its_healthcheck_and_its_cases_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a margin of nothing: whoever grades, checks or fetches waits for as long as all of it can take."""
    monkeypatch.setattr(grade, "MARGIN_S", 0.0)

    class Box:
        async def command_end(self) -> CommandEnd:
            await asyncio.sleep(0.2)
            return CommandEnd(0, 0, "", 0.2)

    command = Command(("true",), 0.05, "/", {})
    with pytest.raises(SandboxLostError, match=r"did not end in 0\.05 s"):
        await grade.end_of(Box(), command)  # type: ignore[arg-type]
    for longer in (replace(command, healthcheck=Healthcheck("true")), replace(command, inputs=(((), ""),) * 200)):
        assert (await grade.end_of(Box(), longer)).status == 0  # type: ignore[arg-type]
