"""`serve` with real containers and evaluations that stop training: what is cancelled comes again, what is measured
is never trained on, and nothing is left."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from orchestrator.tasks.selection import held_out
from tests.e2e.leftovers import containers_of
from tests.fakes.inference import ScriptedServer
from tests.fakes.runs import (
    answers,
    flags,
    lines,
    outcomes,
    printed_outcomes,
    run,
    running,
    until,
    whole_lines,
)
from tests.fakes.trainers import Trainer, run_api

pytestmark = pytest.mark.long

TASKS = 12
HELD = {f"q{n}" for n in range(TASKS) if held_out(f"q{n}", 0.1)}
TRAINED = [f"q{n}" for n in range(TASKS) if f"q{n}" not in HELD]


@pytest.mark.docker
async def test_evaluations_stop_training_and_leave_no_container(home: Path) -> None:
    assert 1 <= len(HELD) <= 3
    total = 4
    async with run_api() as api, ScriptedServer("vllm", answers(TASKS, delay_s=0.4)) as server:
        given = flags(
            home,
            server.base_url,
            rollout_server_url=api.url,
            launcher="docker",
            total_steps=total,
            steps_per_eval=2,
            eval_split="hash:0.1",
            use_wandb="true",
            min_items_sent_before_logging=0,
        )
        trainer = await Trainer.registered(api.url, batch_size=2)
        async with running(*given, directory=home, command="serve", environ={"WANDB_SILENT": "true"}) as serve:
            await trainer.take(total, serve)
            ended = await serve.ended()
            pid = serve.process.pid
    assert ended.code == 0, ended.stderr
    checked = await run("run", directory=home, command="verify")
    assert checked.code == 0, checked.stdout + checked.stderr
    assert not ended.traceback, ended.stderr
    assert containers_of(pid) == []
    assert list(serve.temporary.glob("orchestrator-*")) == []
    assert sorted(trainer.tasks) == sorted(TRAINED[:total])
    assert len(set(trainer.rollouts)) == len(trainer.rollouts) == 2 * total
    evaluations = sorted((home / "run" / "evals").glob("step-*"))
    assert evaluations
    for directory in evaluations:
        assert (directory / "metrics.json").exists()
        assert {line["task_id"] for line in lines(directory / "samples.jsonl")} == HELD
    # What was stopped is on record, told at the end, and was made again under another attempt.
    stopped = outcomes(home / "run")["cancelled"]
    assert printed_outcomes(ended) == outcomes(home / "run")
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("cancelled")]
    assert stopped, "evaluations begin while rollouts are under way"
    assert " 0.0 s" not in line, line
    # Without a login the metrics are kept here; nobody was asked for anything.
    assert "wandb: no login" in ended.stderr
    assert list((home / "run" / "wandb").glob("offline-run-*"))


@pytest.mark.docker
async def test_killed_serve_goes_on_behind_what_it_delivered_and_leaves_nothing(home: Path) -> None:
    async with run_api() as api, ScriptedServer("vllm", answers(TASKS, delay_s=0.05)) as server:
        given = flags(home, server.base_url, rollout_server_url=api.url, launcher="docker", total_steps=6)
        trainer = await Trainer.registered(api.url, batch_size=4)
        async with running(*given, directory=home, command="serve") as first:
            await trainer.take(1, first)
            rollouts = home / "run" / "rollouts.jsonl"
            begun = whole_lines(rollouts)
            await until(lambda: whole_lines(rollouts) > min(begun, 11), "another rollout")
            first.signal(signal.SIGKILL)
            await first.ended()
            before = first.process.pid
        async with running("--env.resume", "run", directory=home, command="serve") as again:
            await trainer.take(2, again)
            ended = await again.ended()
        assert ended.code == 0, ended.stderr
        assert sorted(trainer.tasks) == [f"q{n}" for n in range(6)], (
            "each task once: nothing twice, nothing left out"
        )
        assert len(set(trainer.rollouts)) == 12
        assert list(again.temporary.glob("orchestrator-*")) == []
        assert containers_of(before) == containers_of(again.process.pid) == []
