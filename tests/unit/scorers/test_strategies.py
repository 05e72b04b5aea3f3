"""From parts to one number: bounds, order, and who is at fault."""

import logging
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import ConfigError, ScorerError
from orchestrator.rules.redact import Secret
from orchestrator.scorers.base import ROW_SCORERS
from orchestrator.scorers.correctness import _GRADERS
from orchestrator.scorers.open import open_scorer
from orchestrator.scorers.strategies import STRATEGIES, StrategyScorer, needed
from orchestrator.settings.scoring import ScoringSettings
from orchestrator.settings.sources import load_config
from orchestrator.types import Ended, EndedName

from .episodes import FAILED, FINISHED, PERFECT, PRINTED, code, plan, record, said

PARTS = {"correctness", "format", "final_answer", "execution", "efficiency", "length_penalty", "quality"}

completions = st.one_of(
    st.builds(code, st.sampled_from(["print(1)", "final_answer(42)", "1 / 0", ""])),
    st.builds(said, st.text(max_size=40)),
)
steps = st.lists(st.tuples(completions, st.sampled_from([PRINTED, FAILED, ""])), max_size=6)
answers = st.one_of(st.just("42"), st.text(max_size=30), st.integers(0, 9000).map(lambda n: "x" * n))
endings = st.sampled_from(list(EndedName))


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(episode=steps, answer=answers, name=endings, weight=st.floats(0, 10))
def test_scores_lie_between_0_and_1_with_every_part(strategy, episode, answer, name, weight) -> None:  # type: ignore[no-untyped-def]
    scorer = StrategyScorer(strategy, length_penalty_weight=weight)
    score = scorer.measure(plan(), record(*episode, answer=answer), Ended(name))
    assert 0.0 <= score.value <= 1.0
    assert set(score.parts) == PARTS
    assert all(0.0 <= part <= 1.0 for part in score.parts.values())


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(right=steps, wrong=steps, filler=answers, name=endings)
def test_a_wrong_answer_never_outranks_a_correct_one(strategy, right, wrong, filler, name) -> None:  # type: ignore[no-untyped-def]
    scorer = StrategyScorer(strategy, length_penalty_weight=10)
    good = scorer.measure(plan(), record(*right, answer="42"), FINISHED)
    bad = scorer.measure(plan(), record(*wrong, answer=f"{filler}no"), Ended(name))
    assert bad.parts["correctness"] == 0.0
    assert good.value > bad.value


@pytest.mark.parametrize("name", [name for name in EndedName if name is not EndedName.FINISHED])
def test_only_a_finished_episode_can_be_correct(name: EndedName) -> None:
    for strategy in STRATEGIES:
        score = StrategyScorer(strategy).measure(plan(), PERFECT, Ended(name))
        assert score.parts["correctness"] == 0.0
        assert score.value <= 0.45


def test_values_of_a_perfect_episode() -> None:
    values = {s: StrategyScorer(s).measure(plan(), PERFECT, FINISHED).value for s in STRATEGIES}
    assert values == pytest.approx({"basic": 1.0, "correctness": 1.0, "combined": 0.99})


def test_values_of_a_well_made_wrong_answer() -> None:
    values = {s: StrategyScorer(s).measure(plan("41"), PERFECT, FINISHED).value for s in STRATEGIES}
    assert values == pytest.approx({"basic": 0.1, "correctness": 0.0, "combined": 0.45})


def test_a_near_miss_earns_nothing() -> None:
    assert StrategyScorer("correctness").measure(plan("424"), PERFECT, FINISHED).value == 0.0


def test_a_row_chooses_how_it_is_graded() -> None:
    episode = record((code("final_answer('a')"), ""), answer=" Paris ")
    scorer = StrategyScorer("correctness")
    assert scorer.measure(plan("paris"), episode, FINISHED).value == 1.0
    assert scorer.measure(plan("paris", scorer="exact"), episode, FINISHED).value == 0.0
    assert scorer.measure(plan("Paris", scorer="exact"), episode, FINISHED).value == 1.0
    with pytest.raises(ScorerError, match="does not exist"):
        scorer.measure(plan("Paris", scorer="python:os:system"), episode, FINISHED)


def test_every_scorer_a_row_may_name_exists() -> None:
    assert set(_GRADERS) == set(ROW_SCORERS)


def test_a_task_without_reference_answer_is_our_fault_and_no_reward() -> None:
    with pytest.raises(ScorerError, match="no reference answer"):
        StrategyScorer("combined").measure(plan(None), PERFECT, FINISHED)


@pytest.mark.parametrize(
    ("weights", "right", "wrong"),
    [
        ({"correctness": 1.0}, 1.0, 0.0),
        ({"correctness": 0.8, "format": 0.2}, 1.0, 0.2),
        ({"correctness": 0.1, "format": 0.5, "execution": 0.4}, 1.0, 0.09),
        ({"correctness": 0.5, "efficiency": 0.1}, 0.59, 0.09),
    ],
)
def test_weights_of_ones_own_keep_the_order(weights: dict[str, float], right: float, wrong: float) -> None:
    scorer = StrategyScorer("combined", weights=weights)
    assert scorer.measure(plan(), PERFECT, FINISHED).value == pytest.approx(right)
    assert scorer.measure(plan("41"), PERFECT, FINISHED).value == pytest.approx(wrong)


@pytest.mark.parametrize("weights", ['{"format": 1}', '{"correctness": 0.9, "format": 0.2}', '{"wit": 1}', "[]"])
def test_weights_that_make_no_sense_are_refused(weights: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.combined_weights"):
        load_config(["--env.combined_weights", weights])


def test_unknown_strategy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="one of basic, correctness, combined, judge"):
        load_config(["--env.scoring_strategy", "combine"])


async def test_debug_logs_the_parts(caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncExitStack() as stack:
        settings = ScoringSettings(scoring_strategy="combined", debug_scoring=True)
        scorer = await open_scorer(settings, Secret(), 0.0, stack)
        with caplog.at_level(logging.INFO, "orchestrator"):
            await scorer.score(plan(), PERFECT, FINISHED)
    assert "combined 0.9900 (correctness 1.000, format 1.000" in caplog.text


@pytest.mark.parametrize("scorer", ["gaia", "exact"])
@pytest.mark.parametrize(("answer", "right"), [("42", 1.0), ("forty-two", 1.0), ("XLII", 1.0), ("43", 0.0)])
def test_any_of_several_right_answers_is_right(scorer: str, answer: str, right: float) -> None:
    asked = plan(other_answers=("forty-two", "XLII"), scorer=scorer)
    given_plan, given_record = needed(asked, record((code("final_answer(1)"), ""), answer=answer))
    assert StrategyScorer("correctness").measure(given_plan, given_record, FINISHED).value == right
