"""The operator's own scorer: real processes, and everything it may do wrong in them."""

import asyncio
import os
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError, ScorerError
from orchestrator.scorers.python import PythonScorer
from orchestrator.types import Score

from .episodes import FINISHED, PERFECT, plan

MODULE = '''
import math, os, sys, time
from orchestrator.types import Score

class Mine:
    def score(self, plan, record, ended):
        print("printed", file=sys.stdout)
        return Score(0.25, {"style": 3.0, "pid": os.getpid()})

class Broken:
    def __init__(self):
        raise RuntimeError("no\\nway")

def by_metadata(plan, record, ended):
    """Does what the task's metadata say."""
    match plan.task.metadata["do"]:
        case "hang": time.sleep(600)
        case "raise": raise KeyError("of two\\nlines")
        case "exit": sys.exit(0)
        case "die": os._exit(7)
        case "kill": os.kill(os.getpid(), 9)
        case "nan": return math.nan
        case "above": return 1.5
        case "text": return "1"
        case "nothing": return None
        case "huge": return 10 ** 400
        case "part": return Score(0.5, {"x": math.inf})
        case "right": return record.answer == plan.task.answer and ended.name == "finished"
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_scorer.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


async def test_a_class_scores_and_its_process_is_used_again_and_ended() -> None:
    scorer = PythonScorer("python:own_scorer:Mine", 120)
    await scorer.open()
    first = await scorer.score(plan(), PERFECT, FINISHED)
    second = await scorer.score(plan("41"), PERFECT, FINISHED)
    assert first.value == 0.25
    assert (first.parts["style"], first.parts["correctness"], second.parts["correctness"]) == (3.0, 1.0, 0.0)
    pid = int(first.parts["pid"])
    assert pid == second.parts["pid"] != os.getpid()
    together = await asyncio.gather(*(scorer.score(plan(), PERFECT, FINISHED) for _ in range(8)))
    assert len({score.parts["pid"] for score in together}) <= 4
    await scorer.aclose()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_whatever_goes_wrong_is_a_scorer_error_and_the_next_score_is_right() -> None:
    scorer = PythonScorer("python:own_scorer:by_metadata", 120)
    await scorer.open()
    reasons = {
        "raise": "raised KeyError: 'of two",
        "exit": "raised SystemExit",
        "die": "ended its process: exit code 7",
        "kill": "ended its process: signal 9",
        "nan": "gave the score nan, not a number in [0, 1]",
        "above": "gave the score 1.5",
        "text": "gave the score '1'",
        "nothing": "gave the score None",
        "huge": "gave the score 1000000",
        "part": "gave the part x inf, not a finite number",
        "missing": "raised KeyError: 'do'",
    }
    for do, reason in reasons.items():
        with pytest.raises(ScorerError) as caught:
            await scorer.score(plan(metadata={} if do == "missing" else {"do": do}), PERFECT, FINISHED)
        assert reason in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(ScorerError, match="cannot be handed over"):
        await scorer.score(plan(metadata={"do": lambda: None}), PERFECT, FINISHED)
    good = await scorer.score(plan(metadata={"do": "right"}), PERFECT, FINISHED)
    assert good == Score(1.0, {"correctness": 1.0})
    await scorer.aclose()


async def test_a_scorer_that_hangs_is_ended_with_its_process() -> None:
    scorer = PythonScorer("python:own_scorer:by_metadata", 1.0)
    await scorer.open()
    (process,) = scorer._all
    with pytest.raises(ScorerError, match="gave no score within 1 s"):
        await scorer.score(plan(metadata={"do": "hang"}), PERFECT, FINISHED)
    assert process._process.returncode == -9
    await scorer.aclose()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("python:x", "not of the form"),
        ("python:no_such_module:x", "ModuleNotFoundError"),
        ("python:math:pi", "cannot be called as score"),
        ("python:own_scorer:Broken", "cannot be made: no way"),
        ("python:os:_exit", "cannot be called as score"),
    ],
)
async def test_one_that_cannot_be_used_is_refused_at_start(spec: str, reason: str) -> None:
    scorer = PythonScorer(spec, 120)
    with pytest.raises(ConfigError, match=reason) as refused:
        await scorer.open()
    assert "scoring_strategy" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not scorer._all


async def test_cancelled_while_it_is_closed_it_leaves_no_process(tmp_path: Path) -> None:
    scorer = PythonScorer("python:own_scorer:Mine", 120)
    await scorer.open()
    scores = await asyncio.gather(*(scorer.score(plan(), PERFECT, FINISHED) for _ in range(3)))
    pids = {int(score.parts["pid"]) for score in scores}
    assert len(pids) > 1
    closing = asyncio.create_task(scorer.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    async with asyncio.timeout(60):
        while any(
            Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids
        ):
            await asyncio.sleep(0.05)  # a killed one is gone a moment later
