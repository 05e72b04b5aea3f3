"""Who watches a run from outside: Prometheus asks for metrics, OpenTelemetry is sent spans, people look at a page.

None of it is imported where it was not asked for.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack

from orchestrator.errors import ConfigError, EnvironmentUnusable
from orchestrator.host.base import Hosts
from orchestrator.rules.observer import Listener, Observer
from orchestrator.rules.text import one_line
from orchestrator.settings.output import OutputSettings

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


async def open_watchers(
    settings: OutputSettings,
    model: str,
    hosts: Callable[[], Hosts | None],
    stack: AsyncExitStack,
    observer: Observer,
    environ: Mapping[str, str] | None = None,
) -> list[Listener]:
    """The listeners that were asked for; `stack` closes them. `hosts`: those of the run, None until they are open.
    `environ`: where OpenTelemetry's own variables are. Raises EnvironmentUnusable, ConfigError."""
    watchers: list[Listener] = []
    say = observer.say
    if settings.metrics_port is not None:
        from orchestrator.telemetry.metrics import serving_metrics

        metrics, url = await stack.enter_async_context(serving_metrics(settings.metrics_port, hosts))
        say(f"metrics: {url}")
        watchers.append(metrics)
    if settings.view_port is not None:
        if observer.run_path is None:
            raise ConfigError("env.view_port: the page shows the record; set env.run_dir too")
        from orchestrator.telemetry.live_page import live_page

        page = live_page(settings.view_port, observer.run_path, observer, hosts)
        say(f"live page: {await stack.enter_async_context(page)}")
    if _traces(os.environ if environ is None else environ):
        watchers.append(await _tracing(model, hosts, stack, say))
    return watchers


async def _tracing(
    model: str, hosts: Callable[[], Hosts | None], stack: AsyncExitStack, say: Callable[[str], None]
) -> Listener:
    """Its SDK and exporters raise what they like for variables that they cannot use, some at their import."""
    try:
        from orchestrator.telemetry.tracing import tracing

        return await stack.enter_async_context(tracing(model, hosts, say))
    except EnvironmentUnusable:
        raise
    except Exception as error:
        message = one_line(f"{type(error).__name__}: {error}")
        raise EnvironmentUnusable(
            f"OpenTelemetry cannot be used ({message}): mend its OTEL_ variables, or set OTEL_SDK_DISABLED=true"
        ) from error


def _traces(environ: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's variables ask for spans."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() != "otlp":
        return False
    return any(environ.get(name) for name in _ENDPOINTS)
