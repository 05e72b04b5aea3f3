"""What is read back from a run directory is what was written to it."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.completion.base import Tokenizer
from orchestrator.completion.trajectory import trajectory
from orchestrator.errors import ConfigError
from orchestrator.run import lines as jsonl
from orchestrator.run.directory import RunDirectory
from orchestrator.run.earlier import Earlier, read_earlier, repair_groups, restored
from orchestrator.run.excerpts import Counted
from orchestrator.run.groups import GroupsFile
from orchestrator.run.line import attempt_line, read_attempt
from orchestrator.run.output import groups_path_of
from orchestrator.run.tally import Tally
from orchestrator.settings.saved import SavedSettings
from orchestrator.types import (
    Attempt,
    BadTask,
    Completion,
    Ended,
    EndedName,
    Failed,
    FailedName,
    Group,
    Member,
    Outcome,
    RolloutPlan,
    SandboxExit,
    Score,
    Step,
    ToolCall,
    Turn,
)
from tests.fakes.plans import a_plan, a_record, a_turn
from tests.fakes.written import write_run

IDS = Completion("6*7", "6*7", "stop", (5, 6, 7), (-0.1, -1e-7, 0.0), 2, 3, "v1")


class Letters:
    """Ids that decode to what IDS say."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        return "".join({5: "6", 6: "*", 7: "7"}.get(i, "?") for i in ids)

    def said(self, ids: tuple[int, ...], text: str) -> str:
        return text

    def dated(self, at: float) -> Letters:
        return self

    def render(self, messages: object, *, generation_prompt: bool, tools: object = ()) -> str:
        return ""


def full_turn() -> Turn:
    return replace(a_turn(), prompt_ids=(1, 2), completion=replace(IDS, retries=2), closing="</code>", kept=1)


def full_attempt(outcome: Outcome | None = None) -> Attempt:
    record = a_record(
        turns=0,
        tool_calls=(ToolCall(1, "web_search", {"query": "x", "n": [1, None]}, "found", None, 0.5, 1.5),),
        steps=(Step(1, "Thought", "1", "out", "", "", True, 0.25),),
        answer="42 \u2028 \u00e9",
        sandbox_id="box",
        exit=SandboxExit(137, oom_killed=True, reason="killed"),
        launch_s=0.1,
        waiting_s=0.3,
        cpu_s=None,
        notes=("a note",),
    )
    record = replace(record, turns=(full_turn(), replace(a_turn(sequence=2), segment=1)))
    return Attempt(a_plan(3, 1), record, outcome or Ended(EndedName.MAX_STEPS, "12 steps"))


def as_json(result: Member | Attempt) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(jsonl.dumps(attempt_line(result)))
    return line


def back(result: Member | Attempt, plan: RolloutPlan, tokenizer: Tokenizer | None = None) -> Member | Attempt:
    """What a later process of the run reads of it."""
    return restored(read_attempt(jsonl.dumps(attempt_line(result))), plan, tokenizer)


@pytest.mark.parametrize(
    "outcome",
    [
        *(Ended(name, "detail") for name in EndedName),
        *(Failed(name, "reason") for name in FailedName),
    ],
    ids=lambda o: str(o.name),
)
def test_attempt_comes_back_as_it_was(outcome: Outcome) -> None:
    attempt = full_attempt(outcome)
    assert back(attempt, attempt.plan) == attempt


def test_attempt_that_only_lacks_its_score_comes_back_so() -> None:
    ended = Ended(EndedName.MAX_STEPS, "12 steps")
    attempt = replace(full_attempt(Failed(FailedName.CANCELLED, "stopped")), ungraded=ended)
    assert back(attempt, attempt.plan) == attempt


def test_member_comes_back_with_its_tokens_log_probs_messages_and_score() -> None:
    attempt = replace(full_attempt(), record=replace(full_attempt().record, turns=(replace(full_turn(), kept=0),)))
    member = Member(attempt, trajectory(attempt.record, Letters(), "</code>"), Score(0.85, {"correctness": 1.0}))
    again = back(member, attempt.plan, Letters())
    assert again == member
    assert isinstance(again, Member)
    assert again.trajectory.tokens_T == (1, 2, 5, 6, 7)


def test_the_lowest_float_an_endpoint_says_for_a_log_prob_comes_back() -> None:
    lowest = replace(IDS, logprobs_T=(-3.4e38, -1.7e308, 0.0))
    attempt = replace(
        full_attempt(),
        record=replace(full_attempt().record, turns=(full_turn(), replace(full_turn(), completion=lowest))),
    )
    assert back(attempt, attempt.plan) == attempt


def test_seed_on_record_wins_over_the_planned_one() -> None:
    attempt = full_attempt()
    other = replace(attempt.plan, sampling=replace(attempt.plan.sampling, seed=99))
    again = back(attempt, other)
    assert isinstance(again, Attempt)
    assert again.plan.sampling.seed == attempt.plan.sampling.seed


# ---------------------------------------------------------------- a whole run


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    """Group 0 is on disk, group 1 half done, 2 was a bad task."""
    with closing(RunDirectory(tmp_path)) as directory, closing(GroupsFile(tmp_path / "groups.jsonl")) as groups:
        members = tuple(member(0, index) for index in range(2))
        for one in members:
            await directory.record(one)
        await groups.append(Group(0, a_plan().task, members, tuple(m.attempt for m in members)))
        await directory.record(member(1, 0))
        await directory.record_bad_task(BadTask("t", "torn"), 2)
    return tmp_path


def member(group: int, index: int) -> Member:
    plan = replace(a_plan(index), group=group, rollout_id=f"g{group:06d}-r{index:02d}-a0")
    attempt = Attempt(plan, replace(a_record(), turns=(replace(a_turn(), prompt_ids=(1,), completion=IDS),)), DONE)
    return Member(attempt, trajectory(attempt.record, None, "</code>"), Score(index / 2))


DONE = Ended(EndedName.FINISHED)


def earlier(run: Path, counted: Callable[[Any], None] = lambda line: None) -> Earlier:
    return read_earlier(run / "rollouts.jsonl", run / "groups.jsonl", counted)


def test_what_is_done_is_known_and_every_line_counted(run: Path) -> None:
    counted: list[Any] = []
    found = earlier(run, counted.append)
    assert {number: written.scores for number, written in found.written.items()} == {0: (0.0, 0.5)}
    assert found.bad == {2}
    assert list(found.lines) == ["g000001-r00-a0"]
    assert [told.outcome if isinstance(told, Counted) else told.reason for told in counted] == ["finished"] * 3 + [
        "torn"
    ]
    half = member(1, 0).attempt.plan
    assert found.result(half, None) == member(1, 0)
    assert found.result(replace(half, rollout_id="g000001-r01-a0"), None) is None


def test_a_folder_in_the_place_of_a_rollout_under_way_is_left_alone(run: Path) -> None:
    (run / "under-way" / "g000000-r00-a0.jsonl").mkdir(parents=True)
    assert len(earlier(run).lines) == 1


def test_no_groups_file_means_no_group_is_done(run: Path) -> None:
    (run / "groups.jsonl").unlink()
    assert earlier(run).written == {}
    assert len(earlier(run).lines) == 3


def test_last_group_of_several_lines_is_written_anew(run: Path) -> None:
    path = run / "groups.jsonl"
    (line,) = path.read_bytes().splitlines(keepends=True)
    later = line.replace(b"g000000", b"g000001")
    path.write_bytes(line + line + later + later)
    repair_groups(path, several_lines=False)
    assert path.read_bytes() == line + line + later + later
    repair_groups(path, several_lines=True)
    assert path.read_bytes() == line + line
    path.write_bytes(path.read_bytes() + later + later[:20])
    repair_groups(path, several_lines=True)
    assert path.read_bytes() == line + line
    assert Path(f"{path}.torn").read_bytes() == later + later + later[:20] + b"\n" + later


@pytest.mark.parametrize(
    "content",
    [
        b"a note\nanother, not yet ended",
        b'{"schema": 1}\n{"sch',
        b"\0" * 99,
        b'{"tokens": []}\nmore',
        b"{}\n",
        b"\n",
    ],
)
@pytest.mark.parametrize("several_lines", [False, True])
def test_a_file_that_holds_no_groups_is_left_as_it_is(tmp_path: Path, content: bytes, several_lines: bool) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"notes:1 is not a group of this run; name .* or put that file aside"):
        repair_groups(path, several_lines=several_lines)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="is not a file; name"):
            repair_groups(path, several_lines=False)
    with pytest.raises(ConfigError, match="cannot read"):
        repair_groups(tmp_path / ("x" * 300), several_lines=False)


def test_a_file_without_line_ends_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(1 << 26)  # takes no room
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="not a group of this run"):
            repair_groups(path, several_lines=False)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()
    assert path.stat().st_size == 1 << 26


@pytest.mark.parametrize("length", [0, 4, 30, -1])
def test_a_first_group_half_written_is_set_aside(run: Path, length: int) -> None:
    path = run / "groups.jsonl"
    path.write_bytes(path.read_bytes()[:length])
    repair_groups(path, several_lines=False)
    assert path.read_bytes() == b""


@pytest.mark.parametrize("name", [None, 5, "", "groups\0.jsonl"])
def test_a_name_that_is_none_is_refused(run: Path, name: object) -> None:
    (run / "run.json").write_text(json.dumps({"config": {}, "groups_file": name}))
    with pytest.raises(ConfigError, match="names no groups file"):
        groups_path_of(run)


@pytest.mark.parametrize("text", ["null", "[]", "{}", "{", '{"schema": 1, "rollout_id": 5}', '{"schema": 999}'])
def test_line_that_is_none_of_ours_is_refused_with_its_place(run: Path, text: str) -> None:
    with (run / "rollouts.jsonl").open("a") as file:
        file.write(text + "\n")
    with pytest.raises(ConfigError, match=r"rollouts\.jsonl:5"):
        earlier(run)


@pytest.mark.parametrize("name", ["rollouts.jsonl", "groups.jsonl"])
def test_what_is_there_twice_is_refused_with_its_place(run: Path, name: str) -> None:
    """Two files put together, or two orchestrators on a file system without locks."""
    path = run / name
    text = path.read_bytes()
    path.write_bytes(text + text.replace(b"g000000", b"g000009") + text)
    with pytest.raises(ConfigError, match=rf"{name}:\d+: (g000000-r00-a0|g000001-r00-a0|group 0) is there twice"):
        earlier(run)


def test_line_with_missing_parts_is_refused_when_it_is_needed(run: Path) -> None:
    line = as_json(member(1, 0))
    del line["completions"][0]["token_ids"]
    found = Earlier(lines={line["rollout_id"]: json.dumps(line).encode()})
    with pytest.raises(ConfigError, match="cannot be read back"):
        found.result(member(1, 0).attempt.plan, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_tokens", None),
        ("completion_tokens", 1.5),
        ("visible", None),
        ("retries", "x"),
        ("logprobs", [None, None, None]),
        ("messages", [{"role": "user", "content": 5}]),
    ],
)
def test_a_completion_with_another_type_in_it_is_refused_by_its_field(name: str, value: object) -> None:
    line = as_json(member(1, 0))
    line["completions"][0][name] = value
    found = Earlier(lines={line["rollout_id"]: json.dumps(line).encode()})
    with pytest.raises(
        ConfigError, match=rf"g000001-r00-a0 cannot be read back, no resume: completions\.0\.{name}"
    ):
        found.result(member(1, 0).attempt.plan, None)


@pytest.mark.parametrize(("name", "value"), [("duration_s", None), ("score_parts", True), ("score", "good")])
def test_a_line_that_cannot_be_counted_is_refused_with_its_place(run: Path, name: str, value: object) -> None:
    line = as_json(member(4, 0)) | {name: value}
    with (run / "rollouts.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match=r"rollouts\.jsonl:5 is not a rollout"):
        earlier(run, Tally().earlier_attempt)


def test_another_task_in_the_same_place_is_refused(run: Path) -> None:
    plan = member(1, 0).attempt.plan
    with pytest.raises(ConfigError, match="the dataset has changed"):
        earlier(run).result(replace(plan, task=replace(plan.task, task_id="other")), None)


# ---------------------------------------------------------------- settings


def test_saved_settings_must_describe_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run in"):
        SavedSettings.read(tmp_path)
    for text, complaint in (
        ("{", "not valid JSON"),
        ("[]", "does not describe a run"),
        (f'{{"config": {{}}, "proof": "00", "notes": {"[" * 300 + "]" * 300}}}', "nested too deep"),
        ('{"config": {"env": {}, "openai": []}}', "names no server"),
        ('{"config": {"env": {"new_in_2030": 1}, "openai": [{}]}}', "another version"),
        ('{"config": {"env": {"group_size": -1}, "openai": [{}]}}', "group_size"),
    ):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(ConfigError, match=complaint):
            SavedSettings.read(tmp_path)


def test_every_setting_goes_through_run_json_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.settings.sources import load_config

    config = load_config(
        env={"untrained_outcomes": ["timeout"], "sandbox_memory": "2GiB", "data_path_to_save_groups": "out.jsonl"},
        openai={"base_url": "http://localhost:1/v1", "api_key": "sk-canary-5", "model_name": "m"},
        environ={},
        cwd=tmp_path,
    )
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    write_run(tmp_path, facts={"config": config.public(), "seed": 5})
    assert "canary" not in (tmp_path / "run.json").read_text()
    again = load_config(env={"resume": tmp_path}, environ={"OPENAI_API_KEY": "sk-other"}, cwd=tmp_path)
    assert replace(again.env, seed=None, resume=None) == config.env
    assert again.env.seed == 5
    assert again.openai[0].base_url == "http://localhost:1/v1"
    assert again.openai[0].key() == "sk-other"
