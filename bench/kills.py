"""kill -9 at random instants of a run, resumed, beside an undisturbed one: `python -m bench.kills N`.

Each time a run of 32 rollouts in containers is killed at an instant drawn evenly over its whole length, its start
included, and gone on with. Its groups must be those of the undisturbed run (the endpoint answers by seed), no
rollout may be on record twice, no line be torn, and after 30 s nothing of it may be left. Exits with 1 when
anything was lost, doubled, torn or left.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from bench import machine
from tests.e2e.leftovers import containers_of
from tests.fakes.inference import ScriptedServer
from tests.fakes.runs import (
    Ended,
    answers,
    essence,
    flags,
    lines,
    place,
    run,
    running,
    whole_lines,
    write_tasks,
)

TASKS, GROUP_SIZE, SANDBOXES = 8, 4, 8
ROLLOUTS = TASKS * GROUP_SIZE
DELAY_S = 0.2  # of a completion
LEFT_S = 30.0


@dataclass(frozen=True, slots=True)
class Harm:
    """What a kill has done. All 0: nothing."""

    lost: int = 0  # groups of the undisturbed run that are missing
    doubled: int = 0  # groups too many, rollouts on record twice
    torn: int = 0  # lines that are no JSON, files that end in half a line
    left: int = 0  # containers and directories, 30 s later

    def __bool__(self) -> bool:
        return any((self.lost, self.doubled, self.torn, self.left))


def arguments(home: Path, base_url: str, launcher: str) -> list[str]:
    """The command line of the run."""
    return flags(home, base_url, launcher=launcher, group_size=GROUP_SIZE, max_concurrent_sandboxes=SANDBOXES)


async def undisturbed(launcher: str) -> tuple[list[str], float]:
    """(its groups, how long it takes)."""
    with place() as home:
        write_tasks(home / "tasks.jsonl", TASKS)
        async with ScriptedServer("vllm", answers(TASKS, delay_s=DELAY_S)) as server:
            started = time.monotonic()
            ended = await run(*arguments(home, server.base_url, launcher), directory=home)
            _check(ended)
        return essence(home / "run" / "groups.jsonl"), time.monotonic() - started


async def killed(instant_s: float, expected: list[str], launcher: str) -> tuple[Harm, int]:
    """(the harm, rollouts on record when it was killed)."""
    with place() as home:
        write_tasks(home / "tasks.jsonl", TASKS)
        rollouts, groups = home / "run" / "rollouts.jsonl", home / "run" / "groups.jsonl"
        async with ScriptedServer("vllm", answers(TASKS, delay_s=DELAY_S)) as server:
            command = arguments(home, server.base_url, launcher)
            async with running(*command, directory=home) as first:
                await asyncio.sleep(instant_s)
                first.signal(signal.SIGKILL)
                await first.ended()
                pids = [first.process.pid]
            before = whole_lines(rollouts)
            # Killed before it had begun, there is nothing to go on with: the same command once more.
            begun = (home / "run" / "run.json").exists()
            async with running(*(["--env.resume", "run"] if begun else command), directory=home) as again:
                pids.append(again.process.pid)
                _check(await again.ended())
        torn = 0
        try:
            ids = Counter(str(line["rollout_id"]) for line in lines(rollouts))
            found = Counter(essence(groups))
        except (ValueError, AssertionError):
            return Harm(torn=1), before
        wanted = Counter(expected)
        doubled = (found - wanted).total() + sum(count - 1 for count in ids.values())
        return Harm((wanted - found).total(), doubled, torn, await _left(home, pids)), before


async def _left(home: Path, pids: list[int]) -> int:
    """Containers and directories that are still there when the time is over."""
    until = time.monotonic() + LEFT_S
    while True:
        containers = [name for pid in pids for name in await asyncio.to_thread(containers_of, pid)]
        directories = list((home / "t").glob("orchestrator-*"))
        if not (count := len(containers) + len(directories)) or time.monotonic() > until:
            return count
        await asyncio.sleep(0.5)


def _check(ended: Ended) -> None:
    if ended.code != 0:
        raise RuntimeError(f"a run ended with {ended.code}:\n{ended.stderr}")


async def kills(count: int, launcher: str, seed: int) -> int:
    """How many kills did harm."""
    draw = random.Random(seed)
    expected, length_s = await undisturbed(launcher)
    print(f"undisturbed: {len(expected)} groups in {length_s:.1f} s (load {machine.load():.1f})", flush=True)
    total, harmful = Counter[str](), 0
    for number in range(count):
        instant_s = draw.uniform(0, length_s)
        harm, before = await killed(instant_s, expected, launcher)
        harmful += bool(harm)
        total.update(lost=harm.lost, doubled=harm.doubled, torn=harm.torn, left=harm.left)
        print(f"{number + 1}: at {instant_s:.2f} s, {before} of {ROLLOUTS} on record: {harm}", flush=True)
    print(
        f"{count} kills of a run of {ROLLOUTS} rollouts ({launcher}): "
        + ", ".join(f"{name} {total[name]}" for name in ("lost", "doubled", "torn", "left"))
        + f" (load {machine.load():.1f})"
    )
    return harmful


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kills", description=__doc__.split("\n")[0])
    parser.add_argument("kills", type=int, metavar="N")
    parser.add_argument("--launcher", choices=("docker", "process"), default="docker")
    parser.add_argument("--seed", type=int, default=None, help="of the instants; default: other ones each time")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.randrange(2**31)
    print(f"seed {seed}", flush=True)
    return int(bool(asyncio.run(kills(given.kills, given.launcher, seed))))


if __name__ == "__main__":
    sys.exit(main())
