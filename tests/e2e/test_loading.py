"""`orchestrator` is started before its endpoint serves, as scripts that start both do."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.e2e.endpoint import answers, scripted_endpoint
from tests.e2e.leftovers import containers_of
from tests.fakes.inference import Fault, ScriptedServer, always
from tests.fakes.runs import Ended, Running, flags, lines, outcomes, run, running

TASKS = 1
SCRIPT = {"of q0!": [[answers("0")], [answers("1")]]}
LONG = "--openai.startup_timeout=1h"


async def line_with(started: Running, text: str) -> str:
    """Reads what the command says until a line has the text."""
    assert started.process.stderr is not None
    said: list[str] = []
    async with asyncio.timeout(120):
        while text not in "".join(said[-1:]):
            said.append((await started.process.stderr.readline()).decode())
            assert said[-1], f"no {text!r} in {said}"
    return said[-1]


@pytest.mark.slow
@pytest.mark.docker
async def test_a_server_that_begins_to_listen_late_costs_time_and_nothing_else(home: Path) -> None:
    with socket.socket() as held:  # bound without listening: connections are refused
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        given = flags(home, f"http://127.0.0.1:{port}/v1", launcher="docker")
        async with running(*given, directory=home) as started, AsyncExitStack() as stack:
            line = await line_with(started, "waiting for the endpoint")
            assert line.startswith(
                f"waiting for the endpoint http://127.0.0.1:{port}/v1 for up to 300 s "
                "(--openai.startup_timeout; Ctrl-C ends it): connection failed"
            )
            held.close()
            endpoint = stack.enter_context(scripted_endpoint(SCRIPT, "--dialect", "vllm", "--port", str(port)))
            await line_with(started, f"the endpoint {endpoint.base_url} answers after")
            ended = await started.ended()
            assert containers_of(started.process.pid) == []
    assert ended.code == 0, ended.stderr
    assert "(exact token ids)" in ended.stderr
    assert outcomes(home / "run") == {"finished": 2}
    assert {line["token_source"] for line in lines(home / "run" / "rollouts.jsonl")} == {"sampled"}


async def test_an_endpoint_that_never_serves_ends_by_name_and_nothing_is_left(home: Path) -> None:
    async with ScriptedServer("llamacpp", always("x"), loading=lambda path: Fault("503")) as server:
        given = [*flags(home, server.base_url), "--openai.startup_timeout=1s"]
        ended = await run(*given, directory=home)
    assert ended.code == 3
    *_, waits, error = ended.stderr.splitlines()
    assert ended.stderr.count("waiting for") == 1
    assert waits.startswith(f"waiting for the endpoint {server.base_url} for up to 1 s")
    assert "HTTP 503" in waits
    assert error.startswith(f"orchestrator: the endpoint {server.base_url} does not serve after 1 s: HTTP 503")
    assert "--openai.startup_timeout" in error
    assert not (home / "run").exists()
    assert not list((home / "t").glob("orchestrator-*"))


@pytest.mark.parametrize("command", ["process", "evaluate", "serve"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_the_wait_at_once(home: Path, command: str, number: signal.Signals) -> None:
    """It does not wait for `env.drain_timeout`, as there is no rollout to bring to its end."""
    async with ScriptedServer("vllm", always("x"), loading=lambda path: Fault("503")) as server:
        size = {"group_size": None} if command == "evaluate" else {}
        given = [*flags(home, server.base_url, drain_timeout=3600, **size), LONG]
        async with running(*given, directory=home, command=command) as started:
            await line_with(started, "waiting for the endpoint")
            started.signal(number)
            ended = await started.ended()
    assert ended.code == 128 + number
    assert ended.stderr.strip().splitlines()[-1].endswith("nothing had begun")
    assert not ended.traceback
    assert not list((home / "t").glob("orchestrator-*"))


async def test_a_judge_that_is_loading_is_waited_for_beside_the_endpoint(home: Path) -> None:
    """Each serves once the other one was asked."""
    others: dict[str, ScriptedServer] = {}

    def until_asked(name: str) -> Fault | None:
        return None if name in others and others[name].log.all else Fault("503")

    policy = ScriptedServer("vllm", always(answers("0")), loading=lambda path: until_asked("judge"))
    judge = ScriptedServer("openai", always("VERDICT"), loading=lambda path: until_asked("policy"))
    async with policy, judge:
        others |= {"judge": judge, "policy": policy}
        judged = {"scoring_strategy": "judge", "judge_base_url": judge.base_url, "judge_model_name": "scripted"}
        ended = await run(
            *flags(home, policy.base_url, **judged, max_retries=0, group_policy="drop"), LONG, directory=home
        )
    assert f"the judge's endpoint {judge.base_url} answers after" in ended.stderr
    assert "(exact token ids)" in ended.stderr
    assert ended.code == 3
    assert "the judge gave no verdict" in ended.stderr.splitlines()[-1], "the trial was made when both served"


async def test_where_text_is_all_there_is_the_run_says_so_wherever_people_look(home: Path) -> None:
    async with ScriptedServer("openai", always(answers("0"))) as server:
        ended = await run(*flags(home, server.base_url), directory=home)
    assert ended.code == 0, ended.stderr
    why = "as vllm it answered: HTTP 404"
    assert f"(token ids made from text (retokenized): {why}" in summary_of(ended)
    assert re.search(rf"^token ids +made from text \(retokenized\): {why}", ended.stdout, re.MULTILINE)
    told = json.loads((home / "run" / "run.json").read_text())
    assert told["token_ids"] == "from text"
    assert told["why_text"].startswith(why)
    page = (home / "run" / "groups.html").read_text()
    block = re.search(r'id="run">(.*?)</script>', page, re.DOTALL)
    assert block is not None
    report = json.loads(block[1])
    (warning,) = report["warnings"]
    assert warning.startswith("2 rollouts are retokenized")
    assert why in warning
    assert any(name == "token ids" and value.startswith(f"from text: {why}") for name, value in report["facts"])


def summary_of(ended: Ended) -> str:
    (line,) = [line for line in ended.stderr.splitlines() if "; groups of " in line]
    return line
