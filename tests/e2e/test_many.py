"""Many rollouts at once through the library: all come home, nothing is left of them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import aclosing
from pathlib import Path

import pytest

from orchestrator import Orchestrator, load_config
from orchestrator.tasks import open_tasks
from orchestrator.types import Ended, EndedName, Group
from tests.e2e.endpoint import ScriptedEndpoint, answers, says, scripted_endpoint
from tests.e2e.leftovers import containers_of
from tests.fakes.runs import place, write_tasks
from tests.fakes.tokenizer import tokenizer_folder

pytestmark = pytest.mark.full

GROUPS, GROUP_SIZE, STEPS, SANDBOXES = 8, 8, 4, 16
DELAY_S = 0.2
SETTLE_S = 120.0


def a_script() -> dict[str, list[list[str]]]:
    """Of each group every second rollout is right; all take the same number of steps."""
    steps = [says(f"Step {n}.", f"total = {n} if {n} == 1 else total + {n}\nprint(total)") for n in (1, 2, 3)]
    return {f"of q{n}!": [[*steps, answers(str(n))], [*steps, answers("-1")]] for n in range(GROUPS)}


async def run(endpoint: ScriptedEndpoint, home: Path, groups: int, group_size: int) -> list[Group]:
    config = load_config(
        env={
            "group_size": group_size,
            "max_concurrent_sandboxes": SANDBOXES,
            "tokenizer_name": str(tokenizer_folder()),
            "total_steps": groups,
            "token_source": "exact",
            "seed": 1,
        },
        openai={"base_url": endpoint.base_url, "model_name": "scripted"},
    )
    tasks = open_tasks(f"jsonl:{home / 'tasks.jsonl'}", dataset_path=home, split="validation")
    async with aclosing(Orchestrator(config).groups(tasks)) as made:
        return [group async for group in made]


@pytest.mark.docker
def test_64_rollouts_at_16_sandboxes_all_come_home(monkeypatch: pytest.MonkeyPatch) -> None:
    with place() as home, scripted_endpoint(a_script(), "--dialect", "vllm", delay_s=DELAY_S) as endpoint:
        monkeypatch.setattr("tempfile.tempdir", str(home))
        write_tasks(home / "tasks.jsonl", GROUPS)
        # The first use of gRPC and of the tokenizer makes threads that stay.
        assert len(asyncio.run(run(endpoint, home, 1, 1))) == 1
        before = open_things()
        started, cpu = time.monotonic(), time.process_time()
        groups = asyncio.run(run(endpoint, home, GROUPS, GROUP_SIZE))
        wall_s, cpu_s = time.monotonic() - started, time.process_time() - cpu
        print(f"{GROUPS * GROUP_SIZE} rollouts: {wall_s:.1f} s, {cpu_s:.1f} CPU-s of the orchestrator's own")
        assert [group.dropped for group in groups] == [None] * GROUPS
        for group in groups:
            assert [m.attempt.outcome for m in group.members_G] == [Ended(EndedName.FINISHED)] * GROUP_SIZE
            assert sorted(m.attempt.record.answer or "" for m in group.members_G) == sorted(
                [group.task.answer or "", "-1"] * (GROUP_SIZE // 2)
            )
            assert all(len(m.attempt.record.turns) == STEPS for m in group.members_G)
            assert len(group.attempts) == GROUP_SIZE
        assert len({a.record.sandbox_id for group in groups for a in group.attempts}) == GROUPS * GROUP_SIZE
        assert len(endpoint.completions()) == (GROUPS * GROUP_SIZE + 1) * STEPS
        assert containers_of(os.getpid()) == []
        assert list(home.glob("orchestrator-*")) == []
        settled(before)


def open_things() -> tuple[int, int, int]:
    """(threads of Python, threads of this process, file descriptors)."""
    return threading.active_count(), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def settled(before: tuple[int, int, int]) -> None:
    """Nothing more is open than before; threads of C libraries get a moment to notice."""
    deadline = time.monotonic() + SETTLE_S
    while any(now > then for now, then in zip(open_things(), before, strict=True)):
        assert time.monotonic() < deadline, (before, open_things())
        time.sleep(0.1)
