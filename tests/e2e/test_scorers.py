"""The scorer's word in every command: what it calls solved is solved, its mean is beside it, and an answer it
cannot score is drawn once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.inference import Reply, Script, ScriptedServer, by_task
from tests.fakes.inference.faults import Fault
from tests.fakes.inference.script import Call
from tests.fakes.runs import flags, lines, outcomes, place, run, write_tasks

SCORERS = """
from orchestrator.types import Score

def full(plan, record, ended):
    return 1.0

def half(plan, record, ended):
    return 0.5

def own_correctness(plan, record, ended):
    return Score(0.3, {"correctness": 1.0})

def moody(plan, record, ended):
    if record.answer == "boom":
        raise KeyError("no\\x1b[31m such unit")
    return 1.0 if record.answer == "0" else 0.0
"""
ANSWERS = ["0", "zero", "boom", "boom"]


@pytest.fixture
def home() -> Iterator[Path]:
    with place() as directory:
        (directory / "mine.py").write_text(SCORERS)
        write_tasks(directory / "tasks.jsonl", 1)
        yield directory


def policy() -> ScriptedServer:
    said = [[f"Thought: so.\n<code>\nfinal_answer({answer!r})\n</code>"] for answer in ANSWERS]
    return ScriptedServer("vllm", by_task({"of q0!": said}))


def zero_is_right(call: Call) -> Reply | str:
    """A judge that knows zero by its name too, and whose gateway does not like one word."""
    asked = call.messages[-1].content
    found = re.search(r"GIVEN ANSWER ([0-9a-f]{16})\n(.*)\nEND OF GIVEN ANSWER \1", asked, re.DOTALL)
    if found is None:
        return "A probe."
    mark, answer = found.groups()
    if answer == "boom":
        return Reply("", fault=Fault("403"))
    return f"VERDICT {mark}: {'CORRECT' if answer in ('0', 'zero') else 'INCORRECT'}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "solved", "mean"),
    [
        (None, 1, 0.25),
        ("correctness", 1, 0.25),
        ("basic", 1, 0.325),
        ("combined", 1, None),
        ("judge", 2, 0.5),
        ("python:mine:full", 4, 1.0),
        ("python:mine:half", 0, 0.5),
        ("python:mine:own_correctness", 4, 0.3),
        ("python:mine:moody", 1, 0.25),
    ],
)
async def test_what_is_reported_as_solved_is_the_scorer_s_word(
    home: Path, strategy: str | None, solved: int, mean: float | None
) -> None:
    async with ScriptedServer("openai", zero_is_right) as judge, policy() as endpoint:
        asked = {} if strategy is None else {"scoring_strategy": strategy}
        if strategy == "judge":
            asked |= {"judge_base_url": judge.base_url, "judge_model_name": "scripted"}
        given = flags(home, endpoint.base_url, group_size=None, eval_samples=len(ANSWERS), **asked)
        ended = await run(*given, directory=home, command="evaluate", environ={"JUDGE_API_KEY": "k"})
        assert ended.code == 0, ended.stderr
        asked_policy = len([served for served in endpoint.log.all if not served.probe])
    metrics = json.loads((home / "run" / "metrics.json").read_text())["results"]["all"]
    assert asked_policy == len(ANSWERS), "nothing was drawn again"
    assert metrics["eval/accuracy"] == solved / 4
    samples = lines(home / "run" / "samples.jsonl")
    assert sum(sample["correct"] for sample in samples) == solved
    scores = [sample["score"] for sample in samples]
    assert metrics["eval/score_mean"] == pytest.approx(sum(scores) / 4 if mean is None else mean)
    assert re.search(rf"^all +1 +4 +{solved} +{metrics['eval/score_mean']:.3f} ", ended.stdout, re.MULTILINE)


@pytest.mark.parametrize("strategy", ["judge", "python:mine:moody"])
async def test_an_answer_that_cannot_be_scored_is_drawn_once_and_said(home: Path, strategy: str) -> None:
    async with ScriptedServer("openai", zero_is_right) as judge, policy() as endpoint:
        how = {"scoring_strategy": strategy, "judge_base_url": judge.base_url, "judge_model_name": "scripted"}
        given = flags(home, endpoint.base_url, group_size=len(ANSWERS), **how)
        ended = await run(*given, directory=home, environ={"JUDGE_API_KEY": "k"})
    assert ended.code == 0, ended.stderr
    rollouts = lines(home / "run" / "rollouts.jsonl")
    assert [line["outcome"] for line in rollouts] == ["finished"] * 4
    failed = [line["score_evidence"] for line in rollouts if line["answer"] == "boom"]
    assert [told["control"]["answer"] for told in failed] == ["0", "0"]
    assert all(told["failure"] for told in failed)
    solved = 2 if strategy == "judge" else 1
    assert f"{solved} of 4 correct" in ended.stdout
    assert "not gradable   2 scored 0, the first: " in ended.stdout
    assert "\x1b" not in ended.stdout + ended.stderr
    (group,) = lines(home / "run" / "groups.jsonl")
    assert sorted(group["scores"]) == [0.0] * (4 - solved) + [1.0] * solved


LATER = """
from pathlib import Path

def broken(plan, record, ended):
    if Path("tried").exists():
        raise ValueError("no such\\x1b[31m unit")
    Path("tried").touch()
    return 1.0
"""


async def test_why_a_scorer_fails_on_everything_is_said_where_people_look(home: Path) -> None:
    """It has passed its trial: its service has gone away since then."""
    (home / "mine.py").write_text(LATER)
    async with policy() as endpoint:
        given = flags(
            home, endpoint.base_url, group_size=2, scoring_strategy="python:mine:broken", group_policy="drop"
        )
        ended = await run(*given, directory=home)
    assert ended.code == 1, ended.stderr
    reason = "python:mine:broken raised ValueError: no such"
    assert f"mostly scorer_error: {reason}" in ended.stderr
    assert f"scorer_error   2, the first: {reason}" in ended.stdout
    assert "(mine.py:6)" in ended.stdout
    assert "\x1b" not in ended.stdout + ended.stderr
    assert reason in (home / "run" / "groups.html").read_text()


BODY = "import json, os, time\n\ndef score(plan, record, ended):\n    "
CANNOT_WORK = {
    "return json.loads('{')": r"raised JSONDecodeError: .* \(mine\.py:4\)",
    "return 'good'": r"gave the score 'good', not a number in \[0, 1\] \(mine\.py:3\)",
    "time.sleep(600)": r"gave no score within 2 s \(mine\.py:3\)",
    "os._exit(7)": r"ended its process: exit code 7 \(mine\.py:3\)",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", ["process", "evaluate"])
@pytest.mark.parametrize("body", CANNOT_WORK)
async def test_a_scorer_that_cannot_work_costs_no_completion(home: Path, body: str, command: str) -> None:
    (home / "mine.py").write_text(BODY + body)
    async with policy() as endpoint:
        size = {"group_size": None} if command == "evaluate" else {}
        given = flags(home, endpoint.base_url, scoring_strategy="python:mine:score", scorer_timeout=2, **size)
        ended = await run(*given, directory=home, command=command)
        asked = [served for served in endpoint.log.all if not served.probe]
    assert (ended.code, asked) == (3, []), ended.stderr
    *_, last = ended.stderr.splitlines()
    tried = "it was tried on the answer '0' to task 'q0', before anything was sampled"
    named = rf"orchestrator: env\.scoring_strategy: python:mine:score {CANNOT_WORK[body]}; {tried}"
    assert re.fullmatch(named, last), last
    assert not ended.traceback
    assert not outcomes(home / "run")


@pytest.mark.parametrize(
    ("judge", "told"),
    [
        (lambda call: "Hm.", "env.scoring_strategy: the judge gave no verdict in 3 replies, last: 'Hm.'; it was"),
        (lambda call: Reply("", fault=Fault("403")), "the judge's endpoint refuses the key: set JUDGE_API_KEY"),
    ],
)
async def test_a_judge_that_cannot_work_costs_no_completion(home: Path, judge: Script, told: str) -> None:
    async with ScriptedServer("openai", judge) as server, policy() as endpoint:
        how = {"scoring_strategy": "judge", "judge_base_url": server.base_url, "judge_model_name": "scripted"}
        ended = await run(*flags(home, endpoint.base_url, **how), directory=home, environ={"JUDGE_API_KEY": "k"})
        asked = [served for served in endpoint.log.all if not served.probe]
    assert (ended.code, asked) == (3, []), ended.stderr
    *_, last = ended.stderr.splitlines()
    assert last.startswith(f"orchestrator: {told}"), last


async def test_a_task_source_that_raises_is_named_with_its_line(home: Path) -> None:
    (home / "mine.py").write_text("def tasks():\n    rows = {}\n    yield rows['first']\n")
    async with policy() as endpoint:
        ended = await run(*flags(home, endpoint.base_url, dataset="python:mine:tasks"), directory=home)
        asked = [served for served in endpoint.log.all if not served.probe]
    assert (ended.code, asked) == (2, []), ended.stderr
    assert "env.dataset: python:mine:tasks raised KeyError: 'first' (mine.py:3)" in ended.stderr
