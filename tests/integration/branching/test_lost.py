"""Boxes, nodes and orchestrators that are killed at random turns cost no token: the run gives what an undisturbed
one gives, and nothing that was sampled and told is sampled again."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import oci_images
from tests.fakes.inference import Call, ScriptedServer
from tests.fakes.runs import (
    essence,
    flags,
    lines,
    outcome_seen,
    outcomes,
    place,
    run,
    running,
    until,
    write_tasks,
)
from tests.integration.test_oci_run import containers, environ

_WHY_NOT = oci_images.why_not()
TURNS, TASKS, GROUP = 5, 3, 2
BOX_TASKS, BOX_KILLS, DRIVER_TASKS, DRIVER_KILLS = 24, 100, 12, 40
ROLLOUTS = TASKS * GROUP


def script(call: Call) -> str:
    """The state of the turns before is needed, and every step takes a while. The seed decides who is right."""
    turn = call.turn + 1
    if turn == 1:
        code = "import time\nseen = [1]\nprint(seen)"
    elif turn < TURNS:
        code = f"seen.append({turn})\ntime.sleep(0.3)\nprint(seen)"
    else:
        code = f"final_answer(sum(seen) * {call.seed % 2})"
    return f"Thought {turn}.\n<code>\n{code}\n</code>"


async def undisturbed(directory: Path, server: ScriptedServer, tasks: int = TASKS, **limits: Any) -> list[str]:
    directory.mkdir()
    write_tasks(directory / "tasks.jsonl", tasks)
    ended = await run(*flags(directory, server.base_url, **limits), directory=directory)
    assert ended.code == 0, ended.stderr
    return essence(directory / "run" / "groups.jsonl")


@pytest.fixture
def home() -> Iterator[Path]:
    with place() as directory:
        yield directory


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("draw", [0, pytest.param(1, marks=pytest.mark.full)])
async def test_a_killed_run_goes_on_at_the_turns_of_its_rollouts(home: Path, number: int, draw: int) -> None:
    dice = random.Random(f"{number} {draw}")
    limits = {"group_size": GROUP, "warm_sandboxes": 0, "drain_timeout": 0}
    async with ScriptedServer("vllm", script) as server:
        expected = await undisturbed(home / "plain", server, **limits)
        plain = len(server.log.completed)
        write_tasks(home / "tasks.jsonl", TASKS)
        async with running(*flags(home, server.base_url, **limits), directory=home) as first:
            some = plain + dice.randrange(ROLLOUTS, ROLLOUTS * (TURNS - 1))
            await until(lambda: len(server.log.completed) >= some, "it works")
            first.signal(number)
            await first.ended()
        known = list((home / "run" / "under-way").iterdir())
        before = len(server.log.completed)
        again = await run("--env.resume", "run", directory=home)
    assert again.code == 0, again.stderr
    assert essence(home / "run" / "groups.jsonl") == expected
    record = lines(home / "run" / "rollouts.jsonl")
    continued = [line for line in record if line.get("continued")]
    assert len(continued) == len(known) > 0
    kept = sum(line["continued"][0]["turn"] for line in continued)
    assert not (home / "run" / "under-way").exists()
    assert max(Counter(line["rollout_id"] for line in record).values()) == 1
    # What was on its way when the run was killed is sampled again, and nothing else.
    assert len(server.log.completed) - plain <= plain + len(known)
    assert kept >= before - plain - TURNS * ROLLOUTS
    if number == signal.SIGKILL:
        assert outcomes(home / "run") == {"finished": ROLLOUTS}
        assert {line["attempt"] for line in continued} == {0}
    else:
        assert outcome_seen(home / "run", "cancelled")
        assert {line["attempt"] for line in continued} == {1}


@pytest.mark.full
@pytest.mark.docker
@pytest.mark.timeout(600)
@pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "")
async def test_boxes_that_are_ended_at_random_turns(home: Path) -> None:
    """So many of them are told to end, one after the other, whatever they do at that moment."""
    oci_images.stored_image()
    dice = random.Random(1)
    there: dict[str, float] = {}  # boxes, and from when on each may be ended
    killed = set[str]()
    limits: dict[str, Any] = {"group_size": GROUP, "launcher": "oci", "warm_sandboxes": 0, "max_retries": 50}
    async with ScriptedServer("vllm", script) as server:
        (home / "plain").mkdir()
        write_tasks(home / "plain" / "tasks.jsonl", BOX_TASKS)
        plain = await run(
            *flags(home / "plain", server.base_url, **limits), directory=home / "plain", environ=environ()
        )
        assert plain.code == 0, plain.stderr
        before = len(server.log.completed)
        write_tasks(home / "tasks.jsonl", BOX_TASKS)
        async with running(*flags(home, server.base_url, **limits), directory=home, environ=environ()) as started:
            while started.process.returncode is None and len(killed) < BOX_KILLS:
                await asyncio.sleep(0.05)
                now = time.monotonic()
                for name, pid in containers(home).items():
                    at = there.setdefault(name, now + dice.uniform(0.4, 1.4))
                    if at <= now and name not in killed and dice.random() < 0.7:
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGTERM)
                            killed.add(name)
            ended = await started.ended()
    assert ended.code == 0, ended.stderr
    assert essence(home / "run" / "groups.jsonl") == essence(home / "plain" / "run" / "groups.jsonl")
    end = json.loads((home / "run" / "end.json").read_text())
    print(f"{len(killed)} boxes ended;", end["continued"], "went on;", end["kept_tokens"], "tokens kept;", end)
    assert end["not_continued"] == {}
    assert end["continued"] > len(killed) / 4 > 4, "others had no completion, or had got no further"
    # What was awaited when a box was ended is sampled again, and first turns of boxes that had none.
    assert len(server.log.completed) - before <= before + len(killed)
    assert end["sampled_tokens"] == json.loads((home / "plain" / "run" / "end.json").read_text())["sampled_tokens"]


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_a_run_that_is_killed_again_and_again(home: Path) -> None:
    dice, kills = random.Random(2), 0
    limits: dict[str, Any] = {"group_size": GROUP, "warm_sandboxes": 0, "max_concurrent_sandboxes": 2}
    async with ScriptedServer("vllm", script) as server:
        expected = await undisturbed(home / "plain", server, DRIVER_TASKS, **limits)
        plain = len(server.log.completed)
        write_tasks(home / "tasks.jsonl", DRIVER_TASKS)
        arguments: tuple[str, ...] = tuple(flags(home, server.base_url, **limits))
        while True:
            seen = len(server.log.completed)
            async with running(*arguments, directory=home) as started:
                if kills < DRIVER_KILLS:
                    wanted = seen + dice.choice((1, 1, 2, 3))
                    await until(
                        lambda wanted=wanted, started=started: (
                            len(server.log.completed) >= wanted or started.process.returncode is not None
                        ),
                        "it works",
                    )
                    await asyncio.sleep(dice.uniform(0.0, 0.15))
                    kills += started.process.returncode is None
                    started.signal(signal.SIGKILL)
                ended = await started.ended()
            if ended.code >= 0:
                break
            if (home / "run" / "run.json").exists():
                arguments = ("--env.resume", "run")
        assert ended.code == 0, ended.stderr
    assert essence(home / "run" / "groups.jsonl") == expected
    record = lines(home / "run" / "rollouts.jsonl")
    continued = [one for line in record for one in line.get("continued", ())]
    print(f"{kills} kills; {len(continued)} went on; sampled {len(server.log.completed) - plain} of {plain}")
    assert [one for one in continued if one["refused"]] == []
    assert outcomes(home / "run") == {"finished": DRIVER_TASKS * GROUP}
    assert not (home / "run" / "under-way").exists()


@pytest.mark.full
async def test_an_evaluation_that_is_killed_goes_on_too(home: Path) -> None:
    limits: dict[str, Any] = {"group_size": None, "warm_sandboxes": 0}
    write_tasks(home / "tasks.jsonl", TASKS)
    async with ScriptedServer("vllm", script) as server:
        given = flags(home, server.base_url, **limits)
        async with running(*given, directory=home, command="evaluate") as first:
            await until(lambda: len(server.log.completed) >= 2 * TASKS, "it works")
            first.signal(signal.SIGKILL)
            await first.ended()
        known = list((home / "run" / "under-way").iterdir())
        again = await run("--env.resume", "run", directory=home, command="evaluate")
        assert again.code == 0, again.stderr
        assert len(server.log.completed) <= TASKS * TURNS + len(known)
    record = lines(home / "run" / "rollouts.jsonl")
    assert len([line for line in record if line.get("continued")]) == len(known) > 0
    assert f"continued      {len(known)}, tokens kept " in again.stdout
    assert not (home / "run" / "under-way").exists()
