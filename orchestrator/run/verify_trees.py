"""Checks of groups with branches: that a branch is one of its parent, and what the tree says its tokens are worth.

Pure over parsed lines; `verify` counts the checks. `check` takes its name, whether it is well, and the place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isclose
from typing import Any

from orchestrator.completion.base import Tokenizer
from orchestrator.completion.trajectory import trajectory
from orchestrator.errors import RecordError
from orchestrator.rules.advantages import Leaf, last_forks
from orchestrator.run.line import RecordedAttempt, read_attempt
from orchestrator.run.trees import places

BRANCH, ADVANTAGES = "branch", "advantages"
MASKED = -100
_ROUNDING = 1e-9
Line = Mapping[str, Any]
Check = Callable[[str, bool, str], bool]


def _branch_in(facts: object) -> tuple[str | None, int | None]:
    """(parent, turn) that the facts of a rollout say."""
    if not isinstance(facts, Mapping):
        return None, None
    parent, turn = facts.get("parent"), facts.get("turn")
    return (parent, turn) if isinstance(parent, str) and type(turn) is int else (None, None)


def last_forks_in(group: Line) -> dict[str, int]:
    """The last turn at which somebody branched from a rollout, as the group says."""
    facts = group.get("overrides")
    return last_forks(map(_branch_in, facts)) if isinstance(facts, list) else {}


def check_branch(
    facts: Line, recorded: RecordedAttempt, rollouts: Mapping[str, bytes], where: str, check: Check
) -> None:
    """Checks where one rollout says that it branched, against its record and its parent's."""
    turns, branch, own = recorded.record.turns, recorded.record.fork, _branch_in(facts)
    inherited = [turn for turn in turns if turn.inherited]
    first = recorded.record.branch.turn if recorded.record.branch else 1
    marked = len(inherited) == first - 1 and all(t.inherited == (at < first) for at, t in enumerate(turns, 1))
    check(BRANCH, marked, f"{where}: turns before {first} are inherited, later ones are not")
    if branch is None:
        check(BRANCH, own == (None, None), f"{where}: it has no parent in its run")
        return
    if not check(BRANCH, own == (branch.parent, branch.turn), f"{where}: another parent or turn"):
        return
    text = rollouts.get(branch.parent)
    if not check(BRANCH, text is not None, f"{where}: {branch.parent} is not in rollouts.jsonl") or text is None:
        return
    try:
        parent = read_attempt(text)
    except ValueError as error:
        check(BRANCH, False, f"{where}: the line of {branch.parent} is not a rollout ({error})")
        return
    theirs = parent.record.turns[: branch.turn - 1]
    same_place = (parent.task_id, parent.group) == (recorded.task_id, recorded.group)
    check(BRANCH, same_place, f"{where}: {branch.parent} is of another group")
    same = len(inherited) == len(theirs) == branch.turn - 1 and all(
        (mine.prompt_ids, mine.completion) == (one.prompt_ids, one.completion)
        for mine, one in zip(inherited, theirs, strict=True)
    )
    check(BRANCH, same, f"{where}: what it inherits is not what {branch.parent} sampled")


def check_advantages(
    group: Line,
    members: Mapping[str, RecordedAttempt],
    where: str,
    check: Check,
    tokenizer: Callable[[], Tokenizer | None],
) -> None:
    """Checks the column of advantages, from the scores and branches of the group's `members` on record."""
    written, facts = group.get("advantages"), group["overrides"]
    leaves = []
    for recorded in members.values():
        branch = recorded.record.fork
        score = recorded.score.value if recorded.score is not None else 0.0
        leaves.append(
            Leaf(recorded.rollout_id, score, branch.parent, branch.turn)
            if branch
            else Leaf(recorded.rollout_id, score)
        )
    trees = places(leaves)
    if not trees:
        check(ADVANTAGES, written is None, f"{where}: there are some, and nobody branched")
        return
    if not isinstance(written, list) or len(written) != len(facts):
        check(ADVANTAGES, False, f"{where}: none")
        return
    for fact, mask, values in zip(facts, group["masks"], written, strict=True):
        name = str(fact.get("rollout_id")) if isinstance(fact, Mapping) else ""
        if name not in members:
            continue  # found before
        record, tag = members[name].record, members[name].agent.closing_tag
        tokens = tokenizer() if fact.get("token_source") == "retokenized" else None
        try:
            line = trajectory(record, tokens, tag, fact.get("segment", 0))
            expected = trees[name].advantages(record, line, tokens, tag)
        except RecordError as error:
            check(ADVANTAGES, False, f"{where}, {name}: {error}")
            continue
        check(ADVANTAGES, _fit(values, mask, expected), f"{where}, {name}: not those of its scores")


def _fit(values: Any, mask: Any, expected: Sequence[float]) -> bool:
    """Whether trained tokens have the expected advantage. Ids made from text need their tokenizer."""
    if not isinstance(values, list) or not isinstance(mask, list) or len(values) != len(mask):
        return False
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return False
    if len(expected) != len(values):
        return not expected
    return all(
        isclose(value, wanted, abs_tol=_ROUNDING)
        for value, m, wanted in zip(values, mask, expected, strict=True)
        if m != MASKED
    )
