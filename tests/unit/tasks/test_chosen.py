"""What the settings say of tasks: which, in which order, under which column names, with how large files."""

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.engine.orchestrator import Orchestrator
from orchestrator.errors import ConfigError
from orchestrator.launch.hardening import MIB, too_large
from orchestrator.settings.sources import load_config
from orchestrator.tasks.split import training_tasks
from orchestrator.types import Attachment, BadTask, Task


def write(folder: Path, rows: list[dict[str, Any]], name: str = "tasks.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{folder / name}"


def chosen(dataset: str, *flags: str) -> list[Task | BadTask]:
    env = load_config(["--env.dataset", dataset, *flags]).env
    tasks = training_tasks(env)
    assert list(tasks) == list(tasks)
    return list(tasks)


def ids(dataset: str, *flags: str) -> list[str]:
    return [task.task_id for task in chosen(dataset, *flags)]


@pytest.fixture
def ten(tmp_path: Path) -> str:
    rows: list[dict[str, Any]] = [
        {"task_id": f"t{n}", "question": "What?", "answer": n, "level": n % 3, "metadata": {"tags": [f"k{n % 2}"]}}
        for n in range(10)
    ]
    rows.insert(4, {"task_id": "bad"})
    return write(tmp_path, rows)


def test_flags_filter_cut_and_shuffle(ten: str) -> None:
    assert ids(ten) == ["t0", "t1", "t2", "t3", "bad", *(f"t{n}" for n in range(4, 10))]
    assert ids(ten, "--env.levels", '["1"]') == ["t1", "bad", "t4", "t7"]
    assert ids(ten, "--env.levels", '["1", "2"]', "--env.tags", '["k1"]') == ["t1", "bad", "t5", "t7"]
    assert ids(ten, "--env.max_tasks", "5") == ["t0", "t1", "t2", "t3", "bad", "t4"]
    shuffled = ids(ten, "--env.shuffle_seed", "1")
    assert shuffled != ids(ten)
    assert sorted(shuffled) == sorted(ids(ten))
    assert shuffled != ids(ten, "--env.shuffle_seed", "2")
    assert ids(ten, "--env.shuffle_seed", "1", "--env.max_tasks", "3")[:3] == shuffled[:3]


def test_a_run_is_continued_with_the_same_tasks(ten: str, tmp_path: Path) -> None:
    config = load_config(["--env.dataset", ten, "--env.shuffle_seed", "7", "--env.columns", '{"level": "grade"}'])
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"config": config.public(), "seed": 1}))
    again = load_config(["--env.resume", str(run)])
    assert (again.env.shuffle_seed, again.env.columns) == (7, {"level": "grade"})
    with pytest.raises(ConfigError, match=r"env\.shuffle_seed: the run in"):
        load_config(["--env.resume", str(run), "--env.shuffle_seed", "8"])


def test_columns_of_other_names_are_read(tmp_path: Path) -> None:
    columns = '{"question": "prompt", "answer": "gold", "level": "grade"}'
    dataset = write(tmp_path, [{"prompt": "Two and two?", "gold": 4, "grade": "easy", "question": "not this"}])
    (tmp_path / "tasks.csv").write_text("prompt,gold,grade,question\nTwo and two?,4,easy,not this\n")
    for source in (dataset, f"csv:{tmp_path / 'tasks.csv'}"):
        (task,) = chosen(source, "--env.columns", columns)
        assert isinstance(task, Task)
        assert (task.question, task.answer, task.level) == ("Two and two?", "4", "easy")


@pytest.mark.parametrize(
    ("dataset", "columns", "reason"),
    [
        ("csv:tasks.csv", '{"question": "nope"}', "has no column 'nope'"),
        ("gaia", '{"question": "x"}', "gaia has our columns"),
        ("jsonl:tasks.jsonl", '{"questions": "x"}', "with names out of question, answer"),
        ("jsonl:tasks.jsonl", '["question"]', "a JSON object"),
        ("jsonl:tasks.jsonl", '{"question": 7}', "a JSON object"),
        ("jsonl:tasks.jsonl", "{}", "a JSON object"),
        ("hf:.?question=q", '{"question": "x"}', "name it once"),
    ],
)
def test_columns_nobody_has_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: str, columns: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.csv").write_text("question,answer\n")
    (tmp_path / "tasks.jsonl").write_text("")
    with pytest.raises(ConfigError, match=reason):
        chosen(dataset, "--env.columns", columns)


@pytest.mark.parametrize(
    ("sizes", "memory", "fits"),
    [
        ([], 256, True),
        ([19 * MIB], 256, True),
        ([20 * MIB], 256, False),
        ([64 * MIB], 1024, True),
        ([64 * MIB] * 3, 1024, True),
        ([64 * MIB] * 4, 1024, False),
        ([4097] * 3, 256, True),
        ([1] * 4916, 256, False),  # a page for each
    ],
)
def test_files_must_fit_where_the_sandbox_keeps_them(sizes: list[int], memory: int, fits: bool) -> None:
    files = [Attachment(str(n), Path("/x"), size) for n, size in enumerate(sizes)]
    reason = too_large(files, memory * MIB)
    assert (reason is None) is fits
    assert reason is None or "--env.sandbox_memory" in reason


@pytest.mark.parametrize(("launcher", "bad"), [("docker", True), ("process", False)])
def test_a_task_whose_files_do_not_fit_is_bad_before_anything_starts(launcher: str, bad: bool) -> None:
    env = {"launcher": launcher, "sandbox_memory": 256 * MIB}
    engine = Orchestrator(load_config(env=env, openai={"base_url": "http://localhost:9"}))
    large = Task("large", "What?", "1", attachments=(Attachment("a", Path("/a"), 30 * MIB),))
    small = Task("small", "What?", "1")
    first, second = (engine.maker.fitting(task) for task in (large, small))
    assert second is small
    assert isinstance(first, BadTask) is bad
    assert not bad or "has room for" in first.reason  # type: ignore[union-attr]
