"""Tasks from code in the current directory."""

import sys
from pathlib import Path

import numpy
import pytest

from orchestrator.errors import ConfigError
from orchestrator.tasks import open_tasks
from orchestrator.types import BadTask, Task

MODULE = """
from orchestrator.types import BadTask, Task

def rows():
    yield {"task_id": "a", "question": "What?", "answer": 1, "files": ["note.txt"]}
    yield {"question": ""}
    yield Task("b", "Who?", "me")
    yield Task("c", " ", "me")
    yield Task("b", "Twice?", "me")
    yield BadTask("d", "mine")
    yield 17

def broken():
    yield {"task_id": "a", "question": "What?", "answer": 1}
    raise RuntimeError("two\\nlines")

class Sets:
    @staticmethod
    def listed():
        return [{"task_id": "a", "question": "What?", "answer": 1}]

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The module's name; another one for each test, since imports are remembered."""
    name = f"tasks_of_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "note.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    return name


def read(spec: str) -> list[Task | BadTask]:
    source = open_tasks(spec, dataset_path=Path("."), split="validation")
    assert list(source) == list(source)
    return list(source)


def test_rows_and_tasks_are_checked_alike(module: str) -> None:
    tasks = read(f"python:{module}:rows")
    assert [type(task) for task in tasks] == [Task, BadTask, Task, BadTask, BadTask, BadTask, BadTask]
    assert [task.task_id for task in tasks] == ["a", "row 2", "b", "c", "b", "d", "row 7"]
    assert isinstance(tasks[0], Task)
    assert tasks[0].attachments[0].name == "note.txt"


def test_a_factory_may_return_a_list_and_lie_in_a_class(module: str) -> None:
    assert [task.task_id for task in read(f"python:{module}:Sets.listed")] == ["a"]


@pytest.mark.parametrize("name", ["number", "nothing", "broken", "a:b"])
def test_a_factory_that_does_not_work_is_one_line(module: str, name: str) -> None:
    with pytest.raises(ConfigError, match=module) as refused:
        read(f"python:{module}:{name}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "task",
    [
        Task("t", "?", ["0", "zero"]),  # type: ignore[arg-type]
        Task("t", "?", 2),  # type: ignore[arg-type]
        Task("t", "?", "a", other_answers="bc"),  # type: ignore[arg-type]
        Task("t", "?", "a", other_answers=(2,)),  # type: ignore[arg-type]
        Task("t", "?", None, other_answers=("a", None)),  # type: ignore[arg-type]
        Task("t", "?", "a", other_answers=("x" * 70_000,)),
        Task("t", "?", "a", other_answers=tuple(map(str, range(200)))),
    ],
    ids=lambda task: str((task.answer, task.other_answers))[:30],
)
def test_answers_of_another_kind_make_a_bad_task(monkeypatch: pytest.MonkeyPatch, task: Task) -> None:
    monkeypatch.setattr(sys.modules[__name__], "given", lambda: [task, Task("good", "?", "a")], raising=False)
    found = list(open_tasks(f"python:{__name__}:given", dataset_path=Path("."), split=""))
    assert [type(one) for one in found] == [BadTask, Task]


def test_what_is_made_to_be_counted_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def given() -> list[Task]:
        made.append(1)
        return [Task(f"t{n}", "?", "a") for n in range(3)]

    monkeypatch.setattr(sys.modules[__name__], "given", given, raising=False)
    source = open_tasks(f"python:{__name__}:given", dataset_path=Path("."), split="")
    assert source.count() == 3
    assert len(list(source)) == 3
    assert len(made) == 1
    assert len(list(source)) == 3
    assert len(made) == 2


def test_arrays_of_numpy_are_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": "?", "answer": numpy.array(["4", "four"])}, {"question": "??", "answer": numpy.int64(7)}]
    monkeypatch.setattr(sys.modules[__name__], "given", lambda: rows, raising=False)
    several, one = open_tasks(f"python:{__name__}:given", dataset_path=Path("."), split="")
    assert isinstance(several, Task)
    assert isinstance(one, Task)
    assert (several.answer, several.other_answers, one.answer) == ("4", ("four",), "7")


def test_a_task_keeps_the_working_directory_of_its_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "given", lambda: [Task("t", "?", "a", cwd="")], raising=False)
    (task,) = open_tasks(f"python:{__name__}:given", dataset_path=Path("."), split="")
    assert isinstance(task, Task)
    assert task.cwd == ""
