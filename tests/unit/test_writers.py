"""The groups file: strict JSON, one group a line, in the shape that Atropos' trainers and tools read."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ConfigError
from orchestrator.run import lines as jsonl
from orchestrator.run.groups import GroupFormat, GroupsFile, check_writable, fresh_path, scored_data_group
from orchestrator.types import Ended, EndedName, Group, Member, Message, Task, Trajectory
from tests.fakes.plans import a_member

TASK = Task("task", "What is 6 times 7?", "42")
# Atropos' ScoredDataGroup, and what its own writer adds to each line.
FIELDS = {
    "tokens", "masks", "scores", "inference_logprobs", "messages", "advantages", "ref_logprobs",
    "generation_params", "overrides", "group_overrides",
}  # fmt: skip
FACTS = {
    "rollout_id", "task_id", "outcome", "answer", "score_parts", "steps", "token_source", "duration_s",
    "waiting_s", "tool_calls", "prompt_tokens", "completion_tokens", "policy_version", "node",
}  # fmt: skip


def group(*members: Member) -> Group:
    return Group(0, TASK, members, tuple(m.attempt for m in members))


def written(path: Path, *groups: Group, form: GroupFormat | None = None) -> list[dict[str, Any]]:
    async def write() -> None:
        with closing(GroupsFile(path, form=form)) as file:
            for one in groups:
                await file.append(one)

    asyncio.run(write())
    text = path.read_bytes()
    assert text.endswith(b"\n") or not text
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def test_a_line_holds_what_the_docs_name(tmp_path: Path) -> None:
    (line,) = written(tmp_path / "g.jsonl", group(a_member(0), a_member(1, score=0.25)))
    assert set(line) >= FIELDS
    assert line["tokens"] == [[1, 2, 3], [1, 2, 3]]
    assert line["masks"] == [[-100, 2, 3], [-100, 2, 3]]
    assert line["inference_logprobs"] == [[1.0, -0.5, -0.1], [1.0, -0.5, -0.1]]
    assert line["scores"] == [1.0, 0.25]
    assert line["messages"][0][0] == {"role": "system", "content": "You are an agent."}
    assert line["group_overrides"] == {"group_size": 2}
    assert line["generation_params"] == {"temperature": 1.0, "top_p": 1.0, "max_tokens": 100, "n": 1}
    for facts in line["overrides"]:
        assert set(facts) >= FACTS
    assert [facts["rollout_id"] for facts in line["overrides"]] == ["g000000-r00-a0", "g000000-r01-a0"]


def test_messages_can_be_left_out(tmp_path: Path) -> None:
    (line,) = written(tmp_path / "g.jsonl", group(a_member()), form=GroupFormat(include_messages=False))
    assert line["messages"] is None


def test_one_member_without_log_probs_leaves_the_group_without() -> None:
    bare = a_member()
    bare = replace(bare, trajectory=replace(bare.trajectory, logprobs_T=None))
    assert scored_data_group(group(a_member(1), bare))["inference_logprobs"] is None


def test_outcomes_not_to_be_trained_on_are_masked_and_keep_their_score() -> None:
    late = a_member(1, score=0.0)
    late = replace(late, attempt=replace(late.attempt, outcome=Ended(EndedName.TIMEOUT)))
    line = scored_data_group(group(a_member(), late), GroupFormat(untrained=frozenset({EndedName.TIMEOUT})))
    assert line["masks"] == [[-100, 2, 3], [-100, -100, -100]]
    assert line["scores"] == [1.0, 0.0]


async def test_each_line_is_on_disk_when_it_is_appended(tmp_path: Path) -> None:
    file = GroupsFile(tmp_path / "g.jsonl")
    for number in range(1, 4):
        await file.append(group(a_member()))
        assert (tmp_path / "g.jsonl").read_bytes().count(b"\n") == number
    file.close()
    file.close()


def test_texts_of_any_kind_are_one_line_of_strict_json(tmp_path: Path) -> None:
    odd = "ä\u2028b\u2029c\u0085d\x00e\r\nf\ud800g🙂"
    line = Trajectory((1,), (True,), (-0.5,), (Message("system", odd),), "sampled")
    (read,) = written(tmp_path / "g.jsonl", group(replace(a_member(), trajectory=line)))
    # A lone surrogate is no text.
    assert read["messages"][0][0]["content"] == odd.replace("\ud800", "\ufffd")
    assert len((tmp_path / "g.jsonl").read_text("utf-8").splitlines()) == 1


@pytest.mark.parametrize("text", ["", "plain", "\u2028" * 3, "…\u0105\u2026\u2027\u202a"])
def test_json_is_what_it_was(text: str) -> None:
    assert json.loads(jsonl.dumps({"text": text, text: 1})) == {"text": text, text: 1}


def test_a_taken_name_gets_a_number_and_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"
    assert fresh_path(path) == path
    path.write_text("kept")
    assert fresh_path(path) == path.with_name("out_1.jsonl")
    assert fresh_path(path) == path.with_name("out_2.jsonl")
    assert path.read_text() == "kept"


def test_where_nothing_can_be_written_is_told_before_anything_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_writable(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    with pytest.raises(ConfigError, match="is a file"):
        check_writable(tmp_path / "file" / "b")
    with pytest.raises(ConfigError, match="cannot make"):
        fresh_path(tmp_path / "file" / "out.jsonl")
