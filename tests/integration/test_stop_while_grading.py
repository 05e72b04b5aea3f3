"""A stop while rollouts are graded loses nothing: they are on record whole, and graded from there on resume."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.inference import ScriptedServer
from tests.fakes.runs import (
    ROOT,
    answers,
    essence,
    flags,
    lines,
    outcomes,
    place,
    printed_outcomes,
    run,
    running,
    until,
    write_tasks,
)

pytestmark = pytest.mark.long

TASKS = 2
PRICES = ("--openai.prompt_price=100", "--openai.completion_price=1000")
SCORER = """
import time
from pathlib import Path

def score(plan, record, ended):
    if not Path("tried").exists():  # the run's own trial, before anything is sampled
        Path("tried").touch()
        return 1.0
    Path("grading-" + plan.rollout_id).touch()
    while not Path("go").exists():
        time.sleep(0.02)
    return float(record.answer == plan.task.answer)
"""


@pytest.fixture
def home() -> Iterator[Path]:
    with place() as directory:
        write_tasks(directory / "tasks.jsonl", TASKS)
        (directory / "patient.py").write_text(SCORER)
        yield directory


def pending(process: int, number: signal.Signals) -> bool:
    """Whether the signal waits to be delivered. A process that has ended has none."""
    try:
        told = Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    masks = (line.split()[1] for line in told.splitlines() if line.startswith(("SigPnd:", "ShdPnd:")))
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def by_id(directory: Path) -> dict[str, dict[str, Any]]:
    found = lines(directory / "rollouts.jsonl")
    told = {line["rollout_id"]: line for line in found}
    assert len(told) == len(found), "each id once"
    return told


@pytest.mark.parametrize("signals", [(signal.SIGTERM,), (signal.SIGTERM, signal.SIGINT)], ids=["one", "two"])
async def test_what_was_sampled_is_kept_and_graded_without_sampling_anew(
    home: Path, signals: tuple[signal.Signals, ...]
) -> None:
    scorer = "python:patient:score"
    env = {"scoring_strategy": scorer, "scorer_timeout": 10_000, "warm_sandboxes": 0}
    environ = {"PYTHONPATH": f"{home}:{ROOT}:{ROOT / 'proto'}"}
    goes_on = ("--env.resume", "run", "--env.scoring_strategy", scorer)
    async with ScriptedServer("vllm", answers(TASKS)) as server:
        given = flags(home, server.base_url, **{**env, "drain_timeout": 0.2 if len(signals) == 1 else 10_000})
        async with running(*given, *PRICES, directory=home, environ=environ) as first:
            await until(lambda: any(home.glob("grading-*")), "one is graded")
            await until(lambda: all_ended(home, server), "all have ended")
            for number in signals:
                first.signal(number)
                # Of two that are pending the kernel delivers the lower number first, whichever was sent first.
                await until(lambda number=number: not pending(first.process.pid, number), "it was delivered")
            ended = await first.ended()
        assert ended.code == 143, ended.stderr
        assert not ended.traceback, ended.stderr
        before = by_id(home / "run")
        assert {line["outcome"] for line in before.values()} == {"cancelled"}
        assert len(before) == 2 * TASKS
        assert all(line["completions"] and line["ungraded"] for line in before.values())
        assert printed_outcomes(ended) == outcomes(home / "run")
        asked = len(server.log.completions)
        spent = sum(len(s.prompt_ids) * 100 + len(s.sampled_ids) * 1000 for s in server.log.completions) / 1e6
        assert f"cost           {spent:.4f}" in ended.stdout, "paid, graded or not"
        (home / "go").touch()
        # What is spent is no more than that: grading costs nothing, and nothing else is left to do.
        again = await run(*goes_on, f"--env.max_cost={spent + 0.0001}", directory=home, environ=environ)
        assert again.code == 0, again.stderr
        after = by_id(home / "run")
        done = await run(*goes_on, directory=home, environ=environ)
        assert done.code == 0, done.stderr
        assert len(server.log.completions) == asked, "nothing is sampled a second time"
    assert by_id(home / "run") == after, "and nothing graded a second time"
    graded = {rollout_id: line for rollout_id, line in after.items() if rollout_id not in before}
    assert len(graded) == 2 * TASKS
    for line in graded.values():
        origin = before[line["rollout_id"].replace("-a1", "-a0")]
        for name in ("completions", "tool_calls", "answer", "started_at", "duration_s", "sandbox", "plan"):
            assert line[name] == origin[name], name
        assert line["outcome"] == origin["ungraded"]["outcome"]
        assert line["score"] is not None
        assert line["ungraded"] is None
    assert len(essence(home / "run" / "groups.jsonl")) == TASKS
    verified = await run("run", directory=home, command="verify")
    assert verified.code == 0, verified.stdout
    assert printed_outcomes(again) == outcomes(home / "run")
    tokens = sum(c["completion_tokens"] for line in graded.values() for c in line["completions"])
    assert f"tokens         {tokens} sampled" in again.stdout, "counted once"
    assert f"cost           {spent:.4f}" in again.stdout


def all_ended(home: Path, server: ScriptedServer) -> bool:
    """Every rollout has had its completions, and no sandbox is left."""
    said = sum("final_answer" in served.sampled_text for served in server.log.completions)
    return said == 2 * TASKS and not any(path.is_dir() for path in (home / "t").glob("orchestrator-*/*"))
