"""Many rollouts in one process, and what they leave in it: `python -m bench.soak N`.

Real sandboxes, the benchmark's endpoint. Memory is compared after a warm-up; threads, file descriptors,
containers and directories at the start and at the end, each run having been opened and closed once before.
Exits with 1 when a bound does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench import machine
from bench.endpoint import endpoint
from bench.report import Findings, Section, table
from bench.rollouts import Mark, configuration, run
from tests.e2e.leftovers import containers_of
from tests.fakes.runs import lines as lines_of

MIB = 1 << 20
GROWTH_MIB = 20e6 / MIB
GROUP_SIZE = 4
WARM_UP = 0.2  # of the rollouts, at most WARM_UP_MOST
WARM_UP_MOST = 100
SETTLE_S = 60.0  # threads of C libraries take a moment to notice


@dataclass(frozen=True, slots=True)
class Held:
    """What this process holds."""

    threads: int
    fds: int
    containers: int
    directories: int

    @classmethod
    def now(cls, temporary: Path) -> Held:
        return cls(
            machine.threads(),
            machine.open_files(),
            len(containers_of(os.getpid())),
            len(list(temporary.iterdir())),
        )

    def within(self, before: Held) -> bool:
        return all(getattr(self, name) <= getattr(before, name) for name in self.__slots__)


def soak(rollouts: int, sandboxes: int, launcher: str, turns: int, home: Path) -> Findings:
    """Runs them, `home` being empty and ours. Raises what a run raises."""
    temporary = home / "t"
    temporary.mkdir()
    tempfile.tempdir = str(temporary)
    groups = max(1, rollouts // GROUP_SIZE)
    rollouts = groups * GROUP_SIZE
    marks: list[Mark] = []

    def one(name: str, groups: int, told: Callable[[Mark], None]) -> Mark:
        place = home / name
        place.mkdir()
        config = configuration(
            server.base_url,
            groups=groups,
            group_size=GROUP_SIZE,
            max_concurrent_sandboxes=sandboxes,
            launcher=launcher,
        )
        return asyncio.run(run(config, place, told, 1))

    with endpoint(0.0, turns) as server:
        one("first", 1, lambda mark: None)  # the first use of gRPC and of the tokenizer makes threads that stay
        before = Held.now(temporary)
        end = one("soak", groups, marks.append)
        after = _settled(before, temporary)
    warm = marks[min(int(rollouts * WARM_UP), WARM_UP_MOST) - 1]
    record = home / "soak" / "run"
    lines = {name: len(lines_of(record / name)) for name in ("rollouts.jsonl", "groups.jsonl")}
    found = Findings()
    finished = end.outcomes.get("finished", 0)
    found.add("rollouts finished", finished, f"of {rollouts}", at_least=rollouts)
    found.add("rollouts on record", lines["rollouts.jsonl"], f"of {rollouts}", at_least=rollouts)
    found.add("groups written", lines["groups.jsonl"], f"of {groups}", at_least=groups)
    found.add(
        f"memory, from rollout {warm.rollouts} to {rollouts}",
        (marks[-1].rss_bytes - warm.rss_bytes) / MIB,
        "MiB more",
        at_most=GROWTH_MIB,
        note=f"{warm.rss_bytes / MIB:.0f} to {marks[-1].rss_bytes / MIB:.0f} MiB",
    )
    for name in before.__slots__:
        found.add(
            f"{name} at the end",
            getattr(after, name),
            f"(at the start {getattr(before, name)})",
            at_most=getattr(before, name),
        )
    found.add("rollouts a second", rollouts / end.wall_s, "/s")
    found.add("CPU in the orchestrator per rollout", end.cpu_s / rollouts * 1e3, "CPU-ms")
    return found


def _settled(before: Held, temporary: Path) -> Held:
    """What is held once nothing more goes away."""
    until = time.monotonic() + SETTLE_S
    while not (after := Held.now(temporary)).within(before) and time.monotonic() < until:
        time.sleep(0.2)
    return after


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__.split("\n")[0])
    parser.add_argument("rollouts", type=int, metavar="N")
    parser.add_argument("--sandboxes", type=int, default=8, help="at a time")
    parser.add_argument("--launcher", choices=("docker", "process"), default="docker")
    parser.add_argument("--turns", type=int, default=4, help="completions of a rollout")
    given = parser.parse_args(arguments)
    if given.rollouts < 2 * GROUP_SIZE:
        parser.error(f"at least {2 * GROUP_SIZE} rollouts, or there is nothing to compare")
    logging.disable(logging.WARNING)
    load, started = machine.load(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak") as home:
        found = soak(given.rollouts, given.sandboxes, given.launcher, given.turns, Path(home))
    section = Section(
        "soak", f"{given.rollouts} rollouts", found, time.monotonic() - started, (load, machine.load())
    )
    print(table(section))
    return int(any(figure.holds is False for figure in found.figures))


if __name__ == "__main__":
    sys.exit(main())
