"""A run that may cost so much and no more ends in order before, and goes on with more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator import Orchestrator, load_config
from orchestrator.errors import CostReached
from orchestrator.types import Task
from tests.fakes.inference import ScriptedServer, always
from tests.fakes.runs import Ended, answers, essence, flags, lines, outcomes, run, running
from tests.fakes.tokenizer import tokenizer_folder
from tests.fakes.trainers import Trainer, run_api

TASKS = 10
PRICES = ("--openai.prompt_price=100", "--openai.completion_price=1000")


def cost(run_directory: Path) -> float:
    """By the token counts on record."""
    completions = [c for line in lines(run_directory / "rollouts.jsonl") for c in line.get("completions", ())]
    return sum(c["prompt_tokens"] * 100 + c["completion_tokens"] * 1000 for c in completions) / 1e6


def printed(ended: Ended) -> float:
    found = re.search(r"^cost +([0-9.]+)", ended.stdout, re.MULTILINE)
    assert found, ended.stdout
    return float(found[1])


@pytest.mark.slow
async def test_a_run_ends_before_its_cost_is_passed_and_goes_on_to_the_same_groups(home: Path) -> None:
    async with ScriptedServer("vllm", answers(TASKS, delay_s=0.05)) as server:
        whole = await run(*flags(home, server.base_url, run_dir=home / "whole"), *PRICES, directory=home)
        assert whole.code == 0, whole.stderr
        everything = cost(home / "whole")
        assert printed(whole) == pytest.approx(everything, abs=1e-3)
        most = everything / 2
        given = flags(home, server.base_url, max_cost=most)
        ended = await run(*given, *PRICES, directory=home)
        assert ended.code == 1, ended.stderr
        assert not ended.traceback
        assert 0 < cost(home / "run") <= most
        assert printed(ended) == pytest.approx(cost(home / "run"), abs=1e-3)
        assert "env.max_cost: the run has cost" in ended.stderr
        assert "--env.resume" in ended.stderr
        assert 0 < len(lines(home / "run" / "groups.jsonl")) < TASKS
        again = await run("--env.resume", "run", directory=home)
        assert again.code == 1, "nothing is left"
        assert "env.max_cost: the run has cost" in again.stderr
        more = await run("--env.resume", "run", f"--env.max_cost={10 * everything}", directory=home)
        assert more.code == 0, more.stderr
    assert essence(home / "run" / "groups.jsonl") == essence(home / "whole" / "groups.jsonl")


async def test_even_the_first_rollouts_cannot_pass_it(home: Path) -> None:
    """Nothing is known yet of what a rollout costs: the completion that might pass the limit is not asked for."""
    async with ScriptedServer("vllm", answers(TASKS, delay_s=0.2)) as server:
        given = flags(home, server.base_url, max_cost=0.5, max_completion_tokens=16)
        ended = await run(*given, *PRICES, directory=home)
        assert ended.code == 1, ended.stderr
        assert not ended.traceback, ended.stderr
        served = sum(len(s.prompt_ids) * 100 + len(s.sampled_ids) * 1000 for s in server.log.completions) / 1e6
    assert 0 < served <= 0.5
    assert "env.max_cost" in ended.stderr
    assert set(outcomes(home / "run")) <= {"finished", "no_answer", "cancelled"}


async def test_serve_ends_so_too(home: Path) -> None:
    async with run_api() as api, ScriptedServer("vllm", answers(TASKS, delay_s=0.05)) as server:
        given = flags(home, server.base_url, rollout_server_url=api.url, total_steps=40, max_cost=4)
        trainer = await Trainer.registered(api.url, batch_size=2)
        async with running(*given, *PRICES, directory=home, command="serve") as serve:
            ended = await trainer.until_ended(serve)
    assert ended.code == 1, ended.stderr
    assert not ended.traceback, ended.stderr
    assert 0 < cost(home / "run") <= 4
    assert "env.max_cost: the run has cost" in ended.stderr
    assert 0 < len(trainer.groups) < 40


async def test_a_limit_without_prices_is_refused(home: Path) -> None:
    async with ScriptedServer("vllm", answers(TASKS)) as server:
        ended = await run(*flags(home, server.base_url, max_cost=1), directory=home)
    assert ended.code == 2
    assert "env.max_cost: needs prices" in ended.stderr


@pytest.mark.long
async def test_a_limit_that_the_last_rollouts_come_near_leaves_a_whole_evaluation(home: Path) -> None:
    """There would be no money for another rollout, and none is to come. All cost the same."""
    few = {"group_size": None, "max_completion_tokens": 32, "max_concurrent_sandboxes": 1}
    async with ScriptedServer("vllm", always("Thought.\n<code>\nfinal_answer(1)\n</code>")) as server:
        first = flags(home, server.base_url, run_dir=home / "a", **few)
        whole = await run(*first, *PRICES, directory=home, command="evaluate")
        assert whole.code == 0, whole.stderr
        given = flags(home, server.base_url, max_cost=cost(home / "a") * (1 + 0.5 / TASKS), **few)
        ended = await run(*given, *PRICES, directory=home, command="evaluate")
    assert ended.code == 0, ended.stderr
    assert "no rollout is begun any more" in ended.stderr
    assert len(lines(home / "run" / "rollouts.jsonl")) == TASKS
    assert (home / "run" / "metrics.json").exists()


async def test_a_run_that_is_complete_is_complete_whatever_it_may_cost(home: Path) -> None:
    async with ScriptedServer("vllm", answers(TASKS)) as server:
        whole = await run(*flags(home, server.base_url), *PRICES, directory=home)
        assert whole.code == 0, whole.stderr
        for most in (cost(home / "run"), 0.001):
            again = await run("--env.resume", "run", f"--env.max_cost={most}", directory=home)
            assert again.code == 0, again.stderr


async def test_where_no_tokenizer_counts_a_prompt_its_bytes_bound_it(home: Path) -> None:
    async with ScriptedServer("openai", answers(TASKS)) as server:
        given = flags(home, server.base_url, max_cost=0.05, tokenizer_name="none")
        ended = await run(*given, *PRICES, directory=home)
        assert not server.log.completions or all(s.probe for s in server.log.completions)
    assert ended.code == 1, ended.stderr
    assert "env.max_cost: the run has cost 0.0000" in ended.stderr


async def test_a_program_gets_the_rows_that_are_paid(home: Path) -> None:
    """What was not begun has rows that say so; the next call, which could make none, raises."""
    tasks = [Task(f"q{n}", f"What is number {n} (of q{n}!)?", str(n)) for n in range(TASKS)]
    async with ScriptedServer("vllm", always("Thought.\n<code>\nfinal_answer(1)\n</code>")) as server:
        env = {"launcher": "process", "tokenizer_name": str(tokenizer_folder()), "max_completion_tokens": 32}
        openai = {
            "base_url": server.base_url,
            "model_name": "scripted",
            "prompt_price": 100,
            "completion_price": 1000,
        }
        limits = {"max_concurrent_sandboxes": 1, "group_size": 1, "max_cost": 1.0}
        config = load_config(env={**env, **limits}, openai=openai, environ={}, cwd=home)
        async with Orchestrator(config) as orchestrator:
            rows = await orchestrator.rollouts(tasks)
            scored = [row for row in rows if row.score is not None]
            assert len(rows) == TASKS
            assert 0 < len(scored) < TASKS
            with pytest.raises(CostReached):
                await orchestrator.rollouts(tasks)
