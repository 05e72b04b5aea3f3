"""Spans of a run, sent to a collector that speaks the protocol's own service."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from tests.fakes.collector import attributes, collecting
from tests.fakes.inference import ScriptedServer
from tests.fakes.runs import answers, flags, lines, run
from tests.fakes.trainers import free_port

TASKS = 4
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


async def test_every_rollout_is_a_tree_of_spans_that_agrees_with_the_record(home: Path) -> None:
    async with collecting() as collector, ScriptedServer("vllm", answers(TASKS, delay_s=0.05)) as server:
        given = flags(home, server.base_url)
        environ = {ENDPOINT: collector.address, "OTEL_SERVICE_NAME": "mine"}
        ended = await run(*given, directory=home, environ=environ)
        assert ended.code == 0, ended.stderr
    record = {line["rollout_id"]: line for line in lines(home / "run" / "rollouts.jsonl")}
    assert collector.services == {"mine"}
    groups, rollouts = collector.named("group"), collector.named("rollout")
    assert len(groups) == TASKS
    assert len(rollouts) == len(record) == 2 * TASKS
    children = Counter(
        (collector.spans[s.parent_span_id].name, s.name) for s in collector.spans.values() if s.parent_span_id
    )
    assert children["group", "rollout"] == len(record)
    assert children["rollout", "launch"] == children["rollout", "grading"] == len(record)
    completions = sum(len(line["completions"]) for line in record.values())
    assert children["step", "chat scripted"] == completions
    for span in collector.spans.values():
        if span.parent_span_id:
            parent = collector.spans[span.parent_span_id]
            assert span.trace_id == parent.trace_id
            assert parent.start_time_unix_nano <= span.start_time_unix_nano + 1_000_000, (parent.name, span.name)
            assert span.end_time_unix_nano <= parent.end_time_unix_nano + 1_000_000, (parent.name, span.name)
        assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
    for span in rollouts:
        told = attributes(span)
        line = record[told["orchestrator.rollout_id"]]
        assert told["orchestrator.outcome"] == line["outcome"]
        assert told["orchestrator.score"] == pytest.approx(line["score"])
        sampled = sum(completion["completion_tokens"] for completion in line["completions"])
        assert told["gen_ai.usage.output_tokens"] == sampled
        assert told["gen_ai.request.model"] == "scripted"
    text = "".join(str(span) for span in collector.spans.values())
    assert "Thought" not in text
    assert "What is number" not in text


@pytest.mark.slow
async def test_a_collector_that_is_away_costs_nothing_but_a_moment_at_the_end(home: Path) -> None:
    async with ScriptedServer("vllm", answers(TASKS)) as server:
        environ = {ENDPOINT: f"http://127.0.0.1:{free_port()}"}
        started = time.monotonic()
        ended = await run(*flags(home, server.base_url), directory=home, environ=environ)
        assert time.monotonic() - started < 120
    assert ended.code == 0, ended.stderr
    assert not ended.traceback, ended.stderr
    assert len(lines(home / "run" / "rollouts.jsonl")) == 2 * TASKS


@pytest.mark.slow
@pytest.mark.parametrize(
    "odd",
    [
        {"OTEL_BSP_SCHEDULE_DELAY": "0"},
        {"OTEL_EXPORTER_OTLP_TIMEOUT": "abc"},
        {"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "x"},
    ],
)
async def test_variables_that_cannot_be_used_are_refused_in_one_line(home: Path, odd: dict[str, str]) -> None:
    async with ScriptedServer("vllm", answers(TASKS)) as server:
        environ = {ENDPOINT: f"http://127.0.0.1:{free_port()}", **odd}
        ended = await run(*flags(home, server.base_url), directory=home, environ=environ)
    assert (ended.code, ended.traceback) == (3, False), ended.stderr
    assert "OpenTelemetry cannot be used" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environ", "refused"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, True),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, False),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, False),
    ],
)
async def test_an_unknown_protocol_is_refused_where_spans_are_asked_for(
    home: Path, environ: dict[str, str], refused: bool
) -> None:
    async with ScriptedServer("vllm", answers(TASKS)) as server:
        environ = {ENDPOINT: f"http://127.0.0.1:{free_port()}", **environ}
        ended = await run(*flags(home, server.base_url, total_steps=1), directory=home, environ=environ)
    assert (ended.code == 3) is refused, ended.stderr
    assert ("OTEL_EXPORTER_OTLP_PROTOCOL: 'http/json' is neither" in ended.stderr) is refused
