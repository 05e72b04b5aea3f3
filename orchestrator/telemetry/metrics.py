"""Prometheus metrics of a run, at `/metrics`. The only place that knows prometheus_client.

Counters are told by the observer; gauges are read when somebody asks. A label is a name of ours, of a node or of a
service, never a text that a model or a data set wrote: there are only so many series.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from aiohttp import web

from orchestrator import __version__
from orchestrator.errors import EnvironmentUnusable
from orchestrator.host.base import Hosts
from orchestrator.rules.observer import Listener
from orchestrator.telemetry.listen import listening
from orchestrator.types import Attempt, BadTask, Crossing, EndedName, FailedName, Group, Member, RolloutPlan

SETTING = "env.metrics_port"
try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.metrics_core import Metric
except ImportError as error:
    raise EnvironmentUnusable(
        f"{SETTING}: prometheus-client is not installed; run `pip install 'rollout-orchestrator[metrics]'`"
    ) from error
LAG_EVERY_S = 0.25
_SCORES = tuple(tenth / 10 for tenth in range(11))
_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_LAGS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_BEHIND = (0, 1, 2, 3, 5, 8, 13, 21)


class RunMetrics(Listener):
    """What a run has done so far, and how it stands. `hosts`: those of the run; None: they are not open."""

    def __init__(self, hosts: Callable[[], Hosts | None]) -> None:
        self.registry = CollectorRegistry()
        self._hosts = hosts
        ProcessCollector(registry=self.registry)
        self._gauge("orchestrator_info", "Which version runs.", "version").labels(__version__).set(1)
        self._rollouts = self._counter("orchestrator_rollouts", "Attempts that are over.", "split", "outcome")
        self._again = self._counter("orchestrator_rollout_retries", "Of these, attempts after the first.", "split")
        self._continued = self._counter(
            "orchestrator_rollouts_continued",
            "Sandboxes that were lost, by how their rollout went on in another one.",
            "split",
            "result",
        )
        self._kept = self._counter("orchestrator_tokens_kept", "Tokens that rollouts went on with.", "split")
        self._begun = self._counter("orchestrator_rollouts_begun", "Attempts begun.", "split")
        self._groups = self._counter("orchestrator_groups", "Groups that are over.", "split", "result")
        self._bad_tasks = self._counter("orchestrator_bad_tasks", "Rows that no task could be made of.")
        self._tokens = self._counter(
            "orchestrator_tokens",
            "Tokens of completions, by the endpoint's count: sampled ones, and those of prompts.",
            "split",
            "kind",
        )
        self._retries = self._counter(
            "orchestrator_completion_retries", "Requests that failed and were made again."
        )
        self._requests = self._counter(
            "orchestrator_sandbox_requests",
            "Requests of sandboxes to the outside that were not refused, by class of status and who answered.",
            "split",
            "status",
            "source",
        )
        self._refused = self._counter(
            "orchestrator_sandbox_requests_refused", "Such requests that did not leave, or broke off.", "split"
        )
        self._bytes = self._counter(
            "orchestrator_sandbox_request_bytes", "Bytes of such requests and of their answers.", "split", "way"
        )
        self._services = self._counter("orchestrator_services", "Services beside agents.", "split")
        self._services_ended = self._counter(
            "orchestrator_services_ended", "Of these, those that ended by themselves.", "split"
        )
        self._scores = self._histogram("orchestrator_score", "Scores of rollouts.", _SCORES, "split")
        self._completion_s = self._histogram(
            "orchestrator_completion_seconds", "From the request for a completion to its answer.", _SECONDS
        )
        self._rollout_s = self._histogram(
            "orchestrator_rollout_seconds", "From the assignment to a sandbox to the end.", _SECONDS, "split"
        )
        self._wait_s = self._histogram(
            "orchestrator_rollout_launch_seconds",
            "What a rollout waited for its sandbox, once it had a slot.",
            _SECONDS,
        )
        self._behind = self._histogram(
            "orchestrator_staleness_versions", "Policy versions that a rollout of a group is behind.", _BEHIND
        )
        self.lag_s = self._histogram(
            "orchestrator_event_loop_lag_seconds", "How late the event loop comes to what is due.", _LAGS_S
        )
        self._nodes = self._gauge("orchestrator_node_up", "Whether rollouts go to a node of the cluster.", "node")
        for outcome in (*EndedName, *FailedName):  # from the start: a rate needs a first value
            self._rollouts.labels("train", str(outcome))
        for result in ("complete", "dropped"):
            self._groups.labels("train", result)
        for kind in ("sampled", "prompt"):
            self._tokens.labels("train", kind)
        for result in ("continued", "parted", "refused"):
            self._continued.labels("train", result)
        for way in ("sent", "received"):
            self._bytes.labels("train", way)
        counters = (self._again, self._begun, self._kept, self._refused, self._services, self._services_ended)
        for metric in (*counters, self._scores, self._rollout_s):
            metric.labels("train")
        self.registry.register(self)  # by its `collect`

    def _counter(self, name: str, description: str, *labels: str) -> Counter:
        return Counter(name, description, labels, registry=self.registry)

    def _gauge(self, name: str, description: str, *labels: str) -> Gauge:
        return Gauge(name, description, labels, registry=self.registry)

    def _histogram(self, name: str, description: str, buckets: Iterable[float], *labels: str) -> Histogram:
        return Histogram(name, description, labels, buckets=[*buckets], registry=self.registry)

    # ------------------------------------------------------------ told

    def begun(self, plan: RolloutPlan, node: str) -> None:
        self._begun.labels(plan.split).inc()

    def attempt(self, result: Member | Attempt) -> None:
        attempt = result.attempt if isinstance(result, Member) else result
        split, record = attempt.plan.split, attempt.record
        self._rollouts.labels(split, str(attempt.outcome.name)).inc()
        if attempt.plan.attempt:
            self._again.labels(split).inc()
        if isinstance(result, Member):
            self._scores.labels(split).observe(result.score.value)
        if attempt.ungraded is not None:
            return  # the rest counts with its score
        self._rollout_s.labels(split).observe(record.duration_s)
        self._wait_s.observe(record.launch_s)
        for one in record.continued:
            how = "continued" if not one.refused else "parted" if one.turn else "refused"
            self._continued.labels(split, how).inc()
            self._kept.labels(split).inc(max(0, one.tokens))
        self._tokens.labels(split, "sampled").inc(max(0, record.sampled_tokens))
        self._tokens.labels(split, "prompt").inc(max(0, record.prompt_tokens))
        for request in record.crossings:
            self._request(split, request)
        self._services.labels(split).inc(len(record.services))
        self._services_ended.labels(split).inc(sum(bool(service.ended) for service in record.services))
        for turn in record.own_turns:
            self._completion_s.observe(turn.ended_s - turn.started_s)
            self._retries.inc(max(0, turn.completion.retries))

    def _request(self, split: str, request: Crossing) -> None:
        if request.refusal:
            self._refused.labels(split).inc()
        else:
            self._requests.labels(split, _status_class(request.status), request.source).inc()
        self._bytes.labels(split, "sent").inc(max(0, request.sent))
        self._bytes.labels(split, "received").inc(max(0, request.received))

    def group(self, group: Group) -> None:
        split = next((attempt.plan.split for attempt in group.attempts), "train")
        self._groups.labels(split, "complete" if group.dropped is None else "dropped").inc()
        for member in group.members_G:
            if member.staleness is not None:
                self._behind.observe(member.staleness)

    def bad_task(self, task: BadTask) -> None:
        self._bad_tasks.inc()

    def node(self, name: str, away: str | None) -> None:
        self._nodes.labels(name).set(away is None)

    # ------------------------------------------------------------ read

    def collect(self) -> Iterable[Metric]:
        """How the hosts stand now, for prometheus_client."""
        if (hosts := self._hosts()) is None:
            return
        yield GaugeMetricFamily("orchestrator_rollouts_waiting", "Rollouts that wait for a slot.", hosts.waiting)
        label = ["node"]
        slots = GaugeMetricFamily("orchestrator_slots", "Rollouts that may run at a time.", labels=label)
        running = GaugeMetricFamily("orchestrator_rollouts_running", "Rollouts that have a slot.", labels=label)
        sampling = GaugeMetricFamily(
            "orchestrator_completions_in_flight", "Completions that rollouts wait for.", labels=label
        )
        sandboxes = GaugeMetricFamily(
            "orchestrator_sandboxes", "Sandboxes, by what becomes of them.", labels=[*label, "state"]
        )
        claims = CounterMetricFamily(
            "orchestrator_sandbox_claims",
            "Rollouts by what they found: a sandbox that was ready, one being made, or none.",
            labels=[*label, "found"],
        )
        starts = SummaryMetricFamily(
            "orchestrator_sandbox_start_seconds", "What it takes until a sandbox is ready.", labels=label
        )
        up = GaugeMetricFamily(
            "orchestrator_service_up", "0: the service is away, and nothing is begun.", labels=[*label, "service"]
        )
        parents = GaugeMetricFamily("orchestrator_parents", "What sandboxes are forked from.", labels=label)
        forks = CounterMetricFamily("orchestrator_forks", "Sandboxes that were forked.", labels=label)
        memory = GaugeMetricFamily(
            "orchestrator_sandbox_memory_bytes", "Memory of one sandbox, on average.", labels=label
        )
        for name, now in hosts.now().items():
            node = name[:200]
            slots.add_metric([node], now.slots)
            running.add_metric([node], now.running)
            sampling.add_metric([node], now.sampling)
            starts.add_metric([node], now.started, now.starting_s)
            parents.add_metric([node], now.launcher.parents)
            forks.add_metric([node], now.launcher.forked)
            if now.launcher.memory_bytes is not None:
                memory.add_metric([node], now.launcher.memory_bytes)
            for state, count in now.sandboxes.items():
                sandboxes.add_metric([node, state], count)
            for found, count in now.claims.items():
                claims.add_metric([node, found], count)
            for service, away in now.away.items():
                up.add_metric([node, service], not away)
        yield from (slots, running, sampling, sandboxes, claims, starts, parents, forks, memory, up)


def _status_class(status: int | None) -> str:
    """`2xx`; a foreign server may send any number, and a label has few values."""
    if status is None:
        return "none"
    return f"{status // 100}xx" if 100 <= status < 600 else "other"


@asynccontextmanager
async def serving_metrics(
    address: str, hosts: Callable[[], Hosts | None]
) -> AsyncIterator[tuple[RunMetrics, str]]:
    """Within this block metrics are at `/metrics`. Yields what counts, and its URL. Raises EnvironmentUnusable."""
    metrics = RunMetrics(hosts)

    async def scraped(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(metrics.registry), headers={"Content-Type": content_type})

    application = web.Application()
    application.add_routes([web.get("/metrics", scraped)])
    watching = asyncio.create_task(_watch_lag(metrics.lag_s), name="event loop lag")
    try:
        async with listening(application, address, SETTING) as where:
            yield metrics, f"http://{where}/metrics"
    finally:
        watching.cancel()


async def _watch_lag(lag_s: Histogram) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        lag_s.observe(max(0.0, loop.time() - due_s))
