"""A run with `env.curriculum pools` that is killed at any instant and resumed draws the tasks of an undisturbed
one, under `process` and under `serve`."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest

from tests.fakes.inference import Reply, Script, ScriptedServer, by_task
from tests.fakes.runs import (
    essence,
    flags,
    lines,
    place,
    run,
    running,
    until,
    whole_lines,
    write_tasks,
)
from tests.fakes.trainers import Trainer, run_api
from tests.fakes.written import demand_as_published

TASKS, GROUPS, GROUP = 6, 30, 4
INSTANTS = 4


def script(delay_s: float = 0.0) -> Script:
    """q0 and q3 are hopeless, q1 and q4 easy; of the others some rollouts are right, by their seeds."""
    tasks = {}
    for n in range(TASKS):
        right, wrong = (Reply(f"Thought.\n<code>\nfinal_answer({m})\n</code>", delay_s=delay_s) for m in (n, -1))
        tasks[f"of q{n}!"] = [[[wrong], [wrong]], [[right], [right]], [[right], [wrong]]][n % 3]
    return by_task(tasks, by="seed")


def given(home: Path, url: str, **more: object) -> list[str]:
    settings = {"total_steps": GROUPS, "group_size": GROUP, "max_open_groups": 3, "curriculum": "pools", **more}
    return flags(home, url, **settings)


def drawn(home: Path) -> dict[str, str]:
    """Group → task."""
    groups = [line["overrides"][0] for line in lines(home / "run" / "groups.jsonl")]
    return {facts["rollout_id"].partition("-")[0]: facts["task_id"] for facts in groups}


@pytest.fixture(scope="module")
def undisturbed() -> tuple[list[str], dict[str, str]]:
    async def run_it(home: Path) -> tuple[list[str], dict[str, str]]:
        write_tasks(home / "tasks.jsonl", TASKS, bad=2)
        async with ScriptedServer("vllm", script()) as server:
            ended = await run(*given(home, server.base_url), directory=home)
        assert ended.code == 0, ended.stderr
        demand_as_published(home / "run")
        assert "pool: hopeless" in (home / "run" / "groups.html").read_text()
        return essence(home / "run" / "groups.jsonl"), drawn(home)

    with place() as home:
        return asyncio.run(run_it(home))


@pytest.mark.long
def test_mixed_tasks_come_most(undisturbed: tuple[list[str], dict[str, str]]) -> None:
    tasks = list(undisturbed[1].values())
    counts = {name: tasks.count(name) for name in tasks}
    assert len(tasks) == GROUPS
    assert len(counts) == TASKS
    assert min(counts["q2"], counts["q5"]) > max(counts[f"q{n}"] for n in (0, 1, 3, 4))


@pytest.mark.parametrize(
    "instant",
    [pytest.param(n, marks=pytest.mark.full if n else pytest.mark.long) for n in range(INSTANTS)],
)
async def test_killed_run_goes_on_with_the_same_tasks(
    home: Path, undisturbed: tuple[list[str], dict[str, str]], instant: int
) -> None:
    draw = random.Random()
    begun = int((1 + (instant + draw.random()) / INSTANTS * (GROUPS - 2)) * GROUP)
    write_tasks(home / "tasks.jsonl", TASKS, bad=2)
    async with ScriptedServer("vllm", script(delay_s=0.05)) as server:
        async with running(*given(home, server.base_url), directory=home) as first:
            await until(lambda: whole_lines(home / "run" / "rollouts.jsonl") >= begun, "run")
            await asyncio.sleep(draw.uniform(0, 0.2))
            first.signal(signal.SIGKILL)
            await first.ended()
        # The lag is the run's, whatever may be open now.
        again = await run("--env.resume", "run", "--env.max_open_groups", "8", directory=home)
    assert again.code == 0, again.stderr
    assert (essence(home / "run" / "groups.jsonl"), drawn(home)) == undisturbed
    results = [line["group"] for line in lines(home / "run" / "curriculum.jsonl")]
    assert len(set(results)) == len(results) >= GROUPS


@pytest.mark.parametrize(
    "how",
    [pytest.param("SIGKILL", marks=pytest.mark.long), pytest.param("SIGTERM", marks=pytest.mark.full)],
)
async def test_serve_draws_what_process_does_also_when_it_was_ended(
    home: Path, undisturbed: tuple[list[str], dict[str, str]], how: str
) -> None:
    write_tasks(home / "tasks.jsonl", TASKS, bad=2)
    async with run_api() as api, ScriptedServer("vllm", script(delay_s=0.02)) as server:
        trainer = await Trainer.registered(api.url, batch_size=GROUP)
        common = {"rollout_server_url": api.url, "max_batches_offpolicy": 50}
        words = given(home, server.base_url, **common)
        async with running(*words, directory=home, command="serve") as serve:
            await until(lambda: whole_lines(home / "run" / "groups.jsonl") >= GROUPS // 2, "half of it")
            serve.signal(signal.Signals[how])
            await serve.ended()
        words = given(home, server.base_url, **common, run_dir=None, resume=home / "run")
        async with running(*words, directory=home, command="serve") as serve:
            ended = await serve.ended()
        await trainer.rest()
    assert ended.code == 0, ended.stderr
    expected = undisturbed[1]
    # Some more groups may be under way when enough are delivered.
    assert {name: task for name, task in drawn(home).items() if name in expected}.items() <= expected.items()
    assert len(drawn(home)) >= GROUPS


@pytest.mark.slow
async def test_a_run_without_its_lag_or_with_torn_results_is_refused_by_name(home: Path) -> None:
    write_tasks(home / "tasks.jsonl", TASKS)
    async with ScriptedServer("vllm", script()) as server:
        assert (await run(*given(home, server.base_url, total_steps=8), directory=home)).code == 0
        results = home / "run" / "curriculum.jsonl"
        kept = results.read_text()
        results.write_text('{"schema":1}\n' + kept)
        again = await run("--env.resume", "run", "--env.total_steps", "9", directory=home)
        assert again.code == 2
        assert "curriculum.jsonl:1 is no result of a group" in again.stderr
        results.write_text(kept)
        other = await run("--env.resume", "run", "--env.curriculum", "none", directory=home)
        assert other.code == 2
        assert "env.curriculum" in other.stderr
    once = await run(*given(home, "http://127.0.0.1:9/v1", total_steps=-1, run_dir=home / "b"), directory=home)
    assert once.code == 2
    assert "set --env.total_steps" in once.stderr
