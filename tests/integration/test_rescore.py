"""`orchestrator rescore`, the command: a record and its tasks in, a run directory out, in real processes."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import suppress
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import main
from orchestrator.settings.config import Config
from tests.fakes.recorded_run import GROUP_SIZE, write_recorded_run
from tests.fakes.runs import place, run, running, until

GROUPS = 16  # more than need to break for a scorer to be given up
SCORERS = """
import os, time

def by_answer(plan, record, ended):
    return float(record.answer == plan.task.answer)

def broken(plan, record, ended):
    raise ValueError("no luck")

def waits(plan, record, ended):
    with open("begins", "w") as file:
        file.write(str(os.getpid()))
    os.rename("begins", "began")
    time.sleep(3600)
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recorded_run(tmp_path_factory.mktemp("recorded") / "run", GROUPS)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with place() as home:
        (home / "our_scorers.py").write_text(SCORERS)
        yield home


def tasks(home: Path, count: int = GROUPS + 2, answer: int = 100) -> str:
    """The data set of the recorded run, or less of it, or with other answers."""
    rows = [
        {"task_id": f"sum-{n}", "question": f"What is the sum of table {n}?", "answer": str(answer + n)}
        for n in range(count)
    ]
    (home / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"--env.dataset=jsonl:{home / 'tasks.jsonl'}"


def rescore(recorded: Path, home: Path, *flags: str, name: str = "new") -> int:
    return main(["rescore", str(recorded), f"--env.run_dir={home / name}", *flags])


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def without_verdict(record: Path) -> list[dict[str, Any]]:
    verdict = ("score", "score_parts", "score_evidence")
    return [{name: value for name, value in line.items() if name not in verdict} for line in lines(record)]


def test_scores_are_new_and_all_else_is_the_record(recorded: Path, home: Path) -> None:
    before = {path.name: path.read_bytes() for path in recorded.iterdir()}
    assert rescore(recorded, home, tasks(home), "--env.scoring_strategy=correctness") == 1, (
        "a group lacks a rollout"
    )
    assert without_verdict(home / "new/rollouts.jsonl") == without_verdict(recorded / "rollouts.jsonl")
    scored = [line for line in lines(home / "new/rollouts.jsonl") if line.get("score") is not None]
    assert {line["score"] for line in scored} == {0.0, 1.0}
    assert all(line["score"] == (line["answer"] == str(100 + line["group"])) for line in scored)
    groups = lines(home / "new/groups.jsonl")
    told = {line["rollout_id"]: line["score"] for line in scored}
    assert [group["scores"] for group in groups] == [
        [told[facts["rollout_id"]] for facts in group["overrides"]] for group in groups
    ]
    assert len(groups) == GROUPS + 1
    assert {path.name: path.read_bytes() for path in recorded.iterdir()} == before
    for command in (["verify"], ["view"], ["export", "--format", "sft"]):
        assert main([command[0], str(home / "new"), *command[1:]]) == 0


def test_the_same_scorer_gives_the_same_files(recorded: Path, home: Path) -> None:
    rescore(recorded, home, tasks(home), "--env.scoring_strategy=combined", name="one")
    rescore(home / "one", home, tasks(home), name="two")
    for name in ("rollouts.jsonl", "groups.jsonl"):
        assert (home / "one" / name).read_bytes() == (home / "two" / name).read_bytes()


def test_answers_are_those_that_the_data_set_has_now_and_missing_tasks_are_told(
    recorded: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rescore(recorded, home, tasks(home, 2, answer=7), "--env.scoring_strategy=correctness") == 1
    found = lines(home / "new/rollouts.jsonl")
    assert {line["score"] for line in found if line["group"] < 2} == {0.0}, "the right ones were others"
    lost = [line for line in found if line["group"] >= 2 and line["outcome"] == "scorer_error"]
    assert {line["score"] for line in lost} == {None}
    assert {line["reason"] for line in lost} == {f"its task is not in jsonl:{home / 'tasks.jsonl'}"}
    assert len(lines(home / "new/groups.jsonl")) == 2
    assert "scorer_error" in capsys.readouterr().out


def test_of_a_run_that_is_going_on_the_finished_lines_are_scored(
    recorded: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = home / "run"
    there.mkdir()
    (there / "run.json").write_bytes((recorded / "run.json").read_bytes())
    whole = b"".join((recorded / "rollouts.jsonl").read_bytes().splitlines(keepends=True)[:GROUP_SIZE])
    (there / "rollouts.jsonl").write_bytes(whole + b'{"schema":1,"rollout_id":"g0')
    with (there / "lock").open("w") as lock:
        flock(lock, LOCK_EX)
        assert rescore(there, home, tasks(home)) == 0
    assert "is still running; its finished rollouts were scored" in capsys.readouterr().out
    assert rescore(there, home, tasks(home), name="torn") == 1, "nobody will write the rest of the line"
    assert f"{there / 'rollouts.jsonl'}:{GROUP_SIZE + 1}" in capsys.readouterr().out


def test_another_version_and_somebody_else_s_code_are_refused(
    recorded: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = home / "run"
    there.mkdir()
    (there / "rollouts.jsonl").write_bytes((recorded / "rollouts.jsonl").read_bytes())
    told = json.loads((recorded / "run.json").read_bytes())
    config = {**told["config"], "env": {**told["config"]["env"], "scoring_strategy": "python:evil:scorer"}}
    for change, reason in (
        ({"schema": 2}, "has schema 2; this version reads 1"),
        ({"config": config}, "a recorded run chooses neither code nor services"),
    ):
        (there / "run.json").write_text(json.dumps({**told, **change}))
        assert rescore(there, home, tasks(home)) == 2
        assert reason in capsys.readouterr().err
    assert not (home / "new").exists()


def test_a_full_disk_is_one_line_and_leaves_nothing(
    recorded: Path, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("orchestrator.rescoring.grouping.Grouping.add", full)
    assert rescore(recorded, home, tasks(home)) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert (
        said
        == f"orchestrator: cannot write {home / 'new'}: No space left on device; make room, or set --env.run_dir"
    )
    assert {path.name for path in home.iterdir()} == {"our_scorers.py", "tasks.jsonl"}


def test_scoring_is_as_in_the_run_where_nothing_else_is_said(recorded: Path, tmp_path: Path) -> None:
    told = json.loads((recorded / "run.json").read_bytes())
    own = {"scorer_timeout": 600, "length_penalty_weight": 0.25, "split": "test", "group_policy": "partial:3"}
    told["config"]["env"] |= own
    (tmp_path / "run.json").write_text(json.dumps(told))
    found: list[Config] = []

    def look(config: Config, run_dir: Path) -> int:
        found.append(config)
        return 0

    for flags in ([], ["--env.scorer_timeout=5"]):
        assert main(["rescore", str(tmp_path), *flags], {"rescore": look}) == 0
    assert {name: getattr(found[0].env, name) for name in own} == own
    assert found[1].env.scorer_timeout == 5


# ---------------------------------------------------------------- the operator's scorer


def flags(recorded: Path, home: Path, scorer: str) -> list[str]:
    return [
        str(recorded),
        tasks(home),
        f"--env.run_dir={home / 'new'}",
        f"--env.scoring_strategy=python:our_scorers:{scorer}",
    ]


async def test_the_operator_s_scorer_scores(recorded: Path, home: Path) -> None:
    ended = await run(*flags(recorded, home, "by_answer"), directory=home, command="rescore")
    assert ended.code == 1, ended.stderr
    assert f"{GROUPS + 1} of {GROUPS + 2} written" in ended.stdout


async def test_a_scorer_that_always_breaks_is_given_up(recorded: Path, home: Path) -> None:
    ended = await run(*flags(recorded, home, "broken"), directory=home, command="rescore")
    assert ended.code == 1
    assert "rollouts broke" in ended.stderr
    assert "ValueError: no luck" in ended.stderr
    assert not ended.traceback
    assert not [path for path in home.iterdir() if "new" in path.name]


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_one_that_hangs_can_be_ended_and_no_process_stays_behind(
    recorded: Path, home: Path, number: signal.Signals
) -> None:
    async with running(*flags(recorded, home, "waits"), directory=home, command="rescore") as started:
        await until(lambda: (home / "began").exists(), "the scorer was called")
        grading = int((home / "began").read_text())
        assert is_running(grading)
        assert grading != started.process.pid
        started.signal(number)
        ended = await started.ended()
        await until(lambda: not is_running(grading), "the grading process has ended")
    assert ended.code == (128 + number if number == signal.SIGTERM else -number)
    assert not (home / "new").exists()
    assert "nothing was written" in ended.stdout or number == signal.SIGKILL
    again = await run(*flags(recorded, home, "by_answer"), directory=home, command="rescore")
    assert again.code == 1, again.stderr
    assert (home / "new/groups.jsonl").exists()
