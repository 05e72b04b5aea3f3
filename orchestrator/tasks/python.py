"""`python:MODULE:FACTORY`: tasks from the operator's own code.

The factory is called without arguments each time the tasks are read. It returns Tasks, or rows as in `jsonl:`
files, whose attachments are looked for below the current directory.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.rules.plugins import load_object, raised_at
from orchestrator.tasks.base import BadRow, Source
from orchestrator.tasks.network import demand_hosts
from orchestrator.tasks.pointers import pointer_in
from orchestrator.tasks.rows import MAX_ANSWER_BYTES, MAX_ANSWERS, make_task, one_line
from orchestrator.tasks.surroundings import surroundings
from orchestrator.types import BadTask, Task

_FLAG = "env.dataset"


def python_tasks(spec: str) -> Source:
    """The source. Raises ConfigError if there is no such factory."""
    factory = load_object(spec, _FLAG)
    if not callable(factory):
        raise ConfigError(f"{_FLAG}: {spec} is no function; it must return the tasks when called")
    results: list[Any] = []  # what was made to count it, for the first reading

    def size() -> int | None:
        if not results:
            try:
                results.append(factory())
            except Exception:  # said where the tasks are read
                return None
        return len(results[0]) if isinstance(results[0], list | tuple) else None

    return Source(spec, lambda: _tasks(lambda: results.pop() if results else factory(), spec), size)


def _tasks(factory: Any, spec: str) -> Iterator[Task | BadTask]:
    try:
        rows: Iterable[object] = factory()
        for number, row in enumerate(rows, start=1):
            yield _task(row, spec, f"row {number}")
    except ConfigError:
        raise
    except Exception as error:  # the operator's code
        what = f"{type(error).__name__}: {one_line(error)}{raised_at(error)}"
        raise ConfigError(f"{_FLAG}: {spec} raised {what}") from error


def _task(row: object, spec: str, place: str) -> Task | BadTask:
    if isinstance(row, BadTask):
        return row
    if not isinstance(row, Task):
        return make_task(row, source=spec, place=place, root=Path.cwd())
    if not isinstance(row.task_id, str) or not row.task_id.strip():
        return BadTask(place, "the task_id is missing")
    if not isinstance(row.question, str) or not row.question.strip():
        return BadTask(row.task_id, "the question is missing")
    if reason := _unfit_answers(row.answer, row.other_answers):
        return BadTask(row.task_id, reason)
    try:
        own = surroundings({"root": row.root, "cwd": row.cwd, "user": row.user, "env": row.environment})
        own["network"] = demand_hosts(row.network)
    except BadRow as error:
        return BadTask(row.task_id, str(error))
    for file in row.attachments:
        if (pointer := pointer_in(file.path)) is not None:
            return BadTask(row.task_id, f"file {ascii(file.name)[:120]} is {pointer}")
    # An empty cwd is the image's own, which `surroundings` does not know of.
    return replace(row, **own | ({"cwd": ""} if row.cwd == "" else {}))


def _unfit_answers(answer: object, others: object) -> str:
    """Why no rollout can be graded by these; empty: it can. The types were promised, and nobody checked them."""
    if answer is None and others == ():
        return ""
    if not isinstance(others, tuple) or not all(isinstance(text, str) for text in (answer, *others)):
        return "answer must be a text, and other_answers a tuple of texts"
    if len(others) >= MAX_ANSWERS:
        return f"{1 + len(others)} right answers; at most {MAX_ANSWERS} are allowed"
    if any(len(text.encode("utf-8", "replace")) > MAX_ANSWER_BYTES for text in (str(answer), *others)):
        return f"an answer of more than {MAX_ANSWER_BYTES} bytes"
    return ""
