"""Tasks made of a repository's archive: one bug, the tests out of sight, and what mends it. Without Docker."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.repo_bugs import bugs
from bench.repo_tasks import RECIPES, Recipe, Repository, make_task

LITTLE = "def most(values):\n    return max(values) if values else 0\n\n\ndef both(a, b):\n    return a + b\n"
FILES = {
    "little.py": LITTLE,
    "tests/test_most.py": "from little import most\nassert most([1, 3, 2]) == 3\n",
    "tests/test_none.py": "from little import most\nassert most([]) == 0\n",
    "tests/test_both.py": "from little import both\nassert both(2, 3) == 5\n",
    "tests/test_less.py": "from little import both\nassert both(2, 0) == 2\n",
}
# Programs in the place of pytest's tests: they start in no time.
RUN = """
cd "$TESTS"
for test in tests/*.py; do
  PYTHONPATH="$APP" python3 -S -B "$test" && echo "PASSED $test::test" || echo "FAILED $test::test"
done
"""
RECIPE = Recipe(**{**tomllib.loads(RECIPES.read_text())["python"], "run": RUN, "user": "agent"})


def on_this_machine(recipe: Recipe, repository: Repository, files: Sequence[str]) -> str:
    return ran(recipe.run, repository.app, repository.tests, *files)


def ran(script: str, app: Path, tests: Path, *files: str) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    around = {"APP": str(app), "TESTS": str(tests), "PATH": path}
    return subprocess.run(["sh", "-c", script, "sh", *files], env=around, capture_output=True, text=True).stdout


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    with tarfile.open(tmp_path / "little-1.0.tar.gz", "w:gz") as tar:
        for name, text in FILES.items():
            member = tarfile.TarInfo(f"little-1.0/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return tmp_path / "little-1.0.tar.gz"


def test_a_task_has_one_bug_that_its_tests_notice_and_its_solution_mends(archive: Path, tmp_path: Path) -> None:
    made = make_task(archive, tmp_path / "tasks", RECIPE, on_this_machine)
    task = tmp_path / "tasks" / "little-1.0"
    app, tests = task / "environment/repo", task / "tests/repo"
    assert made.startswith("little-1.0: ")
    assert [path.name for path in app.rglob("*")] == ["little.py"]
    assert (app / "little.py").read_text() != LITTLE
    assert "USER agent" in (task / "environment/Dockerfile").read_text()
    expected = set((task / "tests/expected").read_text().splitlines())
    files = (task / "tests/files").read_text().split()
    assert len(expected) == 4
    assert 0 < len(expected - {*ran((task / "tests/run.sh").read_text(), app, tests, *files).splitlines()}) < 4
    solution = (task / "solution/solve.sh").read_text().replace("cd /app", f"cd {app}")
    subprocess.run(["sh", "-c", solution], check=True, capture_output=True)
    assert (app / "little.py").read_text() == LITTLE


def test_no_task_comes_of_a_repository_whose_tests_notice_nothing(archive: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none of 0 bugs does"):
        make_task(archive, tmp_path / "tasks", replace(RECIPE, sources=["*.c"]), on_this_machine)


def test_each_bug_changes_one_place() -> None:
    python = 'def f(é):\n    if é < 1 and True:\n        return é - 1\n    return "é" in é\n'
    texts = {bug.text for bug in bugs(Path("f.py"), python)}
    for old, new in (
        ("é < 1", "é <= 1"),
        ("é < 1 and True", "(é < 1 or True)"),
        ("é < 1 and True", "(not (é < 1 and True))"),
        ("True", "False"),
        ("é - 1", "é - 2"),
        ("return é", "é"),
        ('"é" in é', "'é' not in é"),
    ):
        assert python.replace(old, new, 1) in texts
    c = "/* a < b */\nif (a < b && c)\n"
    assert [bug.text.splitlines()[1] for bug in bugs(Path("f.c"), c)] == [
        "if (a <= b && c)",
        "if (a < b || c)",
        "if (!(a < b && c))",
    ]
