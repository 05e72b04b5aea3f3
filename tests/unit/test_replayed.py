"""A run read back to be played again: its plans, what it may decide, and what is said to differ."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from orchestrator.cli import main
from orchestrator.commands import replay
from orchestrator.errors import ConfigError, ToolError
from orchestrator.rules.redact import Secret
from orchestrator.run.line import RecordedAttempt, attempt_line, read_attempt
from orchestrator.run.prompts import Prompts
from orchestrator.run.replay import Replayable, differences, digest, plan_of
from orchestrator.settings.config import Config
from orchestrator.settings.row import Entry
from orchestrator.settings.sources import resolve
from orchestrator.tools.recorded import RecordedCalls, RecordedTool
from orchestrator.types import (
    Ended,
    EndedName,
    Failed,
    FailedName,
    ManagedAgent,
    Member,
    Message,
    RolloutPlan,
    Score,
    ToolCall,
)
from tests.fakes.plans import TALK, a_member, a_turn, an_attempt
from tests.fakes.written import write_run


def a_line(member: Member | None = None) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(json.dumps(attempt_line(member or a_member())))
    return line


@pytest.mark.parametrize("sandboxes", [0, 2])
async def test_a_replay_begins_without_a_node_and_takes_what_room_there_is(sandboxes: int) -> None:
    class Nodes:
        """Hosts and executor. Nodes join once a rollout has waited for one."""

        capacity, running, most = sandboxes, 0, 0

        async def execute(self, plan: RolloutPlan) -> tuple[Member]:
            self.running += 1
            await asyncio.sleep(0.001)
            self.capacity = 5
            self.most = max(self.most, self.running)
            self.running -= 1
            return (a_member(index=plan.index),)

    members, counts, nodes = [a_member(index=index) for index in range(40)], Counter[str](), Nodes()
    task = members[0].attempt.plan.task
    attempts = iter([recorded(member) for member in members])
    await replay.play(attempts, {task.task_id: task}, nodes, nodes, Config(), counts, Prompts())  # type: ignore[arg-type]
    assert counts.total() == 40
    assert nodes.most == 5


def recorded(member: Member) -> RecordedAttempt:
    return read_attempt(json.dumps(a_line(member)).encode())


def said(member: Member, observation: str) -> Member:
    """The member with a second turn, to which this was said."""
    more = (Message("assistant", "Thought"), Message("user", f"Observation: {observation}"))
    turns = (a_turn(), replace(a_turn(sequence=2), kept=len(TALK), messages=more))
    return replace(member, attempt=replace(member.attempt, record=replace(member.attempt.record, turns=turns)))


def test_a_plan_is_read_back_as_it_was() -> None:
    member = a_member(index=3)
    plan = member.attempt.plan
    assert plan_of(recorded(member), plan.task, plan.sandbox) == plan
    helper = ManagedAgent("helper", "Helps.", ("web_search",), 3, "tool_calling")
    managed = replace(plan, agent=replace(plan.agent, managed_agents=(helper, ManagedAgent("b", "B."))))
    then = recorded(replace(member, attempt=replace(member.attempt, plan=managed)))
    assert plan_of(then, plan.task, plan.sandbox) == managed


def refused(tmp_path: Path, line: dict[str, Any], reason: str) -> None:
    """Before anything is played."""
    file = tmp_path / "rollouts.jsonl"
    file.write_text(json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match=f"rollout g000000-r00-a0 cannot be read back: {reason}"):
        Replayable.read(file)


@pytest.mark.parametrize(
    "plan", [None, {}, {"sampling": {}}, {"agent": {"x": 1}, "sampling": {"y": 1}, "limits": {}}]
)
def test_a_line_of_another_make_is_refused(plan: Any, tmp_path: Path) -> None:
    refused(tmp_path, {**a_line(), "plan": plan}, "plan")


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("limits", "rollout_timeout_s", "x"),
        ("limits", "rollout_timeout_s", 1e300),
        ("limits", "rollout_timeout_s", -1.0),
        ("limits", "deadline_s", None),
        ("limits", "completions", 1.5),
        ("limits", "proxy_bytes", -1),
        ("sampling", "temperature", True),
        ("sampling", "seed", 10**15),
        ("sampling", "seed", 10**30),
        ("agent", "max_steps", 1 << 40),
        ("agent", "code_tags", ["<code>"]),
        ("agent", "kind", []),
        ("agent", "authorized_imports", [None]),
    ],
)
def test_an_edited_plan_is_refused_by_its_field(part: str, name: str, value: object, tmp_path: Path) -> None:
    line = a_line()
    line["plan"][part][name] = value
    refused(tmp_path, line, rf"plan\.{part}\.{name}")


def test_a_number_that_is_none_makes_a_line_no_json(tmp_path: Path) -> None:
    line = a_line()
    line["plan"]["limits"]["rollout_timeout_s"] = float("nan")
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match="1 other lines"):
        Replayable.read(tmp_path / "rollouts.jsonl")


@pytest.mark.parametrize("helper", [None, {"name": 5, "description": "d", "tools": None}])
def test_an_edited_managed_agent_is_refused(helper: object, tmp_path: Path) -> None:
    line = a_line()
    line["plan"]["agent"]["managed_agents"] = [helper]
    refused(tmp_path, line, r"plan\.agent\.managed_agents\.0")


@pytest.mark.parametrize("parts", [True, [1], "x", 5])
def test_parts_of_a_score_that_are_none_are_refused_before_the_rollout_is_played(
    parts: object, tmp_path: Path
) -> None:
    refused(tmp_path, {**a_line(), "score_parts": parts}, "score_parts")


def test_equal_rollouts_differ_in_nothing_and_times_do_not_count() -> None:
    member = said(a_member(), "1")
    later = replace(member.attempt.record, duration_s=99.0, started_at=9.0)
    assert differences(recorded(member), replace(member, attempt=replace(member.attempt, record=later))) == []


def test_what_differs_is_named_with_both_sides() -> None:
    member = said(a_member(score=1.0), "x" * 100 + "1 left")
    other = said(a_member(score=0.0), "x" * 100 + "2 left")
    changed = replace(other.attempt, outcome=Ended(EndedName.TIMEOUT))
    found = differences(recorded(member), replace(other, attempt=changed, score=Score(0.0, {"correctness": 0.0})))
    assert found[0] == "outcome 'finished' then, 'timeout' now"
    assert "score 1.0 then, 0.0 now" in found
    assert "correctness 1.0 then, 0.0 now" in found
    assert found[-1].startswith("prompt 2: message 4 (user) has 'xxx")
    assert "1 left' then" in found[-1]
    assert "2 left' now" in found[-1]


def test_fewer_completions_and_other_ids_are_told() -> None:
    member = said(a_member(), "1")
    short = replace(member.attempt, record=replace(member.attempt.record, turns=member.attempt.record.turns[:1]))
    assert differences(recorded(member), replace(member, attempt=short)) == ["2 completions then, 1 now"]
    ids = replace(member.attempt.record.turns[0], prompt_ids=(1, 2))
    others = replace(ids, prompt_ids=(1, 3))
    before, after = (
        replace(member, attempt=replace(member.attempt, record=replace(member.attempt.record, turns=(turn,))))
        for turn in (ids, others)
    )
    assert differences(recorded(before), after) == ["prompt 1: the same text, but other ids: another tokenizer?"]


def test_scored_rollouts_are_found_and_one_can_be_chosen(tmp_path: Path) -> None:
    broken = an_attempt(Failed(FailedName.LLM_ERROR, "HTTP 500"), 1)
    write_run(tmp_path / "run", a_member(0), broken, a_member(2))
    file = tmp_path / "run" / "rollouts.jsonl"
    found = Replayable.read(file)
    assert list(found.places) == ["g000000-r00-a0", "g000000-r02-a0"]
    assert [then.rollout_id for then in found.attempts()] == list(found.places)
    assert not found.web_tools
    assert list(Replayable.read(file, "g000000-r02-a0").places) == ["g000000-r02-a0"]
    for wanted in ("g000000-r01-a0", "nonsense"):
        with pytest.raises(ConfigError, match=f"no scored rollout {wanted}"):
            Replayable.read(file, wanted)


class Searching:
    """A tool as agents see it; nobody may call it."""

    description = "Searches."
    inputs: ClassVar = {"query": {"type": "string", "description": "what for"}}
    output_type = "string"

    async def call(self, arguments: Any) -> str:
        raise AssertionError("somebody was asked")


async def test_recorded_tools_answer_as_then_and_ask_nobody() -> None:
    query = {"query": "größer"}
    made = [
        ToolCall(1, "web_search", query, "first", None, 0.0, 1.0),
        ToolCall(2, "web_search", query, "second", None, 1.0, 2.0),
        ToolCall(3, "web_search", {"query": "x"}, None, "overloaded", 2.0, 3.0),
    ]
    calls = RecordedCalls([(digest(c.name, c.arguments), n) for n, c in enumerate(made)], made.__getitem__)
    tool = RecordedTool("web_search", Searching(), calls)
    assert [await tool.call(query) for _ in range(3)] == ["first", "second", "second"]
    for arguments, text in (({"query": "x"}, "overloaded"), ({"query": "y"}, "not in the recording")):
        with pytest.raises(ToolError, match=text):
            await tool.call(arguments)
    assert (tool.description, tool.output_type) == ("Searches.", "string")


async def test_a_call_that_is_not_the_recorded_one_any_more_is_no_answer() -> None:
    asked = {"query": "x"}
    other = ToolCall(1, "web_search", {"query": "y"}, "of another call", None, 0.0, 1.0)
    calls = RecordedCalls([(digest("web_search", asked), 0)], lambda _: other)
    with pytest.raises(ToolError, match="not what it was"):
        await calls.answer("web_search", asked)


def test_a_rollout_in_another_s_place_is_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    recorded = Replayable.read(run / "rollouts.jsonl")
    record = run / "rollouts.jsonl"
    record.write_text(record.read_text().replace("g000000-r00-a0", "g000009-r00-a0"))
    with pytest.raises(ConfigError, match="g000000-r00-a0 cannot be read back: the file is not what it was"):
        list(recorded.attempts())


def test_equal_calls_are_known_again_whatever_their_arguments_hold() -> None:
    as_recorded = digest("f", {"q": "\ufffd", "n": 10**30})
    assert digest("f", {"q": "\ufffd", "n": 10**30}) == as_recorded
    assert digest("f", {"q": "\ud800"}) == digest("f", {"q": "\ufffd"}), "so it is written"
    assert digest("f", {"q": "x"}) != digest("g", {"q": "x"}) != digest("g", {"q": "y"})


def a_run(directory: Path, **env: Any) -> Path:
    servers = [{"base_url": "http://evil.example/v1", "model_name": "theirs"}]
    facts = {"config": {"env": {"dataset": "jsonl:t.jsonl", **env}, "openai": servers}, "seed": 5}
    return write_run(directory, a_member(), facts=facts)


def test_a_recording_decides_nothing_about_confinement_code_and_services(tmp_path: Path) -> None:
    run = a_run(
        tmp_path / "run",
        launcher="process",
        waive_hardening=["seccomp"],
        sandbox_image="evil",
        tavily_base_url="http://evil.example",
        sandbox_memory=1 << 29,
    )
    config = resolve({}, environ={}, cwd=tmp_path, run=run)
    assert (config.env.launcher, config.env.waive_hardening) == ("auto", ())
    assert "evil" not in config.env.sandbox_image + config.env.tavily_base_url
    assert config.env.dataset == "jsonl:t.jsonl"
    assert (config.env.seed, config.env.sandbox_memory) == (5, 1 << 29)
    assert (config.openai[0].base_url, config.openai[0].model_name) == ("", "theirs")
    given = {"env.sandbox_memory": Entry(1 << 30, "--env.sandbox_memory")}
    assert resolve(given, environ={}, cwd=tmp_path, run=run).env.sandbox_memory == 1 << 30


@pytest.mark.parametrize(
    "env",
    [
        {"dataset": "python:os:listdir"},
        {"scoring_strategy": "python:os:system"},
        {"scoring_strategy": "judge"},
        {"agent": "program:/bin/sh"},
        {"prompt_templates": Path("/etc/passwd")},
    ],
)
def test_code_and_judges_a_recording_names_must_be_named_again(env: dict[str, Any], tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", **{k: str(v) for k, v in env.items()})
    ((name, value),) = env.items()
    with pytest.raises(ConfigError, match=f"give --env.{name} yourself"):
        resolve({}, environ={}, cwd=tmp_path, run=run)
    given = {f"env.{name}": Entry(value, f"--env.{name}")}
    assert getattr(resolve(given, environ={}, cwd=tmp_path, run=run).env, name) == value


@pytest.mark.parametrize("name", ["run.json", "rollouts.jsonl"])
@pytest.mark.parametrize("content", [None, b"", b"\xff\0", b"[1]\n", b'{"config": 7}\n'])
def test_damaged_runs_are_refused_in_one_line(
    name: str, content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "run")
    (run / name).unlink()
    if content is not None:
        (run / name).write_bytes(content)
    assert main(["replay", str(run)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_key_is_never_taken_from_a_recording(tmp_path: Path) -> None:
    config = resolve({}, environ={}, cwd=tmp_path, run=a_run(tmp_path / "run"))
    assert config.openai[0].api_key == Secret()
    assert config.tavily_api_key == Secret()


def test_the_report_counts_prompts_turn_by_turn_and_shows_what_differs() -> None:
    prompts, member = Prompts(), a_member()
    pairs = (("1", "1"), ("took 1 ms", "took 2 ms"), ("41 in 0.18s", "42 in 0.19s"))
    for then, now in pairs:
        prompts.compare(recorded(said(member, then)), said(member, now).attempt.record)
    prompts.compare(recorded(said(member, "1")), member.attempt.record)  # it had one turn only
    head, first, second, total, *rest = prompts.table
    assert head.split() == ["turn", "prompts", "identical", "harmless", "state", "not", "reached"]
    assert first.split() == ["1", "4", "4", "100.0%", "0", "0.0%", "0", "0.0%", "0", "0.0%"]
    assert second.split() == ["2", "4", *["1", "25.0%"] * 4]
    assert total.split() == ["all", "8", "5", "62.5%", *["1", "12.5%"] * 3]
    assert rest[0] == "harmless: prompts by what differs: duration 1"
    assert rest[1] == "harmless: 1 rollout, for example"
    assert rest[2].endswith("message 4 (user) has 'Observation: took 1 ms' then, 'Observation: took 2 ms' now")
    assert rest[4].endswith("has 'Observation: 41 in <duration>' then, 'Observation: 42 in <duration>' now")
