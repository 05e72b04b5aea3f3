"""Spans of a run for OpenTelemetry, over OTLP. The only place that knows its SDK.

A span is made when its attempt or group is over, with the times on record: nothing on the way of a rollout knows
of it. What a model wrote, was told or was given by a tool is in no span.

    group > rollout > launch, step > completion, tool call; grading
"""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from orchestrator import __version__
from orchestrator.errors import EnvironmentUnusable
from orchestrator.host.base import Hosts
from orchestrator.rules.observer import Listener
from orchestrator.types import Attempt, Failed, Group, Member, RolloutPlan, Turn

try:
    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
except ImportError as error:
    raise EnvironmentUnusable(
        "OTEL_EXPORTER_OTLP_ENDPOINT asks for spans, and OpenTelemetry is not installed; run "
        "`pip install 'rollout-orchestrator[tracing]'`, or set OTEL_SDK_DISABLED=true"
    ) from error

CLOSE_S = 15.0  # for what was not sent yet
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
# OpenTelemetry's names for generative AI: https://opentelemetry.io/docs/specs/semconv/registry/attributes/gen-ai/
OPERATION = "gen_ai.operation.name"
MODEL = "gen_ai.request.model"
TEMPERATURE = "gen_ai.request.temperature"
TOP_P = "gen_ai.request.top_p"
MOST_TOKENS = "gen_ai.request.max_tokens"
SEED = "gen_ai.request.seed"
PROMPT_TOKENS = "gen_ai.usage.input_tokens"
SAMPLED_TOKENS = "gen_ai.usage.output_tokens"
FINISH_REASONS = "gen_ai.response.finish_reasons"
AGENT = "gen_ai.agent.name"
TOOL = "gen_ai.tool.name"
Attributes = Mapping[str, str | int | float | bool | tuple[str, ...]]


class Tracing(Listener):
    """Makes the spans of one run. `model`: the name that completions are asked for with. `hosts`: as those of
    `open_watchers`."""

    def __init__(self, tracer: Tracer, model: str, hosts: Callable[[], Hosts | None]) -> None:
        self._tracer = tracer
        self._model = model
        self._hosts = hosts
        self._groups: dict[tuple[str, int], Span] = {}  # by split and number
        self._begun_at: dict[str, float] = {}

    def begun(self, plan: RolloutPlan, node: str) -> None:
        self._begun_at[plan.rollout_id] = time.time()
        self._group(plan)

    def attempt(self, result: Member | Attempt) -> None:
        member = result if isinstance(result, Member) else None
        attempt = result.attempt if isinstance(result, Member) else result
        plan, record, now = attempt.plan, attempt.record, time.time()
        group = set_span_in_context(self._group(plan))
        begun_at = self._begun_at.pop(plan.rollout_id, record.started_at)
        attributes: dict[str, str | int | float | bool | tuple[str, ...]] = {
            OPERATION: "invoke_agent",
            MODEL: self._model,
            TEMPERATURE: plan.sampling.temperature,
            TOP_P: plan.sampling.top_p,
            PROMPT_TOKENS: record.prompt_tokens,
            SAMPLED_TOKENS: record.sampled_tokens,
            "orchestrator.rollout_id": plan.rollout_id,
            "orchestrator.task_id": plan.task.task_id[:200],
            "orchestrator.attempt": plan.attempt,
            "orchestrator.outcome": str(attempt.outcome.name),
        }
        if member is not None:
            attributes["orchestrator.score"] = member.score.value
        if record.node:
            attributes["orchestrator.node"] = record.node
        ended_at = record.started_at + record.duration_s
        span = self._span("rollout", group, min(begun_at, record.started_at - record.launch_s), attributes)
        inside = set_span_in_context(span)
        if record.launch_s:
            self._span("launch", inside, record.started_at - record.launch_s).end(_ns(record.started_at))
        self._steps(attempt, inside)
        if member is not None:
            self._span("grading", inside, ended_at).end(_ns(now))
        if isinstance(attempt.outcome, Failed):
            span.set_status(Status(StatusCode.ERROR, str(attempt.outcome.name)))
        span.end(_ns(now))

    def _steps(self, attempt: Attempt, rollout: Context) -> None:
        """Steps by the orchestrator's own clock: each from its completion to the next step, or to the end."""
        record, start = attempt.record, attempt.record.started_at
        firsts = [turn.started_s for turn in record.own_turns if turn.is_step]
        bounds = (
            list(zip(firsts, [*firsts[1:], max(record.duration_s, *firsts, 0.0)], strict=True)) if firsts else []
        )
        steps = [
            (since, until, self._span("step", rollout, start + since, {"orchestrator.step": number}))
            for number, (since, until) in enumerate(bounds, 1)
        ]

        def within(at_s: float) -> Context:
            span = next((span for since, until, span in steps if since <= at_s < until), None)
            return rollout if span is None else set_span_in_context(span)

        for turn in record.own_turns:
            span = self._span(
                f"chat {self._model}",
                within(turn.started_s),
                start + turn.started_s,
                self._of(attempt, turn),
                client=True,
            )
            span.end(_ns(start + turn.ended_s))
        for call in record.tool_calls:
            name = self._tool(call.name)
            attributes = {OPERATION: "execute_tool", TOOL: name}
            span = self._span(f"execute_tool {name}", within(call.started_s), start + call.started_s, attributes)
            if call.error is not None:
                span.set_status(Status(StatusCode.ERROR))
            span.end(_ns(start + call.ended_s))
        for _, until, span in steps:
            span.end(_ns(start + until))

    def _tool(self, name: str) -> str:
        """The name if it is a tool's: model-written code may call any."""
        hosts = self._hosts()
        return name if hosts is not None and name in hosts.tools else "unknown"

    def _of(self, attempt: Attempt, turn: Turn) -> Attributes:
        completion = turn.completion
        attributes: dict[str, str | int | float | bool | tuple[str, ...]] = {
            OPERATION: "chat",
            MODEL: self._model,
            MOST_TOKENS: attempt.plan.sampling.max_tokens,
            SEED: attempt.plan.sampling.seed + turn.sequence,
            PROMPT_TOKENS: completion.prompt_tokens,
            SAMPLED_TOKENS: completion.completion_tokens,
            FINISH_REASONS: (completion.finish_reason,),
            "orchestrator.completion.kind": str(turn.kind),
            "orchestrator.completion.retries": completion.retries,
        }
        if turn.agent:
            attributes[AGENT] = turn.agent
        if completion.policy_version is not None:
            attributes["orchestrator.policy_version"] = completion.policy_version
        return attributes

    def group(self, group: Group) -> None:
        plan = next((attempt.plan for attempt in group.attempts), None)
        if plan is None or (span := self._groups.pop((plan.split, plan.group), None)) is None:
            return
        span.set_attribute("orchestrator.rollouts", len(group.members_G))
        if group.dropped is not None:
            span.set_status(Status(StatusCode.ERROR, "dropped"))
        span.end()

    def end(self) -> None:
        """Ends the spans of groups that are not finished."""
        for span in self._groups.values():
            span.end()
        self._groups.clear()

    def _group(self, plan: RolloutPlan) -> Span:
        key = plan.split, plan.group
        if key not in self._groups:
            attributes: Attributes = {
                "orchestrator.group": plan.group,
                "orchestrator.task_id": plan.task.task_id[:200],
                "orchestrator.split": plan.split,
            }
            self._groups[key] = self._span("group", Context(), time.time(), attributes)
        return self._groups[key]

    def _span(
        self, name: str, parent: Context, at: float, attributes: Attributes | None = None, *, client: bool = False
    ) -> Span:
        """`at`: unix time."""
        kind = SpanKind.CLIENT if client else SpanKind.INTERNAL
        return self._tracer.start_span(name, parent, kind, attributes, start_time=_ns(at))


@asynccontextmanager
async def tracing(
    model: str, hosts: Callable[[], Hosts | None], say: Callable[[str], None]
) -> AsyncIterator[Tracing]:
    """Within this block spans are sent to where OpenTelemetry's variables say. Raises EnvironmentUnusable."""
    service = os.environ.get("OTEL_SERVICE_NAME", "orchestrator")
    resource = Resource.create({"service.name": service, "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter()))
    listener = Tracing(provider.get_tracer("orchestrator", __version__), model, hosts)
    try:
        yield listener
    finally:
        listener.end()
        loop = asyncio.get_running_loop()
        flushed = asyncio.Event()

        def shut() -> None:
            provider.shutdown()
            with suppress(RuntimeError):  # it took too long, and the loop is closed
                loop.call_soon_threadsafe(flushed.set)

        # A daemon: the end of the process waits for a collector that is away no longer than this does.
        threading.Thread(target=shut, name="spans", daemon=True).start()
        try:
            async with asyncio.timeout(CLOSE_S):
                await flushed.wait()
        except TimeoutError:
            say(f"tracing: the collector takes too long; what it has not got after {CLOSE_S:g} s is lost")


def _exporter() -> SpanExporter:
    """By the protocol that is asked for; gRPC, as OpenTelemetry's own tools for Python do."""
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), "grpc")
    match protocol.strip().lower():
        case "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            return GrpcExporter()
        case "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

            return HttpExporter()
        case other:
            raise EnvironmentUnusable(f"OTEL_EXPORTER_OTLP_PROTOCOL: {other!r} is neither grpc nor http/protobuf")


def _ns(at: float) -> int:
    return int(at * 1e9)
