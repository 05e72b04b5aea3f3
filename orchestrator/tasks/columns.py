"""Our names of a row's columns, and renaming for data sets that have others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COLUMNS = ("question", "answer", "task_id", "files", "level", "metadata", "scorer", "image", "limits")

Columns = Mapping[str, str]  # our name → the data set's
NONE: Columns = {}


def renamed(row: object, columns: Columns) -> object:
    """The row with our names. Anything but a mapping is returned as it is, and refused later."""
    if not columns or not isinstance(row, Mapping):
        return row
    found: dict[Any, Any] = {ours: row.get(theirs) for ours, theirs in columns.items()}
    return {**row, **found}
