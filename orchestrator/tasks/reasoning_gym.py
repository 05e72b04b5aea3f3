"""`reasoning_gym:NAME[+NAME..]?seed=42&size=100`: generated tasks, the same for the same seed.

A task is made again from its metadata (name, seed, index, size, settings) when it is scored. Tasks of several
names take turns. Settings other than seed and size go to the data sets' own configuration.
"""

import importlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.tasks.base import Source
from orchestrator.tasks.query import split_query, whole_number
from orchestrator.tasks.rows import one_line
from orchestrator.types import BadTask, Task

# Data sets with a scoring unfit for training, found by trying all sorts of answers on version 0.1.25.
REFUSED: Mapping[str, str] = {
    "boxnet": "it has no reference answer and its scoring breaks",
    "coin_flip": "its scoring calls wrong numbers correct",
    "composite": "it needs a configuration of its own; join names with + instead",
    "game_of_life_halting": "its scoring calls nonsense correct",
    "graph_color": "its scoring refuses its own answers",
    "intermediate_integration": "its scoring runs the answer as code",
    "polynomial_multiplication": "its scoring runs the answer as code",
    "propositional_logic": "its scoring refuses its own answers",
    "rubiks_cube": "its scoring refuses its own answers",
    "rush_hour": "its scoring refuses its own answers",
    "simple_integration": "its scoring runs the answer as code",
}
MAX_SIZE = 1_000_000

Setting = int | float | bool | str
_DEFAULT_SIZE = 500


def reasoning_gym_tasks(text: str) -> Source:
    """The source. Raises ConfigError: not installed, unknown or refused name, a setting the data set refuses."""
    names, settings = split_query(text, "reasoning_gym")
    seed = whole_number(settings, "seed", 42, low=0, high=2**32 - 1)
    size = whole_number(settings, "size", _DEFAULT_SIZE, low=1, high=MAX_SIZE)
    config = {key: _value(value) for key, value in settings.items()}
    unique_names = list(dict.fromkeys(names.split("+")))
    for name in unique_names:
        dataset(name, seed, size, tuple(config.items()))
    return Source(
        f"reasoning_gym:{text}", lambda: _tasks(unique_names, seed, size, config), lambda: size * len(unique_names)
    )


@lru_cache(maxsize=256)
def dataset(name: str, seed: int, size: int, config: tuple[tuple[str, Setting], ...]) -> Any:
    """The data set, which makes an entry each time one is read. Raises ConfigError."""
    try:
        gym = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError(
            "env.dataset: reasoning_gym is not installed; run `pip install 'rollout-orchestrator[reasoning-gym]'`"
        ) from error
    datasets = importlib.import_module("reasoning_gym.factory").DATASETS
    if name not in datasets:
        raise ConfigError(f"env.dataset: reasoning_gym has no data set {name!r}")
    if name in REFUSED:
        raise ConfigError(f"env.dataset: reasoning_gym:{name} is not offered: {REFUSED[name]}")
    try:
        return gym.create_dataset(name, seed=seed, size=size, **dict(config))
    except Exception as error:  # data sets check their settings by assertions, by keywords or not at all
        raise ConfigError(f"env.dataset: reasoning_gym:{name} refuses its settings: {one_line(error)}") from error


@lru_cache(maxsize=64)  # a group's rollouts share an entry, and some take a second to make
def entry(name: str, seed: int, size: int, config: tuple[tuple[str, Setting], ...], index: int) -> Any:
    """Question, answer and metadata of one task. Raises ConfigError, and whatever the generator raises."""
    return dataset(name, seed, size, config)[index]


def _tasks(names: list[str], seed: int, size: int, config: Mapping[str, Any]) -> Iterator[Task | BadTask]:
    for index in range(size):
        for name in names:
            yield _task(name, seed, size, index, config)


def _task(name: str, seed: int, size: int, index: int, config: Mapping[str, Any]) -> Task | BadTask:
    task_id = f"{name}/{seed}/{index}"
    try:
        sample = entry(name, seed, size, tuple(config.items()), index)
    except Exception as error:  # generators that find no puzzle raise various errors
        return BadTask(task_id, f"cannot be generated: {type(error).__name__}: {one_line(error)}")
    question, answer = sample.get("question"), sample.get("answer")
    if not isinstance(question, str) or not question.strip():
        return BadTask(task_id, "generated without a question")
    return Task(
        task_id=task_id,
        question=question,
        answer=None if answer is None else str(answer),
        source=f"reasoning_gym:{name}",
        metadata={
            "dataset": name,
            "seed": seed,
            "index": index,
            "size": size,
            "config": dict(config),
            "tags": [name],
        },
        scorer="reasoning_gym",
    )


def _value(text: str) -> Setting:
    """The value of a setting's text: true, false, a number, else the text."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
