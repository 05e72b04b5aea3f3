"""Who is to blame for a completion that came to nothing: the rule as a table, without an endpoint."""

from __future__ import annotations

import pytest

from orchestrator.completion.base import Interrupted, Refusal, UnusableSample
from orchestrator.errors import (
    AuthenticationError,
    CompletionError,
    CompletionTimeout,
    ContextLengthError,
    FullContext,
    RecordError,
)
from orchestrator.rules.blame import control_age_s, may_pass, needs_control, verdict
from orchestrator.rules.control import CACHE_S, ControlAnswer
from tests.fakes.completers import text_completion

SAMPLE = text_completion("words")
UNUSABLE = UnusableSample("filtered", SAMPLE)
REFUSED, AWAY = Refusal("HTTP 400: no", 400), Refusal("HTTP 404: no", 404)
KEY, OTHER_KEY = AuthenticationError("the key"), AuthenticationError("the control's")
SERVED, BROKEN = ControlAnswer("4"), ControlAnswer(failure=CompletionError("away"))


@pytest.mark.parametrize(
    ("error", "early", "later"),
    [
        (CompletionError("x"), False, True),
        (ContextLengthError("x"), False, True),
        (FullContext("x"), False, False),
        (UNUSABLE, True, True),
        (KEY, True, True),
    ],
)
def test_a_control_is_asked_once_the_policy_could_have_caused_it(
    error: Exception, early: bool, later: bool
) -> None:
    assert (needs_control(error, sampled=False), needs_control(error, sampled=True)) == (early, later)


def test_an_answer_of_the_control_may_be_old_where_the_error_is_about_one_request() -> None:
    for error in (UNUSABLE, ContextLengthError("x"), REFUSED, Interrupted(REFUSED, SAMPLE, ())):
        assert control_age_s(error) == CACHE_S > 0.0
    for error in (CompletionError("x"), AWAY, KEY, RecordError("x"), Interrupted(AWAY, SAMPLE, ())):
        assert control_age_s(error) == 0.0


def test_what_could_be_served_at_a_second_try_is_asked_again() -> None:
    assert all(may_pass(error) for error in (CompletionError("x"), REFUSED, AWAY, Interrupted(AWAY, SAMPLE, ())))
    assert not any(may_pass(error) for error in (UNUSABLE, ContextLengthError("x"), RecordError("x")))


@pytest.mark.parametrize(
    ("error", "sampled", "control", "outcome"),
    [
        (CompletionError("x"), False, None, "llm_error"),
        (ContextLengthError("x"), False, None, "context_length"),
        (RecordError("x"), False, None, "record_error"),
        (CompletionError("x"), True, SERVED, "no_answer"),
        (CompletionTimeout("x"), True, SERVED, "timeout"),
        (ContextLengthError("x"), True, SERVED, "context_length"),
        (RecordError("x"), True, SERVED, "no_answer"),
        (CompletionError("x"), True, BROKEN, "llm_error"),
        (CompletionTimeout("x"), True, BROKEN, "llm_error"),
        (ContextLengthError("x"), True, BROKEN, "llm_error"),
        (RecordError("x"), True, BROKEN, "record_error"),
        (UNUSABLE, False, SERVED, "no_answer"),
        (UNUSABLE, False, BROKEN, "llm_error"),
        (CompletionError("x"), False, SERVED, "llm_error"),
    ],
)
def test_the_policy_is_to_blame_where_it_sampled_and_the_control_is_served(
    error: Exception, sampled: bool, control: ControlAnswer | None, outcome: str
) -> None:
    found = verdict(error, control, sampled=sampled)
    assert found.outcome == outcome
    assert (found.sampled is SAMPLE) == (error is UNUSABLE and control is SERVED)
    assert found.fatal is None


def test_a_refused_key_ends_the_run_where_the_control_s_is_refused_too() -> None:
    assert verdict(KEY, ControlAnswer(failure=OTHER_KEY), sampled=True).fatal is KEY
    assert verdict(KEY, BROKEN, sampled=True).fatal is None
    assert verdict(KEY, SERVED, sampled=True).fatal is None
    assert verdict(CompletionError("x"), ControlAnswer(failure=OTHER_KEY), sampled=True).fatal is None
