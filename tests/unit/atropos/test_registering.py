"""A trainer may come at any moment, also between two questions to the run-api."""

from __future__ import annotations

from typing import Any

from orchestrator.atropos.feed import Feed, Terms
from orchestrator.atropos.position import Ledger, Position
from orchestrator.atropos.run_api import Registration, Trainer
from orchestrator.atropos.stream import TaskStream
from orchestrator.types import BadTask, Task


class TrainerComes:
    """A run-api whose trainer is there from behind the first question on."""

    url = "http://127.0.0.1:1"

    def __init__(self) -> None:
        self.asked = 0

    async def register(self, **terms: Any) -> Registration | None:
        self.asked += 1
        return Registration(0, "quick_0", 0, "", 0) if self.asked > 1 else None

    async def trainer(self) -> Trainer:
        self.asked += 1
        return Trainer(8, 4096) if self.asked > 1 else Trainer(None, None)


class Maker:
    async def registered(self, registration: Registration, trainer: Trainer) -> None:
        self.trainer = trainer


async def test_a_trainer_that_comes_between_two_questions_is_known() -> None:
    ledger, maker = Ledger(Position(7, "tasks")), Maker()

    async def bad_task(task: BadTask, number: int) -> None:
        """There is none."""

    stream = TaskStream([Task("q", "?")], ledger.is_done, bad_task)
    terms = Terms(name="quick", group_size=2, workers=1, worker_timeout_s=60.0, max_token_length=4096)
    api: Any = TrainerComes()
    feed = Feed(api, maker, stream, ledger, terms, lambda said: None)  # type: ignore[arg-type]
    await feed._register()
    assert maker.trainer == Trainer(8, 4096)
