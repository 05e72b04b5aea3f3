"""Tasks that nothing can help are dropped groups, not a sick run: the others are made, and resume gets past."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.inference import Call, Fault, Reply, Script, ScriptedServer
from tests.fakes.runs import answers, flags, lines, outcomes, printed_outcomes, run

pytestmark = pytest.mark.long

TASKS, DEAD = 16, 4
REFUSED = Reply("", fault=Fault("400"))


def with_dead(*dead: int) -> Script:
    """As `answers`, but the prompts of these tasks are refused, whoever asks."""
    others = answers(TASKS)

    def script(call: Call) -> Reply | str:
        return REFUSED if any(f"of q{n}!" in call.task for n in dead) else others(call)

    return script


@pytest.mark.parametrize(
    "dead",
    [
        pytest.param(range(DEAD), id="first"),
        pytest.param(range(0, TASKS, DEAD), id="spread", marks=pytest.mark.full),
    ],
)
async def test_dead_tasks_are_dropped_the_others_made_and_resume_gets_past(home: Path, dead: range) -> None:
    groups = home / "run" / "groups.jsonl"
    alive = {f"q{n}" for n in range(TASKS)} - {f"q{n}" for n in dead}
    async with ScriptedServer("vllm", with_dead(*dead)) as server:
        ended = await run(*flags(home, server.base_url), directory=home)
        assert ended.code == 1, ended.stderr
        assert not ended.traceback
        assert {line["overrides"][0]["task_id"] for line in lines(groups)} == alive
        assert f"{TASKS - DEAD} of {TASKS} written" in ended.stdout
        (told,) = [line for line in ended.stdout.splitlines() if line.startswith("dropped ")]
        assert f"{DEAD} groups: {DEAD} by llm_error" in told
        assert "HTTP 400" in told
        assert "orchestrator process --env.resume run" in told.replace(f"{home}/", "")
        assert printed_outcomes(ended) == outcomes(home / "run")
        # Two rollouts and two in their places: each is tried three times.
        assert outcomes(home / "run")["llm_error"] == DEAD * 4 * 3
        drops = lines(home / "run" / "dropped.jsonl")
        assert {drop["task_id"] for drop in drops} == {f"q{n}" for n in dead}
        assert all("HTTP 400" in drop["reason"] for drop in drops)
        assert "HTTP 400" in (home / "run" / "groups.html").read_text()
        made = groups.read_bytes()
        again = await run("--env.resume", "run", directory=home)
        assert again.code == 1, again.stderr
        assert f"{DEAD} groups: {DEAD} by llm_error" in again.stdout, "tried again, and no sick run"
        assert groups.read_bytes() == made
    async with ScriptedServer("vllm", answers(TASKS)) as server:
        mended = await run("--env.resume", "run", f"--openai.base_url={server.base_url}", directory=home)
    assert mended.code == 0, mended.stderr
    assert {line["overrides"][0]["task_id"] for line in lines(groups)} == {f"q{n}" for n in range(TASKS)}


async def test_a_run_ended_for_its_health_can_be_got_past(home: Path) -> None:
    """Thirteen dead tasks at the beginning: for all a run can tell, everything breaks."""
    dead = range(13)
    env = {"max_retries": 0, "group_policy": "drop"}
    async with ScriptedServer("vllm", with_dead(*dead)) as server:
        ended = await run(*flags(home, server.base_url, max_open_groups=1, **env), directory=home)
        assert ended.code == 1, ended.stderr
        last = ended.stderr.strip().splitlines()[-1]
        assert "rollouts broke" in last
        assert "HTTP 400" in last
        assert "--env.resume" in last
        assert lines(home / "run" / "groups.jsonl") == []
        again = await run("--env.resume", "run", directory=home)
    assert again.code == 1, again.stderr
    assert len(lines(home / "run" / "groups.jsonl")) == TASKS - len(dead)
