"""Generated tasks and their guarded scoring; needs the extra `reasoning-gym`."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError, ScorerError
from orchestrator.scorers.reasoning_gym import is_correct
from orchestrator.tasks import open_tasks
from orchestrator.tasks.reasoning_gym import REFUSED, dataset
from orchestrator.types import BadTask, Task

installed = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="the extra reasoning-gym is not installed"
)

# For an agent that can compute: worth code, quick to generate.
USEFUL = [
    "countdown",
    "letter_counting",
    "base_conversion",
    "count_primes",
    "calendar_arithmetic",
    "time_intervals",
    "number_sorting",
    "word_ladder",
    "shortest_path",
    "zebra_puzzles",
    "puzzle24",
    "string_insertion",
    "n_queens",
]


def read(spec: str) -> list[Task]:
    tasks = list(open_tasks(f"reasoning_gym:{spec}", dataset_path=Path("."), split="validation"))
    assert all(isinstance(task, Task) for task in tasks)
    return [task for task in tasks if isinstance(task, Task)]


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    dataset.cache_clear()
    with pytest.raises(ConfigError, match=r"rollout-orchestrator\[reasoning-gym\]"):
        read("countdown")


@pytest.mark.parametrize("query", ["", "?seed=x", "?seed=-1", "?size=0", "?size=1.5", "?size=99999999", "?seed"])
def test_bad_settings_are_refused_at_start(query: str) -> None:
    name = "countdown" if query else ""
    with pytest.raises(ConfigError, match=r"env\.dataset"):
        read(f"{name}{query}")


@installed
def test_names_take_turns_and_ids_say_how_to_make_the_task_again() -> None:
    tasks = read("countdown+letter_counting?seed=7&size=3")
    assert [task.task_id for task in tasks] == [
        f"{name}/7/{index}" for index in range(3) for name in ("countdown", "letter_counting")
    ]
    assert tasks == read("countdown+letter_counting?seed=7&size=3")
    assert tasks[0].question != read("countdown?seed=8&size=1")[0].question


@installed
@pytest.mark.parametrize("name", USEFUL)
def test_the_reference_answer_is_correct_and_nonsense_is_not(name: str) -> None:
    for task in read(f"{name}?seed=3&size=3"):
        assert task.answer is not None
        assert is_correct(f" {task.answer}\n", task)
        assert not is_correct("nonsense", task)
        assert not is_correct("", task)


@installed
def test_settings_reach_the_data_set() -> None:
    (task,) = read("count_primes?size=1&max_n=10&min_n=5")
    assert is_correct(str(task.answer), task)
    with pytest.raises(ConfigError, match="refuses its settings"):
        read("countdown?no_such_setting=1")


@installed
@pytest.mark.parametrize("name", [*REFUSED, "no_such_name"])
def test_data_sets_with_broken_scoring_are_not_offered(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        read(f"countdown+{name}")


@installed
@pytest.mark.parametrize("name", ["countdown", "puzzle24", "binary_matrix", "n_queens", "spiral_matrix"])
def test_an_answer_is_never_run_as_code(name: str, tmp_path: Path) -> None:
    (task,) = read(f"{name}?seed=3&size=1")
    mark = tmp_path / "mark"
    for text in (
        f"open({str(mark)!r}, 'w')",
        f"[open({str(mark)!r}, 'w')]",
        f"__import__('os').mkdir({str(mark)!r})",
    ):
        assert not is_correct(text, task)
    assert not mark.exists()


@installed
@pytest.mark.parametrize(
    "answer", ["9**9**9", "9 * * 9", "1e999999999", "NaN", "nan+nanj", "9" * 9000, "x" * 20_000]
)
def test_monstrous_answers_are_wrong_at_once(answer: str) -> None:
    for name in ("countdown", "complex_arithmetic", "decimal_arithmetic", "prime_factorization", "power_function"):
        (task,) = read(f"{name}?seed=3&size=1")
        assert not is_correct(answer, task)


@installed
def test_a_task_that_cannot_be_made_again_is_a_scorer_error() -> None:
    (task,) = read("countdown?seed=3&size=1")
    for metadata in ({}, {"dataset": "no_such", "seed": 1, "index": 0}, {**task.metadata, "seed": "1"}):
        with pytest.raises(ScorerError, match=task.task_id):
            is_correct("1", replace(task, metadata=metadata))


@installed
def test_a_generator_that_fails_is_a_bad_task(monkeypatch: pytest.MonkeyPatch) -> None:
    made = dataset("countdown", 99, 2, ())
    monkeypatch.setattr(type(made), "__getitem__", lambda self, index: 1 / 0)
    tasks = list(open_tasks("reasoning_gym:countdown?seed=99&size=2", dataset_path=Path("."), split=""))
    assert all(isinstance(task, BadTask) and "ZeroDivisionError" in task.reason for task in tasks)
    assert len(tasks) == 2
