"""An orchestrator for one sandbox: serves scripted completions on a real Unix socket, keeps what it heard.

It checks nothing that the real proxy checks; it is there to see what the sandbox does.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from rollout_api.v1 import sandbox_pb2 as pb
from rollout_api.v1 import sandbox_pb2_grpc as pb_grpc

ENDED = object()  # in a script: the lease ends here
Served = str | pb.Completion | pb.RequestRefused | object


def action(code: str) -> str:
    """A completion that runs `code`, cut before its closing tag as the proxy cuts it."""
    return f"Thought: I run this.\n<code>\n{code}\n"


@dataclass
class Script:
    """What the sandbox is told. `tools`: functions of the decoded arguments; an exception is an error text."""

    completions: Sequence[Served]
    question: str = "What is it?"
    attachments: Mapping[str, bytes] = field(default_factory=dict)
    tools: Mapping[str, Callable[[dict[str, Any]], str]] = field(default_factory=dict)
    max_steps: int = 8
    step_timeout_s: float = 20.0
    planning_interval: int = 0
    final_answer_at_max_steps: bool = False
    verbosity: int = 0
    max_output_chars: int = 20_000
    instructions: str | None = None
    kind: str = "code"
    calls_as_data: bool = False
    code_tags: tuple[str, str] = ("<code>", "</code>")
    authorized_imports: Sequence[str] = ("*",)
    managed_agents: Sequence[pb.ManagedAgent] = ()
    prompt_templates_json: str | None = None
    sandbox_tools: Sequence[pb.SandboxTool] = ()
    program: Mapping[str, bytes] = field(default_factory=dict)
    cwd: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    healthcheck: pb.Healthcheck | None = None
    output: pb.OutputLimits | None = None
    refuse_parking: str | None = None
    unavailable: set[int] = field(default_factory=set)  # completions refused once, by sequence
    inputs: Mapping[str, Any] = field(
        default_factory=lambda: {
            "query": {"type": "string", "description": "What to look for."},
            "limit": {"type": "integer", "description": "At most so many.", "nullable": True},
        }
    )


class ScriptedOrchestrator(pb_grpc.SandboxServiceServicer):
    """`async with ScriptedOrchestrator(directory, script) as served`: listens at `directory/s`, holds at `t`."""

    def __init__(self, directory: Path, script: Script) -> None:
        self.directory = directory
        self.script = script
        self.park: pb.ParkRequest | None = None
        self.completions: list[pb.CompleteRequest] = []
        self.tool_calls: list[pb.CallToolRequest] = []
        self.steps: list[pb.RecordStepRequest] = []
        self.results: list[pb.SubmitResultRequest] = []
        self.output: bytes | None = None
        self.healthy_after: list[int] = []  # how many completions there were at each report
        self.result_came_first = False
        self.parked = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()
        self.assigned_s = 0.0
        self.first_completion_s = 0.0
        self._served: dict[int, pb.CompleteResponse] = {}
        self._server: grpc.aio.Server | None = None
        self._tether = socket.socket(socket.AF_UNIX)

    async def __aenter__(self) -> ScriptedOrchestrator:
        self._server = grpc.aio.server()
        pb_grpc.add_SandboxServiceServicer_to_server(self, self._server)
        path = self.directory / "s"
        self._server.add_insecure_port(f"unix:{path}")
        await self._server.start()
        path.chmod(0o666)
        tether = self.directory / "t"
        if not tether.exists():  # `Channels` has made one already
            self._tether.bind(str(tether))
            tether.chmod(0o666)
            self._tether.listen(1)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.let_go()
        await self.stop()

    def let_go(self) -> None:
        """The process ends, as far as pid 1 can see."""
        self._tether.close()

    async def stop(self) -> None:
        """Serves no more."""
        assert self._server is not None
        await self._server.stop(0)

    @property
    def observations(self) -> list[str]:
        """What the agent saw after each step that was followed by another completion."""
        return [request.messages[-1].content for request in self.completions[1:]]

    @property
    def answer(self) -> bytes | None:
        """Of the one result."""
        [result] = self.results
        return result.answer if result.HasField("answer") else None

    @property
    def stop_reason(self) -> str:
        """Of the one result."""
        [result] = self.results
        return pb.StopReason.Name(result.stop_reason).removeprefix("STOP_REASON_")

    async def Park(
        self, request: pb.ParkRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ParkResponse]:
        self.park = request
        self.parked.set()
        if self.script.refuse_parking is not None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.script.refuse_parking)
        await self.go.wait()
        script = self.script
        self.assigned_s = asyncio.get_running_loop().time()
        yield pb.ParkResponse(assignment=self._assignment())
        for index, content in enumerate(script.attachments.values()):
            for start in range(0, len(content), 256 * 1024):
                piece = content[start : start + 256 * 1024]
                yield pb.ParkResponse(chunk=pb.AttachmentChunk(index=index, content=piece))
        yield pb.ParkResponse(start=pb.Start())

    async def Complete(
        self, request: pb.CompleteRequest, context: grpc.aio.ServicerContext
    ) -> pb.CompleteResponse:
        if not self.completions:
            self.first_completion_s = asyncio.get_running_loop().time()
        if request.sequence in self._served:
            return self._served[request.sequence]
        self.completions.append(request)
        self.steps += request.steps
        served = self.script.completions[len(self.completions) - 1]
        if served is ENDED:
            response = pb.CompleteResponse(ended=pb.EpisodeEnded(outcome="budget"))
        elif isinstance(served, pb.RequestRefused):
            response = pb.CompleteResponse(refused=served)
        elif isinstance(served, pb.Completion):
            response = pb.CompleteResponse(completion=served)
        else:
            assert isinstance(served, str)
            response = pb.CompleteResponse(
                completion=pb.Completion(
                    text=served,
                    finish_reason=pb.FINISH_REASON_STOP,
                    prompt_tokens=10,
                    completion_tokens=5,
                )
            )
        self._served[request.sequence] = response
        if request.sequence in self.script.unavailable:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
        return response

    async def ReportHealthy(
        self, request: pb.ReportHealthyRequest, context: grpc.aio.ServicerContext
    ) -> pb.ReportHealthyResponse:
        self.healthy_after.append(len(self.completions))
        return pb.ReportHealthyResponse()

    async def CallTool(
        self, request: pb.CallToolRequest, context: grpc.aio.ServicerContext
    ) -> pb.CallToolResponse:
        self.tool_calls.append(request)
        try:
            tool = self.script.tools[request.name]
            output = await asyncio.to_thread(tool, json.loads(request.arguments_json))
        except Exception as error:
            return pb.CallToolResponse(error=str(error))
        return pb.CallToolResponse(output=output)

    async def RecordStep(
        self, request: pb.RecordStepRequest, context: grpc.aio.ServicerContext
    ) -> pb.RecordStepResponse:
        self.steps.append(request)
        return pb.RecordStepResponse()

    async def SendOutput(
        self, requests: AsyncIterator[pb.SendOutputRequest], context: grpc.aio.ServicerContext
    ) -> pb.SendOutputResponse:
        self.result_came_first = bool(self.results)
        self.output = b"".join([request.content async for request in requests])
        return pb.SendOutputResponse()

    async def SubmitResult(
        self, request: pb.SubmitResultRequest, context: grpc.aio.ServicerContext
    ) -> pb.SubmitResultResponse:
        self.results.append(request)
        self.steps += request.steps
        return pb.SubmitResultResponse()

    def _assignment(self) -> pb.Assignment:
        script = self.script
        step_timeout = Duration()
        step_timeout.FromTimedelta(timedelta(seconds=script.step_timeout_s))
        return pb.Assignment(
            question=script.question,
            working_directory=script.cwd,
            environment=script.environment,
            healthcheck=script.healthcheck,
            attachments=[
                pb.AttachmentFile(name=name, size_bytes=len(content))
                for name, content in script.attachments.items()
            ],
            agent=pb.AgentSettings(
                max_steps=script.max_steps,
                step_timeout=step_timeout,
                planning_interval=script.planning_interval,
                code_tag_open=script.code_tags[0],
                code_tag_close=script.code_tags[1],
                final_answer_at_max_steps=script.final_answer_at_max_steps,
                authorized_imports=script.authorized_imports,
                instructions=script.instructions,
                verbosity=script.verbosity,
                max_output_chars=script.max_output_chars,
                kind=pb.AgentKind.Value(f"AGENT_KIND_{script.kind.upper()}"),
                managed_agents=script.managed_agents,
                prompt_templates_json=script.prompt_templates_json,
                calls_as_data=script.calls_as_data,
            ),
            host_tools=[
                pb.HostTool(
                    name=name,
                    description=f"The tool {name}.",
                    inputs_json=json.dumps(script.inputs),
                    output_type="string",
                )
                for name in script.tools
            ],
            sandbox_tools=script.sandbox_tools,
            program=[pb.ProgramFile(path=path, content=content) for path, content in script.program.items()],
            output=script.output,
        )
