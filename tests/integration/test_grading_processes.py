"""Grading in processes of its own: real ones, everything that may go wrong in them, and who is blamed for it."""

from __future__ import annotations

import asyncio
import importlib
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.completion.trajectory import main_line
from orchestrator.errors import ConfigError, ScorerError, ScorerUnusable
from orchestrator.scorers.control import ControlledScorer, control_record, first_control
from orchestrator.scorers.processes import MOST_LOST, GradingProcesses, Ungraded, packed
from orchestrator.scorers.strategies import STRATEGIES, StrategyScorer, needed
from orchestrator.scorers.trial import Trial
from orchestrator.types import AgentKind, Ended, EndedName, Record, RolloutPlan, Score
from tests.fakes.plans import an_agent
from tests.unit.scorers.episodes import FAILED, FINISHED, PERFECT, PRINTED, code, plan, record, said

MODULE = '''
import math, os, sys, time
from pathlib import Path
from orchestrator.types import Score

class Mine:
    def score(self, plan, record, ended):
        print("printed", file=sys.stdout)
        return Score(0.25, {"style": 3.0, "pid": os.getpid()})

class Broken:
    def __init__(self):
        raise RuntimeError("no\\nway")

class Rude(Exception):
    def __str__(self):
        raise RuntimeError("not even a text")

def does(what):
    match what:
        case "hang": time.sleep(600)
        case "raise": raise KeyError("of two\\nlines")
        case "rude": raise Rude
        case "exit": sys.exit(0)
        case "die": os._exit(7)
        case "kill": os.kill(os.getpid(), 9)
        case "forge": os.write(3, b"[]\\n") or os.closerange(3, 20)
        case "nan": return math.nan
        case "above": return 1.5
        case "text": return "1"
        case "nothing": return None
        case "huge": return 10 ** 400
        case "part": return Score(0.5, {"x": math.inf})
    return 0.75

def by_metadata(plan, record, ended):
    """Does what the task's metadata say."""
    return does(plan.task.metadata["do"])

def by_answer(plan, record, ended):
    """Does what the rollout's answer says, and keeps a list of what it was asked about."""
    with open("asked", "a") as file:
        file.write(f"{record.answer}\\n")
    return does(record.answer)

def dies_once(plan, record, ended):
    if not Path("died").exists():
        Path("died").touch()
        os._exit(9)
    return 1.0

def flickers(plan, record, ended):
    """Fails or works as the next character of a file says."""
    which = Path("pattern").read_text()
    Path("pattern").write_text(which[1:])
    if which[0] == "x":
        raise ConnectionError("the service is away")
    return 0.75

def naps(plan, record, ended):
    Path("napping").touch()
    time.sleep(0.5)
    return 0.75
'''
REASONS = {
    "raise": "raised KeyError: 'of two",
    "rude": "raised Rude",
    "exit": "raised SystemExit",
    "die": "ended its process: exit code 7",
    "kill": "ended its process: signal 9",
    "nan": "gave the score nan, not a number in [0, 1]",
    "above": "gave the score 1.5",
    "text": "gave the score '1'",
    "nothing": "gave the score None",
    "huge": "gave the score 1000000",
    "part": "gave the part x inf, not a finite number",
}


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_scorer.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


@asynccontextmanager
async def grading(scorer: StrategyScorer | str, timeout_s: float = 120) -> AsyncIterator[ControlledScorer]:
    processes = GradingProcesses(f"python:own_scorer:{scorer}" if isinstance(scorer, str) else scorer, timeout_s)
    try:
        await processes.open()
        yield ControlledScorer(processes, {} if isinstance(scorer, str) else {"correctness": 0.0})
    finally:
        await processes.aclose()
        assert not processes._all


def other(answer: str) -> RolloutPlan:
    """Of another task: what a control got for the first one is not asked again for a while."""
    first = plan(answer)
    return replace(first, task=replace(first.task, task_id="t2"))


def answered(answer: str) -> Record:
    return record((code(f"final_answer({answer!r})"), ""), answer=answer)


async def test_a_class_scores_by_its_own_word_and_its_process_is_used_again_and_ended() -> None:
    async with grading("Mine") as scorer:
        first = await scorer.score(plan(), PERFECT, FINISHED)
        second = await scorer.score(plan("41"), PERFECT, FINISHED)
        pid = int(first.parts["pid"])
        assert first == second == Score(0.25, {"style": 3.0, "pid": pid}), "nothing is added to what it said"
        assert pid != os.getpid()
        together = await asyncio.gather(*(scorer.score(plan(), PERFECT, FINISHED) for _ in range(8)))
        assert len({score.parts["pid"] for score in together}) <= 4
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_what_a_task_breaks_is_a_scorer_error_and_the_next_score_is_right() -> None:
    async with grading("by_metadata") as scorer:
        for do, reason in {**REASONS, "missing": "raised KeyError: 'do'"}.items():
            task = plan(metadata={} if do == "missing" else {"do": do})
            with pytest.raises(ScorerError) as caught:
                await scorer.score(task, PERFECT, FINISHED)
            assert reason in str(caught.value)
            assert "\n" not in str(caught.value)
        with pytest.raises(ScorerError, match="cannot be handed over"):
            await scorer.score(plan(metadata={"do": lambda: None}, attachments=()), PERFECT, FINISHED)
        assert (await scorer.score(plan(metadata={"do": ""}), PERFECT, FINISHED)).value == 0.75


async def test_an_answer_that_breaks_the_scorer_is_worth_nothing_and_is_not_drawn_again() -> None:
    async with grading("by_answer") as scorer:
        for do, reason in {**REASONS, "forge": "reply channel"}.items():
            score = await scorer.score(plan("42"), answered(do), FINISHED)
            assert (score.value, score.parts, score.solved) == (0.0, {}, False)
            assert reason in score.failure
            assert score.evidence["control"] == {"answer": "42", "got": "0.75"}
        assert (await scorer.score(plan("42"), answered("good"), FINISHED)).value == 0.75
        # Where the reference answer breaks it as well, it is the scorer.
        with pytest.raises(ScorerError, match="raised KeyError"):
            await scorer.score(other("raise"), answered("die"), FINISHED)


@pytest.mark.slow
async def test_an_answer_that_hangs_the_scorer_is_worth_nothing() -> None:
    async with grading("by_answer", 2.0) as scorer:
        score = await scorer.score(plan("42"), answered("hang"), FINISHED)
        assert (score.value, score.failure) == (
            0.0,
            "python:own_scorer:by_answer gave no score within 2 s (own_scorer.py:40)",
        )
        with pytest.raises(ScorerError, match="gave no score within 2 s"):
            await scorer.score(other("hang"), answered("hang"), FINISHED)


@pytest.mark.parametrize("batch", [False, True])
async def test_a_standstill_of_this_process_costs_no_answer_its_score(batch: bool) -> None:
    async with grading("naps", 2.0) as scorer:
        packs = [packed(scorer.grades_with, plan("42"), PERFECT, FINISHED)] * 2
        scored = scorer.score_batch(packs) if batch else scorer.score(plan("42"), PERFECT, FINISHED)
        scoring = asyncio.create_task(scored)
        async with asyncio.timeout(60):
            while not Path("napping").exists():
                await asyncio.sleep(0.01)
        time.sleep(3.0)
        scores = await scoring
        assert (scores if batch else [scores]) == [Score(0.75)] * (2 if batch else 1)


async def test_many_failing_answers_ask_few_controls() -> None:
    async with grading("by_answer") as scorer:
        await asyncio.gather(*(scorer.score(plan("42"), answered("raise"), FINISHED) for _ in range(12)))
    asked = Path("asked").read_text().split()
    assert asked.count("raise") == 2 * 12
    assert asked.count("42") <= 1 + 12


# In the order of the calls: the answer, a control, the answer again, another control.
@pytest.mark.parametrize(("pattern", "score"), [("x..", 0.75), ("x.x.", 0.0), ("xx", None), ("x.xx", None)])
async def test_a_service_that_comes_and_goes_makes_no_answer_wrong(pattern: str, score: float | None) -> None:
    Path("pattern").write_text(pattern)
    async with grading("flickers") as scorer:
        if score is None:
            with pytest.raises(ScorerError, match="the service is away"):
                await scorer.score(plan("42"), PERFECT, FINISHED)
        else:
            given = await scorer.score(plan("42"), PERFECT, FINISHED)
            assert (given.value, bool(given.failure)) == (score, score == 0.0)
    assert Path("pattern").read_text() == ""


async def test_a_control_of_before_an_outage_makes_no_answer_wrong() -> None:
    Path("pattern").write_text("x.x.")
    async with grading("flickers") as scorer:
        assert (await scorer.score(plan("42"), PERFECT, FINISHED)).value == 0.0
        Path("pattern").write_text("xxx")  # the answer twice, and a control after the one that is kept
        with pytest.raises(ScorerError, match="the service is away"):
            await scorer.score(plan("42"), PERFECT, FINISHED)


async def test_a_process_that_ends_for_another_reason_is_no_verdict_on_what_it_was_given() -> None:
    async with grading("dies_once") as scorer:
        assert (await scorer.score(plan(), PERFECT, FINISHED)) == Score(1.0)


async def test_the_control_is_a_plain_rollout_in_the_form_of_the_one_that_failed() -> None:
    bare = record((said("what?"), FAILED), answer="x")
    plain = control_record(plan("it's 42"), bare)
    assert plain.answer == "it's 42"
    (turn,) = plain.turns
    assert turn.messages == bare.turns[0].messages
    assert turn.completion.tokens_T is None
    score = StrategyScorer("combined").measure(plan("it's 42"), plain, FINISHED)
    assert (score.value, score.parts["format"], score.parts["final_answer"]) == (1.0, 1.0, 1.0)
    with_ids = control_record(plan(None), record((said("what?", ids=True), ""), answer="x"))
    assert (
        len(with_ids.turns[0].completion.tokens_T or ()) == len(with_ids.turns[0].completion.logprobs_T or ()) == 1
    )
    assert with_ids.answer


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_strategy_says_the_same_from_a_process(strategy: str) -> None:
    scorer = StrategyScorer(strategy)
    wrong = record((said("no code", ids=True), FAILED), (code("print(1)"), PRINTED), (code("final_answer(1)"), ""))
    async with grading(scorer) as graded:
        for what, ended in ((PERFECT, FINISHED), (wrong, FINISHED), (wrong, Ended(EndedName.MAX_STEPS))):
            unpicklable = plan("42", metadata={"page": lambda: None})
            assert await graded.score(unpicklable, what, ended) == scorer.measure(plan("42"), what, ended)
        with pytest.raises(ScorerError, match="no reference answer to score against"):
            await graded.score(plan(None), PERFECT, FINISHED)
        with pytest.raises(ScorerError, match="does not exist"):
            await graded.score(plan("42", scorer="python:os:system"), PERFECT, FINISHED)


@pytest.mark.slow
async def test_what_is_handed_over_of_a_generated_task_is_what_it_is_made_again_from() -> None:
    about = {"dataset": "basic_arithmetic", "seed": 42, "index": 3, "size": 10, "config": {}, "tags": [object()]}
    task, _ = needed(plan(None, scorer="reasoning_gym", metadata=about), PERFECT)
    assert dict(task.task.metadata) == {name: about[name] for name in about if name != "tags"}
    right = str(_made(about)["answer"])
    async with grading(StrategyScorer("correctness")) as scorer:
        asked = plan(None, scorer="reasoning_gym", metadata=about)
        assert (await scorer.score(asked, answered(right), FINISHED)).value == 1.0
        assert (await scorer.score(asked, answered(right + "1"), FINISHED)).value == 0.0


def _made(about: dict[str, object]) -> dict[str, object]:
    from orchestrator.tasks.reasoning_gym import entry

    return entry(about["dataset"], about["seed"], about["size"], (), about["index"])  # type: ignore[arg-type,no-any-return]


async def test_text_that_our_own_grading_never_ends_on_is_wrong_after_the_limit_and_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    monkeypatch.syspath_prepend(str(tmp_path))
    endless = importlib.import_module("endless").Endless("combined")
    async with grading(endless, 3.0) as scorer:
        never = asyncio.create_task(scorer.score(plan("42"), answered("never"), FINISHED))
        others = [await scorer.score(plan("42"), answered("42"), FINISHED) for _ in range(20)]
        assert {score.value for score in others} == {1.0}
        assert not never.done()
        score = await never
    assert (score.value, score.parts) == (0.0, {"correctness": 0.0})
    assert score.failure == "combined gave no score within 3 s"


ENDLESS = """
from orchestrator.scorers.strategies import StrategyScorer

class Endless(StrategyScorer):
    __slots__ = ()

    def measure(self, plan, record, ended):
        while record.answer == "never":
            pass
        return StrategyScorer.measure(self, plan, record, ended)
"""


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
    processes = GradingProcesses(spec, 120)
    with pytest.raises(ConfigError, match=reason) as refused:
        await processes.open()
    assert "scoring_strategy" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not processes._all


async def test_a_process_that_no_longer_starts_is_nobody_s_wrong_answer() -> None:
    async with grading("Mine") as scorer:
        for process in list(scorer._processes._all):
            await process.end()
        Path("own_scorer.py").unlink()
        with pytest.raises(ScorerError, match="ModuleNotFoundError"):
            await scorer.score(plan(), PERFECT, FINISHED)
        with pytest.raises(Ungraded):
            await scorer._processes.ask(plan(), PERFECT, FINISHED)


async def test_many_rollouts_are_scored_in_one_request_and_one_that_breaks_costs_no_other() -> None:
    spec = "python:own_scorer:by_metadata"

    def asked(*dos: str) -> list[bytes]:
        first = plan()
        plans = [replace(first, task=replace(first.task, metadata={"do": do})) for do in dos]
        return [packed(spec, each, PERFECT, FINISHED) for each in plans]

    async with grading("by_metadata", timeout_s=3) as scorer:
        scores = await scorer.score_batch(asked("well", "hang", "well", "die", "raise", "nan", "well"))
        assert [score and score.value for score in scores] == [0.75, None, 0.75, None, None, None, 0.75]
        assert await scorer.score_batch(asked("well", "well")) == [Score(0.75), Score(0.75)]
        scores = await scorer.score_batch(asked("well", *["die"] * MOST_LOST, "well"))
        assert [score and score.value for score in scores] == [0.75, *[None] * MOST_LOST, None]


async def test_a_batch_is_scored_as_each_alone() -> None:
    strategy = StrategyScorer("combined")
    asked = [(plan("42"), answered("42")), (plan("42"), answered("41")), (plan("7"), answered("7"))]
    async with grading(strategy) as scorer:
        together = await scorer.score_batch([packed(strategy, *each, FINISHED) for each in asked])
        assert together == [await scorer.score(*each, FINISHED) for each in asked]


# ---------------------------------------------------------------- the trial before anything is sampled


def line_of(text: str) -> str:
    """Where this line of MODULE is."""
    (number,) = [n for n, line in enumerate(MODULE.splitlines(), start=1) if text in line]
    return f"own_scorer.py:{number}"


@pytest.mark.parametrize("do", REASONS)
async def test_a_scorer_that_fails_in_its_trial_is_named_with_its_error_and_its_line(do: str) -> None:
    async with grading("by_metadata") as scorer:
        trial = Trial.of(scorer)
        assert trial is not None
        with pytest.raises(ScorerUnusable) as caught:
            await trial.passed(plan(metadata={"do": do}), ids=True, output=False)
    told = str(caught.value)
    assert told.startswith("env.scoring_strategy: python:own_scorer:by_metadata ")
    assert REASONS[do] in told
    raises = {"raise": 'case "raise"', "rude": 'case "rude"', "exit": 'case "exit"'}
    assert f"({line_of(raises.get(do, 'def by_metadata'))}); it was tried on the answer '42' to task 't1'" in told
    assert "\n" not in told


async def test_a_scorer_that_hangs_in_its_trial_is_named() -> None:
    async with grading("by_metadata", 1.0) as scorer:
        with pytest.raises(ScorerUnusable, match=r"gave no score within 1 s \(own_scorer.py:\d+\); it was tried"):
            await Trial(scorer).passed(plan(metadata={"do": "hang"}), ids=False, output=True)


async def test_a_scorer_is_tried_once_however_many_groups_begin() -> None:
    async with grading("by_answer") as scorer:
        trial = Trial(scorer)
        for _ in range(2):
            await asyncio.gather(*(trial.passed(plan("fine"), ids=True, output=True) for _ in range(5)))
        assert Path("asked").read_text() == "fine\n"


async def test_a_trial_that_was_stopped_is_made_again_by_the_next_group() -> None:
    async with grading("by_answer") as scorer:
        trial = Trial(scorer)
        first = asyncio.create_task(trial.passed(plan("hang"), ids=True, output=False))
        async with asyncio.timeout(60):
            while not Path("asked").exists():
                await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await trial.passed(plan("fine"), ids=True, output=False)
    assert Path("asked").read_text() == "hang\nfine\n"


async def test_our_own_strategies_need_no_trial() -> None:
    async with grading(StrategyScorer("correctness")) as scorer:
        assert Trial.of(scorer) is None


@pytest.mark.parametrize("kind", ["code", "tool_calling", "program"])
@pytest.mark.parametrize("ids", [True, False])
def test_what_a_scorer_is_tried_on_is_a_whole_rollout_that_is_right(kind: AgentKind, ids: bool) -> None:
    asked = replace(plan("42"), agent=an_agent(kind=kind))
    record = first_control(asked, ids=ids, output=True)
    score = StrategyScorer("combined").measure(asked, record, FINISHED)
    assert (score.value, score.solved) == (1.0, True)
    assert record.answer == "42"
    assert record.output is not None
    assert (record.turns[0].completion.tokens_T is not None) == ids
    assert main_line(asked, record, None).token_source == ("sampled" if ids else "none")
    assert record.turns[0].messages[-1].content == asked.task.question
    assert first_control(plan(None), ids=ids, output=False).answer == "I do not know."
