"""What is made of a run afterwards: exports of solved rollouts, and its cost by prices that it did not have."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.inference import ScriptedServer
from tests.fakes.runs import Ended, answers, flags, lines, place, run, write_tasks

TASKS = 4
PRICES = ("--openai.prompt_price", "1", "--openai.completion_price", "10")


@dataclass(frozen=True, slots=True)
class Made:
    """A run of 16 rollouts, some right and some wrong; `dialect`: whether its endpoint gave ids."""

    home: Path
    dialect: str

    async def command(self, name: str, *arguments: object) -> Ended:
        return await run(*map(str, arguments), directory=self.home, command=name)

    @property
    def rollouts(self) -> list[dict[str, Any]]:
        return lines(self.home / "run" / "rollouts.jsonl")

    @property
    def cost(self) -> float:
        completions = [one for line in self.rollouts for one in line["completions"]]
        return sum(one["prompt_tokens"] + 10 * one["completion_tokens"] for one in completions) / 1e6


@pytest.fixture(params=["vllm", "openai"])
async def made(request: pytest.FixtureRequest) -> AsyncIterator[Made]:
    with place() as home:
        write_tasks(home / "tasks.jsonl", TASKS)
        async with ScriptedServer(request.param, answers(TASKS)) as server:
            ended = await run(*flags(home, server.base_url, group_size=4), directory=home)
        assert ended.code == 0, ended.stderr
        yield Made(home, request.param)


@pytest.mark.slow
async def test_only_solved_rollouts_become_examples_and_costs_are_told(made: Made) -> None:
    scores = {line["rollout_id"]: line["score"] for line in made.rollouts}
    assert set(scores.values()) == {0.0, 1.0}
    wrong = list(scores.values()).count(0.0)
    for name, options in (("messages", ("--best", 4)), ("dpo", ())):
        ended = await made.command("export", "run", "--format", name, *options, "--output", name)
        assert ended.code == 0, ended.stderr
        for row in lines(made.home / name / "train.jsonl"):
            assert row["score"] == 1.0 if name == "messages" else row["chosen_score"] > row["rejected_score"]
        assert ("not solved\n" in ended.stdout) == (name == "messages")
    ended = await made.command(
        "export", "run", "--format", "messages", "--best", 4, "--solved", "no", "--output", "m"
    )
    assert f"not solved     {wrong} of the rows\n" in ended.stdout
    assert len(lines(made.home / "m" / "train.jsonl")) == len(scores)
    ended = await made.command("export", "run", "--format", "sft", "--best", 4)
    if made.dialect == "openai":
        assert ended.code == 1
        assert ended.stderr.startswith("orchestrator: nothing to export: ")
        assert ended.stderr.endswith("without exact token ids; --format messages has them as conversations\n")
        assert not (made.home / "run" / "export-sft").exists()
    else:
        assert ended.code == 0, ended.stderr
        kept = [row["rollout_id"] for row in lines(made.home / "run" / "export-sft" / "train.jsonl")]
        assert kept == [name for name, score in sorted(scores.items()) if score == 1.0]

    assert (await made.command("view", "run")).stdout.count("\ncost ") == 0
    viewed = await made.command("view", "run", *PRICES)
    each = f"{made.cost / TASKS:.4f} a written group, {made.cost / len(scores):.5f} a trained rollout"
    assert f"\ncost           {made.cost:.4f}; {each}\n" in viewed.stdout
    listed = await made.command("runs", ".", "--json", *PRICES)
    assert json.loads(listed.stdout)["runs"][0]["cost"] == pytest.approx(made.cost)
    compared = await made.command("compare", "run", "run", "--json", *PRICES)
    assert json.loads(compared.stdout)["runs"][0]["cost"] == pytest.approx(made.cost)
