"""docs/agents.md tells of the frameworks that are tested, in the versions that are tested."""

from __future__ import annotations

import pytest

from tests.fakes.runs import ROOT
from tests.frameworks.programs import PROGRAMS, Program, versions

PAGE = (ROOT / "docs" / "agents.md").read_text("utf-8")


@pytest.mark.parametrize(("name", "version"), versions().items())
def test_each_version_is_told(name: str, version: str) -> None:
    assert f"{name} {'.'.join(version.split('.')[:2])}" in PAGE


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_each_example_is_told(program: Program) -> None:
    assert f"| `{program.path.name}` |" in PAGE
    assert f"program:examples/agents/{program.path.name} " in program.path.read_text("utf-8")
