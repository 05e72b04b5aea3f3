"""`orchestrator export --format harbor`: what Harbor 0.26 reads of a job. The fields are those of its models in
`harbor.models`; of a trajectory they refuse any other."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from orchestrator.cli import main
from orchestrator.exporting import atif as module
from orchestrator.exporting.atif import atif
from orchestrator.run.line import RecordedAttempt, read_attempt, recorded_attempt
from orchestrator.run.lines import dumps
from orchestrator.types import Completion, CompletionKind, EndedName, FailedName, Message, Score, Task, Turn
from tests.fakes.recorded_run import write_recorded_run
from tests.fakes.synthetic_run import HOSTILE, Rollouts, write_synthetic_run

TRAJECTORY = {
    "schema_version",
    "session_id",
    "trajectory_id",
    "agent",
    "steps",
    "notes",
    "final_metrics",
    "continued_trajectory_ref",
    "extra",
    "subagent_trajectories",
}
AGENT = {"name", "version", "model_name", "tool_definitions", "extra"}
EVERY_STEP = {"step_id", "timestamp", "source", "message", "observation", "is_copied_context", "extra"}
AGENTS_STEP = {"model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics"}
METRICS = {
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "cost_usd",
    "prompt_token_ids",
    "completion_token_ids",
    "logprobs",
    "extra",
}
RESULT = {"source_call_id", "content", "subagent_trajectory_ref", "extra"}
FINAL = {"total_prompt_tokens", "total_completion_tokens", "total_cached_tokens", "total_cost_usd", "total_steps"}


def demand_atif(trajectory: dict[str, Any]) -> None:
    """What Harbor's models demand of a trajectory."""
    assert set(trajectory) <= TRAJECTORY
    assert trajectory["schema_version"] in {f"ATIF-v1.{n}" for n in range(9)}
    assert set(trajectory["agent"]) <= AGENT
    assert {"name", "version"} <= set(trajectory["agent"])
    assert trajectory["steps"]
    assert [step["step_id"] for step in trajectory["steps"]] == list(range(1, len(trajectory["steps"]) + 1))
    assert set(trajectory.get("final_metrics", {})) <= FINAL
    for step in trajectory["steps"]:
        agents = step["source"] == "agent"
        assert set(step) <= EVERY_STEP | {"llm_call_count"} | (AGENTS_STEP if agents else set())
        assert step["source"] in {"system", "user", "agent"}
        assert isinstance(step["message"], str)
        if "timestamp" in step:
            datetime.fromisoformat(step["timestamp"])
        assert not (agents and step["llm_call_count"] == 0 and {"metrics", "reasoning_content"} & set(step))
        assert set(step.get("metrics", {})) <= METRICS
        called = {call["tool_call_id"] for call in step.get("tool_calls", ())}
        for call in step.get("tool_calls", ()):
            assert set(call) == {"tool_call_id", "function_name", "arguments"}
            assert isinstance(call["arguments"], dict)
        for result in step.get("observation", {}).get("results", ()):
            assert set(result) <= RESULT
            assert result.get("source_call_id") in called | {None}
    inner = trajectory.get("subagent_trajectories", [])
    assert len({one["trajectory_id"] for one in inner}) == len(inner)
    for one in inner:
        demand_atif(one)


def demand_trial(folder: Path) -> dict[str, Any]:
    """What Harbor's models demand of a trial. Gives its result."""
    config, result = read(folder / "config.json"), read(folder / "result.json")
    assert result["config"] == config
    task = config["task"]["path"]
    assert task == result["task_id"]["path"]
    assert not Path(task).is_absolute()
    assert ".." not in Path(task).parts
    UUID(result["id"])
    for name in ("task_name", "trial_name", "trial_uri", "task_checksum"):
        assert isinstance(result[name], str)
    assert {"name", "version"} <= set(result["agent_info"])
    rewarded = result["verifier_result"] is not None
    assert (folder / "verifier" / "reward.json").exists() == rewarded
    if rewarded:
        assert read(folder / "verifier" / "reward.json") == result["verifier_result"]["rewards"]
    if result["exception_info"] is not None:
        assert set(result["exception_info"]) >= {
            "exception_type",
            "exception_message",
            "exception_traceback",
            "occurred_at",
        }
    if (folder / "agent" / "trajectory.json").exists():
        demand_atif(read(folder / "agent" / "trajectory.json"))
    return result


def read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def export(run: Path, output: Path, *flags: str) -> int:
    return main(["export", str(run), "--format", "harbor", "--output", str(output), *flags])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recorded_run(tmp_path_factory.mktemp("recorded") / "run")


@pytest.fixture(scope="module")
def job(recorded: Path) -> Path:
    output = recorded.parent / "jobs"
    assert export(recorded, output) == 0
    return output / "run"


def on_record(run: Path) -> dict[str, RecordedAttempt]:
    texts = (run / "rollouts.jsonl").read_bytes().splitlines()
    return {made.rollout_id: made for text in texts if b'"bad_task"' not in text for made in [read_attempt(text)]}


def test_every_attempt_is_a_trial_with_the_score_as_its_reward(recorded: Path, job: Path) -> None:
    attempts = on_record(recorded)
    assert {folder.name for folder in job.iterdir() if folder.is_dir()} == set(attempts)
    for name, attempt in attempts.items():
        result = demand_trial(job / name)
        rewards = result["verifier_result"] and result["verifier_result"]["rewards"]
        assert (rewards and rewards["reward"]) == (attempt.score and attempt.score.value)
        assert result["agent_result"]["metadata"]["outcome"] == str(attempt.outcome.name)
        begun, ended = (datetime.fromisoformat(result[name]) for name in ("started_at", "finished_at"))
        lasted_s = max([attempt.record.duration_s, *(turn.ended_s for turn in attempt.record.turns)])
        assert (ended - begun).total_seconds() == pytest.approx(lasted_s, abs=1e-5)  # waiting is a part of it
    config, result = read(job / "config.json"), read(job / "result.json")
    assert [task["path"] for task in config["tasks"]] == [f"sum-{n}" for n in range(4)]
    assert (result["n_total_trials"], result["stats"]["n_completed_trials"]) == (16, 16)
    (statistics,) = result["stats"]["evals"].values()
    scores = [attempt.score.value for attempt in attempts.values() if attempt.score]
    assert statistics["n_trials"] == len(scores) == 15
    assert statistics["metrics"][0]["mean"] == pytest.approx(sum(scores) / 15)
    told = read(job.parent / "provenance.json")
    assert told["rows"] == 16
    assert told["left_out"] == {"of a task that could not be rolled out": 1}


def test_a_failure_is_an_exception_and_no_reward(job: Path) -> None:
    result = demand_trial(job / "g000003-r00-a0")
    assert result["verifier_result"] is None
    failure = result["exception_info"]
    assert (failure["exception_type"], failure["exception_message"]) == ("sandbox_lost", "the container is gone")
    assert failure["policy_override"] == {"has_valid_reward": False}
    statistics = read(job / "result.json")["stats"]
    assert statistics["n_errored_trials"] == 1
    (of_agent,) = statistics["evals"].values()
    assert of_agent["exception_stats"] == {"sandbox_lost": ["g000003-r00-a0"]}
    assert "g000003-r00-a0" not in json.dumps(of_agent["reward_stats"])


def test_steps_hold_the_ids_that_were_sent_and_sampled(recorded: Path, job: Path) -> None:
    exact = 0
    for name, attempt in on_record(recorded).items():
        steps = [s for s in read(job / name / "agent" / "trajectory.json")["steps"] if s["source"] == "agent"]
        assert len(steps) == len(attempt.record.turns)
        line: list[int] = []
        for step, turn in zip(steps, attempt.record.turns, strict=True):
            metrics, sampled = step["metrics"], turn.completion
            assert step["message"] == sampled.visible
            if sampled.tokens_T is None or turn.prompt_ids is None or sampled.logprobs_T is None:
                assert not {"prompt_token_ids", "completion_token_ids", "logprobs"} & set(metrics)
                continue
            line += turn.prompt_ids
            assert metrics["prompt_token_ids"] == line
            assert metrics["completion_token_ids"] == list(sampled.tokens_T)
            assert metrics["logprobs"] == list(sampled.logprobs_T)
            line += sampled.tokens_T
            exact += 1
        for step, following in zip(steps, attempt.record.turns[1:], strict=False):
            (result,) = step["observation"]["results"]
            assert result == {"content": following.messages[-1].content, "extra": {"role": "user"}}
    assert exact > 20


def test_changes_and_what_the_grader_printed_are_there(job: Path) -> None:
    folder = job / "g000000-r01-a0"
    text = (folder / "artifacts" / "changes.diff").read_text()
    assert "--- a/etc/hosts\n+++ b/etc/hosts\n@@ -1,2 +1,2 @@\n" in text
    assert "--- /dev/null\n+++ b/workspace/new.txt\n@@ -0,0 +1,1 @@\n+hello\n" in text
    changes = read(folder / "artifacts" / "changes.json")
    assert (changes["count"], changes["left_out"]) == (12, {"pipe": 2, "link": 1})
    entries = read(folder / "artifacts" / "manifest.json")
    assert [entry["destination"] for entry in entries] == ["artifacts/changes.json", "artifacts/changes.diff"]
    assert (folder / "verifier" / "test-stdout.txt").read_text() == "1 failed, 1 passed"
    assert not (folder / "verifier" / "test-stderr.txt").exists()
    report = read(folder / "verifier" / "ctrf.json")["results"]
    assert (report["summary"]["passed"], report["summary"]["failed"], report["summary"]["tests"]) == (1, 1, 2)
    assert report["tests"][1] == {"name": "test_b", "status": "failed", "duration": 0, "message": "assert 1 == 2"}
    assert not (job / "g000000-r00-a0" / "artifacts").exists()


def test_the_reward_is_the_score_where_the_grader_says_another(recorded: Path, job: Path) -> None:
    attempt = on_record(recorded)["g000000-r01-a0"]
    assert attempt.record.grade is not None
    assert attempt.score is not None
    said = demand_trial(job / "g000000-r01-a0")
    assert attempt.record.grade.rewards == {"reward": 0.5} != {"reward": attempt.score.value}
    assert said["verifier_result"]["rewards"] == {"reward": attempt.score.value}
    assert said["agent_result"]["metadata"]["grade"]["rewards"] == {"reward": 0.5}


@pytest.mark.slow
def test_what_is_hostile_stays_within_its_file(tmp_path: Path) -> None:
    write_synthetic_run(tmp_path / "run")
    record = tmp_path / "run" / "rollouts.jsonl"
    lines = [json.loads(text) for text in record.read_bytes().splitlines() if text.endswith(b"}")]
    for number, line in enumerate(lines):
        line["rollout_id"] = f"r{number}"
    record.write_bytes(b"".join(dumps(line) + b"\n" for line in lines))
    assert export(tmp_path / "run", tmp_path / "jobs") == 0
    trials = [folder for folder in (tmp_path / "jobs" / "run").iterdir() if folder.is_dir()]
    results = [demand_trial(folder) for folder in trials]
    assert any(result["agent_result"]["metadata"]["answer"] == HOSTILE for result in results)
    diffs = [(folder / "artifacts" / "changes.diff") for folder in trials]
    heads = [
        line for path in diffs if path.exists() for line in path.read_text().split("\n") if line[:4] == "+++ "
    ]
    assert len(heads) > 1
    assert all(line.isprintable() for line in heads)


@pytest.mark.parametrize("name", ["../out", "a/b", "config.json", "", "x" * 200])
def test_an_id_that_is_no_name_of_a_folder_is_refused(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (run := tmp_path / "run").mkdir()
    (run / "run.json").write_bytes((recorded / "run.json").read_bytes())
    lines = [json.loads(text) for text in (recorded / "rollouts.jsonl").read_bytes().splitlines()[:2]]
    lines[0]["rollout_id"] = name
    (run / "rollouts.jsonl").write_bytes(b"".join(dumps(line) + b"\n" for line in lines))
    assert export(run, tmp_path / "jobs") == 1
    assert "cannot be the name of a folder" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["jobs", "run"]
    assert [path.name for path in (tmp_path / "jobs" / "run").iterdir() if path.is_dir()] == ["g000000-r01-a0"]


@pytest.mark.parametrize("flag", [("--best", "1"), ("--threshold", "1"), ("--margin", "1"), ("--max-tokens", "9")])
def test_nothing_is_chosen_for_harbor(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: tuple[str, str]
) -> None:
    assert export(recorded, tmp_path / "jobs", *flag) == 2
    assert f"{flag[0]}: harbor has all attempts" in capsys.readouterr().err
    assert not (tmp_path / "jobs").exists()


# ---------------------------------------------------------------- one trajectory

BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


def turn(number: int, kept: int, messages: tuple[Message, ...], text: str, **more: Any) -> Turn:
    sampled = Completion(text, text, "stop", (number,), (-0.5,), 3, 1)
    return Turn(number, CompletionKind.ACTION, kept, messages, 0, (7, 8), "", sampled, 0.0, 1.0, **more)


def attempt_of(*turns: Turn, **agent: Any) -> RecordedAttempt:
    made = Rollouts()
    lived = recorded_attempt(made.stuck(Task("t", "Q?", "1"), 0, 0, EndedName.MAX_STEPS))
    return replace(
        lived,
        record=replace(lived.record, turns=turns),
        agent=replace(lived.agent, **agent),
        segment=0,
        score=Score(0.0, {}),
    )


def made_of(attempt: RecordedAttempt) -> dict[str, Any]:
    trajectory = atif(attempt, "0.1.0", "m")
    assert trajectory is not None
    demand_atif(json.loads(dumps(trajectory)))
    return trajectory


def test_calls_of_tools_are_steps_with_their_results() -> None:
    first = turn(1, 0, (Message("system", "s"), Message("user", "Q?")), f"I look.\n{CALL}", tools=(BASH,))
    told = (Message("assistant", f"I look.\n{CALL}"), Message("tool", "a  b"))
    attempt = attempt_of(first, turn(2, 2, told, "two", tools=(BASH,)), call_format="hermes")
    _, _, looked, answered = made_of(attempt)["steps"]
    (call,) = looked["tool_calls"]
    assert (looked["message"], call["function_name"], call["arguments"]) == ("I look.", "bash", {"command": "ls"})
    (result,) = looked["observation"]["results"]
    assert result == {"source_call_id": call["tool_call_id"], "content": "a  b", "extra": {"role": "tool"}}
    assert answered["metrics"]["prompt_token_ids"] == [7, 8, 1, 7, 8]
    assert made_of(attempt)["agent"]["tool_definitions"] == [BASH]


def test_what_the_prompt_has_of_an_assistant_was_not_sampled() -> None:
    example = (Message("user", "1?"), Message("assistant", "1"), Message("user", "Q?"))
    steps = made_of(attempt_of(turn(1, 0, example, "2")))["steps"]
    assert [(step["source"], step.get("llm_call_count")) for step in steps] == [
        ("user", None),
        ("agent", 0),
        ("user", None),
        ("agent", 1),
    ]
    assert steps[1]["is_copied_context"]


def test_other_lines_are_trajectories_of_their_own() -> None:
    side = replace(turn(2, 0, (Message("user", "Plan."),), "A plan."), segment=1)
    trajectory = made_of(attempt_of(turn(1, 0, (Message("user", "Q?"),), "2"), side))
    (other,) = trajectory["subagent_trajectories"]
    assert [step["message"] for step in other["steps"]] == ["Plan.", "A plan."]
    assert other["steps"][-1]["metrics"]["prompt_token_ids"] == [7, 8]
    assert trajectory["final_metrics"]["total_steps"] == 2


def test_prompts_whose_ids_are_too_many_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    first = turn(1, 0, (Message("user", "Q?"),), "a")
    attempt = attempt_of(first, turn(2, 1, (Message("assistant", "a"), Message("user", "o")), "b"))
    monkeypatch.setattr(module, "_MOST_IDS", 7)  # the two prompts have 2 and 5
    assert all("prompt_token_ids" in step["metrics"] for step in made_of(attempt)["steps"] if "metrics" in step)
    monkeypatch.setattr(module, "_MOST_IDS", 6)
    trajectory = made_of(attempt)
    metrics = [step["metrics"] for step in trajectory["steps"] if "metrics" in step]
    assert not any("prompt_token_ids" in one for one in metrics)
    assert [one["completion_token_ids"] for one in metrics] == [(1,), (2,)]
    assert "too many" in trajectory["notes"]


def test_nothing_was_sampled_and_times_that_are_none() -> None:
    made = Rollouts()
    broken = recorded_attempt(made.broken(Task("t", "Q?", "1"), 0, 0, FailedName.LAUNCH_ERROR, "no image"))
    assert atif(replace(broken, record=replace(broken.record, turns=())), "0", None) is None
    attempt = attempt_of(turn(1, 0, (Message("user", "Q?"),), "2"))
    far = replace(attempt, record=replace(attempt.record, started_at=1e15))
    assert not any("timestamp" in step for step in made_of(far)["steps"])
