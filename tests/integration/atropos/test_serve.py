"""`orchestrator serve` between a real run-api and a scripted endpoint with ids: what goes in comes out."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from examples.trainer import RunApi
from tests.fakes.inference import ScriptedServer
from tests.fakes.runs import (
    DEADLINE_S,
    ROOT,
    answers,
    flags,
    lines,
    outcomes,
    printed_outcomes,
    running,
    until,
)
from tests.fakes.trainers import RunApiProcess, Trainer, run_api, sampled, trained
from tests.unit.test_report import Elements

TASKS = 12


@pytest.mark.slow
async def test_twenty_batches_are_what_the_endpoint_sampled(home: Path) -> None:
    api = RunApiProcess()
    async with ScriptedServer("vllm", answers(TASKS)) as server:
        given = flags(home, server.base_url, rollout_server_url=api.url, total_steps=20)
        try:
            async with running(*given, directory=home, command="serve") as serve:
                # Nobody is there yet: it waits for the run-api, then for the trainer.
                await until((home / "run" / "run.json").exists, "serve is up")
                await api.start()
                saved = home / "batches.jsonl"
                training = await asyncio.create_subprocess_exec(
                    *(sys.executable, ROOT / "examples" / "trainer.py", "--url", api.url),
                    *("--batch-size", "2", "--batches", "20", "--save", saved),
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                )
                try:
                    ended = await serve.ended()
                    async with asyncio.timeout(DEADLINE_S):
                        said, _ = await training.communicate()
                finally:
                    if training.returncode is None:
                        training.kill()
                        await training.wait()
        finally:
            await api.kill()
    assert training.returncode == 0, said.decode()
    assert "step 20: 1 groups, 2 rollouts" in said.decode()
    trainer = Trainer(RunApi(api.url), lines(saved))
    assert ended.code == 0, ended.stderr
    assert not ended.traceback, ended.stderr
    assert "waiting for" in ended.stderr
    # Every group complete, nothing twice, all of it on disk as it was sent.
    assert [len(group["tokens"]) for group in trainer.groups] == [2] * 20
    assert len(set(trainer.rollouts)) == len(trainer.rollouts) == 40
    assert Counter(trainer.tasks) == Counter([f"q{n % TASKS}" for n in range(20)])
    written = {line["overrides"][0]["rollout_id"]: line for line in lines(home / "run" / "groups.jsonl")}
    for group in trainer.groups:
        line = written.pop(group["overrides"][0]["rollout_id"])
        assert {key: group[key] for key in line} == line
    assert not written
    given = Counter(sampled(served) for served in server.log.completions)
    taken = Counter(run for group in trainer.groups for run in trained(group))
    assert given == taken, "ids and log-probs are the endpoint's own"
    assert printed_outcomes(ended) == outcomes(home / "run") == {"finished": 40}
    assert "20 of 20 written" in ended.stdout
    assert reported(home) == {"attempts": 40, "written": 20}
    assert list(serve.temporary.glob("orchestrator-*")) == []


def reported(home: Path) -> dict[str, int]:
    """What the report that it left says."""
    totals = Elements((home / "run" / "groups.html").read_text()).block("run")["totals"]
    return {name: totals[name] for name in ("attempts", "written")}


async def test_a_report_is_left_when_the_trainer_is_away_and_a_signal_ends_it(home: Path) -> None:
    async with ScriptedServer("vllm", answers(TASKS)) as server:
        async with run_api() as api:
            given = flags(home, server.base_url, rollout_server_url=api.url, max_batches_offpolicy=1)
            trainer = await Trainer.registered(api.url, batch_size=4)
            async with running(*given, directory=home, command="serve") as serve:
                await trainer.take(2, serve)
                await api.kill()
                serve.signal(signal.SIGTERM)
                ended = await serve.ended()
    assert ended.code == 128 + signal.SIGTERM, ended.stderr
    assert not ended.traceback, ended.stderr
    assert f"report         {home / 'run' / 'groups.html'}" in ended.stdout
    attempts, groups = lines(home / "run" / "rollouts.jsonl"), lines(home / "run" / "groups.jsonl")
    assert reported(home) == {"attempts": len(attempts), "written": len(groups)}
    assert len(groups) >= 4


@pytest.mark.slow
async def test_trees_reach_the_trainer_with_each_token_once(home: Path) -> None:
    """A third of the rollouts has a second turn to branch at; the others' places are drawn whole."""
    async with ScriptedServer("vllm", answers(TASKS)) as server, run_api() as api:
        trees = {"branch": "turns:2 width:3", "group_size": 4, "total_steps": TASKS}
        given = flags(home, server.base_url, rollout_server_url=api.url, **trees)
        trainer = await Trainer.registered(api.url, batch_size=4)
        async with running(*given, directory=home, command="serve") as serve:
            await trainer.take(TASKS, serve)
            ended = await serve.ended()
    assert ended.code == 0, ended.stderr
    told = Counter(sampled(served) for served in server.log.completions)
    taken = Counter(run for group in trainer.groups for run in trained(group))
    assert told == taken, "each completion is trained once, in the row of who sampled it"
    branched = [group for group in trainer.groups if any(facts["parent"] for facts in group["overrides"])]
    assert 0 < len(branched) < TASKS
    for group in trainer.groups:
        if group in branched:
            assert list(map(len, group["advantages"])) == list(map(len, group["tokens"]))
        else:
            assert group["advantages"] is None


@pytest.mark.long
async def test_checkpoint_of_the_trainer_is_one_of_serve_too(home: Path) -> None:
    terms = {"batch_size": 4, "checkpoint_dir": str(home / "checkpoints"), "interval": 2}
    async with ScriptedServer("vllm", answers(TASKS)) as server:
        async with run_api() as api:
            given = flags(
                home, server.base_url, rollout_server_url=api.url, max_batches_offpolicy=1, wandb_name="w"
            )
            trainer = await Trainer.registered(api.url, **terms)
            async with running(*given, directory=home, command="serve") as serve:
                await trainer.take(2, serve)
                saved = home / "checkpoints" / "env_checkpoints" / "w" / "step-2.json"
                await until(saved.exists, "the checkpoint")
                serve.signal(signal.SIGTERM)
                ended = await serve.ended()
        assert ended.code == 128 + signal.SIGTERM, ended.stderr
        assert not ended.traceback, ended.stderr
        told = json.loads(saved.read_text())
        taken = {int(task[1:]) for task in trainer.tasks}
        assert {n for n in range(TASKS) if n < told["following"] or n in told["done"]} == taken
        # Trainer and run-api come back at that step; what had waited for the old ones is made again.
        async with run_api() as api:
            given = flags(
                home,
                server.base_url,
                rollout_server_url=api.url,
                wandb_name="w",
                run_dir=home / "run2",
                total_steps=8,
            )
            later = await Trainer.registered(api.url, **terms, step=2)
            async with running(*given, directory=home, command="serve") as serve:
                await later.take(2, serve)
                ended = await serve.ended()
        assert ended.code == 0, ended.stderr
        assert "goes on at task" in ended.stderr
        assert sorted(trainer.tasks + later.tasks) == [f"q{n}" for n in range(8)]
        # A curriculum has no results to go on by there.
        async with run_api() as api:
            await Trainer.registered(api.url, **terms, step=2)
            given = flags(
                home,
                server.base_url,
                rollout_server_url=api.url,
                wandb_name="w",
                run_dir=home / "run3",
                curriculum="pools",
            )
            async with running(*given, directory=home, command="serve") as serve:
                ended = await serve.ended()
        assert ended.code == 2, ended.stderr
        assert "go on with --env.resume RUN_DIR" in ended.stderr
