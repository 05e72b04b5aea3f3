"""Rollouts as `orchestrator process` runs them, written to a run directory, with what the process uses on the way.

    python -m bench.rollouts --endpoint URL --groups 8 --group-size 8 --sandboxes 8

prints a line when all is imported, waits for one on stdin, opens everything, runs, and prints what it uses after
every few rollouts: a `Mark` per line, as JSON. The last one comes when everything is removed and closed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing, closing
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.machine import open_files, rss_bytes, threads
from orchestrator import Orchestrator, load_config
from orchestrator.completion.tokenizer import load_tokenizer
from orchestrator.rules.observer import Listener, Observer
from orchestrator.run.directory import RunDirectory
from orchestrator.run.groups import GroupsFile
from orchestrator.settings.config import Config
from orchestrator.types import Attempt, Member, Task
from tests.fakes.tokenizer import tokenizer_folder

PAGE = "live page: "
TOKENS_PER_STEP = 2_000


@dataclass(frozen=True, slots=True)
class Mark:
    """What was used when so many rollouts had ended. `sandbox_cpu_s`: of all sandboxes so far, as the kernel
    counted it; 0 where nobody does."""

    rollouts: int
    wall_s: float
    cpu_s: float
    sandbox_cpu_s: float
    rss_bytes: int
    threads: int
    fds: int
    outcomes: dict[str, int]


def configuration(base_url: str, *, groups: int, group_size: int, **more: object) -> Config:
    """Defaults otherwise; only exact ids are good enough. `more`: of `env`."""
    return load_config(
        env={
            "group_size": group_size,
            "total_steps": groups,
            "tokenizer_name": str(tokenizer_folder()),
            "token_source": "exact",
            "seed": 1,
            **more,
        },
        openai={"base_url": base_url, "model_name": "bench"},
    )


def tasks(count: int) -> list[Task]:
    """All with the answer that the endpoint gives."""
    return [Task(f"q{n}", f"What is number {n}? (of q{n}!)", "42") for n in range(count)]


class Marks(Listener):
    """Counts what has ended and says what is used by now."""

    def __init__(self, every: int, told: Callable[[Mark], None]) -> None:
        self._every, self._told = every, told
        self._started = time.perf_counter()
        self._cpu_s = time.process_time()
        self._rollouts = 0
        self._sandbox_cpu_s = 0.0
        self._outcomes: Counter[str] = Counter()

    def attempt(self, result: Member | Attempt) -> None:
        """Counts it."""
        attempt = result.attempt if isinstance(result, Member) else result
        self._rollouts += 1
        self._outcomes[attempt.outcome.name] += 1
        self._sandbox_cpu_s += attempt.record.cpu_s or 0.0
        if self._rollouts % self._every == 0:
            self._told(self.mark())

    def mark(self) -> Mark:
        return Mark(
            self._rollouts,
            time.perf_counter() - self._started,
            time.process_time() - self._cpu_s,
            self._sandbox_cpu_s,
            rss_bytes(),
            threads(),
            open_files(),
            dict(self._outcomes),
        )


async def run(
    config: Config, home: Path, told: Callable[[Mark], None], every: int, page: Path | None = None
) -> Mark:
    """One run into `home`, opening and closing included. The mark of its end. `page`: a file for the address of
    its live page."""

    def say(line: str) -> None:
        print(line, file=sys.stderr)
        if page is not None and line.startswith(PAGE):
            page.write_text(line.removeprefix(PAGE))

    observer = Observer(say=say, run_path=home / "run" if page is not None else None)
    marks = Marks(every, told)
    async with Orchestrator(config, observer) as orchestrator:
        gc.freeze()
        with (
            closing(RunDirectory(home / "run")) as directory,
            closing(
                GroupsFile(directory.path / "groups.jsonl", form=orchestrator.maker.group_format)
            ) as groups_file,
        ):
            observer.writer = directory
            observer.listeners.append(marks)
            async with aclosing(orchestrator.groups(tasks(config.env.total_steps))) as groups:
                async for group in groups:
                    if group.dropped is None:
                        await groups_file.append(group)
    return marks.mark()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.rollouts", description=__doc__.split("\n")[0])
    parser.add_argument("--endpoint", required=True, help="base URL")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--sandboxes", type=int, default=8)
    parser.add_argument("--launcher", default="docker")
    parser.add_argument("--start", default="run")
    parser.add_argument("--steps", type=int, default=20, help="most steps of a rollout")
    parser.add_argument("--metrics-port", help="where metrics are served; default: nowhere")
    parser.add_argument("--page", type=Path, help="a file for the live page's address; default: no page")
    parser.add_argument("--otlp", help="where spans are sent; default: nowhere")
    parser.add_argument("--every", type=int, default=10, help="rollouts between two marks")
    return parser.parse_args()


def main() -> None:
    given = _arguments()
    logging.disable(logging.WARNING)
    config = configuration(
        given.endpoint,
        groups=given.groups,
        group_size=given.group_size,
        max_concurrent_sandboxes=given.sandboxes,
        launcher=given.launcher,
        start=given.start,
        max_steps=given.steps,
        max_token_length=given.steps * TOKENS_PER_STEP,
        max_prompt_tokens=given.steps**2 * TOKENS_PER_STEP,
        metrics_port=given.metrics_port,
        view_port="0" if given.page else None,
    )
    if given.otlp:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = given.otlp

    def told(mark: Mark) -> None:
        print(json.dumps(asdict(mark)), flush=True)

    load_tokenizer(str(tokenizer_folder()))  # its library takes a second to import
    importlib.import_module("orchestrator.host.open")  # imported late by design: `orchestrator --help` is quick
    print("ready", flush=True)
    sys.stdin.readline()
    with tempfile.TemporaryDirectory(prefix="bench") as home:
        told(asyncio.run(run(config, Path(home), told, given.every, given.page)))


if __name__ == "__main__":
    main()
