"""One episode: rehearse, park, take the assignment, run the agent, submit one result."""

from __future__ import annotations

import os
import select
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration
from rollout_api.v1 import sandbox_pb2 as pb

from sandbox import procfs
from sandbox.control import RunnerEnd
from sandbox.errors import (
    ChannelLost,
    EpisodeCrashed,
    LeaseEnded,
    MemoryUsedUp,
    PlaceUnusable,
    StepsUsedUp,
    SupervisorGone,
)
from sandbox.runner.agent import OnStep, build_agent
from sandbox.runner.attachments import receive_attachments
from sandbox.runner.client import Client, assigned
from sandbox.runner.executor import CallTool, Reach, WorkerExecutor
from sandbox.runner.model import Complete
from sandbox.runner.placed import placed
from sandbox.runner.shell_agent import ShellAgent
from sandbox.runner.worker_link import WorkerLink
from sandbox.texts import ANSWER_CHARS
from sandbox.types import (
    AgentKind,
    AgentSettings,
    Assignment,
    Box,
    Completion,
    Kind,
    Message,
    NextStep,
    Result,
    StepSetup,
    Tools,
    ToolSpec,
)
from sandbox.worker.tools import FILE_TOOLS

if TYPE_CHECKING:
    from sandbox.runner.endpoint.server import ProgramEndpoint

EXIT_FAILED = 1
OUTPUT_LIMIT_S = 30.0
OUTPUT_CHUNK_BYTES = 256 * 1024
_COPY = Duration(seconds=60)

Solve = Callable[[str], Result]  # an instruction, with its place in the conversation so far


def main(box: Box, control: RunnerEnd, confinement: pb.Confinement, rehearsed: bool = False) -> int:
    """The runner's whole life; returns its exit code. `rehearsed`: the rehearsal was held before this process was
    forked."""
    link = WorkerLink(control)
    link.replace()
    if rehearsed:
        link.greet()
    else:
        rehearse(link)
        link.replace()
    endpoint: ProgramEndpoint | None = None
    if box.preload:
        from sandbox.runner.program_agent import preload  # imports an HTTP server

        endpoint = preload(link, box.preload)
    with Client(box) as client:
        try:
            return _episode(box, client, link, confinement, endpoint)
        except LeaseEnded:
            return 0
        except (ChannelLost, EpisodeCrashed, SupervisorGone) as failed:  # no result can be submitted
            print(failed, file=sys.stderr, flush=True)
            return EXIT_FAILED


def _episode(
    box: Box, client: Client, link: WorkerLink, confinement: pb.Confinement, endpoint: ProgramEndpoint | None
) -> int:
    """From parking to the result. Raises LeaseEnded, ChannelLost, SupervisorGone; EpisodeCrashed when
    nothing can be submitted."""
    responses = client.park(confinement)
    first = next(responses, None)
    if first is None:
        raise ChannelLost("the stream ended without an assignment")
    started = time.monotonic()
    output: pb.OutputLimits | None = None
    step = steps = 1
    solve: Solve | None = None
    following: NextStep | None = None
    while True:
        try:
            if solve is None:
                assignment = assigned(first)
                output, link.place, steps = assignment.output, assignment.place, assignment.steps
                files = receive_attachments(responses, assignment.attachments, box.attachments)
                if assignment.listeners or assignment.authorities:
                    from sandbox.runner.world import world  # most tasks have none

                    link.place = world(assignment, client.relay, box.attachments)
                if assignment.healthcheck is not None:
                    link.demand_healthy(assignment.healthcheck)
                set_up(link, assignment.setup)
                task = prompt(assignment.question, files)
                solve = _agent(assignment, box, client, link, endpoint)
                checked = assignment.healthcheck is not None or assignment.setup != StepSetup()
            elif following is not None:
                set_up(link, following.setup)
                task, checked = following.question, following.setup != StepSetup()
            if checked:
                client.report_healthy()
            started = time.monotonic()
            result = solve(task)
        except PlaceUnusable as error:
            result = Result("bad_task", detail=str(error))
        except (Exception, EpisodeCrashed) as error:
            traceback.print_exc()
            result = Result("crashed", detail=f"{type(error).__name__}: {error}")
        following = client.submit(result, time.monotonic() - started, step, last=step >= steps)
        if following is None:
            break
        step += 1
    # After the result, so that trouble with the files cannot lose it.
    failed = result.stop_reason in ("crashed", "bad_task")
    if output is not None and not failed:
        client.send_output(left_behind(link, output))
    return EXIT_FAILED if failed else 0


def _agent(
    assignment: Assignment, box: Box, client: Client, link: WorkerLink, endpoint: ProgramEndpoint | None
) -> Solve:
    """What follows one instruction after the other."""
    if assignment.agent.kind == "program":
        from sandbox.runner.program_agent import ProgramAgent

        return ProgramAgent(
            assignment,
            link,
            lambda request, connection: client.answer(request, program=connection),
            call_tool=client.call_tool,
            on_step=client.record_step,
            memory_kills=procfs.memory_kills,
            endpoint=endpoint,
        ).solve
    if assignment.agent.kind == "shell":
        return ShellAgent(
            assignment,
            assignment.place.cwd or str(box.workspace),
            link,
            client.complete,
            on_step=client.record_step,
            memory_kills=procfs.memory_kills,
        ).solve
    return solver(assignment, link, client.complete, call_tool=client.call_tool, on_step=client.record_step)


def set_up(link: WorkerLink, setup: StepSetup) -> None:
    """Prepares a step. Raises PlaceUnusable, EpisodeCrashed, SupervisorGone."""
    if setup.files:
        folder = placed(setup.files, "step-", writable=True)
        try:
            link.demand_healthy(pb.Healthcheck(command=f"cp -R {folder}/. .", timeout=_COPY, retries=1))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    for check in (setup.command, setup.healthcheck):
        if check is not None:
            link.demand_healthy(check)


def left_behind(link: WorkerLink, limits: pb.OutputLimits) -> Iterator[bytes]:
    """Yields the stream of files the worker left, in pieces; it may break off. Raises SupervisorGone."""
    pipe = link.open_output(limits)
    deadline = time.monotonic() + OUTPUT_LIMIT_S
    chunk = bytearray()
    try:
        while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            read = os.read(pipe, OUTPUT_CHUNK_BYTES)
            chunk += read
            if len(chunk) >= OUTPUT_CHUNK_BYTES or not read:
                yield bytes(chunk[:OUTPUT_CHUNK_BYTES])
                del chunk[:OUTPUT_CHUNK_BYTES]
            if not read:
                return
    finally:
        os.close(pipe)


def solver(
    assignment: Assignment, link: WorkerLink, complete: Complete, *, call_tool: CallTool, on_step: OnStep
) -> Solve:
    """smolagents' agent. Raises LeaseEnded, ChannelLost, EpisodeCrashed, SupervisorGone, and its errors."""

    def new_executor(kind: AgentKind, space: str, tools: Mapping[str, ToolSpec]) -> WorkerExecutor:
        reach = Reach(
            host_tools=tuple(spec for spec in assignment.host_tools if spec.name in tools),
            sandbox_tools=tuple(tool for tool in assignment.sandbox_tools if tool.spec.name in tools),
            files=tuple(spec.name for spec in FILE_TOOLS if spec.name in tools),
            space=space,
            kind=kind,
        )
        return WorkerExecutor(link, assignment.agent, reach, call_tool, procfs.memory_kills)

    agent, executor = build_agent(assignment, complete, new_executor, on_step)

    def solve(task: str) -> Result:
        executor.answered, executor.answer = False, None
        try:
            last_words = agent.run(task, reset=False)
        except StepsUsedUp:
            return Result("max_steps")
        except MemoryUsedUp:
            return Result("out_of_memory")
        if not executor.answered:  # it ended with smolagents' extra completion after the last step
            return Result("final_answer", str(last_words).encode("utf-8", "surrogatepass")[:ANSWER_CHARS])
        if executor.answer is None:
            return Result("no_answer")
        return Result("final_answer", executor.answer)

    return solve


def prompt(question: str, files: tuple[Path, ...]) -> str:
    """The task as the agent gets it: the question, and where its files are."""
    if not files:
        return question
    places = "\n".join(f"- {place}" for place in files)
    return f"{question}\n\nThe task comes with these files (read-only, given by their absolute paths):\n{places}"


def rehearse(link: WorkerLink) -> None:
    """A whole run with canned completions, so that the real one finds everything loaded.

    This saves most of the time between assignment and first completion. The real run gets a fresh worker from the
    caller.
    """
    lines = iter(["x = 6 * 7\nprint(x)", "final_answer(x)"])

    def canned(kind: Kind, messages: tuple[Message, ...], agent: str = "", tools: Tools = ()) -> Completion:
        return Completion(f"Thought: a rehearsal.\n<code>\n{next(lines)}\n</code>", 1, 1)

    rehearsal = Assignment("What is 6 * 7?", AgentSettings(max_steps=2, step_timeout_s=30.0))
    solve = solver(rehearsal, link, canned, call_tool=lambda name, arguments: "", on_step=lambda step: None)
    result = solve(rehearsal.question)
    if result.answer != b"42":
        raise RuntimeError(f"the rehearsal ended with {result}")
