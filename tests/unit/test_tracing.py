"""Spans hold no text that a model or a tool wrote."""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from orchestrator.rules.observer import Observer
from orchestrator.settings.output import OutputSettings
from orchestrator.telemetry import open_watchers
from orchestrator.telemetry.tracing import Tracing
from orchestrator.types import Attempt, Failed, FailedName, Group, Task, ToolCall
from tests.fakes.plans import a_member, an_attempt


@dataclass
class FakeHosts:
    tools: dict[str, object] = field(default_factory=lambda: {"web_search": object()})


class Spans:
    def __init__(self) -> None:
        self._kept, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._kept))
        self.tracing = Tracing(provider.get_tracer("t"), "m", FakeHosts)  # type: ignore[arg-type]

    def names(self) -> list[str]:
        return [span.name for span in self._kept.get_finished_spans()]

    def text(self) -> str:
        return "".join(span.to_json() for span in self._kept.get_finished_spans())

    def failed(self) -> list[str]:
        return [s.name for s in self._kept.get_finished_spans() if s.status.status_code is StatusCode.ERROR]


def called(name: str, error: str | None = None) -> Attempt:
    attempt = an_attempt()
    call = ToolCall(0, name, {"secret": "argument"}, None if error else "a result", error, 0.1, 0.2)
    return replace(attempt, record=replace(attempt.record, tool_calls=(call,)))


def test_only_names_of_tools_are_told() -> None:
    spans = Spans()
    for name in ("web_search", "written by a model"):
        spans.tracing.begun(called(name).plan, "")
        spans.tracing.attempt(called(name, "an error"))
    assert [name for name in spans.names() if name.startswith("execute_tool")] == [
        "execute_tool web_search",
        "execute_tool unknown",
    ]
    for text in ("written by", "argument", "a result", "an error"):
        assert text not in spans.text()


def test_failures_and_drops_are_errors_and_groups_left_open_end() -> None:
    spans = Spans()
    member, broken = a_member(0), an_attempt(Failed(FailedName.LLM_ERROR, "the endpoint is away"), index=1)
    for result in (member, broken):
        spans.tracing.begun(member.attempt.plan if result is member else broken.plan, "")
        spans.tracing.attempt(result)
    assert "group" not in spans.names()
    group = Group(0, Task("task", "q"), (member,), (member.attempt, broken), dropped="too few")
    spans.tracing.group(group)
    assert spans.failed() == ["rollout", "group"]
    spans.tracing.begun(member.attempt.plan, "")
    spans.tracing.end()
    assert spans.names().count("group") == 2


async def test_nobody_watches_unless_asked() -> None:
    loaded = {name for name in sys.modules if name.startswith("opentelemetry.exporter")}
    async with AsyncExitStack() as stack:
        assert await open_watchers(OutputSettings(), "model", lambda: None, stack, Observer(), environ={}) == []
        off = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "TRUE"}
        assert await open_watchers(OutputSettings(), "model", lambda: None, stack, Observer(), environ=off) == []
    assert {name for name in sys.modules if name.startswith("opentelemetry.exporter")} == loaded
