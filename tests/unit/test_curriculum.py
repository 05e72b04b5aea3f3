"""The engine with `env.curriculum pools` and a policy whose skill at each task is known; what the report says."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections import Counter
from contextlib import AsyncExitStack, aclosing, closing
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from orchestrator.cli import main
from orchestrator.errors import ConfigError
from orchestrator.report.curriculum import Curriculum
from orchestrator.report.reader import read_run
from orchestrator.rules.estimates import at_least, chance_of_fall
from orchestrator.rules.observer import Observer
from orchestrator.run.directory import RunDirectory
from orchestrator.settings.table import EnvSettings
from orchestrator.types import Group, Task
from tests.fakes.drawing import Drawing, Skill, quarters
from tests.fakes.held_rollouts import held, until
from tests.fakes.skilled import Skilled

GROUP = 4
TASKS = [Task(f"q{n}", "What is 6 times 7?", "42") for n in range(24)]


def skill(task: str, asked: int) -> float:
    """Half of the tasks are hopeless, a quarter is easy, a quarter is in between."""
    number = int(task[1:])
    return (0.0, 1.0, 0.0, 0.3 + number / 60)[number % 4]


async def rolled(
    skill: Skill, seed: int, groups: int, *, curriculum: str = "pools", directory: Path | None = None, **env: Any
) -> tuple[list[Group], Skilled]:
    """The groups of a run of the real engine."""
    observer, completer = Observer(), Skilled(skill)
    settings = {"group_size": GROUP, "max_concurrent_sandboxes": 4, "seed": seed, "total_steps": groups, **env}
    async with AsyncExitStack() as stack:
        if directory is not None:
            observer.writer = stack.enter_context(closing(RunDirectory(directory)))
        engine = await stack.enter_async_context(
            held(observer, completer=completer, curriculum=curriculum, **settings)
        )
        if (pools := engine.orchestrator.maker.pools) is not None:
            pools.lag = 10
        async with aclosing(engine.orchestrator.groups(TASKS)) as stream:
            made = [group async for group in stream]
    return made, completer


def informative(groups: list[Group]) -> int:
    return sum(len({member.score.value for member in group.members_G}) > 1 for group in groups)


async def rate(curriculum: str, seed: int, groups: int) -> float:
    """Informative groups per 1,000 sampled tokens."""
    made, policy = await rolled(skill, seed, groups, curriculum=curriculum)
    assert {group.task.task_id for group in made} == {task.task_id for task in TASKS}
    return 1000 * informative(made) / policy.tokens


@pytest.mark.long
async def test_more_groups_teach_something_for_the_same_tokens_and_no_task_is_left_out() -> None:
    assert await rate("pools", 1, 72) > 1.3 * await rate("none", 1, 72)


@pytest.mark.long
async def test_three_seeds_against_uniform_draws() -> None:
    """The figures of docs/training.md."""
    uniform = [await rate("none", seed, 288) for seed in (1, 2, 3)]
    pools = [await rate("pools", seed, 288) for seed in (1, 2, 3)]
    gains = [b / a for a, b in zip(uniform, pools, strict=True)]
    gain, reach = mean(gains), 4.303 * stdev(gains) / math.sqrt(3)  # Student's quantile of two degrees of freedom
    print(f"uniform {uniform}, pools {pools}: {gain:.2f} times ({gain - reach:.2f} to {gain + reach:.2f})")
    assert gain - reach > 1.5


@pytest.mark.slow
async def test_the_same_scores_give_the_same_tasks_in_the_same_order() -> None:
    runs = [await rolled(skill, 1, 60, max_concurrent_sandboxes=sandboxes) for sandboxes in (2, 8)]
    orders = [[(g.number, g.task.task_id) for g in sorted(groups, key=lambda g: g.number)] for groups, _ in runs]
    # The engine begins some groups more than it is asked for in neither of them.
    assert orders[0] == orders[1]
    assert len(orders[0]) == 60


async def test_what_breaks_is_no_failure_of_its_task() -> None:
    async with held(curriculum="pools", total_steps=6, max_retries=0, group_policy="drop") as engine:
        engine.completer.dead = lambda group, index, attempt: True
        engine.completer.let_all_go()
        groups = [group async for group in engine.orchestrator.groups(TASKS[:2])]
    assert all(group.dropped for group in groups)
    assert [group.task.task_id for group in groups] == ["q0", "q1"] * 3


@pytest.mark.long
async def test_groups_of_equal_scores_that_are_dropped_count_too() -> None:
    groups, _ = await rolled(skill, 1, 96, zero_variance="drop")
    drawn = Counter(group.task.task_id for group in groups)
    assert max(drawn[f"q{n}"] for n in range(0, 24, 2)) < min(drawn[f"q{n}"] for n in range(3, 24, 4))


# ---------------------------------------------------------------- what cannot be


async def test_what_has_no_rounds_is_refused_by_name() -> None:
    async with held(curriculum="pools") as engine:
        with pytest.raises(ConfigError, match=r"env\.curriculum: .* each comes once; set --env\.total_steps"):
            await anext(engine.orchestrator.groups(TASKS))
        with pytest.raises(ConfigError, match=r"env\.curriculum: rollouts\(tasks\)"):
            await engine.orchestrator.rollouts(TASKS)
    async with held(curriculum="pools", total_steps=4) as engine:
        with pytest.raises(ConfigError, match=r"env\.curriculum: .*no iterator"):
            await anext(engine.orchestrator.groups(iter(TASKS)))


async def test_one_call_draws_at_a_time_and_the_next_goes_on_with_what_is_known() -> None:
    async with held(curriculum="pools", total_steps=2) as engine:
        first = engine.orchestrator.groups(TASKS[:2])
        asking = asyncio.create_task(anext(first))
        await until(lambda: bool(engine.running))
        with pytest.raises(ConfigError, match="read at a time"):
            await anext(engine.orchestrator.groups(TASKS))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await first.aclose()
        engine.completer.let_all_go()
        # What was cancelled has no result, and nobody waits for it.
        assert len([group async for group in engine.orchestrator.groups(TASKS[:2])]) == 2


@pytest.mark.parametrize("command", ["evaluate", "replay", "demo", "rescore"])
def test_commands_that_draw_no_task_again_do_not_take_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--env.curriculum", "pools"]) == 2
    assert "this command does not use --env.curriculum" in capsys.readouterr().err


def test_an_evaluation_has_none() -> None:
    assert EnvSettings(curriculum="pools").for_evaluation().curriculum == "none"


# ---------------------------------------------------------------- what the report says


def reported(skill: Skill, seed: int, rounds: int = 24) -> Curriculum:
    drawing = Drawing(TASKS, skill, 10, 5, random.Random(seed), seed)
    drawing.run(12 * rounds)
    return drawing.report


@pytest.mark.slow
async def test_the_report_counts_pools_and_informative_groups(tmp_path: Path) -> None:
    await rolled(skill, 1, 72, directory=tmp_path)
    run = read_run(tmp_path, None)
    facts = dict(run.facts)
    drawn = {name: facts[f"pool: {name}"] for name in ("new", "mixed", "hopeless")}
    assert re.fullmatch(r"\d+ tasks, drawn \d+ times, [1-9]\d* informative", drawn["mixed"])
    assert re.fullmatch(r"\d+ tasks, drawn \d+ times, [01] informative", drawn["hopeless"])
    assert sum(int(re.findall(r"drawn (\d+)", text)[0]) for name, text in facts.items() if "pool" in name) == 72
    assert sum(int(text.split()[0]) for name, text in facts.items() if "pool" in name) == len(TASKS)
    assert facts["informative groups"].endswith("per 1,000 sampled tokens")
    assert not any("failed now" in warning for warning in run.warnings)


def test_solved_at_re_tests_is_a_mean_over_the_data_set() -> None:
    shares = [dict(reported(quarters, seed).facts())["solved at re-tests"] for seed in range(20)]
    assert mean(float(share.partition("%")[0]) for share in shares) == pytest.approx(37.5, abs=1.5)


@pytest.mark.slow
def test_a_policy_that_fails_on_purpose_shows_and_an_honest_one_does_not() -> None:
    def fails_easy_ones(task: str, drawn: int) -> float:
        """One in two, once it was seen to solve them: they come in every round then."""
        return 0.5 if quarters(task, drawn) == 1.0 and drawn >= 3 else quarters(task, drawn)

    def fails_hard_ones(task: str, drawn: int) -> float:
        """All of those in between: they come in every eighth round then."""
        return 0.0 if quarters(task, drawn) == 0.5 and drawn >= 4 else quarters(task, drawn)

    def learns(task: str, drawn: int) -> float:
        return min(1.0, quarters(task, drawn) + drawn / 8)

    def fails_what_it_learned(task: str, drawn: int) -> float:
        return 0.0 if drawn >= 16 and int(task[1:]) % 2 else learns(task, drawn)

    def warned(skill: Skill, seeds: int) -> list[str]:
        return [warning for seed in range(seeds) for warning in reported(skill, seed, rounds=48).warnings()]

    for honest in (quarters, learns):
        assert len(warned(honest, 8)) == 0
    for sandbagging in (fails_easy_ones, fails_hard_ones, fails_what_it_learned):
        assert len(warned(sandbagging, 3)) >= 2, sandbagging
    assert re.search(r"q\d+: 12 of 12, then \d+ of 16", warned(fails_easy_ones, 3)[0])


def test_a_task_that_was_learned_and_is_failed_fell() -> None:
    report = Curriculum()
    for solved in [0] * 8 + [4] * 4 + [1] * 4:
        report.take({"pool": "mixed", "task_id": "a", "solved": solved, "scored": 4, "retest": True})
    assert dict(report.facts())["re-tests"].startswith("1 tasks fell")


def test_lines_of_anything_are_no_result() -> None:
    report = Curriculum()
    for line in ({}, {"pool": "easy"}, {"pool": "easy", "task_id": [], "solved": 5, "scored": 4, "retest": True}):
        report.take(line)
    report.take({"pool": "easy", "task_id": "a", "solved": 5, "scored": 10**9, "retest": True})
    assert report.warnings() == []
    assert dict(report.facts()) == {"pool: easy": "1 tasks, drawn 1 times, 0 informative"}


def test_chances_are_those_of_the_books() -> None:
    assert at_least(0, 10, 0.5) == 1
    assert at_least(9, 10, 0.5) == pytest.approx(11 / 1024)
    assert at_least(3, 3, 0.05) == pytest.approx(0.05**3)
    assert chance_of_fall((8, 8), (0, 8)) == pytest.approx(1 / 12870)
    assert chance_of_fall((4, 8), (4, 8)) == pytest.approx(0.6904, abs=1e-3)
    assert chance_of_fall((0, 8), (8, 8)) == 1
