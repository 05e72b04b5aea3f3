"""A program whose requests run side by side, and one that hangs up."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import socket

import openai
import pytest

from sandbox.runner.endpoint.server import ProgramEndpoint
from sandbox.types import Completion, Request
from tests.fakes.inference import Call, Reply, ScriptedServer
from tests.fakes.runs import flags, lines, outcomes, run

TASKS = 1
ASK = """
import json, os, sys, urllib.request
from concurrent.futures import ThreadPoolExecutor

def ask(*talk, timeout=None):
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(talk)]
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps({"messages": messages}).encode(), headers
    )
    return json.load(urllib.request.urlopen(request, timeout=timeout))["choices"][0]["message"]["content"]
"""
# Twenty agents with two turns each. Each waits for its answers for less than twenty of them take in turn.
TWENTY = f"""{ASK}
def agent(number):
    first = ask(f"agent {{number}}", timeout=12)
    return ask(f"agent {{number}}", first, "go on", timeout=12)

with ThreadPoolExecutor(20) as agents:
    said = list(agents.map(agent, range(20)))
print(len(said))
"""
HANGS_UP = f"""{ASK}
task = sys.stdin.read()
first = ask(task)
try:
    ask(task, first, "slow", timeout=1)
except TimeoutError:
    pass
print(ask(task, first, "quick"))
"""


@pytest.mark.parametrize("parallel", [1, 3])
def test_the_endpoint_asks_for_so_many_completions_at_a_time(parallel: int) -> None:
    together, most, lock = 0, 0, threading.Lock()
    all_there = threading.Barrier(parallel)

    def answer(request: Request, connection: socket) -> Completion:
        nonlocal together, most
        with lock:
            together += 1
            most = max(most, together)
        all_there.wait(timeout=60)
        with lock:
            together -= 1
        return Completion("Hello", 1, 1, "stop")

    endpoint = ProgramEndpoint()
    with (
        endpoint.serving(answer, lambda end: None, parallel=parallel),
        openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="x", timeout=120) as client,
        ThreadPoolExecutor(6) as threads,
    ):
        asked = [
            threads.submit(client.chat.completions.create, model="m", messages=[{"role": "user", "content": "x"}])
            for _ in range(6)
        ]
        numbers = {future.result().id for future in asked}
    assert most == parallel
    assert len(numbers) == 6


async def test_twenty_agents_of_one_program_are_served_side_by_side(home: Path) -> None:
    (home / "agent.py").write_text(TWENTY)

    def script(call: Call) -> Reply:
        return Reply(f"answer {len(call.messages)}", delay_s=1.0)

    async with ScriptedServer("vllm", script) as endpoint:
        given = flags(home, endpoint.base_url, agent="program:agent.py", max_steps=40, group_size=1)
        ended = await run(*given, directory=home)
        served = endpoint.log.completed
    assert ended.code == 0, ended.stderr
    (line,) = lines(home / "run" / "rollouts.jsonl")
    assert (line["outcome"], line["answer"]) == ("finished", "20"), line["reason"]
    assert len(served) == 40
    assert max(sum(one.started_s <= at.started_s < (one.ended_s or 0) for one in served) for at in served) == 16
    assert sorted({turn["segment"] for turn in line["completions"]}) == list(range(20))
    assert sorted(turn["sequence"] for turn in line["completions"]) == list(range(1, 41))


@pytest.mark.parametrize("dialect", ["vllm", "openai"])
async def test_a_completion_whose_client_hung_up_is_cancelled_and_the_line_goes_on(
    home: Path, dialect: str
) -> None:
    (home / "agent.py").write_text(HANGS_UP)

    def script(call: Call) -> Reply:
        asked = call.messages[-1].content
        return Reply("4.5", delay_s=600.0 if asked == "slow" else 0.0)

    async with ScriptedServer(dialect, script) as endpoint:
        given = flags(home, endpoint.base_url, agent="program:agent.py", group_size=1)
        ended = await run(*given, directory=home)
        slow = [one for one in endpoint.log.completions if one.disconnected]
    assert ended.code == 0, ended.stderr
    assert len(slow) == 1
    assert outcomes(home / "run") == {"finished": 1}
    (line,) = lines(home / "run" / "rollouts.jsonl")
    assert [(turn["sequence"], turn["segment"]) for turn in line["completions"]] == [(1, 0), (3, 0)]
    assert "1 completion was given up by the program" in line["notes"]
