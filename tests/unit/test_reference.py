"""The reference of commands and settings is made from their tables, and current."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from orchestrator.commands.table import COMMANDS
from orchestrator.settings.table import SECTIONS

FOLDER = Path(__file__).parents[2] / "docs" / "reference"


def test_the_reference_is_what_its_maker_makes_now() -> None:
    spec = importlib.util.spec_from_file_location("reference_make", FOLDER / "make.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    assert (FOLDER / "README.md").read_text() == maker.page(), "run `python docs/reference/make.py`"


def test_every_command_and_setting_is_in_it_once() -> None:
    lines = (FOLDER / "README.md").read_text().splitlines()
    for command in COMMANDS:
        assert sum(line.startswith(f"### `orchestrator {command.name}") for line in lines) == 1
    for section in SECTIONS.values():
        for row in section.rows().values():
            assert sum(line.startswith(f"| `{row.key}` |") for line in lines) == 1, row.key
