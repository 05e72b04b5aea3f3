"""`env.start_at`: tasks begin at a turn of a solved rollout of an earlier run, which falls as they are solved."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import oci_images
from tests.fakes.inference import Call, Reply, ScriptedServer
from tests.fakes.runs import essence, flags, lines, place, run, running, until, whole_lines, write_tasks
from tests.fakes.trainers import Trainer, run_api
from tests.fakes.written import demand_as_published
from tests.integration.test_oci_run import environ

_WHY_NOT = oci_images.why_not()
pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(600),
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
]
TURNS, GROUPS, GROUP, OPEN = 3, 14, 2, 2
DELAY_S = 0.02


@pytest.fixture
def home() -> Iterator[Path]:
    oci_images.stored_image()
    with place() as directory:
        write_tasks(directory / "tasks.jsonl", 2)
        yield directory


def script(call: Call) -> Reply:
    """q0 is solved in three turns, q1 never."""
    turn = call.turn + 1
    answer = "sum(seen) - 3" if "of q0!" in call.task else "-1"
    code = "seen = [1]" if turn == 1 else f"seen.append({turn - 1})"
    code += f"\nfinal_answer({answer.replace('3', '4')})" if turn == TURNS else "\nprint(seen, object())"
    return Reply(f"Thought {turn} of {call.seed}.\n<code>\n{code}\n</code>", delay_s=DELAY_S)


def given(home: Path, url: str, **more: object) -> list[str]:
    settings = {"group_size": GROUP, "launcher": "oci", "warm_sandboxes": 0, "max_concurrent_sandboxes": 2, **more}
    return flags(home, url, **settings)


async def earlier(home: Path, url: str) -> None:
    ended = await run(*given(home, url, run_dir=home / "earlier"), directory=home, environ=environ())
    assert ended.code == 0, ended.stderr


def later(home: Path, url: str, name: str = "run", **more: object) -> list[str]:
    settings = {"start_at": home / "earlier", "total_steps": GROUPS, "max_open_groups": OPEN, **more}
    return given(home, url, run_dir=home / name, **settings)


def begun(run_directory: Path) -> dict[int, tuple[str, int]]:
    """Group → its task, and the turn at which its rollouts began."""
    groups: dict[int, set[tuple[str, int]]] = {}
    for line in lines(run_directory / "rollouts.jsonl"):
        groups.setdefault(line["group"], set()).add((line["task_id"], line.get("branch", {"turn": 1})["turn"]))
    return {number: one for number, (one,) in groups.items()}


def turns_of(run_directory: Path, task: str) -> list[int]:
    return [turn for _, (name, turn) in sorted(begun(run_directory).items()) if name == task]


@pytest.mark.slow
async def test_the_turn_falls_as_it_is_solved_and_the_beginning_is_masked(home: Path) -> None:
    async with ScriptedServer("vllm", script) as server:
        await earlier(home, server.base_url)
        ended = await run(*later(home, server.base_url), directory=home, environ=environ())
        assert ended.code == 0, ended.stderr
        back = later(home, server.base_url, "back", start_at=f"{home / 'earlier'} back:2", total_steps=2)
        ended_back = await run(*back, directory=home, environ=environ())
        assert ended_back.code == 0, ended_back.stderr
    turns = turns_of(home / "run", "q0")
    assert turns == sorted(turns, reverse=True)
    assert set(turns) == {3, 2, 1}, "no turn is left out, though groups were under way"
    assert set(turns_of(home / "run", "q1")) == {1}, "it was never solved"
    assert turns_of(home / "back", "q0") == [2]
    demand_as_published(home / "run")
    assert f"turn 3: {turns.count(3) * GROUP}" in ended.stdout
    assert "rollouts begun at" in (home / "run" / "groups.html").read_text()
    recorded = {line["rollout_id"]: line for line in lines(home / "run/rollouts.jsonl")}
    for group in lines(home / "run/groups.jsonl"):
        for facts, masks in zip(group["overrides"], group["masks"], strict=True):
            own = [turn for turn in recorded[facts["rollout_id"]]["completions"] if not turn.get("inherited")]
            assert sum(mask != -100 for mask in masks) == sum(len(turn["token_ids"]) for turn in own)
    verified = await run(str(home / "run"), directory=home, command="verify")
    assert verified.code == 0, verified.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", ["process", pytest.param("serve", marks=pytest.mark.full)])
async def test_a_killed_run_begins_its_groups_where_it_would_have(home: Path, command: str) -> None:
    async with ScriptedServer("vllm", script) as server:
        await earlier(home, server.base_url)
        plain = await run(*later(home, server.base_url, "plain"), directory=home, environ=environ())
        assert plain.code == 0, plain.stderr
        if command == "serve":
            await served(home, server.base_url)
        else:
            await killed(home, server.base_url)
    expected, made = begun(home / "plain"), begun(home / "run")
    assert {number: made[number] for number in expected if number in made} == {
        number: one for number, one in expected.items() if number in made
    }
    if command == "process":
        assert essence(home / "run/groups.jsonl") == essence(home / "plain/groups.jsonl")
    else:
        assert len(made) >= GROUPS


async def killed(home: Path, url: str) -> None:
    for share in (0.3, 0.6):
        wanted = int(share * GROUPS * GROUP)
        name = ["--env.resume", str(home / "run")] if (home / "run").exists() else later(home, url)
        async with running(*name, directory=home, environ=environ()) as started:
            await until(lambda wanted=wanted: whole_lines(home / "run/rollouts.jsonl") >= wanted, "it runs")
            await asyncio.sleep(random.uniform(0, 0.2))
            started.signal(signal.SIGKILL)
            await started.ended()
    ended = await run("--env.resume", str(home / "run"), directory=home, environ=environ())
    assert ended.code == 0, ended.stderr


async def served(home: Path, url: str) -> None:
    """Killed once, under a trainer that takes what comes."""
    async with run_api() as api:
        trainer = await Trainer.registered(api.url, batch_size=GROUP)
        common = {"rollout_server_url": api.url, "max_batches_offpolicy": 50}
        words = later(home, url, **common)
        async with running(*words, directory=home, environ=environ(), command="serve") as serve:
            await until(lambda: whole_lines(home / "run/groups.jsonl") >= GROUPS // 2, "half of it")
            serve.signal(signal.SIGKILL)
            await serve.ended()
        resumed = ("--env.resume", str(home / "run"), f"--env.rollout_server_url={api.url}")
        ended = await run(*resumed, directory=home, environ=environ(), command="serve")
        await trainer.rest()
    assert ended.code == 0, ended.stderr


@pytest.mark.slow
async def test_what_cannot_be_is_refused_by_name(home: Path) -> None:
    async with ScriptedServer("vllm", script) as server:
        await earlier(home, server.base_url)
        (home / "templates").mkdir()
        for more, reason in (
            ({"start_at": home / "none"}, "env.start_at: no run in"),
            ({"curriculum": "pools"}, "env.start_at: not with env.curriculum"),
            ({"instructions": "be brief"}, "has another agent: env.instructions differ"),
            ({"sandbox_tools": '["python:json:dumps"]'}, "env.sandbox_tools"),
        ):
            ended = await run(*later(home, server.base_url, **more), directory=home, environ=environ())
            assert (ended.code, ended.stderr.count("\n")) == (2, 1), ended.stderr
            assert reason in ended.stderr
        ended = await run(f"--env.start_at={home / 'earlier'}", directory=home, command="evaluate")
        assert "this command does not use --env.start_at" in ended.stderr
        record = home / "earlier/rollouts.jsonl"
        unsolved = [line for line in lines(record) if line["task_id"] == "q1"]
        record.write_text("".join(f"{json.dumps(line)}\n" for line in unsolved))
        ended = await run(*later(home, server.base_url), directory=home, environ=environ())
        assert "no solved rollout to begin in" in ended.stderr


async def test_a_beginning_that_is_not_reached_is_replaced_by_a_whole_rollout(home: Path) -> None:
    """The record's box printed something else than a fresh one will."""
    async with ScriptedServer("vllm", script) as server:
        await earlier(home, server.base_url)
        record = home / "earlier/rollouts.jsonl"
        record.write_text(record.read_text().replace("[1] <object", "[7] <object"))
        ended = await run(*later(home, server.base_url, total_steps=1), directory=home, environ=environ())
        assert ended.code == 0, ended.stderr
    outcomes = [(line["outcome"], "branch" in line) for line in lines(home / "run/rollouts.jsonl")]
    assert sorted(outcomes) == [("finished", False)] * GROUP + [("record_error", True)] * GROUP
