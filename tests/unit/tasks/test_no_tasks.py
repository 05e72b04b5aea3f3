"""A run that would have nothing to do is refused, and says why."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError
from orchestrator.settings.sources import load_config
from orchestrator.settings.table import EnvSettings
from orchestrator.tasks.no_tasks import tasks_to_evaluate, tasks_to_train
from orchestrator.types import BadTask, Task

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69\nsize 9\n"
ROW = '{"question": "q%d", "answer": "a", "level": %d, "metadata": {"tags": ["t%d"]}}\n'
ROWS = "".join(ROW % (n, n % 3 + 1, n % 2) for n in range(10))


def env(tmp_path: Path, text: str | bytes, *flags: str, name: str = "t.jsonl", kind: str = "jsonl") -> EnvSettings:
    (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return load_config(["--env.dataset", f"{kind}:{tmp_path / name}", *flags]).env


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--env.levels", '["1", "9"]'), "env.levels: no task of"),
        (("--env.levels", '["1", "9"]'), "has 9; leave it out"),
        (("--env.tags", '["t0", "x"]'), "has x; leave it out"),
    ],
)
@pytest.mark.parametrize("load", [tasks_to_train, tasks_to_evaluate])
def test_a_level_or_tag_that_no_task_has_is_refused_beside_one_that_some_have(
    tmp_path: Path, flags: tuple[str, ...], reason: str, load: Callable[[EnvSettings], object]
) -> None:
    with pytest.raises(ConfigError) as error:
        load(env(tmp_path, ROWS, *flags))
    assert reason in str(error.value)
    load(env(tmp_path, ROWS, "--env.levels", '["1", "2"]', "--env.tags", '["t0", "t1"]'))
    load(env(tmp_path, ROWS, "--env.levels", '["1", "2"]', "--env.eval_split", "hash:0.2"))


@pytest.mark.parametrize(
    ("text", "flags", "reason"),
    [
        ("", (), "has no tasks: it is empty"),
        ("\n \n\r\n", (), "has no tasks: it is empty"),
        (ROWS, ("--env.levels", '["9"]'), "none of the 10 tasks has 9; their levels are 1, 2, 3"),
        (ROWS, ("--env.tags", '["x"]'), "none of the 10 tasks has x; their tags are t0, t1"),
        (ROW % (0, 1, 0) + ROW % (1, 2, 1), ("--env.levels", '["1"]', "--env.tags", '["t1"]'), "fits both"),
        (
            '{"QUESTION": "q", "answer": "a"}\n' * 3000,
            (),
            "all 3000 rows cannot be used; line 1: the question is missing; 'QUESTION'",
        ),
        ('{"question": "q", "Answer ": "a"}\n', (), "the answer is missing; 'Answer ' is another name"),
        ('[{"question": "q", "answer": "a"}]', (), "is a JSON array: write one object per line"),
        ('\ufeff[\n{"question": "q", "answer": "a"},\n]', (), "is a JSON array"),
        ('{"question": "q", "answer": "a"},\n' * 2, (), "all 2 rows cannot be used; line 1: no JSON"),
        (POINTER, (), "is a Git LFS pointer and not the file itself: run `git lfs pull`"),
        ("/annex/objects/SHA256E-s5--abc.jsonl\n", (), "run `git annex get`"),
        (gzip.compress(ROWS.encode()), (), "is compressed: unpack it with gunzip"),
        (ROWS.encode("utf-16"), (), "is UTF-16: save it as UTF-8"),
        (b"PAR1\0\0", (), "is a parquet file: name its folder with hf:"),
        (ROWS, ("--env.eval_split", "hash:0.0001"), "holds out none of the tasks"),
    ],
)
def test_nothing_to_do_is_said_with_the_reason(
    tmp_path: Path, text: str | bytes, flags: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(ConfigError) as error:
        tasks_to_train(env(tmp_path, text, *flags))
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError):
        tasks_to_evaluate(env(tmp_path, text, *flags))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "QUESTION,answer\nq,a\n",
            "needs different columns and one `question`; it has 'QUESTION, answer': rename",
        ),
        (
            "question,ANSWER\nq,a\n",
            "the answer is missing; 'ANSWER' is another name: rename it, or set env.columns",
        ),
        ("question,answer\n", "has no tasks: it is empty"),
        ("question,question,answer\nq,q,a\n", "needs different columns"),
        (POINTER, "git lfs pull"),
    ],
)
def test_csv_files_say_it_too(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        tasks_to_train(env(tmp_path, text, name="t.csv", kind="csv"))
    assert reason in str(error.value)


def test_what_was_read_to_find_a_task_is_read_once_and_again_each_time(tmp_path: Path) -> None:
    source = tasks_to_train(env(tmp_path, "no JSON\n" + ROWS, "--env.shuffle_seed", "3"))
    first = list(source)
    assert first == list(source) == list(source)
    assert [type(task) for task in first].count(BadTask) == 1
    assert len(first) == 11
    assert source.count() == 10


def test_one_good_task_among_bad_ones_is_something_to_do(tmp_path: Path) -> None:
    source = tasks_to_train(env(tmp_path, "x\n" * 20_000 + ROW % (1, 1, 1)))
    assert sum(isinstance(task, Task) for task in source) == 1
    assert sum(1 for _ in source) == 20_001


def test_byte_order_mark_and_line_ends_of_windows_are_no_part_of_a_row(tmp_path: Path) -> None:
    text = "\ufeff" + ROWS.replace("\n", "\r\n")
    assert len(list(tasks_to_train(env(tmp_path, text)))) == 10


def test_an_attachment_that_was_not_fetched_is_a_bad_task(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text(POINTER)
    (tmp_path / "note.txt").write_text(f"It says: {POINTER}")
    row = '{"question": "q%d", "answer": "a", "files": ["%s"]}\n'
    bad, good = tasks_to_train(env(tmp_path, row % (1, "a.png") + row % (2, "note.txt")))
    assert isinstance(bad, BadTask)
    assert bad.reason == "file 'a.png' is a Git LFS pointer and not the file itself: run `git lfs pull`"
    assert isinstance(good, Task)
