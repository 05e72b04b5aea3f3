"""Each way a rollout can end has one name."""

from __future__ import annotations

import pytest

from orchestrator.errors import DockerError, LaunchError, SandboxLostError
from orchestrator.outcome import ClockExpired, DeadlineExpired, Ending, Refused, Submission, decide
from orchestrator.types import Ended, Failed, Record, SandboxExit
from tests.fakes.plans import a_record

KILLED = SandboxExit(137, oom_killed=True)


@pytest.mark.parametrize(
    ("ending", "name"),
    [
        (Submission("final_answer", b"42", ""), "finished"),
        (Submission("final_answer", None, ""), "no_answer"),
        (Submission("final_answer", b"\xed\xa0\x80", ""), "invalid_answer"),
        (Submission("final_answer", b"x" * (64 * 1024 + 1), ""), "invalid_answer"),
        (Submission("final_answer", b"x" * (64 * 1024), ""), "finished"),
        (Submission("max_steps", None, ""), "max_steps"),
        (Submission("no_answer", None, ""), "no_answer"),
        (Submission("out_of_memory", None, ""), "out_of_memory"),
        (Submission("crashed", None, "boom"), "sandbox_crashed"),
        (Refused("budget", "3 completions"), "budget"),
        (Refused("context_length", ""), "context_length"),
        (Refused("llm_error", "HTTP 500"), "llm_error"),
        (Refused("bad_task", "file gone"), "bad_task"),
        (ClockExpired(), "timeout"),
        (SandboxExit(0, oom_killed=False), "sandbox_crashed"),
        (SandboxExit(0, oom_killed=True), "sandbox_crashed"),
        (SandboxExit(137, oom_killed=False), "sandbox_crashed"),
        (KILLED, "out_of_memory"),
        (SandboxLostError("gone"), "sandbox_lost"),
        (DockerError("no answer"), "docker_error"),
        (LaunchError("no start"), "launch_error"),
    ],
)
def test_every_ending_has_one_name(ending: Ending, name: str) -> None:
    outcome, _ = decide(ending, a_record(turns=2))
    assert outcome.name == name


@pytest.mark.parametrize(
    "ending",
    [
        Submission("final_answer", b"42", ""),
        Submission("max_steps", None, ""),
        Submission("crashed", None, ""),
        SandboxExit(1, oom_killed=False),
        KILLED,
        ClockExpired(),
    ],
)
def test_nothing_is_scored_without_a_sampled_token(ending: Ending) -> None:
    outcome, answer = decide(ending, a_record(turns=0))
    assert isinstance(outcome, Failed)
    assert outcome.name == "sandbox_lost"
    assert answer is None


def test_a_task_that_does_not_fit_is_the_data_s_fault() -> None:
    outcome, _ = decide(Refused("context_length", "9000 tokens"), a_record(turns=0))
    assert outcome == Failed(outcome.name, "the task does not fit: 9000 tokens")
    assert outcome.name == "bad_task"


def test_the_deadline_blames_whoever_took_the_time() -> None:
    record: Record = a_record(duration_s=100.0, waiting_s=90.0)
    assert decide(DeadlineExpired(sampling_s=60.0), record)[0].name == "llm_error"
    assert decide(DeadlineExpired(sampling_s=40.0), record)[0].name == "timeout"  # the rest went into tools


def test_only_an_accepted_answer_is_passed_on() -> None:
    assert decide(Submission("final_answer", "größer".encode(), ""), a_record())[1] == "größer"
    assert decide(Submission("max_steps", b"42", ""), a_record())[1] is None
    assert isinstance(decide(Submission("max_steps", b"42", ""), a_record())[0], Ended)
