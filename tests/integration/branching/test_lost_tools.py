"""Calls of host tools that a program made over `/mcp` are answered from the record when its sandbox is lost: no
tool is called twice, and the program reads what it read."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from tests.fakes import oci_images
from tests.fakes.inference import Call, Reply, ScriptedServer
from tests.fakes.runs import flags, lines, run, running, until
from tests.integration.test_oci_run import containers, environ
from tests.integration.test_program_tools import CLIENT

_WHY_NOT = oci_images.why_not()
pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(300),
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
]
# Each answer is another one, and what was called is seen from outside.
TOOLS = '''
import pathlib, secrets

def draw(name: str) -> str:
    """Draws a word.

    Args:
        name: Whose.
    """
    with open(pathlib.Path(__file__).with_name("called"), "a") as file:
        file.write(name + "\\n")
    if name == "fails":
        raise ValueError("no " + secrets.token_hex(4))
    return name + secrets.token_hex(4)
'''
PROGRAM = f"""{CLIENT}
seen = [call("draw", name="first"), call("draw", name="fails")]
complete(f"one {{seen}}")
with ThreadPoolExecutor(8) as threads:
    seen += threads.map(lambda n: call("draw", name=f"side{{n}}"), range(8))
seen += [call("draw", name="again"), call("draw", name="again")]
complete(f"two {{seen}}")
seen.append(call("draw", name="behind"))
complete(f"three {{seen}}")
seen.append(call("draw", name="last"))
print(json.dumps([seen, complete(f"four {{seen}}")]))
"""
NAMES = ["first", "fails", *(f"side{n}" for n in range(8)), "again", "again", "behind", "last"]


@pytest.mark.parametrize("lost", ["sandbox", pytest.param("orchestrator", marks=pytest.mark.long)])
async def test_a_program_reads_what_its_tools_said_before_the_loss(home: Path, lost: str) -> None:
    held = asyncio.Event()

    def script(call: Call) -> Reply:
        if "three" in call.messages[-1].content and not held.is_set():
            held.set()
            return Reply("never read", delay_s=60.0)
        return Reply("ok")

    task = {"task_id": "t", "question": "Ask.", "answer": "ok"}
    (home / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    (home / "draw_tools.py").write_text(TOOLS)
    (home / "agent.py").write_text(PROGRAM)
    more = {"agent": "program:agent.py", "group_size": 1, "warm_sandboxes": 0, "launcher": "oci"}
    async with ScriptedServer("vllm", script) as server:
        given = flags(home, server.base_url, host_tools=json.dumps(["python:draw_tools:draw"]), **more)
        async with running(*given, directory=home, environ=environ()) as started:
            await until(held.is_set, "it asks for the third completion")
            if lost == "sandbox":
                for pid in containers(home).values():
                    os.kill(pid, signal.SIGTERM)
            else:
                started.signal(signal.SIGKILL)
            ended = await started.ended()
        if lost == "orchestrator":
            given = [*given, "--env.resume", str(home / "run")]
            ended = await run(*given, directory=home, environ=environ())
        sampled = len(server.log.completed)
    assert ended.code == 0, ended.stderr
    (line,) = [one for one in lines(home / "run" / "rollouts.jsonl") if one["outcome"] == "finished"]
    assert line["continued"][-1]["turn"] == 2
    assert not line["continued"][-1]["refused"]
    assert sampled == 4, "nothing that was read was sampled twice"
    seen, _ = json.loads(line["answer"])
    assert sorted(seen) == sorted(call["output"] or call["error"] for call in line["tool_calls"])
    assert sorted((home / "called").read_text().split()) == sorted(NAMES), "no tool is called twice"
