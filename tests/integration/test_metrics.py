"""Metrics of a run, scraped while it goes on."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.inference import ScriptedServer
from tests.fakes.runs import (
    ROOT,
    Running,
    answers,
    flags,
    lines,
    outcomes,
    run,
    running,
    until,
    whole_lines,
)
from tests.fakes.trainers import free_port

TASKS = 8
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(url: str) -> Samples:
    text = urllib.request.urlopen(url, timeout=60).read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


async def metrics_url(started: Running) -> str:
    """Where the run says that its metrics are."""
    assert started.process.stderr is not None
    while "metrics: " not in (said := (await started.process.stderr.readline()).decode()):
        assert said, "it has ended"
    return said.split()[-1]


async def test_a_run_under_way_tells_what_it_did_and_how_it_stands(home: Path) -> None:
    seen: list[Samples] = []
    async with ScriptedServer("vllm", answers(TASKS, delay_s=0.3)) as server:
        given = flags(home, server.base_url, metrics_port=0)
        async with running(*given, directory=home) as started:
            url = await metrics_url(started)
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", url)
            ending = asyncio.create_task(started.ended())
            while not ending.done():
                try:
                    seen.append(await asyncio.to_thread(scrape, url))
                except OSError:
                    break
                await asyncio.sleep(0.05)
            ended = await ending
    assert ended.code == 0, ended.stderr
    written = outcomes(home / "run")
    assert written == {"finished": 2 * TASKS}
    last = seen[-1]
    counted = value(last, "orchestrator_rollouts_total", split="train", outcome="finished")
    assert 0 < counted <= 2 * TASKS
    assert value(last, "orchestrator_rollouts_total", split="train", outcome="llm_error") == 0
    assert value(last, "orchestrator_score_count", split="train") == counted
    groups = value(last, "orchestrator_groups_total", split="train", result="complete")
    assert 0 < groups <= TASKS
    sampled = sum(
        completion["completion_tokens"]
        for line in lines(home / "run" / "rollouts.jsonl")[: int(counted)]
        for completion in line["completions"]
    )
    assert value(last, "orchestrator_tokens_total", split="train", kind="sampled") == sampled
    here = {"node": ""}
    busy = [one for one in seen if ("orchestrator_slots", (("node", ""),)) in one]
    assert {value(one, "orchestrator_slots", **here) for one in busy} == {4}
    assert max(value(one, "orchestrator_rollouts_running", **here) for one in busy) == 4
    assert max(value(one, "orchestrator_completions_in_flight", **here) for one in busy) >= 1
    assert max(value(one, "orchestrator_sandboxes", **here, state="leased") for one in busy) >= 1
    assert max(value(one, "orchestrator_sandbox_start_seconds_count", **here) for one in busy) >= 4
    found = [
        value(busy[-1], "orchestrator_sandbox_claims_total", **here, found=f) for f in ("ready", "made", "none")
    ]
    assert sum(found) == value(busy[-1], "orchestrator_rollouts_begun_total", split="train")
    for service in ("Docker", "the inference endpoint"):
        assert value(busy[-1], "orchestrator_service_up", **here, service=service) == 1
    assert value(last, "process_resident_memory_bytes") > 1 << 20
    assert value(last, "orchestrator_event_loop_lag_seconds_count") > 0
    text = {label for name, labels in last for _, label in labels}
    assert not any("Thought" in label or label.startswith("q") for label in text)


async def test_a_port_that_is_taken_is_said_before_anything_begins(home: Path) -> None:
    async with ScriptedServer("vllm", answers(TASKS)) as server:
        port = server.base_url.removesuffix("/v1").rpartition(":")[2]
        ended = await run(*flags(home, server.base_url, metrics_port=port), directory=home)
        odd = await run(*flags(home, server.base_url, metrics_port="a..b:9000"), directory=home)
    assert (odd.code, odd.traceback) == (3, False), odd.stderr
    assert ended.code == 3
    assert f"env.metrics_port: nothing can listen at {port}" in ended.stderr
    assert not ended.traceback
    assert not (home / "run").exists()


class Prometheus:
    """A real one, that asks this URL every half second."""

    def __init__(self, directory: Path, url: str) -> None:
        self.port = free_port()
        config = {
            "scrape_configs": [
                {
                    "job_name": "run",
                    "scrape_interval": "500ms",
                    "scrape_timeout": "500ms",
                    "static_configs": [{"targets": [url.removeprefix("http://").removesuffix("/metrics")]}],
                }
            ]
        }
        (directory / "prometheus.json").write_text(json.dumps(config))  # JSON is YAML
        self.process = subprocess.Popen(
            [
                *("prometheus", f"--config.file={directory}/prometheus.json", "--log.level=error"),
                *(f"--storage.tsdb.path={directory}/tsdb", f"--web.listen-address=127.0.0.1:{self.port}"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def query(self, expression: str, at: float) -> list[Any]:
        """Raises HTTPError for an expression that it does not take. `at`: unix time."""
        asked = urllib.parse.urlencode({"query": expression, "time": at})
        url = f"http://127.0.0.1:{self.port}/api/v1/query?{asked}"
        answer = json.loads(urllib.request.urlopen(url, timeout=60).read())
        assert answer["status"] == "success"
        found: list[Any] = answer["data"]["result"]
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def dashboard() -> list[str]:
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    panels = [one for panel in board["panels"] for one in panel.get("panels", [panel])]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_the_dashboard_asks_for_metrics_that_the_page_tells_of() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    told = {*re.findall(r"`(orchestrator_\w+)`", page)}
    asked = {name for expression in dashboard() for name in re.findall(r"orchestrator_\w+", expression)}
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in asked} <= told
    assert {"orchestrator_parents", "orchestrator_forks_total", "orchestrator_sandbox_memory_bytes"} <= asked


@pytest.mark.full
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus is installed")
async def test_a_real_prometheus_answers_every_query_of_the_dashboard(home: Path) -> None:
    """From what it scraped of one run. Only what needs a policy server, egress or a launcher of containers has no
    series."""
    async with ScriptedServer("vllm", answers(TASKS, delay_s=2.0)) as server:
        async with running(*flags(home, server.base_url, metrics_port=0), directory=home) as started:
            prometheus = Prometheus(home, await metrics_url(started))
            try:
                await until(lambda: whole_lines(home / "run" / "groups.jsonl") >= TASKS - 2, "most of it is done")
                now = time.time()
                ended = await started.ended()
                assert ended.code == 0, ended.stderr
                silent = set()
                for expression in dashboard():
                    asked = expression.replace("$__rate_interval", "1m")
                    found = await asyncio.to_thread(prometheus.query, asked, now)
                    if not any(math.isfinite(float(series["value"][1])) for series in found):
                        silent.add(expression)
            finally:
                prometheus.end()
    assert len(dashboard()) > 20
    names = ("orchestrator_staleness", "orchestrator_sandbox_requests_total", "orchestrator_sandbox_memory_bytes")
    assert all(any(name in expression for name in names) for expression in silent), silent
