"""Where tasks come from: a small protocol, and one module per kind of source.

`open_tasks` parses `env.dataset` and checks that the source can be read; each row is checked when it is read.
`split` and `selection` choose tasks by the configuration.
"""

from collections.abc import Collection
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.rules.redact import shown
from orchestrator.rules.text import path_of
from orchestrator.tasks.base import Columns, Source

GRAMMAR = (
    "gaia, harbor:PATH, jsonl:PATH, csv:PATH, hf:NAME?question=COLUMN&answer=COLUMN, "
    "reasoning_gym:NAME?seed=42&size=100, python:MODULE:FACTORY"
)


def open_tasks(
    dataset: str,
    *,
    dataset_path: Path,
    split: str,
    columns: Columns | None = None,
    mcp_servers: Collection[str] = (),
) -> Source:
    """The source that `dataset` names. Raises ConfigError: unknown, missing, unreadable.

    `dataset_path`: GAIA's folder. `split`: of GAIA, of a registry of `harbor:`, and of `hf:` if it names none.
    `columns`: our names of columns → the data set's. `mcp_servers`: names of those that the operator has: a task
    that names another one is refused.
    """
    kind, _, rest = dataset.partition(":")
    if columns and kind in ("gaia", "harbor", "reasoning_gym", "python"):
        raise ConfigError(f"env.columns: {kind} has our columns already; it is for jsonl:, csv: and hf:")
    if dataset == "gaia":
        from orchestrator.tasks.gaia.source import gaia_tasks

        return gaia_tasks(dataset_path, split)
    columns = columns or {}
    match kind if rest else "":
        case "harbor":
            from orchestrator.tasks.harbor.source import harbor_tasks

            return harbor_tasks(_path(rest), name=dataset, split=split, mcp_servers=mcp_servers)
        case "jsonl":
            from orchestrator.tasks.jsonl import jsonl_tasks

            return jsonl_tasks(_path(rest), name=dataset, columns=columns)
        case "csv":
            from orchestrator.tasks.csv import csv_tasks

            return csv_tasks(_path(rest), name=dataset, columns=columns)
        case "hf":
            from orchestrator.tasks.hf import hf_tasks

            return hf_tasks(rest, split=split, columns=columns)
        case "reasoning_gym":
            from orchestrator.tasks.reasoning_gym import reasoning_gym_tasks

            return reasoning_gym_tasks(rest)
        case "python":
            from orchestrator.tasks.python import python_tasks

            return python_tasks(dataset)
    raise ConfigError(f"env.dataset: {dataset!r} is not understood; valid are {GRAMMAR}")


def may_bring_images(dataset: str) -> bool:
    """Whether rows of this data set may name images that are files beside it: then it chooses what code runs."""
    return dataset.startswith(("jsonl:", "csv:"))


def _path(text: str) -> Path:
    try:
        return path_of(text)
    except ValueError:
        raise ConfigError(f"env.dataset: {shown(text)} cannot be a path; name a file that is there") from None
