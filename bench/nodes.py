"""The driver of a run over many nodes: how many rollouts a second it plans, grades and writes, and what bounds it.

The driver is the real one, from the tasks to the files. The nodes are simulated: rollouts last as long as real
ones do, and the finished attempt, 4,000 tokens of it, is unpickled here as it is when it comes through Ray.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import random
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from bench.live import Lag
from bench.machine import process_cpu_s, rss_bytes
from bench.numbers import p99
from bench.report import Findings, Scale
from orchestrator import Orchestrator, load_config
from orchestrator.cluster.order import Broken, Delivery, Inspection, NodeFacts, Opening, Order, Pulse, software
from orchestrator.cluster.remote import ListedNode
from orchestrator.completion.replay import Replayed
from orchestrator.completion.tokenizer import load_tokenizer
from orchestrator.rules.observer import Listener, Observer
from orchestrator.run.directory import RunDirectory
from orchestrator.run.groups import GroupsFile
from orchestrator.settings.config import Config
from orchestrator.types import Attempt, Ended, EndedName, Member, Task
from tests.fakes.synthetic_run import Rollouts
from tests.fakes.tokenizer import tokenizer_folder

TITLE = "the driver of a run over many nodes, which are simulated"
GROUP_SIZE = 8
SANDBOXES = 32  # on each node
ROLLOUT_S = (4.0, 12.0)  # what a rollout of a few steps takes
LINE_TOKENS = 4000
STEPS = 5
KINDS = 32  # different attempts that come back
SEED = 18


def deliveries() -> list[bytes]:
    """Finished attempts of about LINE_TOKENS, pickled as they cross."""
    tokenizer = load_tokenizer(str(tokenizer_folder()))
    made = Rollouts(SEED, tokenizer)
    found = []
    for kind in range(KINDS):
        plan = made.plan(Task("q", "What is it?", "42"), 0, kind)
        words = "".join(f"    value_{n} = table[{n * kind % 97}] + {n}\n" for n in range(31))
        code = f"Thought: step {kind}.\n<code>\n{words}</code>"
        seen = "Execution logs:\n" + "".join(f"row {n}: {n * 7 + kind}\n" for n in range(31))
        last = f"Thought: done.\n<code>\nfinal_answer({42 if kind % 2 else 41})\n</code>"
        steps = [*[(code, seen, "")] * (STEPS - 1), (last, "", "")]
        attempt = made.attempt(plan, steps, Ended(EndedName.FINISHED), "42" if kind % 2 else "41")
        found.append(pickle.dumps(Delivery(attempt.record, attempt.outcome), pickle.HIGHEST_PROTOCOL))
    return found


class SimulatedNode:
    """A host actor whose rollouts last as long as they are told to."""

    def __init__(self, back: Sequence[bytes], lasting: Sequence[float]) -> None:
        self._back = itertools.cycle(back)
        self._lasting = itertools.cycle(lasting)

    async def look(self, image: str, *, docker: bool) -> Inspection:
        return Inspection(software(), None)

    async def open(self, opening: Opening) -> NodeFacts | Broken:
        return NodeFacts(True, {"launcher": "process"}, {}, ())

    async def carry_out(self, order: Order) -> Delivery:
        pickle.dumps(order, pickle.HIGHEST_PROTOCOL)
        await asyncio.sleep(next(self._lasting))
        delivery: Delivery = pickle.loads(next(self._back))
        return delivery

    async def pulse(self) -> Pulse:
        return Pulse()

    async def replayed(self) -> Replayed | None:
        return None

    async def drain(self) -> None:
        """Nothing is kept warm."""

    async def close(self) -> None:
        """Nothing is open."""

    def end(self) -> None:
        """There is no process."""


class SimulatedCluster:
    """In the place of `RayLink`."""

    def __init__(self, nodes: int, back: Sequence[bytes], lasting: tuple[float, float]) -> None:
        self._nodes = nodes
        self._back = back
        self._lasting = lasting

    async def open(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """As `open`."""

    async def nodes(self) -> list[ListedNode]:
        return [ListedNode(f"{number:06x}", f"node-{number}") for number in range(self._nodes)]

    async def start(self, node_id: str) -> SimulatedNode:
        draw = random.Random(int(node_id, 16))
        return SimulatedNode(self._back, [draw.uniform(*self._lasting) for _ in range(SANDBOXES)])


@dataclass(frozen=True, slots=True)
class Spent:
    """What was used by then. CPU in seconds: `loop` of the event loop's thread, `graders` of the processes that
    grade."""

    rollouts: int
    wall_s: float
    cpu_s: float
    loop_s: float
    graders_s: float
    rss_bytes: int


class Meter(Listener):
    """Notes what is used when so many rollouts are over."""

    def __init__(self, at: Sequence[int]) -> None:
        self._at = set(at)
        self._rollouts = 0
        self.spent: list[Spent] = []

    def attempt(self, result: Member | Attempt) -> None:
        """Runs in the event loop's thread."""
        if not isinstance(result, Member):
            raise RuntimeError(f"{result.plan.rollout_id}: {result.outcome}")
        self._rollouts += 1
        if self._rollouts in self._at:
            self.spent.append(
                Spent(
                    self._rollouts,
                    time.perf_counter(),
                    time.process_time(),
                    time.thread_time(),
                    sum(process_cpu_s(pid) for pid in _children()),
                    rss_bytes(),
                )
            )


def _children() -> list[int]:
    lists = (task / "children" for task in Path("/proc/self/task").iterdir())
    return [int(pid) for children in lists for pid in children.read_text().split()]


async def measure(scale: Scale) -> Findings:
    found = Findings()
    back = await asyncio.to_thread(deliveries)
    lasting = scale.pick((0.05, 0.2), ROLLOUT_S, ROLLOUT_S)
    levels = scale.pick({2: 16}, {10: 320, 100: 4000, 1000: 6000}, {10: 640, 100: 16000, 1000: 48000})
    for nodes, rollouts in levels.items():
        lag = Lag()
        begin, end = await _run(SimulatedCluster(nodes, back, lasting), rollouts, lag)
        count = end.rollouts - begin.rollouts
        name, live = f"{nodes} nodes", nodes * SANDBOXES
        promise = {"at_least": 300.0} if nodes == 1000 else {}
        found.add(
            f"{name}: rollouts", count / (end.wall_s - begin.wall_s), "/s", note=f"{live} sandboxes", **promise
        )
        for what, spent in (
            ("CPU of the driver", end.cpu_s - begin.cpu_s),
            ("of it the event loop's thread", end.loop_s - begin.loop_s),
            ("CPU of the grading processes", end.graders_s - begin.graders_s),
        ):
            found.add(f"{name}: {what}", spent / count * 1e3, "ms per rollout")
        found.add(f"{name}: memory of the driver", end.rss_bytes / 1e6, "MB resident")
        grown = (end.rss_bytes - begin.rss_bytes) / count / 1e3
        found.add(f"{name}: memory of the driver", grown, "KB more per rollout")
        found.add(f"{name}: loop lag, p99", p99(lag.late_s) * 1e3, "ms", note=f"most {max(lag.late_s) * 1e3:.0f}")
    return found


async def _run(cluster: SimulatedCluster, rollouts: int, lag: Lag) -> tuple[Spent, Spent]:
    """What was used after a tenth of the rollouts, and after nine tenths."""
    config = load_config(
        env={
            "cluster": "ray",
            "launcher": "process",
            "group_size": GROUP_SIZE,
            "total_steps": rollouts // GROUP_SIZE,
            "max_concurrent_sandboxes": SANDBOXES,
            "warm_sandboxes": 0,
            "tokenizer_name": str(tokenizer_folder()),
            "seed": 1,
        },
        openai={"base_url": "http://127.0.0.1:9/v1", "model_name": "bench"},
    )
    meter = Meter([rollouts // 10, rollouts * 9 // 10])
    tasks = [Task(f"q{n}", f"What is number {n}?", "42") for n in range(100)]
    with tempfile.TemporaryDirectory(prefix="bench") as home:
        async with (
            _driver(config, cluster, meter, Path(home)) as (orchestrator, groups_file),
            lag.watched(),
            aclosing(orchestrator.groups(tasks)) as groups,
        ):
            async for group in groups:
                if group.dropped is not None:
                    raise RuntimeError(group.dropped)
                await groups_file.append(group)
    begin, end = meter.spent
    return begin, end


@asynccontextmanager
async def _driver(
    config: Config, cluster: SimulatedCluster, meter: Meter, home: Path
) -> AsyncIterator[tuple[Orchestrator, GroupsFile]]:
    """As `orchestrator process` opens it."""
    observer = Observer(listeners=[meter], say=lambda line: None)
    with patch("orchestrator.cluster.link.RayLink", lambda address: cluster):
        async with Orchestrator(config, observer) as orchestrator:
            with (
                closing(RunDirectory(home / "run")) as directory,
                closing(GroupsFile(home / "groups.jsonl", form=orchestrator.maker.group_format)) as groups_file,
            ):
                observer.writer = directory
                yield orchestrator, groups_file
