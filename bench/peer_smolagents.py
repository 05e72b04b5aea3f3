"""smolagents' own DockerExecutor beside ours, where it can run: it needs an image with Jupyter in it."""

from __future__ import annotations

import importlib.util
import os
import socket
import time

import docker

from bench.numbers import p50
from bench.report import Findings

IMAGE = os.environ.get("BENCH_JUPYTER_IMAGE", "jupyter-kernel")  # the name smolagents gives it
NAMES = ("DockerExecutor: start", "DockerExecutor: first step", "DockerExecutor: clean-up")


def measure_docker_executor(found: Findings, rounds: int) -> None:
    """Start, first step, clean-up: medians. Blocks."""
    if why := _why_not():
        found.add(NAMES[0], None, "ms", note=f"smolagents' DockerExecutor cannot run here: {why}")
        return
    from smolagents.monitoring import AgentLogger, LogLevel
    from smolagents.remote_executors import DockerExecutor

    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(rounds):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        started = time.perf_counter()
        executor = DockerExecutor(
            [], AgentLogger(LogLevel.OFF), port=port, image_name=IMAGE, build_new_image=False
        )
        try:
            ready = time.perf_counter()
            executor.run_code_raise_errors("print(1)")
            stepped = time.perf_counter()
        finally:
            executor.cleanup()
        ended = time.perf_counter()
        for name, value in zip(NAMES, (ready - started, stepped - ready, ended - stepped), strict=True):
            times[name].append(value)
    for name, values in times.items():
        found.samples[name] = values
        found.add(f"{name}, p50", p50(values) * 1e3, "ms")


def _why_not() -> str:
    """Empty: it can run."""
    if importlib.util.find_spec("websocket") is None:
        return "the package websocket-client is not installed (`pip install 'smolagents[docker]'`)"
    client = docker.from_env()
    try:
        client.images.get(IMAGE)
    except docker.errors.ImageNotFound:
        return f"there is no image {IMAGE} with Jupyter's kernel gateway (BENCH_JUPYTER_IMAGE names another)"
    finally:
        client.close()
    return ""
