"""Where a task's agent works: what rows may say, in every kind of data set, and what they may not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.rules.plan import sandbox_of
from orchestrator.tasks import open_tasks
from orchestrator.tasks.python import _task
from orchestrator.tasks.rows import make_task
from orchestrator.types import BadTask, Task
from tests.fakes.plans import a_sandbox

WHOLE = {
    "root": "writable",
    "cwd": "/app//src/.",
    "user": "1000:50",
    "env": {"LANG": "de_DE", "N": 3, "EMPTY": ""},
}


def made(folder: Path | None = None, **columns: Any) -> Task | BadTask:
    row = {"task_id": "t", "question": "?", "answer": "42", **columns}
    return make_task(row, source="test", place="line 1", root=folder)


def read(dataset: str, folder: Path) -> list[Task | BadTask]:
    return list(open_tasks(dataset, dataset_path=folder, split="train"))


def demand_whole(task: Task | BadTask) -> None:
    assert isinstance(task, Task), task
    assert (task.root, task.cwd, task.user) == ("writable", "/app/src", "1000:50")
    assert task.environment == {"LANG": "de_DE", "N": "3", "EMPTY": ""}


def test_a_row_says_where_its_agent_works() -> None:
    demand_whole(made(**WHOLE))
    assert made() == made(None, root=None, cwd="", user=None, env="")


def test_every_source_of_rows_reads_it(tmp_path: Path) -> None:
    row = {"question": "?", "answer": "42", **WHOLE}
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    demand_whole(*read(f"jsonl:{tmp_path}/t.jsonl", tmp_path))
    cells = [json.dumps(cell).replace('"', '""') if isinstance(cell, dict) else cell for cell in row.values()]
    (tmp_path / "t.csv").write_text(",".join(row) + "\n" + ",".join(f'"{cell}"' for cell in cells) + "\n")
    demand_whole(*read(f"csv:{tmp_path}/t.csv", tmp_path))


def test_a_parquet_file_has_them_too(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    rows = [{"question": "?", "answer": "42", **WHOLE, "env": {"LANG": "de_DE", "N": "3", "EMPTY": ""}}]
    rows += [{"question": "other", "answer": "42", "env": {"LANG": "C"}}]  # parquet adds the other keys, as null
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    first, second = read(f"hf:{tmp_path}", tmp_path)
    demand_whole(first)
    assert isinstance(second, Task)
    assert (second.environment, second.cwd) == ({"LANG": "C"}, None)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"root": "rw"}, "root 'rw' is unknown; valid are read-only, writable"),
        ({"cwd": "app"}, "cwd 'app' must be an absolute path"),
        ({"cwd": "/app/../etc"}, "cwd '/app/../etc' must be"),
        ({"cwd": "/a\0b"}, "cwd '/a\\x00b' must be"),
        ({"cwd": "/" + "a" * 2000}, "cwd has 2001 bytes, at most 1024 are allowed"),
        ({"cwd": 7.5}, "cwd '7.5' must be"),
        ({"user": "-x"}, "user '-x' is no name"),
        ({"user": "1000:x"}, "user '1000:x' is no name"),
        ({"user": 70000}, "user '70000' is no name and no UID[:GID] of at most 65535"),
        ({"user": True}, "user must be text, not bool"),
        ({"env": ["A=1"]}, "env must be an object of texts, not list"),
        ({"env": {"A-B": "1"}}, "env names 'A-B', which is no name of a variable"),
        ({"env": {"A": ["1"]}}, "env A must be text, not list"),
        ({"env": {"A": "\0"}}, "env A has a NUL in it"),
        ({"env": {"A": "\ud800"}}, "env A is no valid UTF-8"),
        ({"env": {"A": "x" * 33_000}}, "env A has 33000 bytes, at most 32768 are allowed"),
        ({"env": {f"A{n}": "x" * 30_000 for n in range(3)}}, "env has more than 65536 bytes"),
        ({"env": {f"A{n}": "" for n in range(101)}}, "env has 101 variables, at most 100 are allowed"),
        *(
            ({"env": {name: "x"}}, f"env sets {name}, which the sandbox needs for itself")
            for name in ("OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANSWER_FILE", "LD_PRELOAD", "PYTHONHOME")
        ),
    ],
)
def test_what_cannot_be_had_is_a_bad_task_that_names_it(columns: dict[str, Any], reason: str) -> None:
    task = made(**columns)
    assert isinstance(task, BadTask)
    assert task.reason.startswith(reason)


def test_a_task_of_the_operators_own_code_is_held_to_the_same() -> None:
    task = Task("t", "?", "42", cwd="/app//x", environment={"A": "1"})
    assert _task(task, "spec", "row 1") == Task("t", "?", "42", cwd="/app/x", environment={"A": "1"})
    bad = _task(Task("t", "?", "42", environment={"LD_PRELOAD": "x"}), "spec", "row 1")
    assert bad == BadTask("t", "env sets LD_PRELOAD, which the sandbox needs for itself: leave it out")


def test_a_workspace_lies_beside_the_tasks(tmp_path: Path) -> None:
    (tmp_path / "tasks/repo").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    root = tmp_path / "tasks"
    (root / "link").symlink_to("../outside")
    task = made(root, workspace="repo")
    assert isinstance(task, Task)
    assert task.workspace == str(root / "repo")
    for name, reason in {
        "nowhere": "workspace 'nowhere' is not beside the dataset",
        "../outside": "workspace '../outside' leads out of the dataset's folder",
        "link": "workspace 'link' leads out of the dataset's folder",
        ".": "workspace '.' holds the tasks and their answers: give it a folder",
    }.items():
        bad = made(root, workspace=name)
        assert isinstance(bad, BadTask)
        assert bad.reason == reason
    both = made(None, workspace="repo")
    assert isinstance(both, BadTask)
    assert "has no folder to find it in" in both.reason


def test_the_sandbox_is_what_the_task_asks_for() -> None:
    usual = a_sandbox("usual")
    assert sandbox_of(Task("t", "?"), usual, 1 << 20) == usual
    own = sandbox_of(Task("t", "?", image="own", root="writable", user="1000"), usual, 1 << 20)
    assert (own.image, own.root, own.storage_bytes, own.user) == ("own", "writable", 1 << 20, "1000")
    assert own.storage_inodes > 0
    laid = sandbox_of(Task("t", "?", workspace="/cache/w"), usual, 1 << 20)
    assert (laid.root, laid.layers) == ("writable", ("/cache/w",))
    assert sandbox_of(Task("t", "?", root="read-only"), own, 1 << 20).storage_bytes == 0
