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
from orchestrator.completion.base import content_ids
from orchestrator.completion.line import visible_text
from orchestrator.completion.tokenizer import HubTokenizer, load_tokenizer
from orchestrator.completion.trajectory import trajectory
from orchestrator.errors import ConfigError
from orchestrator.report.details import TokenTable
from orchestrator.run.earlier import restored
from orchestrator.run.groups import scored_data_group
from orchestrator.run.line import attempt_line, read_attempt
from orchestrator.run.verify import CHECKS, Findings, Wanted, check_group
from orchestrator.types import (
    Completion,
    CompletionKind,
    Crossing,
    Group,
    Member,
    Message,
    Record,
    Score,
    Task,
    Turn,
)
from tests.fakes.plans import TALK, an_attempt
from tests.fakes.tokenizer import tokenizer_folder

TAG = "</code>"
ASKED = Wanted(size=2)
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
    lines = {m.attempt.plan.rollout_id: attempt_line(m) for m in made}
    # As they come from the disk: lists, no tuples.
    return plain(scored_data_group(group)), {name: plain(line) for name, line in lines.items()}


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def written(lines: Rollouts) -> dict[str, bytes]:
    return {name: json.dumps(line).encode() for name, line in lines.items()}


def look(group: dict[str, Any], rollouts: Rollouts | None, asked: Wanted = ASKED) -> Findings:
    findings = Findings(asked)
    check_group(group, "line 1", findings, None if rollouts is None else written(rollouts))
    return findings


def test_a_side_line_may_begin_without_a_system_message_and_the_main_line_may_not() -> None:
    made = [a_member(index) for index in range(2)]
    sides = tuple(replace(m, trajectory=trajectory(m.attempt.record, None, TAG, 1)) for m in made)
    group = Group(0, Task("task", "?", "42"), sides, tuple(m.attempt for m in made))
    lines = {m.attempt.plan.rollout_id: plain(attempt_line(m)) for m in made}
    side = plain(scored_data_group(group))
    assert [m["role"] for m in side["messages"][0]] == ["user", "assistant"]
    assert look(side, lines).wrong == {}
    right, rollouts = a_group()
    del right["messages"][0][0]
    assert "messages" in look(right, rollouts).wrong


def test_a_right_group_passes_every_check() -> None:
    group, rollouts = a_group()
    refused = Crossing(1, 0.0, 1.0, "GET", "https", "a.example", 443, "/", None, refusal="not named")
    member = a_member(0)
    asked = replace(member.attempt, record=replace(member.attempt.record, crossings=(refused,)))
    rollouts[asked.plan.rollout_id] = plain(attempt_line(replace(member, attempt=asked)))
    findings = look(group, rollouts)
    assert findings.wrong == {}
    assert set(findings.checked) == set(CHECKS)
    assert (findings.groups, findings.rollouts, findings.sources["sampled"]) == (1, 2, 2)


def test_without_a_record_the_rest_is_still_checked() -> None:
    group, _ = a_group()
    findings = look(group, None, Wanted())
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
        ("record", lambda group: group["overrides"][0].update(token_source="another")),
        ("record", lambda group: group["overrides"][0].update(token_source="none")),
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
    assert look(*a_group(1), Wanted(size=2, least=1)).wrong == {}


def test_what_is_masked_on_purpose_is_right_and_what_is_not_is_wrong() -> None:
    group, rollouts = a_group()
    masked = copy.deepcopy(group)
    for index in range(2):
        length = len(masked["tokens"][index])
        masked["masks"][index], masked["inference_logprobs"][index] = [-100] * length, [1.0] * length
    untrained = Wanted(untrained=frozenset({"finished"}))
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
    asked = Wanted.of(env)
    assert (asked.size, asked.least) == (8, 3)
    assert asked.masks_all({"outcome": "timeout"})
    assert asked.masks_all({"outcome": "finished", "mixed_policy_versions": True})
    assert not asked.masks_all({"outcome": "finished"})
    with pytest.raises((KeyError, ValueError)):
        Wanted.of({"group_size": "many"})


def test_settings_that_ask_for_more_than_a_group_has_are_compared_all_the_same() -> None:
    env = {"group_size": 2, "group_policy": "partial:9", "untrained_outcomes": [], "train_mixed_versions": True}
    assert set(look(*a_group(), Wanted.of(env)).wrong) == {"size"}


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


# ---------------------------------------------------------------- ids made from text


@pytest.fixture(scope="module")
def tokenizer() -> HubTokenizer:
    return load_tokenizer(str(tokenizer_folder()))


def said(text: str) -> Completion:
    return Completion(text, text, "stop", None, None, 9, 2)


def a_text_group(tokenizer: HubTokenizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `a_group`, of one member at an endpoint without ids, whose program wrote an example into its request."""
    first = (TALK[0], Message("user", "1 + 1?"), Message("assistant", "forty-two"), TALK[1])
    again = (*first, Message("assistant", f"forty-two{TAG}"), Message("user", "Observation:\nforty-two"))
    turns = (
        Turn(1, CompletionKind.ACTION, 0, first, 0, None, "", said("\nforty-two"), 0, 1),
        Turn(2, CompletionKind.ACTION, 4, again[4:], 0, None, "", said("one <|im_end|> two"), 1, 2),
    )
    attempt = replace(an_attempt(), record=Record(0.0, turns=turns, answer="42"))
    member = Member(attempt, trajectory(attempt.record, tokenizer, TAG), Score(1.0))
    line = scored_data_group(Group(0, Task("task", "?", "42"), (member,), (attempt,)))
    return plain(line), {attempt.plan.rollout_id: plain(attempt_line(member))}


def look_at_text(group: dict[str, Any], rollouts: Rollouts, tokenizer: HubTokenizer | None) -> Findings:
    findings = Findings(Wanted(size=1), tokenizer=lambda: tokenizer)
    check_group(group, "line 1", findings, None if rollouts is None else written(rollouts))
    return findings


def train(start: int, ids: list[int]) -> Callable[[dict[str, Any]], None]:
    return lambda group: group["masks"][0].__setitem__(slice(start, start + len(ids)), ids)


def places(tokenizer: HubTokenizer, group: dict[str, Any], text: str) -> list[int]:
    """Where the ids of `text` begin."""
    ids, line = tokenizer.encode(text), group["tokens"][0]
    return [i for i in range(len(line)) if line[i : i + len(ids)] == ids]


def test_a_line_made_from_text_passes_with_its_tokenizer_and_without(tokenizer: HubTokenizer) -> None:
    group, rollouts = a_text_group(tokenizer)
    findings = look_at_text(group, rollouts, tokenizer)
    assert (findings.wrong, findings.unread) == ({}, 0)
    assert findings.checked["sampled ids"] == findings.checked["one line"] == 1
    findings = look_at_text(group, rollouts, None)
    assert (findings.wrong, findings.unread) == ({}, 1)
    assert findings.checked["sampled ids"] == 1


def test_what_nobody_sampled_is_not_to_be_trained(tokenizer: HubTokenizer) -> None:
    """The same words are there four times: once written by the program, once sampled, once printed by code."""
    group, rollouts = a_text_group(tokenizer)
    ids = tokenizer.encode("forty-two")
    example, sampled_one, printed = places(tokenizer, group, "forty-two")
    assert group["masks"][0][sampled_one] == ids[0]
    for place in (example, printed):
        spoiled = copy.deepcopy(group)
        train(place, ids)(spoiled)
        assert "sampled ids" in look_at_text(spoiled, rollouts, tokenizer).wrong
        assert "sampled ids" in look_at_text(spoiled, rollouts, None).wrong
        train(sampled_one, [-100] * len(ids))(spoiled)  # as many as there should be, elsewhere
        assert "one line" in look_at_text(spoiled, rollouts, tokenizer).wrong


def test_a_span_that_is_too_long_too_short_or_of_other_ids_is_found(tokenizer: HubTokenizer) -> None:
    group, rollouts = a_text_group(tokenizer)
    ids = tokenizer.encode("forty-two")
    place = places(tokenizer, group, "forty-two")[1]
    tag = group["tokens"][0][place + len(ids)]
    for change in (train(place + len(ids), [tag]), train(place, [-100]), both(place, ids[-1])):
        spoiled = copy.deepcopy(group)
        change(spoiled)
        assert "sampled ids" in look_at_text(spoiled, rollouts, tokenizer).wrong
    spoiled = copy.deepcopy(group)
    spoiled["tokens"][0][0] = ids[0]
    assert set(look_at_text(spoiled, rollouts, tokenizer).wrong) == {"one line"}


def test_a_control_token_in_the_place_of_its_name_is_found(tokenizer: HubTokenizer) -> None:
    """What was sampled names a control token. One in its place decodes to the same text."""
    group, rollouts = a_text_group(tokenizer)
    spelled = content_ids(tokenizer, "one <|im_end|> two")
    line, mask, place = group["tokens"][0], group["masks"][0], places(tokenizer, group, "one")[-1]
    assert line[place : place + len(spelled)] == spelled
    ids = tokenizer.encode("one <|im_end|> two")
    line[place : place + len(spelled)] = mask[place : place + len(spelled)] = ids
    assert tokenizer.decode(ids) == tokenizer.decode(spelled)
    assert "sampled ids" in look_at_text(group, rollouts, tokenizer).wrong


def test_ids_beyond_the_tokenizer_are_right_where_they_were_sampled(tokenizer: HubTokenizer) -> None:
    beyond = (tokenizer.size + 3, tokenizer.size + 9)
    text, visible, _ = visible_text(tokenizer, beyond, ())
    completion = Completion(text, visible, "stop", beyond, (-1.0, -2.0), 3, 2)
    turn = Turn(1, CompletionKind.ACTION, 0, TALK, 0, (1, 2, 3), "", completion, 0, 1)
    attempt = replace(an_attempt(), record=Record(0.0, turns=(turn,), answer="42"))
    member = Member(attempt, trajectory(attempt.record, tokenizer, TAG), Score(1.0))
    line = plain(attempt_line(member))
    group = plain(scored_data_group(Group(0, Task("task", "?", "42"), (member,), (attempt,))))
    assert look_at_text(group, {attempt.plan.rollout_id: line}, tokenizer).wrong == {}
    assert group["masks"][0] == [-100, -100, -100, *beyond]
    again = restored(read_attempt(json.dumps(line).encode()), attempt.plan, tokenizer)
    assert isinstance(again, Member)
    assert again.trajectory == member.trajectory
    assert TokenTable(tokenizer).member(group, 0) is not None


def test_a_run_is_verified_with_the_tokenizer_it_names(
    tokenizer: HubTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group, rollouts = a_text_group(tokenizer)
    env = {"group_size": 1, "group_policy": "backfill", "untrained_outcomes": [], "train_mixed_versions": True}
    told = {"config": {"env": env}, "groups_file": "groups.jsonl", "tokenizer": str(tokenizer_folder())}
    (tmp_path / "run.json").write_text(json.dumps(told))
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rollouts.values()))
    (tmp_path / "groups.jsonl").write_text(json.dumps(group) + "\n")
    assert verify.run(tmp_path) == 0
    assert "made from text, and" not in capsys.readouterr().out
    both(places(tokenizer, group, "forty-two")[1], tokenizer.encode("x")[0])(group)
    (tmp_path / "groups.jsonl").write_text(json.dumps(group) + "\n")
    assert verify.run(tmp_path) == 1
    assert "what is trained is not the text sampled" in capsys.readouterr().out
    (tmp_path / "run.json").write_text(json.dumps(told | {"tokenizer": "no/such-tokenizer"}))
    assert verify.run(tmp_path) == 0
    assert "1 rollouts have ids made from text" in capsys.readouterr().out


def test_an_evaluation_has_no_groups_to_check(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"command": "evaluate", "config": {"env": {}}}))
    with pytest.raises(ConfigError, match="holds an evaluation, which has no groups"):
        verify.run(tmp_path)
