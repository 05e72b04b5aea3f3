"""The Docker Engine is killed, or stopped, and started again in mid-run: the run finishes, nothing of that is
scored, nothing is left."""

from __future__ import annotations

import asyncio
import signal

import pytest

from orchestrator.launch.names import DEFAULT_IMAGE
from tests.fakes import own_engine
from tests.fakes.inference import ScriptedServer
from tests.fakes.own_engine import OwnEngine
from tests.fakes.runs import (
    answers,
    flags,
    lines,
    outcomes,
    place,
    printed_outcomes,
    running,
    until,
    whole_lines,
    write_tasks,
)

pytestmark = pytest.mark.full

TASKS = 6
AWAY_S = 3.0
INFRASTRUCTURE = {"docker_error", "launch_error", "sandbox_lost"}


@pytest.mark.docker
@pytest.mark.skipif(own_engine.why_not() is not None, reason=own_engine.why_not() or "")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_engine_restart_costs_time_and_nothing_else(number: signal.Signals) -> None:
    with place() as home:
        write_tasks(home / "tasks.jsonl", TASKS)
        async with (
            OwnEngine(home, DEFAULT_IMAGE) as engine,
            ScriptedServer("vllm", answers(TASKS, delay_s=1.0)) as server,
        ):
            given = flags(home, server.base_url, launcher="docker")
            async with running(*given, directory=home, environ={"DOCKER_HOST": engine.url}) as started:
                await until(lambda: whole_lines(home / "run" / "rollouts.jsonl") >= 2, "it runs")
                await engine.end(number)
                await asyncio.sleep(AWAY_S)
                await engine.start()
                ended = await started.ended()
            assert ended.code == 0, ended.stderr
            assert not ended.traceback, ended.stderr
            counts = outcomes(home / "run")
            assert printed_outcomes(ended) == counts
            told = [line["reason"] for line in lines(home / "run" / "rollouts.jsonl")]
            assert counts["finished"] == 2 * TASKS, (counts, told, ended.stderr)
            assert set(counts) <= {"finished", *INFRASTRUCTURE}
            for line in lines(home / "run" / "rollouts.jsonl"):
                assert (line["score"] is not None) == (line["outcome"] == "finished")
            assert engine.containers() == []
