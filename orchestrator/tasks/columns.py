"""What a row's columns are called: our names, and where a data set has its own for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COLUMNS = ("question", "answer", "task_id", "files", "level", "metadata", "scorer", "image", "limits")

Columns = Mapping[str, str]  # our name → the data set's
NONE: Columns = {}


def renamed(row: object, columns: Columns) -> object:
    """The row under our names. A row that is none is left as it is, to be refused as what it is."""
    if not columns or not isinstance(row, Mapping):
        return row
    found: dict[Any, Any] = {ours: row.get(theirs) for ours, theirs in columns.items()}
    return {**row, **found}
