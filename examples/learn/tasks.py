"""The tasks of a run: what it trains on, and what it is measured by and never sees.

Both come from reasoning_gym, under different seeds, and lie on the two sides of the hash split that `evaluate` and
`serve` make by themselves. A training task that asks in the same words as a held-out one is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from orchestrator.tasks.reasoning_gym import reasoning_gym_tasks
from orchestrator.tasks.selection import held_out
from orchestrator.types import Task

# The last one is there to fail: 64 tokens of code do not break a cipher.
SETS = ("chain_sum", "products", "count_bits", "spell_backward", "letter_counting", "gcd", "caesar_cipher")
SHARE = 0.5  # of the ids that the hash holds out
HELD_OUT_SEED = 777  # of all runs, so that they are measured by the same tasks
# reasoning_gym makes instance i of a seed from the number seed + i, so neighbouring seeds have the same questions.
# Those of two runs are further apart than a piece is long, and never meet a held-out one's.
TRAINING_SEED, SEED_STEP = 10_000, 1_000
_PIECE, _PIECES, _PIECE_STEP = 200, 50, 100_000  # instances made at a time, how often at most, and how far apart


def write_tasks(path: Path, sets: Sequence[str], held_out_each: int, training_each: int, seed: int) -> int:
    """Writes the tasks, set by set in turn, held-out ones first. Returns how many training tasks were left out
    because a held-out one has the same words."""
    measured = [task for name in sets for task in _some(name, HELD_OUT_SEED, held_out_each, held=True)]
    words = {_words(task) for task in measured}
    left_out = 0

    def new(task: Task) -> bool:
        nonlocal left_out
        left_out += (known := _words(task) in words)
        return not known

    trained = [
        list(_some(name, TRAINING_SEED + SEED_STEP * seed, training_each, held=False, fit=new)) for name in sets
    ]
    in_turn = [task for turn in zip(*trained, strict=True) for task in turn]
    path.write_text("".join(json.dumps(_row(task)) + "\n" for task in [*measured, *in_turn]), "utf-8")
    return left_out


def same_words(asked: Sequence[str], measured: Sequence[str]) -> int:
    """How many of the questions asked in training are those of held-out tasks."""
    words = {_folded(question) for question in measured}
    return sum(_folded(question) in words for question in asked)


def _some(
    name: str, seed: int, wanted: int, *, held: bool, fit: Callable[[Task], bool] = lambda _: True
) -> Iterator[Task]:
    """Tasks of one set on one side of the split; the seed after the next when one is used up. No two have the same
    words."""
    seen: set[str] = set()
    for piece in range(_PIECES):
        for task in reasoning_gym_tasks(f"{name}?seed={seed + _PIECE_STEP * piece}&size={_PIECE}"):
            if not isinstance(task, Task) or held_out(task.task_id, SHARE) != held or _words(task) in seen:
                continue
            if fit(task):
                seen.add(_words(task))
                yield task
                if len(seen) == wanted:
                    return
    raise SystemExit(f"learn: {name} has no {wanted} different tasks")


def _row(task: Task) -> dict[str, object]:
    told = asdict(task)
    kept = ("task_id", "question", "answer", "scorer", "metadata")
    return {key: told[key] for key in kept} | {"level": task.metadata["dataset"]}  # counted apart by it


def _words(task: Task) -> str:
    return _folded(task.question)


def _folded(question: str) -> str:
    return " ".join(question.casefold().split())
