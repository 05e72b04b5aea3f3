"""Whole `serve` processes between a real run-api, the example trainer's calls and an endpoint with ids, disturbed:
nothing is given twice, what is given is what was sampled, and what is lost is told."""

from __future__ import annotations

import asyncio
import re
import signal
from collections import Counter
from pathlib import Path

import pytest

from examples.trainer import Group
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
from tests.fakes.trainers import Trainer, run_api, sampled, trained

pytestmark = pytest.mark.long

TASKS = 12
AHEAD = 3  # env.max_batches_offpolicy by default: groups of one batch each that may wait


@pytest.mark.parametrize("how", ["restarted", "reset"])
async def test_run_api_that_forgets_everything_costs_what_waited_in_it_and_no_more(home: Path, how: str) -> None:
    async with run_api() as api, ScriptedServer("vllm", answers(TASKS)) as server:
        given = flags(home, server.base_url, rollout_server_url=api.url)
        first = await Trainer.registered(api.url, batch_size=2)
        async with running(*given, directory=home, command="serve") as serve:
            await _full(home, 0)
            await first.take(1, serve)  # the run-api forms all batches at once, and keeps the others
            await _full(home, AHEAD)
            if how == "restarted":
                await api.kill()
                await api.start()
            else:
                await api.reset()
            second = await Trainer.registered(api.url, batch_size=2, step=1)
            await second.take(5, serve)
            ended = await _stopped(serve)
            await second.rest()
    assert "restarted or reset" in ended.stderr
    assert AHEAD < _told(ended, "lost with the run-api") <= AHEAD + AHEAD - 1
    _accounted(home, ended, server, first, second)


async def test_trainer_that_is_away_stops_the_flow_at_the_bound_and_gets_all_of_it_later(home: Path) -> None:
    async with run_api() as api, ScriptedServer("vllm", answers(TASKS)) as server:
        given = flags(home, server.base_url, rollout_server_url=api.url, total_steps=8)
        trainer = await Trainer.registered(api.url, batch_size=2)
        async with running(*given, directory=home, command="serve") as serve:
            await trainer.take(2, serve)
            await _full(home, 2)
            made = whole_lines(home / "run" / "rollouts.jsonl")
            await asyncio.sleep(1.0)
            assert whole_lines(home / "run" / "rollouts.jsonl") == made == 2 * (2 + AHEAD)
            await trainer.take(6, serve)
            ended = await serve.ended()
    assert ended.code == 0, ended.stderr
    assert sorted(trainer.tasks) == sorted(f"q{n}" for n in range(8))
    assert _accounted(home, ended, server, trainer) == 0


async def test_deliveries_that_break_arrive_once_and_a_refused_one_is_told(home: Path) -> None:
    async with (
        run_api() as api,
        FaultyRunApi(api.url).serving() as between,
        ScriptedServer("vllm", answers(TASKS)) as server,
    ):
        between.faults = ["500", "503", "reset before", "reset after", "422", "", "reset after"]
        given = flags(home, server.base_url, rollout_server_url=between.url, total_steps=8)
        trainer = await Trainer.registered(api.url, batch_size=2)
        async with running(*given, directory=home, command="serve") as serve:
            await trainer.take(8, serve)
            ended = await serve.ended()
    assert ended.code == 0, ended.stderr
    assert not between.faults
    assert "told to answer 422" in ended.stderr
    assert _told(ended, "refused") == 1
    assert _accounted(home, ended, server, trainer) == 1


async def test_run_api_that_is_away_while_groups_are_finished_gets_them_when_it_is_back(home: Path) -> None:
    total = 10
    async with run_api() as api, ScriptedServer("vllm", answers(TASKS, delay_s=0.5)) as server:
        given = flags(home, server.base_url, rollout_server_url=api.url, total_steps=total)
        trainer = await Trainer.registered(api.url, batch_size=2)
        async with running(*given, directory=home, command="serve") as serve:
            await trainer.take(2, serve)
            asked = len(server.log.completions)
            await until(lambda: len(server.log.completions) > asked, "a group is under way")
            await trainer.rest()
            await api.kill()
            written = whole_lines(home / "run" / "groups.jsonl")
            await until(lambda: whole_lines(home / "run" / "groups.jsonl") > written, "a group without a run-api")
            kept = [_name(group) for group in lines(home / "run" / "groups.jsonl")[written:]]
            await api.start()
            await trainer.register(batch_size=2, step=len(trainer.batches))
            # A delivery that the kill broke off counts as made: then one batch less comes.
            ended = await trainer.until_ended(serve)
    assert ended.code == 0, ended.stderr
    assert set(kept) <= set(trainer.rollouts)
    _accounted(home, ended, server, trainer)
    broken_off, lost = _told(ended, "perhaps not arrived"), _told(ended, "lost with the run-api")
    assert total - broken_off <= len(trainer.groups) <= total + lost  # some that "may be lost" were taken
    assert broken_off <= 1


async def test_two_runs_with_groups_of_different_sizes_and_weights_feed_one_trainer(home: Path) -> None:
    places = {2: home / "small", 4: home / "large"}
    async with run_api() as api, ScriptedServer("vllm", answers(TASKS)) as server:
        given = {}
        for size, directory in places.items():
            directory.mkdir()
            write_tasks(directory / "tasks.jsonl", TASKS)
            given[size] = flags(
                directory,
                server.base_url,
                rollout_server_url=api.url,
                wandb_name=directory.name,
                group_size=size,
                inference_weight=size,
                seed=size,
            )
        trainer = await Trainer.registered(api.url, batch_size=8)
        async with (
            running(*given[2], directory=places[2], command="serve") as small,
            running(*given[4], directory=places[4], command="serve") as large,
        ):
            sizes: set[int] = set()
            while len(trainer.batches) < 5 or len(sizes) < 2:
                await trainer.take(1, small)
                sizes |= {len(group["tokens"]) for group in trainer.groups}
                assert len(trainer.batches) < 200, f"only groups of {sizes} come"
            ends = {2: await _stopped(small), 4: await _stopped(large)}
            await trainer.rest()
    assert all(sum(len(group["tokens"]) for group in batch) == 8 for batch in trainer.batches)
    given_to = [(group["env_id"], _name(group)) for group in trainer.groups]
    assert len(set(given_to)) == len(given_to), "the two call their groups the same"
    for size, directory in places.items():
        written = {_name(group): group for group in lines(directory / "run" / "groups.jsonl")}
        for group in (group for group in trainer.groups if len(group["tokens"]) == size):
            line = written[_name(group)]
            assert {key: group[key] for key in line} == line
        assert f"registered as {directory.name}_" in ends[size].stderr
        assert not ends[size].traceback
        assert printed_outcomes(ends[size]) == outcomes(directory / "run")
    _sampled_by(server, trainer)


# ---------------------------------------------------------------- accounts


def _accounted(home: Path, ended: Ended, server: ScriptedServer, *trainers: Trainer) -> int:
    """Nothing twice, every group complete, as it was written and sampled, and what is missing was told. How many
    groups are missing."""
    assert not ended.traceback, ended.stderr
    given = [rollout for trainer in trainers for rollout in trainer.rollouts]
    assert len(set(given)) == len(given), "nothing is given twice"
    written = {_name(group): group for group in lines(home / "run" / "groups.jsonl")}
    for group in (group for trainer in trainers for group in trainer.groups):
        assert len(group["tokens"]) == 2
        line = written.pop(_name(group))
        assert {key: group[key] for key in line} == line
    ways = ("lost with the run-api", "refused", "perhaps not arrived", "written but not delivered")
    told = [_told(ended, what) for what in ways]
    assert len(written) <= sum(told), f"{len(written)} groups are missing, and {told} were told"
    _sampled_by(server, *trainers)
    assert printed_outcomes(ended) == outcomes(home / "run")
    assert list((home / "t").glob("orchestrator-*")) == []
    return len(written)


def _sampled_by(server: ScriptedServer, *trainers: Trainer) -> None:
    """Every trained stretch is a completion of the endpoint's log, ids and log-probs, and used once."""
    taken = Counter(run for trainer in trainers for group in trainer.groups for run in trained(group))
    assert taken
    assert not taken - Counter(sampled(served) for served in server.log.completions)


def _name(group: Group) -> str:
    name: str = group["overrides"][0]["rollout_id"]
    return name


def _told(ended: Ended, what: str) -> int:
    """The number before these words in the closing table."""
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("delivered")]
    found = re.search(rf"(\d+) {what}", line)
    return int(found[1]) if found else 0


async def _full(home: Path, taken: int) -> None:
    """As much waits for the trainer as may."""
    await until(lambda: whole_lines(home / "run" / "groups.jsonl") >= taken + AHEAD, "the queue is full")
    await asyncio.sleep(0.5)


async def _stopped(serve: Running) -> Ended:
    serve.signal(signal.SIGTERM)
    ended = await serve.ended()
    assert ended.code == 128 + signal.SIGTERM, ended.stderr
    return ended
