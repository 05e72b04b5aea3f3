"""One episode: rehearse, park, take the assignment, run the agent, submit one result."""

from __future__ import annotations

import os
import select
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

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
from sandbox.runner.shell_agent import run_shell_agent
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
    Result,
    Tools,
    ToolSpec,
)
from sandbox.worker.tools import FILE_TOOLS

if TYPE_CHECKING:
    from sandbox.runner.endpoint.server import ProgramEndpoint

EXIT_FAILED = 1
OUTPUT_LIMIT_S = 30.0
OUTPUT_CHUNK_BYTES = 256 * 1024


def main(box: Box, control: RunnerEnd, confinement: pb.Confinement) -> int:
    """The runner's whole life; returns its exit code."""
    link = WorkerLink(control)
    rehearse(link)
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
    try:
        assignment = assigned(first)
        output, link.place = assignment.output, assignment.place
        files = receive_attachments(responses, assignment.attachments, box.attachments)
        if assignment.healthcheck is not None:
            link.demand_healthy(assignment.healthcheck)
            client.report_healthy()
        started = time.monotonic()
        if assignment.agent.kind == "program":
            from sandbox.runner.program_agent import run_program_agent

            result = run_program_agent(
                assignment,
                prompt(assignment.question, files),
                link,
                lambda request, connection: client.answer(request, program=connection),
                on_step=client.record_step,
                memory_kills=procfs.memory_kills,
                endpoint=endpoint,
            )
        elif assignment.agent.kind == "shell":
            result = run_shell_agent(
                assignment,
                prompt(assignment.question, files),
                assignment.place.cwd or str(box.workspace),
                link,
                client.complete,
                on_step=client.record_step,
                memory_kills=procfs.memory_kills,
            )
        else:
            result = solve(
                assignment, files, link, client.complete, call_tool=client.call_tool, on_step=client.record_step
            )
    except PlaceUnusable as error:
        result = Result("bad_task", detail=str(error))
    except (Exception, EpisodeCrashed) as error:
        traceback.print_exc()
        result = Result("crashed", detail=f"{type(error).__name__}: {error}")
    client.submit(result, time.monotonic() - started)
    # After the result, so that trouble with the files cannot lose it.
    failed = result.stop_reason in ("crashed", "bad_task")
    if output is not None and not failed:
        client.send_output(left_behind(link, output))
    return EXIT_FAILED if failed else 0


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


def solve(
    assignment: Assignment,
    files: tuple[Path, ...],
    link: WorkerLink,
    complete: Complete,
    *,
    call_tool: CallTool,
    on_step: OnStep,
) -> Result:
    """Runs the agent. Raises LeaseEnded, ChannelLost, EpisodeCrashed, SupervisorGone, and errors of smolagents."""

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
    try:
        last_words = agent.run(prompt(assignment.question, files))
    except StepsUsedUp:
        return Result("max_steps")
    except MemoryUsedUp:
        return Result("out_of_memory")
    if not executor.answered:  # it ended with smolagents' extra completion after the last step
        return Result("final_answer", str(last_words).encode("utf-8", "surrogatepass")[:ANSWER_CHARS])
    if executor.answer is None:
        return Result("no_answer")
    return Result("final_answer", executor.answer)


def prompt(question: str, files: tuple[Path, ...]) -> str:
    """The task as the agent gets it: the question, and where its files are."""
    if not files:
        return question
    places = "\n".join(f"- {place}" for place in files)
    return f"{question}\n\nThe task comes with these files (read-only, given by their absolute paths):\n{places}"


def rehearse(link: WorkerLink) -> None:
    """A whole run with canned completions, so that the real one finds everything loaded.

    This saves most of the time between assignment and first completion. The rehearsal's worker is
    replaced: the real run gets a fresh one.
    """
    lines = iter(["x = 6 * 7\nprint(x)", "final_answer(x)"])

    def canned(kind: Kind, messages: tuple[Message, ...], agent: str = "", tools: Tools = ()) -> Completion:
        return Completion(f"Thought: a rehearsal.\n<code>\n{next(lines)}\n</code>", 1, 1)

    link.replace()
    rehearsal = Assignment("What is 6 * 7?", AgentSettings(max_steps=2, step_timeout_s=30.0))
    result = solve(rehearsal, (), link, canned, call_tool=lambda name, arguments: "", on_step=lambda step: None)
    if result.answer != b"42":
        raise RuntimeError(f"the rehearsal ended with {result}")
    link.replace()
