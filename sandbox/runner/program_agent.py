"""Runs an agent program: its endpoint in the runner, its process in the code worker."""

import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from itertools import count

from sandbox import held
from sandbox.errors import (
    ClientGone,
    EpisodeCrashed,
    EpisodeEnd,
    Interrupted,
    RequestRefused,
    ToolFailure,
    WorkerDied,
    WorkerLost,
    WorkerMisbehaved,
)
from sandbox.runner.endpoint.server import PRELOADED_PORT, Ask, CallTool, ProgramEndpoint
from sandbox.runner.placed import placed
from sandbox.runner.worker_link import WorkerLink
from sandbox.texts import ANSWER_CHARS
from sandbox.types import Assignment, Completion, Request, Result, StepReport, StopReason

_NO_LIMIT_S = 14 * 86_400.0  # the orchestrator's limits on the rollout end it sooner
_LAST_LINES, _LAST_BYTES, _HEAD_CHARS = 12, 2_000, 400  # of what the program said last; of the line before it
_PRELOAD_LIMIT_S = 40.0  # the orchestrator waits a minute for a sandbox to be parked


def preload(link: WorkerLink, modules: tuple[str, ...]) -> ProgramEndpoint:
    """Has the worker start the program's process and import modules in it; the endpoint is the program's. Raises
    SupervisorGone.

    The process has its whole environment from the start, as modules read it when they are imported: so the
    endpoint's address is taken now."""
    endpoint = _endpoint()
    if held.python is not None:
        return endpoint
    setup = {"kind": "preload", "modules": modules, "environment": endpoint.environment}
    deadline = time.monotonic() + _PRELOAD_LIMIT_S
    try:
        link.send(setup, deadline)
        link.receive(deadline)
    except WorkerLost as lost:
        print(f"env.program_preload: {type(lost).__name__}: {lost}", file=sys.stderr, flush=True)
        link.replace()  # the program is started when there is one, and imports for itself
    return endpoint


def _endpoint() -> ProgramEndpoint:
    """Where modules were imported before there was a sandbox, they may have read its address."""
    return ProgramEndpoint() if held.python is None else ProgramEndpoint(PRELOADED_PORT)


class ProgramAgent:
    """Runs the program once for each instruction, in one worker. `endpoint`: the one that `preload` returned."""

    def __init__(
        self,
        assignment: Assignment,
        link: WorkerLink,
        complete: Ask,
        *,
        call_tool: CallTool,
        on_step: Callable[[StepReport], None],
        memory_kills: Callable[[], int | None],
        endpoint: ProgramEndpoint | None = None,
    ) -> None:
        self._assignment, self._link, self._memory_kills = assignment, link, memory_kills
        self._steps = _Steps(complete, call_tool, on_step)
        self._endpoint = endpoint
        self._lost = False  # the worker is

    def solve(self, task: str) -> Result:
        """Runs it to its end. Raises EpisodeEnd."""
        settings, link = self._assignment.agent, self._link
        endpoint, self._endpoint = self._endpoint or _endpoint(), None
        endpoint.context_tokens = settings.max_token_length
        program = placed(self._assignment.program, "program-")
        if self._lost:
            link.replace()
        try:
            link.settle()
        except WorkerLost as lost:
            raise EpisodeCrashed(f"a fresh code worker cannot be used: {lost}") from lost
        link.limit_output(settings.max_output_chars)
        killed_before = self._memory_kills()
        bell, ring = os.pipe()
        ends: list[EpisodeEnd] = []

        def ended(end: EpisodeEnd) -> None:
            ends.append(end)
            os.write(ring, b"!")

        with endpoint.serving(
            self._steps.ask,
            ended,
            parallel=settings.max_parallel_completions,
            tools=self._assignment.host_tools,
            call_tool=self._steps.call_tool,
        ):
            try:
                status, answer, errors = _run(link, str(program), task, endpoint.environment, bell)
            except Interrupted:
                raise ends[0] from None
            except WorkerLost as lost:
                self._lost = True
                status, answer, errors = (lost.status if isinstance(lost, WorkerDied) else 1), None, ""
            finally:
                shutil.rmtree(program, ignore_errors=True)  # it is nothing that the agent changed of its root
        link.drain_output()
        printed = link.take_output()
        self._steps.tell(printed, status)
        short_of_memory = status == -signal.SIGKILL and self._memory_kills() != killed_before
        how = "was killed for memory" if short_of_memory else f"ended with exit code {status}"
        detail = _detail(f"the program {how}", endpoint.notes.refusals, errors if errors.strip() else printed)
        if answer is not None:
            text = answer.encode("utf-8", "surrogatepass")[:ANSWER_CHARS]
            return Result("final_answer", text, detail, endpoint.notes.take())
        reason: StopReason = "out_of_memory" if short_of_memory else "no_answer"
        return Result(reason, detail=detail, notes=endpoint.notes.take())


def _detail(how: str, refused: list[str], printed: str) -> str:
    """How the program ended and why; then more refused requests and the last lines it printed."""
    end = printed.encode("utf-8", "replace")[-_LAST_BYTES:].decode("utf-8", "ignore")
    lines = [line.rstrip() for line in end.splitlines() if line.strip()][-_LAST_LINES:]
    why = (refused or lines)[-1:]
    return "\n".join([": ".join((how, *why))[:_HEAD_CHARS], *refused[:-1], *lines])


def _run(
    link: WorkerLink, program: str, task: str, environment: dict[str, str], bell: int
) -> tuple[int, str | None, str]:
    """(exit code, answer, end of standard error), as the worker says. Raises WorkerLost; Interrupted when the bell
    rings."""
    deadline = time.monotonic() + _NO_LIMIT_S
    setup = {"kind": "program", "program": program, "task": task, "environment": environment}
    link.send(setup, deadline)
    done = link.receive(deadline, bell)
    answer, status, errors = done.get("answer"), done.get("status"), done.get("errors")
    if not (isinstance(status, int) and isinstance(errors, str) and isinstance(answer, str | None)):
        raise WorkerMisbehaved("it sent an invalid frame")
    return status, answer, errors


class _Steps:
    """Reports each completion as a step, and as the last step the program's end with what it printed."""

    def __init__(self, complete: Ask, call_tool: CallTool, on_step: Callable[[StepReport], None]) -> None:
        self._complete = complete
        self._call_tool = call_tool
        self._on_step = on_step
        self._numbers = count(1)

    def ask(self, request: Request, connection: socket.socket) -> Completion:
        """Raises RequestRefused, ClientGone, EpisodeEnd."""
        started = time.monotonic()
        try:
            completion = self._complete(request, connection)
        except (RequestRefused, ClientGone):  # nobody got anything: no step
            raise
        except Exception as error:  # unhandled, it would only hang up on the program
            raise EpisodeCrashed(f"asking for a completion: {type(error).__name__}: {error}") from error
        if not request.count_only:
            self._show(completion.text, "", time.monotonic() - started)
        return completion

    def call_tool(self, name: str, arguments: str, connection: socket.socket) -> str:
        """The tool's output. Raises ToolFailure, ClientGone, EpisodeEnd."""
        try:
            return self._call_tool(name, arguments, connection)
        except (ToolFailure, ClientGone):
            raise
        except Exception as error:  # as above
            raise EpisodeCrashed(f"calling a tool: {type(error).__name__}: {error}") from error

    def tell(self, printed: str, status: int) -> None:
        """Reports the program's end."""
        self._show("", printed, 0.0, "" if status == 0 else f"the program ended with exit code {status}")

    def _show(self, output: str, observations: str, duration_s: float, error: str = "") -> None:
        kind = "ProgramError" if error else ""
        self._on_step(StepReport(next(self._numbers), output, "", observations, kind, error, False, duration_s))
