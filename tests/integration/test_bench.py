"""Every section of the benchmark runs and leaves a result; how quick anything is, is not asked here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import SECTIONS
from tests.fakes.runs import ROOT

pytestmark = pytest.mark.full

HANG_S = 1200


@pytest.mark.docker
@pytest.mark.timeout(1500)
def test_every_section_measures_something(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "--tiny", "--results", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (results,) = tmp_path.glob("*.json")
    sections = {section["name"]: section for section in json.loads(results.read_text())["sections"]}
    assert list(sections) == list(SECTIONS)
    for name, section in sections.items():
        assert section["error"] == ""
        assert any(figure["value"] is not None for figure in section["findings"]["figures"]), name
    assert results.with_suffix(".svg").exists()


def test_an_unknown_section_is_refused_with_the_known_ones() -> None:
    command = [sys.executable, "-m", "bench", "strat"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert ended.returncode == 2
    assert all(name in ended.stderr for name in SECTIONS)
