"""A trainer may come at any moment, also between two questions to the run-api."""

from __future__ import annotations

from typing import Any

from orchestrator.atropos.connection import Connection
from orchestrator.atropos.position import Ledger, Position
from orchestrator.atropos.run_api import Registration, Trainer
from orchestrator.atropos.terms import Terms


class TrainerComes:
    """A run-api whose trainer is there from behind the first question on."""

    url = "http://127.0.0.1:1"

    def __init__(self) -> None:
        self.asked = 0

    async def register(self, terms: Terms) -> Registration | None:
        self.asked += 1
        return Registration(0, "quick_0", 0, "", 0) if self.asked > 1 else None

    async def trainer(self) -> Trainer:
        self.asked += 1
        return Trainer(8, 4096) if self.asked > 1 else Trainer(None, None)


async def test_a_trainer_that_comes_between_two_questions_is_known() -> None:
    known: list[Trainer] = []

    async def registered(registration: Registration, trainer: Trainer) -> None:
        known.append(trainer)

    terms = Terms(name="quick", group_size=2, workers=1, worker_timeout_s=60.0, max_token_length=4096)
    api: Any = TrainerComes()
    ledger = Ledger(Position(7, "tasks"))
    await Connection(api, terms, ledger, lambda said: None, registered).register()
    assert known == [Trainer(8, 4096)]
