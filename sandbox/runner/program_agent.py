"""Runs an agent program: its endpoint in the runner, its process in the code worker."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from sandbox.errors import EpisodeCrashed, EpisodeEnd, Interrupted, WorkerDied, WorkerLost, WorkerMisbehaved
from sandbox.runner.endpoint import MODEL, Ask, ProgramEndpoint
from sandbox.runner.worker_link import WorkerLink
from sandbox.texts import ANSWER_CHARS
from sandbox.types import Assignment, Completion, Message, Result, StepReport
from sandbox.worker.program import place

_NO_LIMIT_S = 14 * 86_400.0  # the orchestrator's limits on the rollout end it sooner
_MAX_DETAIL_CHARS = 500


def run_program_agent(
    assignment: Assignment,
    task: str,
    link: WorkerLink,
    complete: Ask,
    *,
    on_step: Callable[[StepReport], None],
    memory_kills: Callable[[], int | None],
) -> Result:
    """Runs the program to its end. Raises EpisodeEnd."""
    program = place(assignment.program)
    link.limit_output(assignment.agent.max_output_chars)
    killed_before = memory_kills()
    bell, ring = os.pipe()
    ends: list[EpisodeEnd] = []
    steps = _Steps(complete, on_step)

    def ended(end: EpisodeEnd) -> None:
        ends.append(end)
        os.write(ring, b"!")

    with ProgramEndpoint(steps.ask, ended) as endpoint:
        environment = {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": "sandbox", "OPENAI_MODEL": MODEL}
        try:
            done = _run(link, str(program), task, environment, bell)
        except Interrupted:
            raise ends[0] from None
        except WorkerLost as lost:
            done = {"status": lost.status if isinstance(lost, WorkerDied) else 1, "answer": None}
    link.drain_output()
    printed = link.take_output()
    status, answer = int(done["status"]), done["answer"]
    steps.tell(printed, status)
    if answer is not None:
        return Result("final_answer", answer.encode("utf-8", "surrogatepass")[:ANSWER_CHARS])
    if status == -signal.SIGKILL and memory_kills() != killed_before:
        return Result("out_of_memory")
    end = " ".join(printed.split())[-_MAX_DETAIL_CHARS:]
    return Result("no_answer", detail=f"the program ended with exit code {status}: {end}")


def _run(link: WorkerLink, program: str, task: str, environment: dict[str, str], bell: int) -> dict[str, Any]:
    """The worker's frame about the program's end. Raises WorkerLost; Interrupted when the bell rings."""
    deadline = time.monotonic() + _NO_LIMIT_S
    setup = {"kind": "program", "program": program, "task": task, "environment": environment}
    link.send(setup, deadline)
    done = link.receive(deadline, bell)
    answer, status = done.get("answer"), done.get("status")
    if not isinstance(status, int) or not (answer is None or isinstance(answer, str)):
        raise WorkerMisbehaved("it sent what is no frame")
    return {"status": status, "answer": answer}


class _Steps:
    """Reports each completion as a step, and as the last step the program's end with what it printed."""

    def __init__(self, complete: Ask, on_step: Callable[[StepReport], None]) -> None:
        self._complete = complete
        self._on_step = on_step
        self._number = 0

    def ask(self, messages: tuple[Message, ...], stop: tuple[str, ...]) -> Completion:
        """Raises EpisodeEnd."""
        started = time.monotonic()
        try:
            completion = self._complete(messages, stop)
        except Exception as error:  # unhandled, it would only hang up on the program
            raise EpisodeCrashed(f"asking for a completion: {type(error).__name__}: {error}") from error
        self._show(completion.text, "", time.monotonic() - started)
        return completion

    def tell(self, printed: str, status: int) -> None:
        """Reports the program's end."""
        self._show("", printed, 0.0, "" if status == 0 else f"the program ended with exit code {status}")

    def _show(self, output: str, observations: str, duration_s: float, error: str = "") -> None:
        self._number += 1
        kind = "ProgramError" if error else ""
        self._on_step(StepReport(self._number, output, "", observations, kind, error, False, duration_s))
