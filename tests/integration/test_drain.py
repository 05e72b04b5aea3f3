"""Signals: a run that is asked to stop drains, then stops; what is finished is on disk, nothing is left."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.fakes.inference import ScriptedServer
from tests.fakes.runs import (
    answers,
    essence,
    flags,
    lines,
    outcome_seen,
    outcomes,
    printed_outcomes,
    run,
    running,
    until,
    whole_lines,
)

TASKS = 6
NEVER_S = 10_000.0


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)], ids=lambda v: str(v)
)
async def test_first_signal_lets_running_rollouts_finish_and_begins_nothing(
    home: Path, number: signal.Signals, code: int
) -> None:
    rollouts = home / "run" / "rollouts.jsonl"
    async with ScriptedServer("vllm", answers(TASKS, delay_s=0.5)) as server:
        async with running(*flags(home, server.base_url, drain_timeout=NEVER_S), directory=home) as first:
            await until(lambda: whole_lines(rollouts) >= 2, "some rollouts are done")
            first.signal(number)
            ended = await first.ended()
        assert ended.code == code
        assert not ended.traceback, ended.stderr
        assert f"stopped by {signal.Signals(number).name}" in ended.stderr
        counts = outcomes(home / "run")
        assert set(counts) == {"finished"}
        assert counts["finished"] < 2 * TASKS
        assert printed_outcomes(ended) == counts
        assert not list((home / "t").glob("orchestrator-*"))
        again = await run("--env.resume", "run", directory=home)
    assert again.code == 0, again.stderr
    assert outcomes(home / "run") == {"finished": 2 * TASKS}
    assert len(essence(home / "run" / "groups.jsonl")) == TASKS


async def test_after_the_drain_what_runs_is_cancelled_and_recorded_so(home: Path) -> None:
    async with ScriptedServer("vllm", answers(TASKS, delay_s=NEVER_S)) as server:
        async with running(*flags(home, server.base_url, drain_timeout=0.5), directory=home) as first:
            await until(lambda: len(server.log.completions) >= 4, "four rollouts wait for their completions")
            first.signal(signal.SIGTERM)
            ended = await first.ended()
        assert ended.code == 143
        assert not ended.traceback, ended.stderr
        assert outcomes(home / "run") == {"cancelled": 4}
        assert printed_outcomes(ended) == {"cancelled": 4}
        assert not list((home / "t").glob("orchestrator-*"))
        assert lines(home / "run" / "groups.jsonl") == []
        await until(lambda: all(s.disconnected for s in server.log.completions), "cancelled upstream")
    async with ScriptedServer("vllm", answers(TASKS)) as server:
        again = await run("--env.resume", "run", f"--openai.base_url={server.base_url}", directory=home)
    assert again.code == 0, again.stderr
    assert outcomes(home / "run") == {"cancelled": 4, "finished": 2 * TASKS}
    attempts = {
        line["rollout_id"]: line["plan"]["sampling"]["seed"] for line in lines(home / "run/rollouts.jsonl")
    }
    assert len(attempts) == 2 * TASKS + 4
    assert attempts["g000000-r00-a0"] == attempts["g000000-r00-a1"]


@pytest.mark.long
async def test_second_signal_while_sandboxes_are_being_removed_is_no_trouble(home: Path) -> None:
    async with (
        ScriptedServer("vllm", answers(TASKS, delay_s=NEVER_S)) as server,
        running(*flags(home, server.base_url, drain_timeout=0), directory=home) as first,
    ):
        await until(lambda: len(server.log.completions) >= 4, "four rollouts wait for their completions")
        first.signal(signal.SIGTERM)
        await asyncio.sleep(0.02)
        first.signal(signal.SIGTERM)
        ended = await first.ended()
    assert ended.code == 143
    assert not ended.traceback, ended.stderr
    assert outcomes(home / "run") == {"cancelled": 4}


@pytest.mark.long
async def test_run_under_nohup_outlives_its_terminal(home: Path) -> None:
    async with (
        ScriptedServer("vllm", answers(TASKS, delay_s=0.3)) as server,
        running(*flags(home, server.base_url), directory=home, wrapper=("nohup",)) as first,
    ):
        await until(lambda: whole_lines(home / "run" / "rollouts.jsonl") >= 2, "it runs")
        first.signal(signal.SIGHUP)
        ended = await first.ended()
    assert ended.code == 0, ended.stderr
    assert outcomes(home / "run") == {"finished": 2 * TASKS}


@pytest.mark.long
async def test_second_signal_stops_at_once_and_still_removes_sandboxes(home: Path) -> None:
    async with (
        ScriptedServer("vllm", answers(TASKS, delay_s=NEVER_S)) as server,
        running(*flags(home, server.base_url, drain_timeout=NEVER_S), directory=home) as first,
    ):
        await until(lambda: len(server.log.completions) >= 4, "four rollouts wait for their completions")
        first.signal(signal.SIGINT)
        await asyncio.sleep(0.2)
        first.signal(signal.SIGTERM)
        ended = await first.ended()
    assert ended.code == 130
    assert not ended.traceback, ended.stderr
    assert outcomes(home / "run") == {"cancelled": 4}
    assert not list((home / "t").glob("orchestrator-*"))


@pytest.mark.long
async def test_signal_while_launching_is_paused_ends_the_run(home: Path) -> None:
    async with (
        ScriptedServer("vllm", answers(TASKS, delay_s=0.2)) as server,
        running(*flags(home, server.base_url, drain_timeout=NEVER_S), directory=home) as first,
    ):
        await until(lambda: whole_lines(home / "run" / "rollouts.jsonl") >= 1, "it runs")
        await server.__aexit__()
        await until(lambda: outcome_seen(home / "run", "llm_error"), "the endpoint is missed")
        first.signal(signal.SIGTERM)
        ended = await first.ended()
    assert ended.code == 143
    assert "the inference endpoint is away, launching pauses" in ended.stderr
    assert not ended.traceback, ended.stderr
