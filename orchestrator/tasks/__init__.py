"""Where tasks come from: one small protocol, one file per kind of source.

`open_tasks` reads the grammar of `env.dataset` and checks that the source can be read at all; each
row is checked where it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.tasks.base import TaskSource

GRAMMAR = (
    "gaia, jsonl:PATH, csv:PATH, hf:NAME?question=COLUMN&answer=COLUMN, "
    "reasoning_gym:NAME?seed=42&size=100, python:MODULE:FACTORY"
)


def open_tasks(dataset: str, *, dataset_path: Path, split: str) -> TaskSource:
    """The source that `dataset` names. Raises ConfigError: unknown, missing, unreadable.

    `dataset_path` is GAIA's folder; `split` GAIA's split, and that of `hf:` where it names none.
    """
    if dataset == "gaia":
        from orchestrator.tasks.gaia import gaia_tasks

        return gaia_tasks(dataset_path.expanduser(), split)
    kind, _, rest = dataset.partition(":")
    opening = _KINDS.get(kind)
    if opening is None or not rest:
        raise ConfigError(f"env.dataset: {dataset!r} is not understood; valid are {GRAMMAR}")
    return opening(dataset, rest, split)


def _jsonl(dataset: str, rest: str, split: str) -> TaskSource:
    from orchestrator.tasks.jsonl import jsonl_tasks

    return jsonl_tasks(Path(rest).expanduser(), name=dataset)


def _csv(dataset: str, rest: str, split: str) -> TaskSource:
    from orchestrator.tasks.csv import csv_tasks

    return csv_tasks(Path(rest).expanduser(), name=dataset)


def _hf(dataset: str, rest: str, split: str) -> TaskSource:
    from orchestrator.tasks.hf import hf_tasks

    return hf_tasks(rest, split=split)


def _reasoning_gym(dataset: str, rest: str, split: str) -> TaskSource:
    from orchestrator.tasks.reasoning_gym import reasoning_gym_tasks

    return reasoning_gym_tasks(rest)


def _python(dataset: str, rest: str, split: str) -> TaskSource:
    from orchestrator.tasks.python import python_tasks

    return python_tasks(dataset)


_KINDS: dict[str, Callable[[str, str, str], TaskSource]] = {
    "jsonl": _jsonl,
    "csv": _csv,
    "hf": _hf,
    "reasoning_gym": _reasoning_gym,
    "python": _python,
}
