"""The engine with `env.curriculum pools` and a policy whose skill at each task is known; what the report says."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing, closing
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ConfigError
from orchestrator.report.summary import read_run
from orchestrator.rules.estimates import at_least, chance_of_fall
from orchestrator.rules.observer import Observer
from orchestrator.run.directory import RunDirectory
from orchestrator.settings.flags import parse
from orchestrator.types import Group, Task
from tests.fakes.held_rollouts import held, until
from tests.fakes.skilled import Skilled

GROUP = 4
TASKS = [Task(f"q{n}", "What is 6 times 7?", "42") for n in range(24)]
Skill = Callable[[str, int], float]


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


async def test_more_groups_teach_something_for_the_same_tokens_and_no_task_is_left_out() -> None:
    for seed in (1, 2, 3):
        rates = []
        for curriculum in ("none", "pools"):
            groups, policy = await rolled(skill, seed, 96, curriculum=curriculum)
            assert {group.task.task_id for group in groups} == {task.task_id for task in TASKS}
            rates.append(1000 * informative(groups) / policy.tokens)
        assert rates[1] > 1.3 * rates[0]


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
        with pytest.raises(Exception):  # noqa: B017 - nothing works: the run ends, however it says so
            async for _ in engine.orchestrator.groups(TASKS[:2]):
                pass
        pools = engine.orchestrator.maker.pools
        assert pools is not None
        assert pools.takes("q0")
        assert pools.takes("q1")


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
def test_commands_that_draw_no_task_again_do_not_take_it(command: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.curriculum"):
        main([command, "--env.curriculum", "pools"])


# ---------------------------------------------------------------- what the report says


async def told(tmp_path: Path, skill: Skill, seed: int = 1, rounds: int = 24) -> tuple[dict[str, str], list[str]]:
    await rolled(skill, seed, rounds * 12, directory=tmp_path)
    run = read_run(tmp_path, None)
    return dict(run.facts), run.warnings


async def test_the_report_counts_pools_and_informative_groups(tmp_path: Path) -> None:
    facts, warnings = await told(tmp_path, skill, rounds=8)
    assert facts["pool: new"] == "0 tasks, drawn 24 times, 6 informative"
    assert facts["pool: hopeless"].startswith("12 tasks, drawn ")
    assert facts["pool: hopeless"].endswith(" 0 informative")
    assert "per 1,000 sampled tokens" in facts["informative groups"]
    assert float(facts["solved at re-tests"].partition("%")[0]) == pytest.approx(37, abs=8)
    assert warnings == []


async def test_a_policy_that_fails_on_purpose_shows(tmp_path: Path) -> None:
    def sandbagging(task: str, asked: int) -> float:
        """Fails one in two of the easy ones once it has seen them twice, so that they come in every round."""
        able = skill(task, asked)
        return 0.5 if able == 1.0 and asked >= 2 * GROUP else able

    _, warnings = await told(tmp_path, sandbagging)
    assert len(warnings) == 1
    assert "fails on purpose" in warnings[0]
    assert any(f"q{n} (4 of 4, then " in warnings[0] for n in range(1, 24, 4))


def test_chances_are_those_of_the_books() -> None:
    assert at_least(0, 10, 0.5) == 1
    assert at_least(9, 10, 0.5) == pytest.approx(11 / 1024)
    assert at_least(3, 3, 0.05) == pytest.approx(0.05**3)
    assert chance_of_fall((8, 8), (0, 8)) == pytest.approx(1 / 12870)
    assert chance_of_fall((4, 8), (4, 8)) == pytest.approx(0.6904, abs=1e-3)
    assert chance_of_fall((0, 8), (8, 8)) == 1
