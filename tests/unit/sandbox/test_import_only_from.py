"""The runner beside an agent that is root finds no module where the agent may write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.runs import ROOT

TRY = """
import importlib, json, sys, wave_of_ours
from sandbox.pid1.supervisor import import_only_from
import_only_from(sys.argv[1])
for name in ("json.tool", "wave", "wave_of_ours.late"):
    try: importlib.import_module(name)
    except ImportError: print("no", name)
    else: print("has", name)
"""


def tried(folder: Path, packages: Path) -> list[str]:
    path = os.pathsep.join((str(packages), str(ROOT), str(ROOT / "proto")))
    done = subprocess.run(
        [sys.executable, "-c", TRY, str(folder)],
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    (package := tmp_path / "packages" / "wave_of_ours").mkdir(parents=True)
    for name in ("__init__.py", "late.py"):
        (package / name).touch()
    return tmp_path / "packages"


def test_modules_come_from_the_folder_alone(packages: Path) -> None:
    assert tried(packages, packages) == ["no json.tool", "no wave", "has wave_of_ours.late"]


def test_a_folder_whose_name_begins_alike_is_another(packages: Path) -> None:
    assert tried(packages.with_name("pack"), packages) == ["no json.tool", "no wave", "no wave_of_ours.late"]
