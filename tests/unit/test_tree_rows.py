"""A tree in training data: every token that was sampled is trained once, with the advantage of its edge."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from examples.trainer import check_group as check_columns
from examples.trainer import sequences
from orchestrator.completion.base import Tokenizer
from orchestrator.completion.tokenizer import load_tokenizer
from orchestrator.completion.trajectory import main_line, trajectory
from orchestrator.run.excerpts import read_counted
from orchestrator.run.groups import GroupFormat, sampled_in, untrained_tokens
from orchestrator.run.line import attempt_line
from orchestrator.run.rows import group_rows
from orchestrator.run.tally import Tally
from orchestrator.run.verify import Findings, Wanted, check_group
from orchestrator.trainers.trl import answer
from orchestrator.trainers.trl_async import samples
from orchestrator.types import CompletionKind, EndedName, Member, Message
from orchestrator.types.prefix import branching, going_on
from tests.fakes.tokenizer import tokenizer_folder
from tests.fakes.trees import TAG, tree

SAMPLED = {*(110, 111, 120, 121, 130, 131), *(220, 221, 230, 231), *(330, 331), *range(410, 431, 10)}
SAMPLED |= {token + 1 for token in SAMPLED if token >= 410}


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_each_sampled_token_is_trained_in_one_row_with_the_advantage_of_its_edge() -> None:
    (columns,) = GroupFormat().groups(tree())
    worth: dict[int, float] = {}
    for mask, values in zip(columns["masks"], columns["advantages"], strict=True):
        assert len(mask) == len(values)
        for token, value in zip(mask, values, strict=True):
            assert token != -100 or value == 0.0
            if token != -100:
                assert token not in worth, "trained twice"
                worth[token] = value
    assert set(worth) == SAMPLED
    at_2, at_3 = 1 / 3, 0.0  # values of the nodes before turns 2 and 3
    root = (at_2 + 1.0) / 2
    expected = {11: at_2 - root, 12: at_3 - at_2, 13: 0.0 - at_3, 22: 1 - at_2, 23: 1 - at_2, 33: 0.0 - at_3}
    for token, value in worth.items():
        assert value == pytest.approx(expected.get(token // 10, 1 - root)), token
    facts = columns["overrides"]
    parent = facts[0]["rollout_id"]
    assert [(one["parent"], one["turn"]) for one in facts] == [
        (None, None),
        (parent, 2),
        (parent, 3),
        (None, None),
    ]
    assert [one["completion_tokens"] for one in facts] == [6, 4, 2, 6]
    assert [one["untrained_completions"] for one in facts] == [0] * 4


def test_masked_trunks_leave_what_is_shared_to_nobody() -> None:
    (columns,) = GroupFormat(trunk_masked=True).groups(tree())
    trained = {token for mask in columns["masks"] for token in mask if token != -100}
    assert trained == SAMPLED - {110, 111, 120, 121}, "all before the trunk's last fork"


@pytest.mark.parametrize("masked", [False, True])
def test_rows_are_the_groups_lines(masked: bool) -> None:
    form = GroupFormat(trunk_masked=masked)
    (columns,) = form.groups(tree())
    for place, row in enumerate(group_rows(tree(), form)):
        ids = [*row.prompt_ids, *row.completion_ids]
        mask = [
            *[-100] * len(row.prompt_ids),
            *(i if m else -100 for i, m in zip(row.completion_ids, row.env_mask, strict=True)),
        ]
        assert (ids, mask) == (columns["tokens"][place], columns["masks"][place])
        assert row.advantages == tuple(columns["advantages"][place][len(row.prompt_ids) :])
        assert (row.parent, row.turn) == (
            columns["overrides"][place]["parent"],
            columns["overrides"][place]["turn"],
        )


def test_what_the_run_masks_has_no_log_probs_and_no_advantages() -> None:
    """As an outcome that is not trained, or a side line."""
    group, untrained = tree(), frozenset({EndedName.FINISHED})
    (columns,) = GroupFormat(untrained=untrained).groups(group)
    for name, nothing in (("masks", -100), ("inference_logprobs", 1.0), ("advantages", 0.0)):
        assert {value for values in columns[name] for value in values} == {nothing}
    rollouts = {m.attempt.plan.rollout_id: json.dumps(plain(attempt_line(m))).encode() for m in group.members_G}
    findings = Findings(Wanted(size=4, untrained=frozenset(map(str, untrained))))
    check_group(columns, "line 1", findings, rollouts)
    assert findings.wrong == {}
    members = tuple(with_plan(member) for member in group.members_G)
    for rows in (
        group_rows(group, GroupFormat(untrained=untrained)),
        group_rows(replace(group, members_G=members), GroupFormat(all_segments=False)),
    ):
        assert not any(
            value for row in rows for value, on in zip(row.advantages or (), row.env_mask, strict=True) if not on
        )


def test_trl_gets_each_token_to_train_once() -> None:
    rows = group_rows(tree(), GroupFormat())
    given = answer(rows, [0], 0, with_logprobs=True)
    seen: Counter[int] = Counter()
    for ids, mask in zip(given["completion_ids"], given["env_mask"], strict=True):
        seen.update(token for token, on in zip(ids, mask, strict=True) if on)
    assert seen == dict.fromkeys(SAMPLED, 1)
    seen.clear()
    for sample in samples(rows):
        seen.update(int(t) for t, on in zip(sample["input_ids"], sample["completion_mask"], strict=True) if on)
    assert seen == dict.fromkeys(SAMPLED, 1)


def test_a_loss_over_the_groups_line_sees_each_token_once() -> None:
    """The policy gradient of a table of log-probs, one per id: its gradient is the advantage, once for each."""
    (columns,) = GroupFormat().groups(tree())
    gradient: Counter[int] = Counter()
    for ids, mask in zip(columns["tokens"], columns["masks"], strict=True):
        for token, label in zip(ids, mask, strict=True):
            gradient[token] += label != -100
    assert {token: gradient[token] for token in SAMPLED} == dict.fromkeys(SAMPLED, 1)
    assert sum(gradient.values()) == len(SAMPLED)


def test_nothing_counts_what_is_inherited() -> None:
    group, tally = tree(), Tally()
    for member in group.members_G:
        tally.attempt(member)
        counted = read_counted(json.dumps(attempt_line(member), default=list).encode())
        assert counted.sampled_tokens == member.attempt.record.sampled_tokens
    tally.group(group)
    assert tally.tokens == tally.trained_tokens == sampled_in(group) == len(SAMPLED)
    assert untrained_tokens(group, all_segments=True) == 0


@pytest.mark.parametrize("masked", [False, True])
def test_ids_made_from_texts_are_the_same_in_every_row_of_a_tree(masked: bool) -> None:
    """Here the tokenizer makes one token of the end of a completion and the tag that the agent puts behind it."""
    tokenizer = load_tokenizer(str(tokenizer_folder()))
    group = tree()
    group = replace(group, members_G=tuple(as_texts(member, tokenizer) for member in group.members_G))
    form = GroupFormat(tokenizer=tokenizer, trunk_masked=masked)
    (columns,) = form.groups(group)
    trunk, branch = columns["tokens"][:2]
    inherited = next(at for at, m in enumerate(columns["masks"][1]) if m != -100)
    assert trunk[:inherited] == branch[:inherited]
    rows = group_rows(group, form)
    assert [row.advantages for row in rows] == [
        tuple(values[len(row.prompt_ids) :]) for row, values in zip(rows, columns["advantages"], strict=True)
    ]


def as_texts(member: Member, tokenizer: Tokenizer) -> Member:
    """Of an endpoint without ids. A space ends each completion."""
    record = member.attempt.record
    turns = []
    for turn in record.turns:
        text = turn.completion.visible + " "
        said = replace(turn.completion, text=text, visible=text, tokens_T=None, logprobs_T=None)
        talk = tuple(Message(m.role, m.content.replace(TAG, f" {TAG}")) for m in turn.messages)
        turns.append(replace(turn, messages=talk, prompt_ids=None, completion=said))
    record = replace(record, turns=tuple(turns))
    attempt = replace(member.attempt, record=record)
    return replace(member, attempt=attempt, trajectory=main_line(attempt.plan, record, tokenizer))


def test_a_line_that_is_all_inherited_is_no_line_of_the_branch() -> None:
    """A plan that the trunk asked for aside, before the fork."""
    group = tree()
    members = [with_plan(member) for member in group.members_G]
    rows = group_rows(replace(group, members_G=tuple(members)), GroupFormat(all_segments=True))
    assert [(row.index, row.segment) for row in rows] == [(0, 0), (0, 1), (1, 0), (2, 0), (3, 0), (3, 1)]
    assert {row.weight for row in rows if row.index in (1, 2)} == {1.0}
    assert GroupFormat(all_segments=True).groups(replace(group, members_G=tuple(members)))[1:] == []


def with_plan(member: Member) -> Member:
    first, *others = member.attempt.record.turns
    record = replace(member.attempt.record, turns=(replace(first, segment=1, kind=CompletionKind.PLAN), *others))
    attempt = replace(member.attempt, record=record)
    return replace(member, attempt=attempt, trajectory=trajectory(record, None, "</code>", 0))


def test_a_branch_that_sampled_nothing_yet_is_not_gone_on_with() -> None:
    """Its own turns begin where it branched, not behind what it was brought to so far."""
    trunk = tree().members_G[0].attempt.record
    prefix = branching("g000000-r00-a0", trunk, 3)
    begun = replace(trunk, turns=prefix.turns[:1], branch=prefix.branch)
    assert going_on(begun, "lost") is None
    own = replace(trunk, turns=(*prefix.turns, trunk.turns[2]), branch=prefix.branch)
    assert going_on(own, "lost") is not None


# ------------------------------------------------------------ verify


def look(
    change: Callable[[dict[str, Any], dict[str, Any]], None] | None = None, *, masked: bool = False
) -> set[str]:
    """Which checks fail once a right group was changed."""
    group = tree()
    (columns,) = GroupFormat(trunk_masked=masked).groups(group)
    rollouts = {m.attempt.plan.rollout_id: plain(attempt_line(m)) for m in group.members_G}
    columns = copy.deepcopy(plain(columns))
    if change is not None:
        change(columns, rollouts)
    findings = Findings(Wanted(size=4, trunk_masked=masked))
    check_group(columns, "line 1", findings, {name: json.dumps(line).encode() for name, line in rollouts.items()})
    return set(findings.wrong)


BRANCH = "g000000-r02-a0"


def drop_parent(columns: dict[str, Any], rollouts: dict[str, Any]) -> None:
    del rollouts[columns["overrides"][0]["rollout_id"]]


def other_ids(columns: dict[str, Any], rollouts: dict[str, Any]) -> None:
    rollouts[columns["overrides"][2]["rollout_id"]]["completions"][0]["token_ids"] = [999, 998]


def other_logprobs(columns: dict[str, Any], rollouts: dict[str, Any]) -> None:
    rollouts[columns["overrides"][2]["rollout_id"]]["completions"][1]["logprobs"] = [-0.1, -0.3]


def trained_twice(columns: dict[str, Any], rollouts: dict[str, Any]) -> None:
    del rollouts[columns["overrides"][2]["rollout_id"]]["completions"][0]["inherited"]


def trained_in_the_file(columns: dict[str, Any], rollouts: dict[str, Any]) -> None:
    columns["masks"][1] = [-100 if t < 100 else t for t in columns["tokens"][1]]
    columns["inference_logprobs"][1] = [1.0 if m == -100 else -0.1 for m in columns["masks"][1]]


def other_turn(columns: dict[str, Any], rollouts: dict[str, Any]) -> None:
    columns["overrides"][1]["turn"] = 3


def forged_in_another_run(turn: int) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """Of a parent that is not at hand, the branch's own turns must fit all the same."""

    def change(columns: dict[str, Any], rollouts: dict[str, Any]) -> None:
        rollouts[BRANCH]["branch"] |= {"turn": turn, "run": "/another/run"}
        columns["overrides"][2] |= {"parent": None, "turn": None}

    return change


def other_advantage(columns: dict[str, Any], rollouts: dict[str, Any]) -> None:
    columns["advantages"][0] = [value + 0.1 for value in columns["advantages"][0]]


def no_advantages(columns: dict[str, Any], rollouts: dict[str, Any]) -> None:
    columns["advantages"] = None


@pytest.mark.parametrize("masked", [False, True])
def test_a_right_tree_passes(masked: bool) -> None:
    assert look(masked=masked) == set()


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (drop_parent, "branch"),
        (other_ids, "branch"),
        (other_logprobs, "branch"),
        (trained_twice, "branch"),
        (trained_in_the_file, "sampled ids"),
        (other_turn, "branch"),
        (forged_in_another_run(1), "branch"),
        (forged_in_another_run(1 << 50), "branch"),
        (other_advantage, "advantages"),
        (no_advantages, "advantages"),
    ],
)
def test_a_broken_tree_is_named(change: Callable[[dict[str, Any], dict[str, Any]], None], check: str) -> None:
    assert check in look(change)


def test_the_example_trainer_takes_the_advantages_of_the_edges() -> None:
    (columns,) = GroupFormat().groups(tree())
    check_columns(columns)
    taken = [line.advantages_T for line in sequences(columns)]
    spread = 0.5  # of the scores 0, 1, 0, 1
    assert taken == [[value / spread for value in values] for values in columns["advantages"]]
    with pytest.raises(ValueError, match="one for each token"):
        check_columns({**columns, "advantages": [*columns["advantages"][:2], [0.0], [0.0]]})
