"""Grades answers to reasoning_gym's tasks by the data set's own scoring, with guards around it.

That scoring trusts the answer: some data sets pass it to `eval`, some accept `NaN`, some compute for hours on
`1e999999999`, many give partial credit to nonsense. So an answer must look harmless before it is scored, and only
full credit counts.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from orchestrator.errors import ConfigError, ScorerError
from orchestrator.tasks.reasoning_gym import MAX_SIZE, dataset, entry
from orchestrator.types import Task

FULL_CREDIT = 0.99
MAX_ANSWER_CHARS = 10_000

# The form of right answers in data sets that evaluate them: without names, calls and powers.
_ARITHMETIC = re.compile(r"(?!.*(?:\*\s*\*|/\s*/|\d{13}))[\d+*/() -]{1,300}", re.ASCII)
_EVALUATED: Mapping[str, re.Pattern[str]] = {
    "binary_matrix": re.compile(r"[\d\s]+", re.ASCII),
    "countdown": _ARITHMETIC,
    "n_queens": re.compile(r"[Q_\s]+"),
    "puzzle24": _ARITHMETIC,
    "spiral_matrix": re.compile(r"[\d\s-]+", re.ASCII),
    "string_insertion": re.compile(r"[A-Z]+"),
}
# NaN and infinity, huge exponents, and numbers with more digits than any task has.
_MONSTER = re.compile(r"\b[+-]?(?:s?nan|inf(?:inity)?)\b|\d[_.]*e[+-]?\d{3,}|(?<!\d)\d{1000,}", re.IGNORECASE)


def is_correct(answer: str, task: Task) -> bool:
    """Whether the data set gives full credit. If its scoring raises, the answer is wrong.

    Raises ScorerError if the task cannot be made again.
    """
    name, source, sample = _made_again(task)
    answer = answer.strip()
    if not answer or len(answer) > MAX_ANSWER_CHARS:
        return False
    shape = _EVALUATED.get(name)
    if not shape.fullmatch(answer) if shape else _MONSTER.search(answer):
        return False
    try:
        credit = float(source.score_answer(answer=answer, entry=sample))
    except Exception:  # `prime_factorization` and others raise if the answer is no number
        return False
    return math.isfinite(credit) and credit >= FULL_CREDIT


def _made_again(task: Task) -> tuple[str, Any, Any]:
    """(name, data set, entry) of the task, made from its metadata."""
    about = task.metadata
    name, seed, index = about.get("dataset"), about.get("seed"), about.get("index")
    size, config = about.get("size", MAX_SIZE), about.get("config", {})
    numbers = all(type(number) is int and number >= 0 for number in (seed, index, size))
    if not isinstance(name, str) or not isinstance(config, Mapping) or not numbers:
        raise ScorerError(f"task {task.task_id!r}: its metadata names no reasoning_gym task")
    try:
        settings = tuple(config.items())
        return name, dataset(name, seed, size, settings), entry(name, seed, size, settings, index)
    except ConfigError as error:
        raise ScorerError(f"task {task.task_id!r}: {error}") from error
    except Exception as error:  # a generator that fails
        raise ScorerError(f"task {task.task_id!r} cannot be made again: {type(error).__name__}") from error
