"""64 rollouts whose sandboxes are ended by somebody else, one in ten of them at a random turn, beside the same run
left alone, in turns."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from bench.numbers import p50, ratio_of_pairs
from bench.report import Findings, Scale
from tests.fakes import oci_images
from tests.fakes.inference import Call, Reply, ScriptedServer
from tests.fakes.runs import flags, place, running, until, write_tasks
from tests.integration.test_oci_run import containers, environ

TURNS, SHARE = 4, 0.1
STEP_S, COMPLETION_S = 0.2, 0.5


async def losses(found: Findings, scale: Scale) -> None:
    groups, group_size = scale.pick((1, 4), (8, 8), (8, 8))
    rollouts = groups * group_size
    kills = max(1, round(SHARE * rollouts))
    wall: dict[bool, list[float]] = {False: [], True: []}
    tokens: dict[bool, list[float]] = {False: [], True: []}
    kept, gone_on = list[float](), list[float]()
    oci_images.stored_image()
    dice = random.Random(42)
    for pair in range(scale.pick(1, 2, 5)):
        for disturbed in (True, False) if pair % 2 else (False, True):
            wall_s, sampled, end = await _run(groups, group_size, kills if disturbed else 0, dice)
            wall[disturbed].append(wall_s)
            tokens[disturbed].append(sampled)
            if disturbed:
                kept.append(end["kept_tokens"])
                gone_on.append(end["continued"])
    found.samples |= {"left alone, s": wall[False], "with losses, s": wall[True]}
    promise = scale is not Scale.TINY
    note = f"{kills} of {rollouts} sandboxes ended; median of {len(wall[True])} pairs"
    found.add(
        "wall clock with losses / left alone",
        ratio_of_pairs(wall[True], wall[False]),
        "x",
        note=note,
        **({"at_most": 1.15} if promise else {}),
    )
    found.add(
        "sampled tokens with losses / left alone",
        ratio_of_pairs(tokens[True], tokens[False]),
        "x",
        note="by the completions that the endpoint answered",
        **({"at_most": 1.02} if promise else {}),
    )
    found.add("rollouts that went on", p50(gone_on), "", note="others had no completion, or were parked")
    found.add("tokens kept", p50(kept), "")


def _script(call: Call) -> Reply:
    turn = call.turn + 1
    code = f"import time\ntime.sleep({STEP_S})\nprint({turn})" if turn < TURNS else "final_answer(1)"
    return Reply(f"Thought {turn}.\n<code>\n{code}\n</code>", delay_s=COMPLETION_S)


async def _run(
    groups: int, group_size: int, kills: int, dice: random.Random
) -> tuple[float, int, dict[str, float]]:
    """(wall clock in seconds, tokens that were sampled, end.json)."""
    with place() as home:
        write_tasks(home / "tasks.jsonl", groups)
        async with ScriptedServer("vllm", _script) as server:
            given = flags(
                home,
                server.base_url,
                launcher="oci",
                group_size=group_size,
                max_concurrent_sandboxes=2 * group_size,
            )
            started_s = time.monotonic()
            async with running(*given, directory=home, environ=environ()) as started:
                killing = asyncio.create_task(_kill(home, server, groups * group_size, kills, dice))
                ended = await started.ended()
                wall_s = time.monotonic() - started_s
                killing.cancel()
            assert ended.code == 0, ended.stderr
            end = json.loads((home / "run" / "end.json").read_text())
            again = len(server.log.completed) / (groups * group_size * TURNS)
            return wall_s, round(end["sampled_tokens"] * again), end


def _answered(server: ScriptedServer, completions: int) -> bool:
    return len(server.log.completed) >= completions


async def _kill(home: Path, server: ScriptedServer, rollouts: int, kills: int, dice: random.Random) -> None:
    """Ends a random sandbox each time that so many completions were answered."""
    begun = len(server.log.completed)
    for number in sorted(dice.sample(range(1, rollouts * TURNS - rollouts), kills)):
        await until(partial(_answered, server, begun + number), "it works")
        if pids := list(containers(home).values()):
            with suppress(ProcessLookupError):
                os.kill(dice.choice(pids), signal.SIGTERM)
