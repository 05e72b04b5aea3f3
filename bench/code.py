"""Agent code: a step in our worker process beside the same step in smolagents' LocalPythonExecutor.

Both on this machine's Python, in turns; the worker's time includes the way to it and back. Its figures are the
same inside a container, where only the share of CPU differs.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.numbers import p50, ratio_of_pairs
from bench.report import Findings, Scale
from sandbox.pid1.identity import WORKER_NICE
from sandbox.runner.executor import Reach, WorkerExecutor
from sandbox.types import AgentSettings
from tests.fakes.worker_host import worker_link

TITLE = "agent code, beside smolagents' LocalPythonExecutor"
LOOPS = {
    "nested loops": """
total = 0
for i in range({n}):
    for j in range(100):
        total += i * j % 7
print(total)
""",
    "a sieve": """
size = {n} * 60
sieve = [True] * size
for i in range(2, size):
    if sieve[i]:
        for j in range(i * i, size, i):
            sieve[j] = False
print(sum(sieve))
""",
    "words counted": """
counts = {{}}
for i in range({n} * 40):
    word = "w" + str(i * i % 997)
    counts[word] = counts.get(word, 0) + 1
print(max(counts.values()))
""",
}
ORDINARY = {
    "a few lines": "values = [3, 1, 2]\nvalues.sort()\nprint(values, sum(values) / len(values))",
    "a class": "class Point:\n    def __init__(self, x):\n        self.x = x\n\nprint(Point(3).x)",
}


async def measure(scale: Scale) -> Findings:
    found = Findings()
    size, rounds = scale.pick(10, 300, 1000), scale.pick(2, 5, 11)
    steps = {name: code.format(n=size) for name, code in LOOPS.items()} | ORDINARY
    with tempfile.TemporaryDirectory(prefix="code") as home, worker_link(Path(home)) as link:
        link.replace()
        os.nice(WORKER_NICE)  # as nice as the worker is: on a busy machine both get the same share
        settings = AgentSettings(max_steps=1, step_timeout_s=120.0, max_output_chars=20_000)
        ours = WorkerExecutor(link, settings, Reach(), lambda name, arguments: "", lambda: None)
        ours.send_variables(variables={})
        theirs = _local_executor()
        for name, code in steps.items():
            ratios, times = _pairs(ours, theirs, code, rounds if name in LOOPS else 10 * rounds)
            found.samples[f"{name}: worker, s"], found.samples[f"{name}: LocalPythonExecutor, s"] = times
            found.add(f"{name}: worker, p50", p50(times[0]) * 1e3, "ms")
            found.add(f"{name}: LocalPythonExecutor, p50", p50(times[1]) * 1e3, "ms")
            promised = {"at_least": 100.0} if name in LOOPS and scale is not Scale.TINY else {}
            found.add(f"{name}: how much quicker", ratios, "x", note="median of pairs", **promised)
    return found


def _local_executor() -> Callable[[str], object]:
    from smolagents import local_python_executor
    from smolagents.local_python_executor import BASE_PYTHON_TOOLS, LocalPythonExecutor

    # Its limits would end loop-heavy steps before they are measured.
    local_python_executor.MAX_OPERATIONS = local_python_executor.MAX_WHILE_ITERATIONS = 10**12
    executor: Any = LocalPythonExecutor([], timeout_seconds=None)
    executor.send_tools(dict(BASE_PYTHON_TOOLS))
    step: Callable[[str], object] = executor
    return step


def _pairs(
    ours: Callable[[str], object], theirs: Callable[[str], object], code: str, rounds: int
) -> tuple[float, tuple[list[float], list[float]]]:
    """(how many times as quick ours is, the times of both)."""
    times: tuple[list[float], list[float]] = ([], [])
    logs = []
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            started = time.perf_counter()
            output = (ours, theirs)[which](code)
            times[which].append(time.perf_counter() - started)
            logs.append(str(getattr(output, "logs", "")).strip())
    if len(set(logs)) != 1:
        raise RuntimeError(f"the two do not print the same: {sorted(set(logs))}")
    return ratio_of_pairs(times[1], times[0]), times
