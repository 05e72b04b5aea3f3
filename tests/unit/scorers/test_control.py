"""What a scorer is tried with where it failed on a rollout: something plain that is otherwise like it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.scorers.control import control_record
from orchestrator.types import Completion, Record
from tests.fakes.plans import a_plan, a_record, a_turn

EXACT = Completion("odd", "odd", "stop", (5, 6), (-0.5, -0.5), 3, 2, policy_version="7")
TEXT = Completion("odd", "odd", "stop", None, None, 3, 2)


@pytest.mark.parametrize("completion", [EXACT, TEXT], ids=["ids", "text"])
def test_a_control_has_what_the_rollout_has_and_the_reference_answer(completion: Completion) -> None:
    prompt_ids = None if completion.tokens_T is None else (1, 2, 3)
    turn = replace(a_turn(), completion=completion, prompt_ids=prompt_ids, agent="helper")
    record: Record = control_record(a_plan(), replace(a_record(), turns=(turn, turn), steps=()))
    ((plain,), made) = record.turns, record.turns[0].completion
    assert (made.tokens_T is None, made.logprobs_T is None) == (prompt_ids is None, prompt_ids is None)
    assert made.policy_version == completion.policy_version
    assert (record.answer, record.steps, record.output, plain.agent) == ("42", (), None, "")
    assert "odd" not in made.text
