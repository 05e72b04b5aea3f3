"""What a run says while it goes on, and the table at its end: on a terminal and elsewhere."""

from __future__ import annotations

import io
import os
import pty
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.commands import process
from orchestrator.run.line import attempt_line
from orchestrator.run.lines import dumps
from orchestrator.run.tally import Tally
from orchestrator.terminal.closing import closing_table, share
from orchestrator.terminal.live import LiveProgress
from orchestrator.terminal.open import open_progress
from orchestrator.terminal.progress import PlainProgress
from orchestrator.types import BadTask, Crossing, Failed, FailedName, Group, Score, Task
from tests.fakes.plans import a_member, a_plan, an_attempt


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def tally() -> Tally:
    return Tally()


def a_group(*scores: float, task_id: str = "task", dropped: str | None = None) -> Group:
    members = tuple(a_member(index, score) for index, score in enumerate(scores))
    attempts = tuple(member.attempt for member in members)
    return Group(0, Task(task_id, "?", "42"), members, attempts, dropped)


def test_elsewhere_than_on_a_terminal_each_group_is_one_line(tally: Tally) -> None:
    out = io.StringIO()
    with open_progress(12, tally, out) as progress:
        assert type(progress) is PlainProgress
        for group in (a_group(1.0, 0.25), a_group(dropped="0 of 2 rollouts usable")):
            tally.group(group)
            progress.group(group)
    first, second = out.getvalue().splitlines()
    assert re.fullmatch(r"\[ +\d+\.\d s\] group  1/12  task +1\.00 0\.25", first)
    assert re.fullmatch(r"\[ +\d+\.\d s\] group  2/12  task +dropped, 0 of 2 rollouts usable", second)
    assert "\x1b" not in out.getvalue()


def test_once_a_minute_it_says_how_long_it_will_take(tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("orchestrator.terminal.progress.time.monotonic", lambda: clock[0])
    out = io.StringIO()
    tally.groups = 5  # of an earlier process of the run
    with open_progress(20, tally, out) as progress:
        assert progress.left_s() is None
        progress.begun(a_plan(0), "")
        for _ in range(10):
            clock[0] += 10.0
            tally.group(group := a_group(1.0, 0.25))
            progress.group(group)
    said = [line for line in out.getvalue().splitlines() if line.endswith(" left")]
    assert said == ["11 of 20 groups, 2 min left"]
    assert progress.left_s() == 50.0


def test_how_many_draws_each_outcome_bought_is_told(tally: Tally) -> None:
    lost, refused = Failed(FailedName.SANDBOX_LOST, "gone"), Failed(FailedName.LLM_ERROR, "HTTP 500")
    for index, failures in enumerate(((refused, refused, lost), (refused,), ())):
        for number, failure in enumerate(failures):
            tally.attempt(an_attempt(failure, index, number))
        tally.attempt(replace(a_member(index), attempt=an_attempt(index=index, attempt=len(failures))))
    elsewhere = replace(an_attempt(refused), plan=replace(a_plan(), group=7))
    tally.attempt(elsewhere)  # what nobody drew again bought nothing
    table = io.StringIO()
    closing_table(tally, [], table)
    assert "drawn again    llm_error 3, sandbox_lost 1; in 1 group, at most 4 in one (group 0)" in table.getvalue()


HOSTILE = "mine raised\n\x1b]0;owned\x07\u202e KeyError" + "x" * 500


def test_reasons_stand_where_people_look_and_cannot_steer_the_terminal(tally: Tally) -> None:
    broken = [an_attempt(Failed(FailedName.SCORER_ERROR, HOSTILE), index) for index in (1, 2)]
    kept = replace(a_group(1.0), attempts=(*a_group(1.0).attempts, *broken))
    dropped = replace(a_group(dropped=f"0 of 2 rollouts usable, mostly scorer_error: {HOSTILE}"), number=1)
    unscorable = replace(a_member(), score=Score(0.0, {}, {"failure": HOSTILE}))
    for result in (*broken, unscorable, an_attempt(Failed(FailedName.CANCELLED, "stopped"))):
        tally.attempt(result)
    for out, view in ((io.StringIO(), PlainProgress), (Terminal(), LiveProgress)):
        progress = view(None, tally, out)
        for group in (kept, dropped):
            progress.group(group)
        shown = out.getvalue()
        assert "1.00 and 2 scorer_error: mine raised" in re.sub(r"\x1b\[[\d;]*m", "", shown)
        assert "mostly scorer_error: mine raised" in shown
        assert "\x1b]" not in shown
        assert "\u202e" not in shown
        assert max(map(len, shown.splitlines())) < 400
    table = io.StringIO()
    closing_table(tally, [], table)
    assert "\nscorer_error   2, the first: mine raised ]0;owned KeyErrorxx" in table.getvalue()
    assert "\nnot gradable   1 scored 0, the first: mine raised" in table.getvalue()
    assert "\ncancelled" not in table.getvalue()


def test_names_from_a_data_set_cannot_steer_the_terminal(tally: Tally) -> None:
    out = io.StringIO()
    progress = open_progress(None, tally, out)
    tally.group(group := a_group(0.5, task_id="\x1b]0;owned\x07\nline" + "x" * 99))
    progress.group(group)
    progress.bad_task(BadTask("a\x1b[2Jb\r\n", "no\x9bgood"))
    assert len(out.getvalue().splitlines()) == 2
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", out.getvalue())


@pytest.mark.parametrize("term", ["dumb", None])
def test_a_terminal_that_cannot_redraw_gets_plain_lines(
    monkeypatch: pytest.MonkeyPatch, tally: Tally, term: str | None
) -> None:
    if term is None:
        monkeypatch.delenv("TERM", raising=False)
    else:
        monkeypatch.setenv("TERM", term)
    assert type(open_progress(None, tally, Terminal())) is PlainProgress


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, io.TextIOWrapper]]:
    """(where what was drawn can be read, the terminal itself)."""
    for name, value in (("TERM", "xterm"), ("COLUMNS", "90"), ("LINES", "24")):
        monkeypatch.setenv(name, value)
    reading, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stream:
        yield reading, stream
    os.close(reading)


def drawn(reading: int, wanted: str, deadline_s: float = 10.0) -> str:
    """What was drawn until `wanted` is in it, without colours."""
    seen, end = "", time.monotonic() + deadline_s
    while wanted not in seen and time.monotonic() < end:
        seen += re.sub(r"\x1b\[[0-9;]*m", "", os.read(reading, 65536).decode())
    assert wanted in seen
    return seen


def test_the_live_view_counts_groups_sandboxes_outcomes_scores_and_tokens(
    screen: tuple[int, io.TextIOWrapper], tally: Tally
) -> None:
    reading, stream = screen
    progress = open_progress(3, tally, stream)
    assert isinstance(progress, LiveProgress)
    with progress:
        for index in range(3):
            progress.begun(a_plan(index), "")
        drawn(reading, "3 running")
        for index in range(2):
            tally.attempt(member := a_member(index, score=float(index)))
            progress.attempt(member)
        tally.group(group := a_group(0.0, 1.0))
        progress.group(group)
        seen = drawn(reading, "sampled, ")
        seen += drawn(reading, "1 of 3")
        seen += drawn(reading, "1 running")
        seen += drawn(reading, "finished 2 (100%)")
        assert "mean 0.500, 1 of 2 correct (50%), 1 group mixed" in seen
        assert re.search(r"group 1/3  task +0\.00 1\.00", seen)


def test_what_is_said_during_the_live_view_stays_readable(
    screen: tuple[int, io.TextIOWrapper], tally: Tally
) -> None:
    reading, stream = screen
    with open_progress(None, tally, stream) as progress:
        progress.say("look at [runs/x] and " + "word " * 30)
        seen = drawn(reading, "look at [runs/x]")
        seen += drawn(reading, "0 done")
    assert all(len(line) <= 90 for line in re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", seen).splitlines())


def test_the_closing_table_says_how_much_of_what_and_where(tally: Tally) -> None:
    for index, score in enumerate((1.0, 0.0, 0.25)):
        tally.attempt(a_member(index, score))
    lost = replace(an_attempt(index=3), outcome=Failed(FailedName.LLM_ERROR, "no answer"))
    tally.attempt(lost)
    tally.bad_task()
    tally.group(a_group(1.0, 0.0, 0.25))
    out = io.StringIO()
    closing_table(tally, [("groups file", "runs/a b/groups.jsonl"), ("report", "runs/a b/groups.html")], out, 2)
    lines = dict(line.split("  ", 1) for line in out.getvalue().splitlines())
    said = {label: text.strip() for label, text in lines.items()}
    assert said["groups"] == "1 of 2 written, 1 with mixed scores, 0 dropped"
    assert said["outcomes"] == "finished 3 (60%), llm_error 1 (20%), bad_task 1 (20%)"
    assert said["scores"] == "mean 0.417, 1 of 3 correct (33%)"
    assert said["report"] == "runs/a b/groups.html"
    assert "per rollout 10.00 s" in said["time"]
    assert list(said)[-2:] == ["groups file", "report"]


@pytest.mark.parametrize(
    ("cpu_s", "told"),
    [
        ([0.5, None, 0.7, None], "per rollout 10.00 s from its assignment, 0.60 s of CPU in its sandbox"),
        ([None, None], "per rollout 10.00 s from its assignment"),
    ],
)
def test_cpu_that_nobody_counted_is_not_counted_as_none(
    tally: Tally, cpu_s: list[float | None], told: str
) -> None:
    for index, used in enumerate(cpu_s):
        attempt = an_attempt(index=index)
        tally.attempt(replace(attempt, record=replace(attempt.record, cpu_s=used)))
    out = io.StringIO()
    closing_table(tally, [], out)
    assert next(line for line in out.getvalue().splitlines() if line.startswith("time")).endswith(f"; {told}")


def test_the_closing_table_of_a_run_without_a_rollout_has_no_scores(tally: Tally) -> None:
    out = io.StringIO()
    closing_table(tally, [], out)
    assert "outcomes       none\n" in out.getvalue()
    assert "\nscores" not in out.getvalue()


def test_on_a_narrow_terminal_the_table_breaks_between_words_and_keeps_paths_whole(
    monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    tally.outcomes = Counter({"finished": 3, "sandbox_crashed": 2, "context_length": 1})
    path = "/" + "long/" * 20 + "groups.html"
    out = Terminal()
    closing_table(tally, [("report", path)], out)
    lines = out.getvalue().splitlines()
    assert any(path in line for line in lines)
    assert all(len(line) <= 40 for line in lines if path not in line)
    assert any(line.startswith(" " * 15) for line in lines)


@pytest.mark.parametrize(
    ("part", "whole", "text"), [(0, 0, "0%"), (0, 9, "0%"), (1, 999, "<1%"), (998, 999, ">99%"), (2, 3, "67%")]
)
def test_a_share_never_hides_that_there_is_something(part: int, whole: int, text: str) -> None:
    assert share(part, whole) == text


async def test_a_report_that_cannot_be_written_is_a_line_of_the_table_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "groups.html").mkdir()
    (tmp_path / "groups.jsonl").touch()

    async def replayed() -> None:
        """Completions came from an endpoint."""

    hosts = SimpleNamespace(tokenizer=None, replayed=replayed)
    output = SimpleNamespace(
        run=SimpleNamespace(path=tmp_path), groups=SimpleNamespace(path=tmp_path / "groups.jsonl")
    )
    rows: list[tuple[str, object]] = []
    await process._report(hosts, output, rows)
    ((label, text),) = rows
    assert label == "report"
    assert str(text).startswith("none, it could not be written: ")


def test_the_closing_table_says_what_sandboxes_asked_of_the_outside(tally: Tally, tmp_path: Path) -> None:
    out = io.StringIO()
    closing_table(tally, (), out)
    assert "requests" not in out.getvalue()
    asked = Crossing(1, 0.0, 1.0, "GET", "https", "pypi.org", 443, "/", 200, source="network")
    refused = replace(asked, status=None, refusal="not allowed", source="border")
    crossings = (*[asked] * 1000, *[replace(asked, source="cache")] * 300, *[refused] * 31)
    attempt = an_attempt()
    attempt = replace(attempt, record=replace(attempt.record, crossings=crossings))
    tally.attempt(attempt)
    rollouts = tmp_path / "rollouts.jsonl"
    rollouts.write_bytes(dumps(attempt_line(attempt)) + b"\n")
    for counted in (tally, Tally.read(rollouts, None)):
        out = io.StringIO()
        closing_table(counted, (), out)
        assert "requests       1,331 (31 refused, 300 from the cache)\n" in out.getvalue()
