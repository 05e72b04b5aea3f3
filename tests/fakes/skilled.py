"""A policy whose skill at each task is known: how often it answers "42" there."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable

from orchestrator.completion.base import CompletionRequest
from orchestrator.types import Completion
from tests.fakes.completers import text_completion
from tests.fakes.held_rollouts import HeldCompleter


class Skilled(HeldCompleter):
    """`skill` gives the chance to solve a task, and how many answers it was asked for there before. Which answers
    are right follows from their seeds. A wrong answer takes three times the tokens of a right one."""

    def __init__(self, skill: Callable[[str, int], float]) -> None:
        super().__init__()
        self._skill = skill
        self._asked: Counter[str] = Counter()
        self.tokens = 0

    async def sample(self, request: CompletionRequest) -> Completion:
        task = request.task_id
        digest = hashlib.blake2b(f"{request.sampling.seed} {task}".encode(), digest_size=8).digest()
        right = int.from_bytes(digest) / 2**64 < self._skill(task, self._asked[task])
        self._asked[task] += 1
        completion = text_completion("42" if right else "I do not know", request.stop)
        self.tokens += completion.completion_tokens
        return completion
