"""From parts to one number: bounds, order, and who is at fault."""

import logging
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import ConfigError, ScorerError
from orchestrator.scorers import make_scorer
from orchestrator.scorers.base import ROW_SCORERS
from orchestrator.scorers.correctness import _GRADERS
from orchestrator.scorers.python import python_scorer
from orchestrator.scorers.strategies import STRATEGIES
from orchestrator.types import Ended, EndedName, Score

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
    scorer = make_scorer(strategy, length_penalty_weight=weight)
    score = scorer.score(plan(), record(*episode, answer=answer), Ended(name))
    assert 0.0 <= score.value <= 1.0
    assert set(score.parts) == PARTS
    assert all(0.0 <= part <= 1.0 for part in score.parts.values())


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(right=steps, wrong=steps, filler=answers, name=endings)
def test_a_wrong_answer_never_outranks_a_correct_one(strategy, right, wrong, filler, name) -> None:  # type: ignore[no-untyped-def]
    scorer = make_scorer(strategy, length_penalty_weight=10)
    good = scorer.score(plan(), record(*right, answer="42"), FINISHED)
    bad = scorer.score(plan(), record(*wrong, answer=f"{filler}no"), Ended(name))
    assert bad.parts["correctness"] == 0.0
    assert good.value > bad.value


@pytest.mark.parametrize("name", [name for name in EndedName if name is not EndedName.FINISHED])
def test_only_a_finished_episode_can_be_correct(name: EndedName) -> None:
    for strategy in STRATEGIES:
        score = make_scorer(strategy).score(plan(), PERFECT, Ended(name))
        assert score.parts["correctness"] == 0.0
        assert score.value <= 0.45


def test_values_of_a_perfect_episode() -> None:
    values = {s: make_scorer(s).score(plan(), PERFECT, FINISHED).value for s in STRATEGIES}
    assert values == pytest.approx({"basic": 1.0, "correctness": 1.0, "combined": 0.99})


def test_values_of_a_well_made_wrong_answer() -> None:
    values = {s: make_scorer(s).score(plan("41"), PERFECT, FINISHED).value for s in STRATEGIES}
    assert values == pytest.approx({"basic": 0.1, "correctness": 0.0, "combined": 0.45})


def test_a_near_miss_earns_nothing() -> None:
    assert make_scorer("correctness").score(plan("424"), PERFECT, FINISHED).value == 0.0


def test_a_row_chooses_how_it_is_graded() -> None:
    episode = record((code("final_answer('a')"), ""), answer=" Paris ")
    scorer = make_scorer("correctness")
    assert scorer.score(plan("paris"), episode, FINISHED).value == 1.0
    assert scorer.score(plan("paris", scorer="exact"), episode, FINISHED).value == 0.0
    assert scorer.score(plan("Paris", scorer="exact"), episode, FINISHED).value == 1.0
    with pytest.raises(ScorerError, match="does not exist"):
        scorer.score(plan("Paris", scorer="python:os:system"), episode, FINISHED)


def test_every_scorer_a_row_may_name_exists() -> None:
    assert set(_GRADERS) == set(ROW_SCORERS)


def test_a_task_without_reference_answer_is_our_fault_and_no_reward() -> None:
    with pytest.raises(ScorerError, match="no reference answer"):
        make_scorer("combined").score(plan(None), PERFECT, FINISHED)


def test_unknown_strategy_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"did you mean combined\?"):
        make_scorer("combine")


def test_debug_logs_the_parts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "orchestrator"):
        make_scorer("combined", debug=True).score(plan(), PERFECT, FINISHED)
    assert "combined 0.9900 (correctness 1.000, format 1.000" in caplog.text


def constant(value: object) -> SimpleNamespace:
    return SimpleNamespace(score=lambda plan, record, ended: value)


@pytest.fixture
def custom(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Makes a scorer out of any object, as if it stood in a module of the operator's."""

    def make(found: object):  # type: ignore[no-untyped-def]
        module = SimpleNamespace(mine=found)
        monkeypatch.setitem(__import__("sys").modules, "operators_module", module)
        return make_scorer("python:operators_module:mine")

    return make


def test_a_function_an_object_and_a_class_can_be_scorers(custom) -> None:  # type: ignore[no-untyped-def]
    class Mine:
        def score(self, plan, record, ended):  # type: ignore[no-untyped-def]
            return Score(0.25, {"style": 3.0})

    assert custom(lambda plan, record, ended: True).score(plan(), PERFECT, FINISHED).value == 1.0
    assert custom(constant(0.5)).score(plan(), PERFECT, FINISHED).value == 0.5
    score = custom(Mine).score(plan(), PERFECT, FINISHED)
    assert score == Score(0.25, {"style": 3.0, "correctness": 1.0})


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -0.1, 1.1, 10**400, "1", None, [], Score(0.5, {"x": math.nan})]
)
def test_a_result_that_is_no_number_between_0_and_1_is_a_scorer_error(custom, value) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ScorerError, match="operators_module"):
        custom(constant(value)).score(plan(), PERFECT, FINISHED)


def test_an_exception_of_a_custom_scorer_is_a_scorer_error(custom) -> None:  # type: ignore[no-untyped-def]
    def broken(plan, record, ended):  # type: ignore[no-untyped-def]
        raise KeyError("metadata\nof two lines")

    with pytest.raises(ScorerError, match="KeyError") as caught:
        custom(broken).score(plan(), PERFECT, FINISHED)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "spec", ["python:", "python:x", "python:no_such_module:x", "python:math:no_such", "python:math:pi"]
)
def test_a_custom_scorer_that_cannot_be_used_is_refused_at_start(spec: str) -> None:
    with pytest.raises(ConfigError, match="scoring_strategy"):
        python_scorer(spec)
