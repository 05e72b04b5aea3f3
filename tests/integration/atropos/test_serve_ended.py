"""`serve` ended in the middle of a delivery and gone on with: the trainer gets every group once, and the groups
file holds each once and as it was delivered."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.fakes.faulty_run_api import FaultyRunApi
from tests.fakes.inference import ScriptedServer
from tests.fakes.runs import (
    Ended,
    Running,
    answers,
    flags,
    lines,
    outcomes,
    printed_outcomes,
    running,
    until,
    whole_lines,
    write_tasks,
)
from tests.fakes.trainers import Trainer, run_api

pytestmark = pytest.mark.long

TASKS = 6


def given(home: Path, server: ScriptedServer, url: str, *, resumed: bool = False, **more: object) -> list[str]:
    """Of a run that delivers each task once, with room for all of them: the trainer comes when it is told to."""
    env: dict[str, object] = {"total_steps": TASKS, "max_batches_offpolicy": 20, **more}
    if resumed:
        env |= {"run_dir": None, "resume": home / "run"}
    return flags(home, server.base_url, rollout_server_url=url, **env)


def sending(home: Path) -> bool:
    """Whether a delivery has begun whose end is not known."""
    position = home / "run" / "position.json"
    return position.exists() and json.loads(position.read_text())["sending"] is not None


async def end(serve: Running, how: str) -> Ended:
    if how == "SIGKILL":
        serve.signal(signal.SIGKILL)
        return await serve.ended()
    serve.signal(signal.SIGTERM)
    await asyncio.sleep(0.3)  # two signals of a kind at once are one
    serve.signal(signal.SIGTERM)
    ended = await serve.ended()
    assert ended.code == 128 + signal.SIGTERM, ended.stderr
    assert not ended.traceback, ended.stderr
    return ended


def exactly_once(home: Path, trainer: Trainer) -> None:
    assert Counter(trainer.tasks) == Counter(f"q{n}" for n in range(TASKS))
    assert set(Counter(trainer.rollouts).values()) == {1}
    as_delivered(home, trainer)


def as_delivered(home: Path, trainer: Trainer) -> None:
    """The groups file holds what the trainer got, each group once."""
    written = lines(home / "run" / "groups.jsonl")
    by_name = {group["overrides"][0]["rollout_id"]: group for group in trainer.groups}
    assert len(written) == len(by_name)
    for line in written:
        group = by_name[line["overrides"][0]["rollout_id"]]
        assert {key: group[key] for key in line} == line


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM twice"])
@pytest.mark.parametrize(
    ("fault", "taken"),
    [
        ("hang after", False),
        ("hang after", True),
        ("hang before", True),
        ("502 after", True),
        ("504 after", False),
        ("reset after", True),
    ],
)
async def test_ended_in_the_middle_of_a_delivery(home: Path, how: str, fault: str, taken: bool) -> None:
    async with (
        run_api() as api,
        FaultyRunApi(api.url).serving() as between,
        ScriptedServer("vllm", answers(TASKS)) as server,
    ):
        # Behind a fault that has an answer nothing is answered any more: it cannot ask what became of it.
        between.faults, between.closed_behind = ["", "", fault], not fault.startswith("hang")
        trainer = await Trainer.registered(api.url, batch_size=2)
        async with running(*given(home, server, between.url), directory=home, command="serve") as serve:
            await until(lambda: not between.faults and (between.waiting or between.closed), "the delivery")
            assert sending(home)
            if taken:
                await trainer.rest()
            await end(serve, how)
        assert sending(home)
        between.closed = False
        async with running(
            *given(home, server, between.url, resumed=True), directory=home, command="serve"
        ) as serve:
            ended = await serve.ended()
        await trainer.rest()
        assert ended.code == 0, ended.stderr
        assert "perhaps not arrived" not in ended.stdout
    assert not sending(home)
    exactly_once(home, trainer)
    assert printed_outcomes(ended) == outcomes(home / "run")


async def test_new_run_for_the_same_trainer_knows_what_the_killed_one_was_sending(home: Path) -> None:
    async with (
        run_api() as api,
        FaultyRunApi(api.url).serving() as between,
        ScriptedServer("vllm", answers(TASKS)) as server,
    ):
        between.faults = ["", "", "hang after"]
        trainer = await Trainer.registered(
            api.url, batch_size=2, checkpoint_dir=str(home / "checkpoints"), interval=100
        )
        # One ahead of the trainer: it is at a step when the last delivery hangs.
        more = {"max_batches_offpolicy": 1, "max_num_workers": 1}
        async with running(*given(home, server, between.url, **more), directory=home, command="serve") as serve:
            await trainer.take(2, serve)
            await until(lambda: bool(between.waiting), "the delivery")
            await trainer.take(1)
            await end(serve, "SIGKILL")
        anew = given(home, server, api.url, run_dir=home / "run2")
        async with running(*anew, directory=home, command="serve") as serve:
            ended = await serve.ended()
        await trainer.rest()
    assert ended.code == 0, ended.stderr
    assert "perhaps not arrived" not in ended.stdout
    assert Counter(trainer.tasks) == Counter(f"q{n}" for n in range(TASKS))


async def test_ended_in_a_delivery_whose_fate_cannot_be_told_it_is_counted_and_not_sent_again(home: Path) -> None:
    async with ScriptedServer("vllm", answers(TASKS)) as server:
        async with run_api() as api, FaultyRunApi(api.url).serving() as between:
            between.faults = ["", "hang after"]
            first = await Trainer.registered(api.url, batch_size=2)
            async with running(*given(home, server, between.url), directory=home, command="serve") as serve:
                await until(lambda: bool(between.waiting), "the delivery")
                await first.rest()
                await end(serve, "SIGKILL")
        async with run_api() as api:
            second = await Trainer.registered(api.url, batch_size=2, step=2)
            async with running(
                *given(home, server, api.url, resumed=True), directory=home, command="serve"
            ) as serve:
                ended = await serve.ended()
            await second.rest()
    assert ended.code == 0, ended.stderr
    assert "1 perhaps not arrived" in ended.stdout
    assert Counter(first.tasks + second.tasks) == Counter(f"q{n}" for n in range(TASKS))


# ---------------------------------------------------------------- an environment of an operator's own

SUBCLASS = '''
import asyncio
from pathlib import Path
from orchestrator.atropos import OrchestratorEnv

class Own(OrchestratorEnv):
    seen = set()

    async def postprocess_histories(self, made):
        """Halves the scores. But for the first group it waits, when it sees one for the first time."""
        name = made["overrides"][0]["rollout_id"]
        new, first = name not in self.seen, not self.seen
        self.seen.add(name)
        with Path("seen").open("a") as file:
            file.write(name + "\\n")
        while new and not first and not Path("go").exists():
            await asyncio.sleep(0.02)
        return {**made, "scores": [score / 2 for score in made["scores"]]}

if __name__ == "__main__":
    Own.cli()
'''


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM twice", "evaluation"])
async def test_group_cancelled_in_postprocess_histories_is_there_once(home: Path, how: str) -> None:
    """An evaluation that stops training cancels what is there under way, and it comes again."""
    write_tasks(home / "tasks.jsonl", 4 * TASKS)
    (home / "own.py").write_text(SUBCLASS)
    more: dict[str, object] = {"max_concurrent_sandboxes": 8, "eval_split": "hash:0.2", "steps_per_eval": 1}
    how_to = {"directory": home, "command": "serve", "program": (sys.executable, str(home / "own.py"))}
    async with run_api() as api, ScriptedServer("vllm", answers(4 * TASKS)) as server:
        trainer = await Trainer.registered(api.url, batch_size=2)
        async with running(*given(home, server, api.url, **more), **how_to) as serve:
            await until(lambda: whole_lines(home / "seen") > 1, "a group that waits in postprocess_histories")
            if how == "evaluation":
                await trainer.take(1, serve)
                await until(lambda: max(Counter(seen(home)).values()) > 1, "it comes again")
                (home / "go").touch()
                ended = await serve.ended()
            else:
                await end(serve, how)
        if how != "evaluation":
            (home / "go").touch()
            async with running(*given(home, server, api.url, resumed=True, **more), **how_to) as serve:
                ended = await serve.ended()
        await trainer.rest()
    assert ended.code == 0, ended.stderr
    assert len(trainer.tasks) == len(set(trainer.tasks)) == TASKS
    as_delivered(home, trainer)
    assert max(score for group in trainer.groups for score in group["scores"]) <= 0.5
    names = [line["rollout_id"] for line in lines(home / "run" / "rollouts.jsonl")]
    assert len(names) == len(set(names)), "no rollout is made twice"
    assert printed_outcomes(ended) == outcomes(home / "run")


def seen(home: Path) -> list[str]:
    return (home / "seen").read_text().split()
