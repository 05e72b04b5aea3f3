"""What is counted, and how hosts are shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from orchestrator.host.base import HostNow
from orchestrator.launch.base import LauncherNow
from orchestrator.telemetry.metrics import RunMetrics
from orchestrator.types import BadTask, Crossing, Ended, EndedName, Failed, FailedName, Group, ServiceRecord, Task
from tests.fakes.plans import a_member, an_attempt

ROOT = Path(__file__).parents[2]


@dataclass
class FakeHosts:
    """Two nodes, one of them without its endpoint."""

    waiting: int = 3
    nodes: Mapping[str, HostNow] = field(
        default_factory=lambda: {
            "a": HostNow(
                *(4, 2, {"ready": 1, "leased": 2}, {"ready": 5, "made": 1, "none": 0}, 8, 2.5, 1),
                LauncherNow(1, 9, 1000),
                {"Docker": False},
            ),
            "b": HostNow(
                *(4, 0, {"ready": 0, "leased": 0}, {"ready": 0, "made": 0, "none": 2}, 2, 1.0, 0),
                LauncherNow(),
                {"Docker": True},
            ),
        }
    )

    def now(self) -> Mapping[str, HostNow]:
        return self.nodes


def told(metrics: RunMetrics) -> dict[str, float]:
    """Samples by name and labels as they are written."""
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    return {
        sample.name + "".join(f" {name}={value}" for name, value in sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_attempts_groups_and_scores_are_counted_by_split_and_outcome() -> None:
    metrics = RunMetrics(lambda: None)
    good, bad = a_member(0, 1.0), a_member(1, 0.0)
    broken = an_attempt(Failed(FailedName.LLM_ERROR, "away"), index=2)
    again = an_attempt(Failed(FailedName.LLM_ERROR, "away"), index=2, attempt=1)
    for result in (good, bad, broken, again):
        metrics.attempt(result)
    attempts = (good.attempt, bad.attempt, broken, again)
    group = Group(0, Task("task", "q"), (good, bad), attempts)
    metrics.group(group)
    metrics.group(replace(group, dropped="of equal scores"))
    metrics.bad_task(BadTask("t", "no question"))
    found = told(metrics)
    assert found["orchestrator_rollouts_total outcome=finished split=train"] == 2
    assert found["orchestrator_rollouts_total outcome=llm_error split=train"] == 2
    assert found["orchestrator_rollouts_total outcome=timeout split=train"] == 0
    assert found["orchestrator_rollout_retries_total split=train"] == 1
    assert found["orchestrator_score_bucket le=0.0 split=train"] == 1
    assert found["orchestrator_score_count split=train"] == 2
    assert found["orchestrator_groups_total result=complete split=train"] == 1
    assert found["orchestrator_groups_total result=dropped split=train"] == 1
    assert found["orchestrator_bad_tasks_total"] == 1
    record = good.attempt.record
    assert found["orchestrator_tokens_total kind=sampled split=train"] == 4 * record.sampled_tokens
    assert found["orchestrator_completion_seconds_count"] == 4 * len(record.turns)


def test_an_attempt_without_its_score_is_counted_once_with_its_tokens() -> None:
    """A run was stopped while it graded: the attempt comes again, with its score."""
    metrics = RunMetrics(lambda: None)
    ended = an_attempt()
    metrics.attempt(replace(ended, outcome=Failed(FailedName.CANCELLED, ""), ungraded=Ended(EndedName.FINISHED)))
    before = told(metrics)
    assert before["orchestrator_rollouts_total outcome=cancelled split=train"] == 1
    assert before["orchestrator_tokens_total kind=sampled split=train"] == 0


def test_requests_and_services_of_an_attempt_are_counted() -> None:
    metrics = RunMetrics(lambda: None)
    metrics.attempt(an_attempt())
    found = told(metrics)
    begun = {name: found[name] for name in found if re.search(r"_requests?_.*total |_services.*total ", name)}
    assert begun == {
        "orchestrator_sandbox_requests_refused_total split=train": 0,
        "orchestrator_sandbox_request_bytes_total split=train way=sent": 0,
        "orchestrator_sandbox_request_bytes_total split=train way=received": 0,
        "orchestrator_services_total split=train": 0,
        "orchestrator_services_ended_total split=train": 0,
    }, "a rate needs a first value"
    asked = Crossing(1, 0.0, 1.0, "GET", "https", "pypi.org", 443, "/", 200, sent=3, received=40, source="network")
    crossings = (
        asked,
        replace(asked, source="cache"),
        replace(asked, status=999),
        replace(asked, status=None, refusal="not allowed", received=0, source="border"),
    )
    services = (ServiceRecord("db", "postgres", 0.0, ended="code 1"), ServiceRecord("web", "nginx", 0.0))
    attempt = an_attempt()
    metrics.attempt(replace(attempt, record=replace(attempt.record, crossings=crossings, services=services)))
    found = told(metrics)
    requests = "orchestrator_sandbox_requests_total source={} split=train status={}"
    assert found[requests.format("network", "2xx")] == 1
    assert found[requests.format("cache", "2xx")] == 1
    assert found[requests.format("network", "other")] == 1
    assert found["orchestrator_sandbox_requests_refused_total split=train"] == 1
    assert found["orchestrator_sandbox_request_bytes_total split=train way=sent"] == 12
    assert found["orchestrator_sandbox_request_bytes_total split=train way=received"] == 120
    assert found["orchestrator_services_total split=train"] == 2
    assert found["orchestrator_services_ended_total split=train"] == 1


def test_hosts_are_shown_by_node_and_only_while_they_are_open() -> None:
    hosts: list[FakeHosts | None] = [None]
    metrics = RunMetrics(lambda: hosts[0])  # type: ignore[arg-type,return-value]
    assert "orchestrator_slots node=a" not in told(metrics)
    hosts[0] = FakeHosts()
    metrics.node("a", None)
    metrics.node("b", "the inference endpoint is away")
    found = told(metrics)
    assert found["orchestrator_rollouts_waiting"] == 3
    assert found["orchestrator_rollouts_running node=a"] == 2
    assert found["orchestrator_completions_in_flight node=a"] == 1
    assert found["orchestrator_sandboxes node=a state=leased"] == 2
    assert found["orchestrator_sandbox_claims_total found=none node=b"] == 2
    assert found["orchestrator_sandbox_start_seconds_sum node=a"] == 2.5
    forked = ("orchestrator_parents", "orchestrator_forks_total", "orchestrator_sandbox_memory_bytes")
    assert [found[f"{name} node=a"] for name in forked] == [1, 9, 1000]
    assert "orchestrator_sandbox_memory_bytes node=b" not in found
    assert found["orchestrator_service_up node=a service=Docker"] == 1
    assert found["orchestrator_service_up node=b service=Docker"] == 0
    assert (found["orchestrator_node_up node=a"], found["orchestrator_node_up node=b"]) == (1, 0)


def test_the_docs_name_every_metric_and_no_other() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    cells = re.findall(r"^\|([^|]+)\|", page, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(orchestrator_\w+)`", cell)}
    families = RunMetrics(FakeHosts).registry.collect()  # type: ignore[arg-type]
    known = {f.name + "_total" * (f.type == "counter") for f in families if not f.name.startswith("process_")}
    assert named == known
