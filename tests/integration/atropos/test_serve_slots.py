"""`serve` and slow rollouts: they hold up no other group, and being slow earns no second draw."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.fakes.inference import Call, Reply, ScriptedServer
from tests.fakes.runs import flags, lines, outcomes, running, until
from tests.fakes.trainers import Trainer, run_api

TASKS = 12
NEVER_S = 10_000.0
RIGHT = "Thought.\n<code>\nfinal_answer(1)\n</code>"


def one_hangs(call: Call) -> Reply:
    """The first rollout of every task waits for ever, the others answer."""
    return Reply(RIGHT, delay_s=0.0 if call.number is None or call.same else NEVER_S)


async def test_stragglers_of_other_groups_may_hold_every_slot(home: Path) -> None:
    async with run_api() as api, ScriptedServer("vllm", one_hangs) as server:
        given = flags(home, server.base_url, rollout_server_url=api.url, drain_timeout=0)
        await Trainer.registered(api.url, batch_size=4)
        async with running(*given, directory=home, command="serve") as serve:
            # Four sandboxes, groups of two, one of each hangs: the fourth group's has the last sandbox.
            await until(lambda: len(server.log.completions) == 7, "a rollout of each of four groups hangs")
            await until(lambda: outcomes(home / "run")["finished"] == 3, "and the others have ended")
            serve.signal(signal.SIGTERM)
            ended = await serve.ended()
        assert ended.code == 143, ended.stderr
    rollouts = lines(home / "run" / "rollouts.jsonl")
    assert sorted(line["group"] for line in rollouts if line["outcome"] == "cancelled") == [0, 1, 2, 3]


@pytest.mark.long
async def test_a_rollout_cut_off_by_the_worker_timeout_ends_as_timeout_and_is_not_drawn_again(home: Path) -> None:
    slow = "Thought.\n<code>\nimport time\nwhile True:\n    time.sleep(1)\n</code>"

    def script(call: Call) -> Reply:
        return Reply(RIGHT if call.same else slow)

    async with run_api() as api, ScriptedServer("vllm", script) as server:
        given = flags(
            home,
            server.base_url,
            rollout_server_url=api.url,
            worker_timeout=3,
            step_timeout=NEVER_S,
            rollout_timeout=NEVER_S,
            total_steps=2,
        )
        trainer = await Trainer.registered(api.url, batch_size=2)
        async with running(*given, directory=home, command="serve") as serve:
            await trainer.take(2, serve)
            ended = await serve.ended()
        assert ended.code == 0, ended.stderr
    rollouts = lines(home / "run" / "rollouts.jsonl")
    assert Counter(line["outcome"] for line in rollouts if line["group"] < 2) == {"timeout": 2, "finished": 2}
    assert {line["attempt"] for line in rollouts} == {0}
    given_scores = {
        facts["outcome"]: score
        for group in trainer.groups
        for facts, score in zip(group["overrides"], group["scores"], strict=True)
    }
    assert given_scores["timeout"] < given_scores["finished"]
