"""Each way a rollout can end has one name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.errors import DockerError, LaunchError, SandboxLostError
from orchestrator.rules.control import ControlAnswer
from orchestrator.rules.outcome import (
    MAX_LINES,
    ClockExpired,
    DeadlineExpired,
    Ending,
    Refused,
    Submission,
    decide,
)
from orchestrator.types import Ended, Failed, FailedName, Record, SandboxExit
from tests.fakes.plans import a_record, a_turn

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
        (Submission("no_answer", None, "", control=ControlAnswer("Hello.")), "no_answer"),
        (Submission("no_answer", None, "", control=ControlAnswer(failure=OSError("away"))), "llm_error"),
        (Submission("crashed", None, "boom"), "sandbox_crashed"),
        (Submission("bad_task", None, "its place is a file now"), "sandbox_crashed"),
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


@pytest.mark.parametrize("program", [False, True])
def test_a_place_that_a_task_cannot_have_is_the_data_s_fault(program: bool) -> None:
    outcome, _ = decide(Submission("bad_task", None, "/a: Not a directory"), a_record(turns=0), program=program)
    assert outcome == Failed(FailedName.BAD_TASK, "/a: Not a directory")


def test_the_deadline_blames_whoever_took_the_time() -> None:
    record: Record = a_record(duration_s=100.0, waiting_s=90.0)
    assert decide(DeadlineExpired(sampling_s=60.0), record)[0].name == "llm_error"
    assert decide(DeadlineExpired(sampling_s=40.0), record)[0].name == "timeout"  # the rest went into tools
    assert decide(DeadlineExpired(sampling_s=50.0), record)[0].name == "timeout"  # half of it is not most of it


def test_only_an_accepted_answer_is_passed_on() -> None:
    assert decide(Submission("final_answer", "größer".encode(), ""), a_record())[1] == "größer"
    assert decide(Submission("max_steps", b"42", ""), a_record())[1] is None
    assert isinstance(decide(Submission("max_steps", b"42", ""), a_record())[0], Ended)


SAID = "the program ended with exit code 1: ZeroDivisionError\nTraceback\n  1 / 0"


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        (Submission("no_answer", None, SAID), f"no completion: {SAID}"),
        (Submission("final_answer", b"42", SAID), f"no completion: {SAID}"),
        (
            Submission("out_of_memory", None, "the program was killed for memory"),
            "no completion: the program was killed",
        ),
        (Submission("final_answer", b"42", ""), "no completion: finished"),
        (Submission("no_answer", None, "x\n" * 2000), "no completion: " + "\n".join("x" * MAX_LINES)),
        (Submission("no_answer", None, "Bearer sk-abcdefgh1234"), "no completion: Bearer [key]"),
        (Refused("budget", "65 MiB over the proxy"), "no completion: budget, 65 MiB over the proxy"),
        (ClockExpired(), "no completion: timeout, the rollout's own clock"),
    ],
)
def test_a_program_without_a_completion_is_the_operator_s_to_mend(ending: Ending, reason: str) -> None:
    outcome, answer = decide(ending, a_record(turns=0), program=True)
    assert isinstance(outcome, Failed)
    assert (outcome.name, answer) == ("agent_error", None)
    assert outcome.reason.startswith(reason)
    assert len(outcome.reason.split("\n")) <= MAX_LINES
    assert outcome.headline == outcome.reason.split("\n")[0]


@pytest.mark.parametrize(
    ("ending", "name"),
    [
        (SandboxExit(1, oom_killed=False), "sandbox_lost"),
        (KILLED, "sandbox_lost"),
        (SandboxLostError("gone"), "sandbox_lost"),
        (DockerError("no answer"), "docker_error"),
        (Submission("crashed", None, "boom"), "sandbox_lost"),
        (Refused("llm_error", "HTTP 500"), "llm_error"),
        (Refused("context_length", "9000 tokens"), "bad_task"),
    ],
)
def test_what_is_not_the_program_s_own_end_stays_what_it_was(ending: Ending, name: str) -> None:
    assert decide(ending, a_record(turns=0), program=True)[0].name == name


def test_an_image_without_a_shell_is_the_operator_s_to_mend() -> None:
    """Of all agents, only a shell agent can end so before its first completion."""
    outcome, _ = decide(Submission("no_answer", None, "no sh"), a_record(turns=0))
    assert (outcome.name, outcome.reason) == ("agent_error", "no completion: no sh")  # type: ignore[union-attr]
    assert decide(ClockExpired(), a_record(turns=0))[0].name == "sandbox_lost"


@pytest.mark.parametrize("ending", [Submission("no_answer", None, SAID), ClockExpired(), Refused("budget", "")])
def test_no_policy_can_choose_an_agent_error(ending: Ending) -> None:
    """Nothing was served before one; with a completion, however empty, there is none."""
    assert isinstance(decide(ending, a_record(turns=1), program=True)[0], Ended)
    empty = a_turn(completion=replace(a_turn().completion, completion_tokens=0))
    assert decide(ending, replace(a_record(), turns=(empty,)), program=True)[0].name == "sandbox_lost"


def test_a_program_that_ends_while_it_waits_for_its_first_completion_blames_who_lets_it_wait() -> None:
    ending, record = Submission("no_answer", None, SAID), a_record(turns=0, waiting_s=10.0)
    assert decide(ending, record, program=True)[0].name == "agent_error"  # its requests were refused
    outcome, _ = decide(ending, record, program=True, awaited=True)
    assert outcome == Failed(outcome.name, f"the first completion was still awaited: {SAID}")
    assert outcome.name == "llm_error"
