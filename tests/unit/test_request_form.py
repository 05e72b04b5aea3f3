"""What a refusal says, and how the next request looks: each condition by itself, without a server."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.completion.base import CompletionRequest, Endpoint
from orchestrator.completion.parameters import EXTRAS, RequestForm, kind_of, neutral
from orchestrator.errors import ParameterError
from orchestrator.types import Message, Wishes
from tests.unit.test_refused_parameters import STOPS, TOOL, request

FORM = RequestForm()
OPENAI = FORM.without_extras()


def after(words: str, form: RequestForm = OPENAI, asked: CompletionRequest | None = None, **extras: Any) -> Any:
    return form.after(words, asked or request(), strict=True, extras=extras)


def test_stop_strings_are_blamed_only_where_some_were_sent() -> None:
    """A text that was asked for without them may speak of stopping all the same."""
    refused = "stop: not with this temperature"
    assert after(refused).most_stops == 0
    for form, asked in ((OPENAI, request(stop=())), (replace(OPENAI, most_stops=0), request())):
        changed = after(refused, form, asked)
        assert (changed.most_stops, changed.left_out - form.left_out) == (form.most_stops, {"temperature"})


def test_the_limit_is_renamed_once() -> None:
    renamed = after("max_tokens is not supported, use max_completion_tokens")
    assert renamed == replace(OPENAI, limit="max_completion_tokens")
    assert after("max_completion_tokens is not supported", renamed) is None
    assert "max_tokens" not in renamed.body(request(), "m", Endpoint("http://e/v1", "m"))


@pytest.mark.parametrize("cut", [0, 1])
def test_a_refusal_s_own_field_goes_before_its_words(cut: int) -> None:
    """Also where the object is cut off."""
    error = {"error": {"param": "temperature", "message": "Unsupported. Valid are seed, logprobs and stop."}}
    words = json.dumps(error)
    assert after(words[: len(words) - cut]).left_out - OPENAI.left_out == {"temperature"}


def test_an_answer_that_was_all_thought_teaches_nothing() -> None:
    words = "Could not finish the message because max_tokens or model output limit was reached"
    assert after(words) is None


@pytest.mark.parametrize(
    ("words", "sent", "before", "most"),
    [
        ("stop: at most 2 are taken", 3, None, 2),
        ("stop: only one is taken", 3, None, 1),
        ("stop: at most 4 are taken", 3, None, 1),  # too many all the same
        ("stop: at most 0 are taken", 3, None, 1),
        ("stop: at most 4 are taken", 1, None, 0),
        ("stop: too many", 3, None, 1),
        ("stop: too many", 1, None, 0),
        ("stop: too many", 9, None, 4),
        ("stop: too many", 9, 4, 1),  # four were sent
        ("stop: at most 3 are taken", 9, 2, 1),
        ("stop: unknown", 3, None, 0),
    ],
)
def test_as_many_stop_strings_are_sent_as_are_taken(words: str, sent: int, before: int | None, most: int) -> None:
    stop = tuple(f"s{number}" for number in range(sent))
    changed = after(words, replace(OPENAI, most_stops=before), request(stop=stop))
    assert changed == replace(OPENAI, most_stops=most)


@pytest.mark.parametrize("words", ["messages[0].role must be user", "first message must use the user role"])
def test_a_role_that_must_be_the_user_s_folds_the_system_message(words: str) -> None:
    assert after(words) == replace(OPENAI, folds_system=True)


def test_a_system_message_is_folded_once_and_only_where_there_is_one() -> None:
    words = "the system role is not supported"
    assert after(words) == replace(OPENAI, folds_system=True)
    assert after(words, replace(OPENAI, folds_system=True)) is None
    assert after(words, asked=request(messages=(Message("user", "q"),))) is None


def test_reasoning_is_blamed_where_it_is_named_and_asked_for_otherwise_once() -> None:
    effort = {"enabled": True, "effort": "low"}
    assert after("bad request", reasoning=effort) is None
    changed = after("reasoning: unknown", reasoning=effort)
    assert changed == replace(OPENAI, asks_effort=True)
    with pytest.raises(ParameterError, match=r"env\.thinking_mode.*leave it out"):
        after("reasoning_effort: unknown", changed, reasoning=effort)


def test_what_one_kind_and_all_kinds_do_not_take_holds_together() -> None:
    odd = RequestForm(frozenset({"seed"}), "max_completion_tokens", 2, True, True)
    other = RequestForm(frozenset({"n"}), most_stops=3)
    both = RequestForm(frozenset({"seed", "n"}), "max_completion_tokens", 2, True, True)
    assert odd.beside(other) == other.beside(odd) == both
    assert odd.beside(FORM).most_stops == FORM.beside(odd).most_stops == 2


def test_kinds_are_told_apart_by_what_is_demanded() -> None:
    wishes = [Wishes(), Wishes(TOOL), Wishes(TOOL, "required"), Wishes(TOOL, "required", "f")]
    assert len({kind_of(wish) for wish in wishes}) == len(wishes)


def test_a_neutral_request_has_no_word_of_the_rollout_s() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "mine", "schema": {"title": "mine"}}}
    tool = ({"type": "function", "function": {"name": "mine"}},)
    asked = request(
        messages=(Message("system", "mine"), Message("user", "mine")),
        stop=("mine", *STOPS),
        wishes=Wishes(tool, "required", "mine", form),
    )
    plain = neutral(asked, 16)
    body = json.dumps(FORM.body(plain, "m", Endpoint("http://e/v1", "m")))
    assert not any(word in body for word in ("mine", *STOPS))
    assert (len(plain.stop), plain.messages[0].role) == (len(asked.stop), "system")
    assert kind_of(plain.wishes) == kind_of(asked.wishes)


@pytest.mark.parametrize("takes_n", [True, False])
def test_n_is_sent_where_it_is_taken(takes_n: bool) -> None:
    body = FORM.body(request(), "m", Endpoint("http://e/v1", "m", takes_n=takes_n))
    assert ("n" in body) is takes_n
    assert EXTRAS.keys() <= body.keys()
