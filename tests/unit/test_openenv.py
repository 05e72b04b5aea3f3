"""OpenEnv's traces say what our rows say, bit by bit; and which draw a seed and an episode stand for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

pytest.importorskip("openenv", reason="needs the extra openenv")

from openenv.core.harness import TrainingTrace

from orchestrator.run.files import ROLLOUTS_FILE
from orchestrator.run.groups import GroupFormat
from orchestrator.run.line import attempt_line, recorded_attempt
from orchestrator.run.rows import Row, recorded_rows
from orchestrator.trainers.openenv import epoch_of, traces, training_trace
from orchestrator.types import AgentKind, Attempt, EndedName, Failed, FailedName, Group
from tests.fakes.plans import a_plan, a_record
from tests.fakes.trees import tree
from tests.unit.test_rows import groups

pytestmark = pytest.mark.trainers

TIMEOUT = frozenset({EndedName.TIMEOUT})


def lines_of(trace: TrainingTrace) -> dict[int, tuple[list[int], list[int], list[float]]]:
    """Segment → its whole line, the mask over it, and the log-probs of all sampled tokens."""
    found: dict[int, tuple[list[int], list[int], list[float]]] = {}
    for turn in trace.turns:
        tokens, mask, logprobs = found.get(turn.metadata["segment"], ([], [], []))
        assert turn.prompt_token_ids[: len(tokens)] == tokens, "each prompt begins with the line so far"
        between = len(turn.prompt_token_ids) - len(tokens)
        assert turn.loss_mask[: len(turn.prompt_token_ids)] == [0] * len(turn.prompt_token_ids)
        found[turn.metadata["segment"]] = (
            turn.prompt_token_ids + turn.completion_token_ids,
            mask + [0] * between + turn.loss_mask[len(turn.prompt_token_ids) :],
            logprobs + turn.per_token_logps,
        )
    return found


def same(row: Row, line: tuple[list[int], list[int], list[float]]) -> bool:
    tokens, mask, logprobs = line
    ours = [0] * len(row.prompt_ids) + list(row.env_mask)
    if not any(row.env_mask):
        return tokens == [*row.prompt_ids, *row.completion_ids] and not any(mask)
    trained = [p for p in row.logprobs or () if p is not None]
    return tokens == [*row.prompt_ids, *row.completion_ids] and mask == ours and logprobs == trained


@given(groups(), st.sampled_from(["code", "program"]), st.none() | st.booleans(), st.booleans(), st.booleans())
def test_a_trace_is_the_rows_of_its_rollout(
    group: Group, kind: AgentKind, all_segments: bool | None, mixed: bool, all_ends: bool
) -> None:
    form = GroupFormat(
        all_segments=all_segments, mixed_versions=mixed, untrained=frozenset() if all_ends else TIMEOUT
    )
    told = [recorded_attempt(member) for member in group.members_G]
    told = [replace(one, agent=replace(one.agent, kind=kind)) for one in told]
    assume(all(turn.completion.logprobs_T is not None for one in told for turn in one.record.turns))
    for one in told:
        trace, rows = training_trace(one, form), {row.segment: row for row in recorded_rows(one, form)}
        lines = lines_of(trace)
        assert lines.keys() == rows.keys()
        assert all(same(row, lines[n]) for n, row in rows.items())
        assert trace.turns[-1].metadata["segment"] == one.segment
        dropped = training_trace(one, form, dropped="why")
        assert not any(any(turn.loss_mask) for turn in dropped.turns)
        assert [turn.completion_token_ids for turn in dropped.turns] == [
            turn.completion_token_ids for turn in trace.turns
        ]


@given(groups())
def test_a_record_without_logprobs_has_no_trace(group: Group) -> None:
    told = recorded_attempt(group.members_G[0])
    assume(any(turn.completion.logprobs_T is None for turn in told.record.turns))
    with pytest.raises(ValueError, match=r"has no sampled ids or no log-probs; .*env\.token_source exact"):
        training_trace(told, GroupFormat())


@given(groups(), st.sampled_from(FailedName))
def test_what_failed_is_context_alone(group: Group, name: FailedName) -> None:
    member = group.members_G[0]
    assume(all(turn.completion.logprobs_T is not None for turn in member.attempt.record.turns))
    failed = recorded_attempt(replace(member.attempt, outcome=Failed(name, "why")))
    trace = training_trace(failed, GroupFormat(all_segments=True))
    assert not any(any(turn.loss_mask) for turn in trace.turns)
    # A record that does not add up has no lines.
    assert bool(trace.turns) == (name is not FailedName.RECORD_ERROR)


@pytest.mark.parametrize("masked", [False, True])
def test_traces_train_each_sampled_token_of_a_tree_once_or_mask_what_is_shared(
    masked: bool, tmp_path: Path
) -> None:
    group, form = tree(), GroupFormat(trunk_masked=masked)
    record = tmp_path / ROLLOUTS_FILE
    record.write_text("".join(f"{json.dumps(attempt_line(member))}\n" for member in group.members_G))
    branch = f"turns:2 width:2{' trunk:masked' if masked else ''}"
    terms = {"trained_segments": None, "untrained_outcomes": [], "train_mixed_versions": False, "branch": branch}
    (tmp_path / "run.json").write_text(json.dumps({"config": {"env": terms}}))
    found = [
        token
        for _, trace in traces(tmp_path)
        for turn in trace.turns
        for token, on in zip([*turn.prompt_token_ids, *turn.completion_token_ids], turn.loss_mask, strict=True)
        if on
    ]
    (columns,) = form.groups(group)
    assert sorted(found) == sorted(token for mask in columns["masks"] for token in mask if token != -100)


def test_a_completion_without_a_token_has_no_turn() -> None:
    record = a_record(2)
    first, second = (
        replace(
            turn,
            prompt_ids=(turn.sequence,),
            completion=replace(turn.completion, tokens_T=ids, logprobs_T=tuple(-1.0 for _ in ids)),
        )
        for turn, ids in zip(record.turns, ((5, 6), ()), strict=True)
    )
    told = recorded_attempt(
        Attempt(a_plan(), replace(record, turns=(first, second)), Failed(FailedName.LLM_ERROR, "why"))
    )
    (turn,) = training_trace(told, GroupFormat()).turns
    assert (turn.prompt_token_ids, turn.completion_token_ids) == ([1], [5, 6])
    assert turn.response["choices"][0]["finish_reason"] == first.completion.finish_reason


NAMED = st.tuples(st.none() | st.integers(), st.none() | st.text())


@given(NAMED, NAMED)
def test_an_epoch_is_named_by_seed_and_episode_together(
    one: tuple[int | None, str | None], other: tuple[int | None, str | None]
) -> None:
    assert (epoch_of(*one) == epoch_of(*other)) == (one == other)
    epoch = epoch_of(*one)
    assert (epoch is None) == (one == (None, None))
    assert epoch is None or 0 <= epoch < 1 << 62


def test_lone_surrogates_are_a_name_too() -> None:
    assert epoch_of(None, "\ud800") != epoch_of(None, "\ud801")
