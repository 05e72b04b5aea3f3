"""What check-tasks keeps of tasks, for which tasks it counts, and what it is told as."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError
from orchestrator.grading.check import scope_of, takeovers_of
from orchestrator.grading.measured import measured
from orchestrator.grading.panel import Output, delivered, policies
from orchestrator.grading.scope import in_scope
from orchestrator.settings.table import EnvSettings
from orchestrator.tasks.base import Source
from orchestrator.tasks.checks import (
    cached_file,
    check_of,
    checks_file,
    only_checked,
    read_checks,
    with_checked,
    write_checks,
)
from orchestrator.tasks.content import content_of
from orchestrator.tasks.harbor.source import harbor_tasks
from orchestrator.tasks.no_tasks import tasks_to_train
from orchestrator.terminal.checks import print_checks
from orchestrator.types import BadTask, Change, Checked, Difference, Grader, Task, TaskCheck
from tests.fakes.harbor import a_task

PASSED = TaskCheck(
    "c", checked=Checked(("/app",), source="reward.txt", duration_s=1.5), no_op=(0.0,), solution=(1.0, 1.0)
)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tasks_in(folder: Path) -> dict[str, Task]:
    found = list(harbor_tasks(folder, name=f"harbor:{folder}", split=""))
    return {task.task_id: task for task in found if isinstance(task, Task)}


def checked(folder: Path, **checks: TaskCheck) -> Path:
    """The tasks of a folder with these checks, each for the task as it is now."""
    tasks = tasks_in(folder)
    file = checks_file(f"harbor:{folder}")
    assert file is not None
    return write_checks(
        file, {name: replace(one, content=content_of(tasks[name])) for name, one in checks.items()}
    )


# ---------------------------------------------------------------- what is kept


def test_checks_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "checks.json"
    one = replace(PASSED, panel={"forged reward": 0.0, "odd": None}, failures=("é",), runs_delivered=True)
    assert write_checks(file, {"a": one}) == file
    assert read_checks(file) == {"a": one}
    assert [path.name for path in tmp_path.iterdir()] == ["checks.json"]


def test_where_the_folder_cannot_be_written_to_the_cache_has_them(tmp_path: Path) -> None:
    file = tmp_path / "gone" / "checks.json"  # no folder: root may write to any that is there
    assert write_checks(file, {"a": PASSED}) == cached_file(file)
    assert read_checks(file) == {"a": PASSED}
    file.parent.mkdir()
    assert write_checks(file, {**read_checks(file), "b": PASSED}) == file
    assert not cached_file(file).exists()
    assert set(read_checks(file)) == {"a", "b"}


# ---------------------------------------------------------------- for which task


@pytest.mark.parametrize(
    "changed",
    ["instruction.md", "tests/test.sh", "solution/solve.sh", "environment/Dockerfile", "environment/more"],
)
def test_a_check_counts_for_the_task_as_it_was(tmp_path: Path, changed: str) -> None:
    a_task(tmp_path / "t")
    file = checked(tmp_path, t=PASSED)
    task = tasks_in(tmp_path)["t"]
    assert check_of(task, read_checks(file)) is not None
    known = with_checked(task, read_checks(file))
    assert known.grader is not None
    assert known.grader.checked == PASSED.checked
    assert check_of(known, read_checks(file)) is not None
    other = replace(task, task_id="other")
    assert with_checked(other, read_checks(file)) == other
    (tmp_path / "t" / changed).write_text("something else\n")
    task = tasks_in(tmp_path)["t"]
    assert check_of(task, read_checks(file)) is None
    assert with_checked(task, read_checks(file)) == task


def test_a_moved_folder_keeps_its_checks(tmp_path: Path) -> None:
    a_task(tmp_path / "a" / "t")
    checked(tmp_path / "a", t=PASSED)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    file = checks_file(f"harbor:{tmp_path / 'b'}")
    assert check_of(tasks_in(tmp_path / "b")["t"], read_checks(file)) is not None


def test_links_and_modes_are_content(tmp_path: Path) -> None:
    a_task(tmp_path / "t", tests__more="x")
    digests = {content_of(tasks_in(tmp_path)["t"])}
    (tmp_path / "t/tests/more").chmod(0o755)
    digests.add(content_of(tasks_in(tmp_path)["t"]))
    (tmp_path / "t/tests/more").unlink()
    os.symlink("test.sh", tmp_path / "t/tests/more")
    digests.add(content_of(tasks_in(tmp_path)["t"]))
    assert len(digests) == 3


def test_the_name_of_an_image_is_content(tmp_path: Path) -> None:
    """And no folder, whatever lies there."""
    digests = set()
    for image in ("far.example/base:1", "far.example/base:2", "base"):
        toml = f'[environment]\ndocker_image = "{image}"\n'
        digests.add(content_of(tasks_in(a_task(tmp_path / "t", toml).parent)["t"]))
    assert len(digests) == 3


# ---------------------------------------------------------------- only checked tasks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("changed", "failed", "new", "passed"):
        a_task(tmp_path / "tasks" / name)
    a_task(tmp_path / "tasks" / "refused", "gpus")
    failed = replace(PASSED, failures=("an untouched sandbox gets 1, and must get 0",))
    checked(tmp_path / "tasks", changed=PASSED, failed=failed, passed=PASSED)
    (tmp_path / "tasks/changed/tests/test.sh").write_text("exit 1\n")
    return tmp_path / "tasks"


def test_only_tasks_that_passed_are_left_and_the_others_are_counted(folder: Path) -> None:
    source = tasks_to_train(EnvSettings(dataset=f"harbor:{folder}", only_checked_tasks=True))
    assert [task.task_id for task in source] == ["passed"]
    assert [task.task_id for task in source] == ["passed"]  # again: read anew
    assert source.notes()[-1] == (
        "of 5 tasks 1 passed their check; left out: 1 have changed since, 1 failed it, 1 were not checked, "
        "1 cannot be used"
    )
    every = tasks_to_train(EnvSettings(dataset=f"harbor:{folder}"))
    assert [task.task_id for task in every if isinstance(task, Task)] == ["changed", "failed", "new", "passed"]


def test_where_none_has_passed_a_run_is_refused_with_what_to_do(folder: Path) -> None:
    (folder / "checks.json").unlink()
    with pytest.raises(ConfigError, match=r"only_checked_tasks: of 5 tasks 0 .*`orchestrator check-tasks harbor:"):
        tasks_to_train(EnvSettings(dataset=f"harbor:{folder}", only_checked_tasks=True))


def test_tasks_without_a_grader_are_counted_too(tmp_path: Path) -> None:
    source = only_checked(Source("s", lambda: iter([Task("a", "q", "1"), BadTask("b", "odd")])), None)
    assert list(source) == []
    assert source.notes() == ("of 2 tasks 0 passed their check; left out: 1 have no grader, 1 cannot be used",)


# ---------------------------------------------------------------- scope


def added(*paths: str, kind: str = "added") -> tuple[Change, ...]:
    return tuple(Change(path, kind, mode=0o755) for path in paths)  # type: ignore[arg-type]


def test_the_scope_is_the_folders_that_the_image_has() -> None:
    changes = (
        *added("/app/", "/app/calc.py", kind="changed"),
        *added(
            "/app/out/", "/app/out/deep/", "/app/out/deep/a", "/srv/new/", "/srv/new/b", "/answer.txt", "/made/"
        ),
        *added("/made/x", "/logs/verifier/test-stdout.txt", "/solution/solve.sh", "/tests/test.sh"),
        *added("/usr/lib/python3/__pycache__/", "/usr/lib/python3/__pycache__/os.pyc", "/opt/x.pyc"),
        *added("/var/x/y", kind="removed"),
    )
    assert scope_of(Difference(changes, len(changes))) == ("/answer.txt", "/app", "/made", "/srv", "/var/x")
    assert scope_of(Difference(changes, len(changes) + 1)) is None
    assert scope_of(Difference()) == ()


def test_what_a_solution_itself_changes_is_no_takeover() -> None:
    changes = added("/usr/bin/tool", "/etc/profile", "/app/x")
    takeovers = takeovers_of(Difference(changes, 3))
    assert takeovers == ("/etc/profile", "/usr/bin/", "/usr/bin/tool")
    dropped = re.compile(in_scope(Grader("harbor", checked=Checked(("/usr", "/etc"), takeovers))).dropped)
    assert [bool(dropped.match(p)) for p in ("/usr/bin/", "/usr/bin/tool", "/usr/bin/sh", "/etc/bash.bashrc")] == [
        False,
        False,
        True,
        True,
    ]


# ---------------------------------------------------------------- what is told


def test_the_measured_values_have_the_ids_of_the_field() -> None:
    good = replace(PASSED, no_op=(0.0, 0.0), panel={"a": 0.0, "b": 0.0}, delivered=0.0)
    assert {name: (one["status"], one["measured"]) for name, one in measured(good).items()} == {
        "semantic.oracle_max": ("pass", 1.0),
        "semantic.floor_gap": ("pass", 1.0),
        "semantic.verifier_determinism": ("pass", 0.0),
        "statistical.adversarial_floor": ("pass", 0.0),
        "statistical.gameability_gap": ("pass", 0.0),
    }
    beaten = measured(replace(good, panel={"a": 0.5, "b": 0.0}, delivered=1.0))
    assert beaten["statistical.adversarial_floor"] == {"status": "fail", "measured": 0.5}
    assert beaten["statistical.gameability_gap"] == {"status": "warn", "measured": 1.0}
    broken = measured(replace(good, panel={"a": None, "b": 0.0}))
    assert broken["statistical.adversarial_floor"]["status"] == "fail"
    unsolved = measured(TaskCheck("c", solution=(1.0, 0.5)))
    assert unsolved["semantic.oracle_max"] == {"status": "fail", "measured": 0.5}
    assert unsolved["semantic.verifier_determinism"] == {"status": "fail", "measured": 0.5}
    assert unsolved["statistical.adversarial_floor"] == {"status": "skip", "measured": None}


def test_the_table_has_a_row_for_each_task_and_says_why() -> None:
    stream = io.StringIO()
    failed = replace(PASSED, panel={"a": 1.0, "b": 0.0}, failures=("a gets 1, and must get 0",))
    found = {"good": PASSED, "bad": failed, "odd": "there is no image \x1b[31m"}
    print_checks(found, 1, Path("/x/checks.json"), stream)
    text = stream.getvalue()
    assert "\x1b" not in text
    rows = {line.split()[0]: line for line in text.splitlines()[1:4]}
    assert rows["good"].split()[1] == "ok"
    assert "1 ×2" in rows["good"]
    assert "1 of 2" in rows["bad"]
    assert "bad: a gets 1, and must get 0" in text
    assert "3: 1 passed, 1 failed, 1 could not be checked" in text
    assert "1 of them were checked before" in text
    assert "/x/checks.json" in text


# ---------------------------------------------------------------- the panel


def test_every_policy_is_a_script_that_a_shell_can_read() -> None:
    outputs = [Output("/app/it's.py", True), Output("/app/run", True), Output("/out.txt")]
    scripts = policies(outputs, "/app", library=True)
    assert len(scripts) == 16
    assert "ld.so.preload" not in policies(outputs, "/app", library=False)
    for name, script in {**scripts, "delivered": delivered(outputs)}.items():
        read = subprocess.run(["/bin/sh", "-n", "-c", script], capture_output=True, text=True, check=False)
        assert (read.returncode, read.stderr) == (0, ""), name
    assert delivered([Output("/out.txt")]) == ""
    assert json.dumps(scripts)
