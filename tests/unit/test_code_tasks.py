"""The code tasks of the examples are whole: Harbor's keys and files, small, without a network."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "code-tasks"
TASKS = sorted(path.parent for path in FOLDER.glob("*/task.toml"))
KEYS = {
    "task": {"name", "description", "keywords"},
    "metadata": {"difficulty", "category", "tags"},
    "agent": {"timeout_sec"},
    "verifier": {"timeout_sec"},
    "environment": {"cpus", "memory_mb", "storage_mb", "network_mode"},
}
LIMITS = {"easy": 240, "medium": 300, "hard": 900}  # seconds of the agent
NETWORK = re.compile(r"\b(curl|wget|pip3?|apt|apt-get|uvx?|npm|urllib|socket|git)\b|https?://(?!shop\.example/)")
each = pytest.mark.parametrize("task", TASKS, ids=lambda path: path.name)


def _settings(task: Path) -> dict[str, Any]:
    return tomllib.loads((task / "task.toml").read_text())


def _files(task: Path) -> list[Path]:
    return [path for path in task.rglob("*") if path.is_file()]


def test_there_are_twelve_and_four_of_each_difficulty() -> None:
    difficulties = [_settings(task)["metadata"]["difficulty"] for task in TASKS]
    assert {name: difficulties.count(name) for name in LIMITS} == dict.fromkeys(LIMITS, 4)
    assert len({_settings(task)["metadata"]["category"] for task in TASKS}) == len(TASKS) == 12


@each
def test_a_task_says_what_it_needs_in_harbor_s_keys(task: Path) -> None:
    settings = _settings(task)
    assert settings.pop("schema_version") == "1.4"
    artifacts = settings.pop("artifacts")
    assert artifacts
    assert all(path == "/app" or path.startswith("/app/") for path in artifacts)
    assert {name: set(table) for name, table in settings.items()} == KEYS
    assert settings["task"]["name"] == f"rollout-orchestrator/{task.name}"
    assert settings["agent"]["timeout_sec"] <= LIMITS[settings["metadata"]["difficulty"]]
    assert settings["verifier"]["timeout_sec"] == 180
    assert settings["environment"]["memory_mb"] == 512
    assert settings["environment"]["network_mode"] == "no-network"


@each
def test_a_task_has_all_its_files_and_they_are_small(task: Path) -> None:
    files = _files(task)
    assert {"environment", "instruction.md", "solution", "task.toml", "tests"} == {
        path.relative_to(task).parts[0] for path in files
    }
    for name in ("tests/test.sh", "solution/solve.sh"):
        assert (task / name).stat().st_mode & 0o111 == 0o111, f"{name} is not executable"
    assert not [path for path in task.rglob("*") if path.is_symlink()]
    assert sum(path.stat().st_size for path in files) < 60_000
    assert 200 < len((task / "instruction.md").read_text()) < 3_000
    assert "/tests" not in (task / "instruction.md").read_text()


@each
def test_what_a_task_delivers_is_named_in_its_instruction(task: Path) -> None:
    assert all(path in (task / "instruction.md").read_text() for path in _settings(task)["artifacts"])


@each
def test_no_task_needs_a_network(task: Path) -> None:
    base, *steps = (task / "environment" / "Dockerfile").read_text().splitlines()
    assert base == "FROM python:3.12-slim"
    assert {step.split()[0] for step in steps if not step.startswith(" ")} <= {"WORKDIR", "COPY", "RUN"}
    assert [line for path in _files(task) for line in path.read_text().splitlines() if NETWORK.search(line)] == []


@each
def test_graders_are_kept_apart_from_what_they_grade_in_one_way(task: Path) -> None:
    for name in ("tests/judge.py", "tests/test.sh"):
        assert (task / name).read_bytes() == (TASKS[0] / name).read_bytes()


@each
def test_the_table_has_the_task_as_it_is(task: Path) -> None:
    metadata = _settings(task)["metadata"]
    row = f"| [{task.name}]({task.name}/instruction.md) | {metadata['category']} | {metadata['difficulty']} |"
    assert row in (FOLDER / "README.md").read_text()


def test_tests_know_what_the_images_hold() -> None:
    log = FOLDER / "log-report"
    assert (log / "tests/access.log").read_bytes() == (log / "environment/access.log").read_bytes()
    for task, file in (("repair-config", "config.json"), ("fix-sum", "total.py")):
        lines = (FOLDER / task / "environment" / file).read_text().splitlines()
        assert "".join(f"    {line}\n" for line in lines) in (FOLDER / task / "instruction.md").read_text()
    photos = FOLDER / "rename-photos"
    made = re.findall(r"'([^']+)'", (photos / "environment/Dockerfile").read_text())
    known = re.findall(r'"([^"]+\.[^"]+)"', (photos / "tests/grade.py").read_text().partition("FOLDER")[0])
    assert made
    assert made == known
