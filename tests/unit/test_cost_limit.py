"""A limit of money: what it lets through, and which prices it is told."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.engine.orchestrator import Orchestrator
from orchestrator.errors import ConfigError, CostReached
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.requests import AgentRequest
from orchestrator.rules.cost_limit import CostLimit
from orchestrator.rules.observer import Observer
from orchestrator.run.prices import PriceList, Prices
from orchestrator.run.tally import Tally
from orchestrator.settings.config import Config
from orchestrator.settings.endpoint import OpenAISettings
from orchestrator.settings.table import EnvSettings
from orchestrator.types import CompletionKind, Crossing, FailedName, Wishes
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.plans import TALK, a_plan, an_attempt
from tests.fakes.synthetic_run import WordTokenizer


def cents(rollout_id: str, prompt_tokens: int, sampled_tokens: int) -> float:
    return prompt_tokens * 0.01 + sampled_tokens * 0.1


class Told:
    """How often a limit said that nothing is to be begun any more."""

    def __init__(self, most: float) -> None:
        self.count = 0
        self.cost_limit = CostLimit(most, cents, self._empty)

    def _empty(self) -> None:
        self.count += 1


async def test_a_completion_that_could_pass_the_limit_is_not_asked_for() -> None:
    cost_limit = Told(10.0).cost_limit
    async with cost_limit.hold("r", 100, 50) as settle:  # at most 6.00
        settle(100, 10)
    assert cost_limit.spent == pytest.approx(2.0)
    async with cost_limit.hold("s", 100, 50) as settle:
        settle(100, 50)
    assert cost_limit.spent == pytest.approx(8.0)
    with pytest.raises(CostReached, match=r"env\.max_cost: the run has cost 8\.0000 of 10"):
        async with cost_limit.hold("t", 100, 11):
            pass
    async with cost_limit.hold("t", 100, 10):
        pass


async def test_a_completion_waits_for_those_that_may_leave_enough() -> None:
    cost_limit, asked = Told(10.0).cost_limit, asyncio.Event()

    async def other(most: int) -> bool:
        async with cost_limit.hold("s", 100, most):
            asked.set()
        return True

    async with cost_limit.hold("r", 100, 50) as settle:
        waiting = asyncio.create_task(other(50))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not asked.is_set()
        settle(100, 10)
    assert await waiting
    async with cost_limit.hold("r", 100, 50) as settle:
        waiting = asyncio.create_task(other(50))
        await asyncio.sleep(0)
        settle(100, 50)
    with pytest.raises(CostReached):
        await waiting


async def test_what_a_failed_completion_held_is_given_back() -> None:
    cost_limit = Told(10.0).cost_limit
    for _ in range(5):
        with pytest.raises(ValueError, match="broken"):
            async with cost_limit.hold("r", 100, 80):
                raise ValueError("broken")
    assert cost_limit.spent == 0


def end(cost_limit: CostLimit, name: str, cost: float, *, graded: bool = True, held: bool = True) -> None:
    """The attempt `name` of the rollout with the name's first letter."""
    cost_limit.ended(name, name[0], cost, graded=graded, held=held)


def test_no_rollout_is_begun_when_those_under_way_will_use_up_the_rest() -> None:
    told = Told(10.0)
    for name in "abcd":
        told.cost_limit.begun(name, name[0])
    assert told.count == 0, "nothing is known of what a rollout costs"
    end(told.cost_limit, "a", 2.0)  # 2 spent, three under way and the next one: 10
    assert told.count == 0
    told.cost_limit.begun("e", "e")
    assert (told.count, told.cost_limit.is_empty) == (1, True)
    end(told.cost_limit, "b", 2.0)
    assert told.count == 1


def test_what_earlier_processes_spent_counts() -> None:
    told = Told(10.0)
    told.cost_limit.open(7.0)
    told.cost_limit.begun("a", "a")
    end(told.cost_limit, "a", 2.0)
    assert told.count == 1
    used_up = Told(10.0)
    used_up.cost_limit.open(10.0)
    assert (used_up.count, used_up.cost_limit.is_empty) == (1, True)


def test_what_other_machines_sampled_is_spent_when_it_is_known() -> None:
    cost_limit = Told(10.0).cost_limit
    for name in "ab":
        cost_limit.begun(name, name[0])
    end(cost_limit, "a", 6.0, held=False)
    with pytest.raises(CostReached, match=r"12\.0000 of 10"):
        end(cost_limit, "b", 6.0, held=False)


@pytest.mark.parametrize("held", [True, False])
async def test_an_attempt_that_comes_again_with_its_score_is_paid_once(held: bool) -> None:
    cost_limit = Told(10.0).cost_limit
    cost_limit.begun("a0", "a")
    if held:
        async with cost_limit.hold("a0", 100, 30) as settle:
            settle(100, 30)
    end(cost_limit, "a0", 4.0, graded=False, held=held)
    end(cost_limit, "a1", 4.0, held=held)
    assert cost_limit.spent == pytest.approx(4.0)


def test_a_resumed_run_opens_with_what_all_its_records_cost() -> None:
    server = OpenAISettings(model_name="m", prompt_price=1.0, completion_price=1.0)
    orchestrator = Orchestrator(Config(env=EnvSettings(max_cost=10.0), openai=(server,)), Observer())
    training, evaluation = Tally(cost=3.0, ungraded={(1, 0)}), Tally(cost=4.0, ungraded={(2, 1)})
    orchestrator.shared.costs.open("train", training, [evaluation])
    cost_limit = orchestrator.shared.costs.cost_limit
    assert cost_limit is not None
    for place in (("train", 1, 0), ("eval", 2, 1)):
        cost_limit.ended("graded now", place, 2.0, graded=True, held=True)
    assert cost_limit.spent == pytest.approx(7.0)


async def test_an_evaluation_s_rollouts_with_the_ids_of_others_are_paid_once() -> None:
    cost_limit = Told(10.0).cost_limit
    for split in ("train", "eval"):
        cost_limit.begun("g0-r0-a0", (split, 0, 0))
    for _ in range(2):
        async with cost_limit.hold("g0-r0-a0", 100, 20) as settle:
            settle(100, 20)
    for split in ("eval", "train"):
        cost_limit.ended("g0-r0-a0", (split, 0, 0), 3.0, graded=True, held=True)
    assert cost_limit.spent == pytest.approx(6.0)


@pytest.mark.parametrize("known", [False, True], ids=["nothing counts", "a tokenizer"])
async def test_tools_and_formats_in_a_prompt_are_paid_too(known: bool) -> None:
    """An endpoint that takes texts prints them: how long that is, is known when it has answered."""
    tools = ({"type": "function", "function": {"name": "f", "description": "x " * 2000, "parameters": {}}},)
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"description": "y" * 3000}}}
    plan = a_plan()
    plan = replace(plan, agent=replace(plan.agent, kind="program"))
    for wishes in (Wishes(tools=tools), Wishes(response_format=form)):
        cost_limit = CostLimit(100 * 0.1 + 2000 * 0.01, cents, lambda: None)
        completer = ScriptedCompleter(["hello"])
        completer.guides = True
        lease = Lease(plan, completer, WordTokenizer() if known else None, {}, cost_limit=cost_limit)
        reply = await lease.complete(AgentRequest(1, CompletionKind.ACTION, TALK, wishes=wishes), b"1")
        assert reply.ended == FailedName.CANCELLED
        assert isinstance(lease.completions.fatal, CostReached)


def test_what_earlier_attempts_cost_is_spent_before_they_get_their_score() -> None:
    told = Told(10.0)
    told.cost_limit.open(9.0, ["a"])
    end(told.cost_limit, "a1", 4.0)
    assert told.cost_limit.spent == pytest.approx(9.0)
    end(told.cost_limit, "a2", 0.5, held=False)
    assert told.cost_limit.spent == pytest.approx(9.5), "the next attempt of that place is another one"


def test_what_a_rollout_asked_is_spent_when_it_is_over_and_ends_no_other() -> None:
    told = Told(10.0)
    for name in "abc":
        told.cost_limit.begun(name, name)
    told.cost_limit.ended("a", "a", 3.0, graded=True, held=True, apart=2.5)  # its completions were held
    assert (told.cost_limit.spent, told.cost_limit.is_empty) == (2.5, True), "three more would be 12"
    told.cost_limit.ended("b", "b", 9.0, graded=True, held=True, apart=9.0)
    assert told.cost_limit.spent == 11.5, "those under way come to their end"


def test_a_request_has_a_price_beside_those_of_tokens_or_alone() -> None:
    asked = Crossing(1, 0.0, 1.0, "GET", "https", "h.example", 443, "/", 200, source="network")
    free = (replace(asked, source="cache"), replace(asked, source="record"), replace(asked, source="border"))
    attempt = an_attempt()
    attempt = replace(attempt, record=replace(attempt.record, crossings=(asked, asked, *free)))
    server = OpenAISettings(model_name="m", prompt_price=0.0, completion_price=0.0)
    for servers in ((server,), (OpenAISettings(),)):
        prices = Prices.of(servers, EnvSettings(request_price=0.5))
        assert prices is not None
        assert prices.cost_of(attempt) == 1.0
        assert Prices.recorded({"prices": prices.public()}) == prices
        tally = Tally(prices)
        tally.attempt(attempt)
        assert tally.cost == 1.0
    assert Prices.of((OpenAISettings(),), EnvSettings()) is None


def test_afterwards_a_request_gets_a_price_where_the_run_has_none() -> None:
    tokens = Prices(((1.0, 2.0),), (1.0,))
    later = PriceList.read(None, None, None, 0.25)
    assert later.of({"prices": tokens.public()}) == replace(tokens, request=0.25)
    assert later.of({"prices": replace(tokens, request=4.0).public()}) == replace(tokens, request=4.0)
    assert later.of({}) == Prices(((0.0, 0.0),), (1.0,), 0.25)
    assert PriceList().of({}) is None


def priced(table: Path, *models: str) -> Prices | None:
    servers = tuple(OpenAISettings(model_name=model) for model in models)
    return Prices.of(servers, EnvSettings(price_table=table))


def test_prices_come_from_a_table_by_model(tmp_path: Path) -> None:
    table = tmp_path / "prices.yaml"
    table.write_text("small: {prompt: 0.5, completion: 2}\nlarge/model: {prompt: 3, completion: 15.0}\n")
    prices = priced(table, "large/model")
    assert prices is not None
    assert prices.cost("g0", 1_000_000, 1_000_000) == 18
    own = OpenAISettings(model_name="other", prompt_price=1.0, completion_price=1.0)
    assert Prices.of((own,), EnvSettings(price_table=table)) == Prices(((1.0, 1.0),), (1.0,))
    with pytest.raises(ConfigError, match=r"env\.price_table: no prices of other in "):
        priced(table, "small", "other")


@pytest.mark.parametrize(
    "content",
    [
        *(
            "",
            "[]",
            "a: 1",
            "a: {prompt: 1}",
            "a: {prompt: 1, completion: -1}",
            "a: {prompt: 1, completion: .nan}",
        ),
        *("a: {prompt: true, completion: 1}", "a: {prompt: 1, completion: 1, more: 1}", "{", "a: !!python/none 1"),
        *("[" * 1_000, "\x00"),
    ],
)
def test_a_table_that_is_none_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    table = tmp_path / "prices.yaml"
    table.write_text(content)
    with pytest.raises(ConfigError, match=r"env\.price_table: ") as refused:
        priced(table, "a")
    assert "\n" not in str(refused.value)


def test_a_table_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.price_table: .* cannot be read"):
        priced(tmp_path / "none.yaml", "a")
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match=r"env\.price_table: .* is not a file"):
            priced(place, "a")
