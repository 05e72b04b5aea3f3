"""A trainer tells `serve` which weights it serves; groups say how old their rollouts' policies are."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.request
from pathlib import Path

import pytest

from tests.fakes.inference import ScriptedServer
from tests.fakes.runs import DEADLINE_S, Running, answers, flags, running, until
from tests.fakes.trainers import Trainer, free_port, run_api

TASKS = 12


async def say(port: int, **served: str) -> None:
    """As a trainer does after an update."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/policy", json.dumps(served).encode(), {"Content-Type": "application/json"}
    )
    await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=30).close())


async def take_until(trainer: Trainer, serve: Running, version: str) -> None:
    """Batches, up to the first that only this version has sampled."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            (batch,) = await trainer.take(1, serve)
            spans = [span for group in batch for facts in group["overrides"] for span in facts["policy_spans"]]
            if spans and {span["oldest"] for span in spans} == {version}:
                return


@pytest.mark.slow
async def test_groups_tell_the_version_that_the_trainer_said_and_how_far_behind_it_is(home: Path) -> None:
    """The endpoint says nothing of its weights; in the end it has each version under a name of its own."""
    port = free_port()
    async with run_api() as api, ScriptedServer("vllm", answers(TASKS, delay_s=0.2)) as server:
        address = f"127.0.0.1:{port}"
        given = flags(home, server.base_url, rollout_server_url=api.url, policy_address=address)
        trainer = await Trainer.registered(api.url, batch_size=2)
        async with running(*given, directory=home, command="serve") as serve:
            await trainer.take(1, serve)
            await say(port, version="1")
            await take_until(trainer, serve, "1")
            server.model.name = "policy-3"
            await say(port, version="3", model="policy-3")
            await take_until(trainer, serve, "3")
            serve.process.send_signal(signal.SIGTERM)
            ended = await serve.ended()
    assert ended.code == 143, ended.stderr
    assert "the policy is version 3 now, asked for as policy-3" in ended.stderr
    assert server.log.completions[-1].body["model"] == "policy-3"
    told = [facts for group in trainer.groups for facts in group["overrides"]]
    assert told[0]["policy_version"] is None
    assert told[-1]["staleness"] == 0
    for facts in told:
        oldest = {span["oldest"] for span in facts["policy_spans"]} or {None}
        assert (facts["staleness"] is None) == (None in oldest)
        assert facts["staleness"] in (None, 0, 2)


@pytest.mark.slow
async def test_groups_that_are_too_old_are_not_delivered(home: Path) -> None:
    port = free_port()
    async with run_api() as api, ScriptedServer("vllm", answers(TASKS, delay_s=1.0)) as server:
        address = f"127.0.0.1:{port}"
        given = flags(home, server.base_url, rollout_server_url=api.url, policy_address=address, max_staleness=1)
        trainer = await Trainer.registered(api.url, batch_size=2)
        async with running(*given, directory=home, command="serve") as serve:
            await trainer.take(1, serve)
            await say(port, version="5")
            await take_until(trainer, serve, "5")  # there is room for more groups now
            begun = len(server.log.completions)
            await until(lambda: len(server.log.completions) > begun, "version 5 samples")
            await say(port, version="9")
            await take_until(trainer, serve, "9")
            serve.process.send_signal(signal.SIGTERM)
            ended = await serve.ended()
    assert ended.code == 143, ended.stderr
    told = [facts["staleness"] for group in trainer.groups for facts in group["overrides"]]
    assert set(told) <= {None, 0}, told
    assert "rollouts are more than 1 policy versions behind" in ended.stderr
