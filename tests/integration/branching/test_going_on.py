"""A rollout whose sandbox is lost goes on at its last completed turn, in a fresh one, with the ids it has."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.fakes import oci_images
from tests.fakes.inference import Call, ScriptedServer
from tests.fakes.runs import essence, flags, lines, outcomes, run, running, until, write_tasks
from tests.integration.test_oci_run import containers, environ

_WHY_NOT = oci_images.why_not()
pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(600),
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
]
TURNS = 4


def script(call: Call) -> str:
    """The state of the turns before is needed, and every step takes a while."""
    turn = call.turn + 1
    if turn == 1:
        code = "import time\nseen = [1]\nprint(seen)"
    elif turn < TURNS:
        code = f"seen.append({turn})\ntime.sleep(0.3)\nprint(seen, final_answer)"
    else:
        code = "final_answer(sum(seen))"
    return f"Thought {turn}.\n<code>\n{code}\n</code>"


async def test_it_goes_on_at_its_turn_with_the_same_ids(home: Path) -> None:
    write_tasks(home / "tasks.jsonl", 1)
    (other := home / "other").mkdir()
    write_tasks(other / "tasks.jsonl", 1)
    limits = {"group_size": 2, "warm_sandboxes": 0, "max_concurrent_sandboxes": 2, "launcher": "oci"}
    async with ScriptedServer("vllm", script) as server:
        plain = await run(*flags(other, server.base_url, **limits), directory=other, environ=environ())
        assert plain.code == 0, plain.stderr
        before = len(server.log.completed)
        server.at_most = before + 4
        async with running(*flags(home, server.base_url, **limits), directory=home, environ=environ()) as started:
            await until(lambda: len(server.log.completed) == server.at_most, "it works")
            for pid in containers(home).values():
                os.kill(pid, signal.SIGTERM)
            server.at_most = None
            ended = await started.ended()
    assert ended.code == 0, ended.stderr
    assert essence(home / "run" / "groups.jsonl") == essence(other / "run" / "groups.jsonl")
    assert outcomes(home / "run") == {"finished": 2}
    assert len(server.log.completed) == 2 * before, "nothing was sampled twice"
    print([line["continued"] for line in lines(home / "run/rollouts.jsonl")], ended.stderr)
    assert all(line["continued"] for line in lines(home / "run/rollouts.jsonl"))
