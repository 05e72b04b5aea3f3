"""The checks of training data, each against a group that is right but for one thing."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.commands import verify
from orchestrator.completion.recorder import trajectory
from orchestrator.errors import ConfigError
from orchestrator.rundir import rollout_line
from orchestrator.types import Completion, CompletionKind, Group, Member, Message, Record, Score, Task, Turn
from orchestrator.verify import CHECKS, Asked, Findings, check_group
from orchestrator.writers import scored_data_group
from tests.fakes.plans import TALK, an_attempt

TAG = "</code>"
ASKED = Asked(sizes=range(2, 3))
Rollouts = Mapping[str, Mapping[str, Any]]


def sampled(text: str, *ids: int) -> Completion:
    return Completion(text + TAG, text, "stop", ids, tuple(-i / 10 for i in ids), 9, len(ids))


def a_member(index: int) -> Member:
    """Two turns of one line, and a plan aside."""
    talk = (*TALK, Message("assistant", f"one{TAG}"), Message("user", "Observation:\n1"))
    turns = (
        Turn(1, CompletionKind.ACTION, 0, TALK, 0, (1, 2, 3), "", sampled("one", 4, 5), 0, 1),
        Turn(2, CompletionKind.PLAN, 0, (Message("user", "plan"),), 1, (8, 8), "", sampled("plan", 9), 1, 2),
        Turn(3, CompletionKind.ACTION, 0, talk, 0, (6, 4), "", sampled("two", 7, 4), 2, 3),
    )
    attempt = an_attempt(index=index)
    record = Record(0.0, turns=turns, answer="42")
    attempt = replace(attempt, record=record)
    return Member(attempt, trajectory(record, None, TAG), Score(1.0 - index / 2))


def a_group(members: int = 2) -> tuple[dict[str, Any], dict[str, Any]]:
    """(a line of a groups file, the lines of rollouts.jsonl behind it)."""
    made = tuple(a_member(index) for index in range(members))
    group = Group(0, Task("task", "?", "42"), made, tuple(m.attempt for m in made))
    lines = {m.attempt.plan.rollout_id: rollout_line(m) for m in made}
    # As they come from the disk: lists, no tuples.
    return plain(scored_data_group(group)), {name: plain(line) for name, line in lines.items()}


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def look(group: dict[str, Any], rollouts: Rollouts | None, asked: Asked = ASKED) -> Findings:
    findings = Findings(asked)
    check_group(group, "line 1", findings, rollouts)
    return findings


def test_a_right_group_passes_every_check() -> None:
    findings = look(*a_group())
    assert findings.wrong == {}
    assert set(findings.checked) == set(CHECKS)
    assert (findings.groups, findings.rollouts, findings.sources["sampled"]) == (1, 2, 2)


def test_without_a_record_the_rest_is_still_checked() -> None:
    group, _ = a_group()
    findings = look(group, None, Asked())
    assert findings.wrong == {}
    assert not {"record", "sampled ids", "sampled log-probs", "one line"} & set(findings.checked)


def first(name: str, place: int, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda group: group[name][0].__setitem__(place, value)


def both(place: int, value: int) -> Callable[[dict[str, Any]], None]:
    def change(group: dict[str, Any]) -> None:
        group["tokens"][0][place] = group["masks"][0][place] = value

    return change


@pytest.mark.parametrize(
    ("check", "change"),
    [
        ("sampled ids", both(3, 77)),
        ("one line", first("tokens", 0, 77)),
        ("mask", first("masks", 3, 77)),
        ("logprob", first("inference_logprobs", 3, 0.5)),
        ("logprob", first("inference_logprobs", 3, None)),
        ("logprob", first("inference_logprobs", 3, True)),
        ("logprob", first("inference_logprobs", 0, -1.0)),
        ("sampled log-probs", first("inference_logprobs", 3, -0.41)),
        ("shape", lambda group: group["tokens"][0].append("7")),
        ("shape", lambda group: group["scores"].pop()),
        ("shape", lambda group: group.update(tokens=[])),
        ("shape", lambda group: group["masks"].__setitem__(0, None)),
        ("shape", lambda group: group["inference_logprobs"].__setitem__(0, None)),
        ("score", lambda group: group["scores"].__setitem__(0, -0.1)),
        ("score", lambda group: group["scores"].__setitem__(0, "1")),
        ("score", lambda group: group["scores"].__setitem__(0, 10**400)),
        ("logprob", first("inference_logprobs", 3, -(10**400))),
        ("outcome", lambda group: group["overrides"][0].update(outcome=[])),
        ("messages", first("messages", 2, {"role": [], "content": "on"})),
        ("record", lambda group: group["scores"].__setitem__(0, 0.5)),
        ("record", lambda group: group["overrides"][0].update(task_id="other")),
        ("record", lambda group: group["overrides"][0].update(segment=5)),
        ("outcome", lambda group: group["overrides"][0].update(outcome="docker_error")),
        ("outcome", lambda group: group["overrides"].__setitem__(1, group["overrides"][0])),
        ("messages", lambda group: group["messages"][0].pop(1)),
        ("messages", lambda group: group["messages"][0].pop()),
        ("messages", first("messages", 0, {"role": "user", "content": "hello"})),
        ("messages", first("messages", 2, {"role": "assistant", "content": f"on{TAG}"})),
        ("messages", first("messages", 2, {"role": "assistant", "content": "on"})),
        ("messages", first("messages", 3, {"role": "user", "content": "Observation:\n2"})),
        ("messages", first("messages", 3, "Observation")),
        ("size", lambda group: group["group_overrides"].update(group_size=3)),
    ],
)
def test_one_thing_that_is_wrong_is_named(check: str, change: Callable[[dict[str, Any]], None]) -> None:
    group, rollouts = a_group()
    change(group)
    assert check in look(group, rollouts).wrong


def test_a_mask_in_another_place_is_found_where_the_ids_are_the_same() -> None:
    group, rollouts = a_group()
    # 4 is in the line as a prompt's id and as a sampled one.
    assert group["tokens"][0][6] == group["tokens"][0][8] == 4
    mask, logprobs = group["masks"][0], group["inference_logprobs"][0]
    mask[6], mask[8] = mask[8], mask[6]
    logprobs[6], logprobs[8] = logprobs[8], logprobs[6]
    assert set(look(group, rollouts).wrong) == {"sampled ids"}


def test_a_size_nobody_asked_for_is_wrong_even_if_the_group_says_so() -> None:
    assert set(look(*a_group(1)).wrong) == {"size"}
    assert look(*a_group(1), Asked(sizes=range(1, 3))).wrong == {}


def test_what_is_masked_on_purpose_is_right_and_what_is_not_is_wrong() -> None:
    group, rollouts = a_group()
    masked = copy.deepcopy(group)
    for index in range(2):
        length = len(masked["tokens"][index])
        masked["masks"][index], masked["inference_logprobs"][index] = [-100] * length, [1.0] * length
    untrained = Asked(untrained=frozenset({"finished"}))
    assert set(look(masked, rollouts).wrong) == {"trained", "sampled ids"}
    assert look(masked, rollouts, untrained).wrong == {}
    assert "trained" in look(group, rollouts, untrained).wrong


@pytest.mark.parametrize("line", [{}, {"completions": 1}, {"completions": [{"kept": "x"}]}])
def test_a_record_that_is_none_is_a_finding_and_no_crash(line: dict[str, Any]) -> None:
    group, rollouts = a_group()
    known = {"task_id": "task", "outcome": "finished", "answer": "42", "score": 1.0}
    findings = look(group, rollouts | {next(iter(rollouts)): known | line})
    assert set(findings.wrong) == {"record"}


def test_what_was_asked_for_is_read_from_the_settings() -> None:
    policy = {"group_size": 8, "group_policy": "partial:3"}
    env = policy | {"untrained_outcomes": ["timeout"], "train_mixed_versions": False}
    asked = Asked.of(env)
    assert asked.sizes == range(3, 9)
    assert asked.masks_all({"outcome": "timeout"})
    assert asked.masks_all({"outcome": "finished", "mixed_policy_versions": True})
    assert not asked.masks_all({"outcome": "finished"})
    with pytest.raises((KeyError, ValueError)):
        Asked.of({"group_size": "many"})


def test_settings_that_ask_for_more_than_a_group_has_are_compared_all_the_same() -> None:
    env = {"group_size": 2, "group_policy": "partial:9", "untrained_outcomes": [], "train_mixed_versions": True}
    assert set(look(*a_group(), Asked.of(env)).wrong) == {"size"}


def test_names_that_are_no_text_and_huge_numbers_are_printed_as_violations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group, _ = a_group()
    group["overrides"][0] |= {"rollout_id": "\ud800\x1b[31m", "outcome": [], "token_source": "[/bold]\ud800"}
    group["scores"][1] = 10**400
    (tmp_path / "groups.jsonl").write_text(json.dumps(group) + "\n")
    assert verify.run(tmp_path / "groups.jsonl") == 1
    out = capsys.readouterr().out
    assert "2 violations" in out
    assert "\x1b[31m" not in out
    out.encode()


def test_a_groups_file_that_no_file_can_be_called_is_refused(tmp_path: Path) -> None:
    env = {"group_size": 2, "group_policy": "full", "untrained_outcomes": [], "train_mixed_versions": True}
    (tmp_path / "run.json").write_text(json.dumps({"config": {"env": env}, "groups_file": "x" * 300}))
    with pytest.raises(ConfigError, match="its groups file cannot be looked for"):
        verify.run(tmp_path)
