"""Makes a Task or a BadTask of one row of a data set. All sources of rows share this.

Rows are mappings with the names of `jsonl:` files or GAIA's. An invalid row becomes a BadTask with a reason of one
line; nothing is raised.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.scorers.base import NEEDS_NO_ANSWER, ROW_SCORERS
from orchestrator.tasks.attachments import attach
from orchestrator.tasks.base import NONE, BadRow, Columns, renamed
from orchestrator.tasks.cells import FOREIGN, cell_text, kind_of, plain, storable
from orchestrator.tasks.graders import demand_services, grader_of
from orchestrator.tasks.network import network_of
from orchestrator.tasks.pointers import pointer_in
from orchestrator.tasks.services import demand_own_volumes, services_of
from orchestrator.tasks.surroundings import surroundings
from orchestrator.types import Attachment, BadTask, Service, Task

MAX_QUESTION_BYTES = 1 << 20
MAX_ANSWER_BYTES = 64 << 10
MAX_ANSWERS = 100  # of a task, each as right as the others
MAX_ID_CHARS = 256
MAX_LEVEL_CHARS = 64

# Limits that a task may set: the flag's name → the highest value allowed.
LIMITS: Mapping[str, float] = {
    "max_steps": 1_000,
    "step_timeout": 3_600.0,
    "rollout_timeout": 86_400.0,
    "rollout_deadline": 604_800.0,
    "max_token_length": 10_000_000,
}
_COUNTS = frozenset({"max_steps", "max_token_length"})
IMAGE = re.compile(r"[A-Za-z0-9][\w./:@-]{0,254}", re.ASCII)
_HIDDEN = "?"  # GAIA's test split has it in place of the answer


def make_task(
    row: object, *, source: str, place: str, root: Path | None, columns: Columns = NONE
) -> Task | BadTask:
    """The task. `place` names a row without an id, like `line 17`. `root`: folder of its files; None: none.
    `columns`: our names of columns → the data set's."""
    task_id, row = place, renamed(row, columns)
    try:
        if not isinstance(row, Mapping):
            raise BadRow(f"a row is an object with a question and an answer, not {kind_of(row)}")
        question = _question(row)
        task_id = _task_id(row, place, question)
        scorer, metadata = _scorer(row), _metadata(row)
        grader = grader_of(_mapping(row, "grader"), lambda what, name: _beside(what, name, root))
        services = _services(row, root)
        demand_services(grader, services)
        answer, *others = _answers(row, scorer, metadata, is_graded=grader is not None)
        return Task(
            task_id=task_id,
            question=question,
            answer=answer,
            attachments=_attachments(row, root),
            level=_level(row),
            source=source,
            metadata=metadata,
            scorer=scorer,
            image=_image(row, root),
            limits=_limits(row),
            other_answers=tuple(other for other in others if other is not None),
            workspace=_workspace(row, root),
            **surroundings(row),
            dockerfile=_dockerfile(row, root),
            grader=grader,
            services=services,
            network=network_of(row),
        )
    except BadRow as error:
        if isinstance(row, Mapping) and task_id == place:
            task_id = _id_text(row) or place  # the question is invalid; the row may still have an id
        ours = str(error).split(maxsplit=2)[:2]
        theirs = [f" (its column is {columns[name]!a})" for name in ours if name in columns]
        return BadTask(task_id[:MAX_ID_CHARS], f"{error}{''.join(theirs)}")


def one_line(error: BaseException) -> str:
    """The text of an exception on one line, shortened."""
    return (" ".join(str(error).split()) or type(error).__name__)[:300]


def _first(row: Mapping[Any, Any], *names: str) -> Any:
    """The value of the first of these columns that is not empty."""
    values = (plain(row.get(name)) for name in names)
    return next((value for value in values if not (value is None or (isinstance(value, str) and not value))), None)


def _mapping(row: Mapping[Any, Any], name: str, *others: str) -> Mapping[Any, Any]:
    """The same of a column with objects; empty where there is none."""
    value = _first(row, name, *others)
    if value is not None and (not isinstance(value, Mapping) or FOREIGN in value):
        raise BadRow(f"{name} must be an object, not {kind_of(value)}")
    return value or {}


def _absence(row: Mapping[Any, Any], what: str, *names: str) -> BadRow:
    """Says it, and which column may have been meant."""
    near = [key for key in row if isinstance(key, str) and key.strip().casefold() == names[0]]
    meant = (
        f"; {near[0]!a} is another name: rename it, or set env.columns" if near and near[0] not in names else ""
    )
    return BadRow(f"the {what} is missing{meant}")


def _question(row: Mapping[Any, Any]) -> str:
    value = _first(row, "question", "Question")
    if value is None:
        raise _absence(row, "question", "question", "Question")
    if not isinstance(value, str):
        raise BadRow(f"question must be text, not {kind_of(value)}")
    question = cell_text(value, "question", MAX_QUESTION_BYTES)
    if not question.strip():
        raise BadRow("the question is blank")
    return question


def _task_id(row: Mapping[Any, Any], place: str, question: str) -> str:
    value = _first(row, "task_id")
    if value is None:
        # The same in every run, and another one if the question changes.
        digest = hashlib.blake2b(question.encode(), digest_size=4).hexdigest()
        return f"{place.replace(' ', '-')}-{digest}"
    task_id = cell_text(value, "task_id", 4 * MAX_ID_CHARS)
    if not task_id.strip() or len(task_id) > MAX_ID_CHARS:
        raise BadRow(f"task_id must have 1 to {MAX_ID_CHARS} characters and not be blank")
    return task_id


def _id_text(row: Mapping[Any, Any]) -> str:
    value = row.get("task_id")
    try:
        return "" if value is None else cell_text(value, "task_id", 4 * MAX_ID_CHARS).strip()
    except BadRow:
        return ""


def _scorer(row: Mapping[Any, Any]) -> str | None:
    value = _first(row, "scorer")
    if value is not None and value not in ROW_SCORERS:
        raise BadRow(f"scorer {ascii(value)[:60]} is unknown; valid are {', '.join(ROW_SCORERS)}")
    return value  # type: ignore[no-any-return]  # None or a member of ROW_SCORERS


def _answers(
    row: Mapping[Any, Any], scorer: str | None, metadata: Mapping[str, Any], *, is_graded: bool
) -> list[str | None]:
    """The answer, and others that are as right. `is_graded`: a grader says what is right."""
    value = _first(row, "answer", "Final answer")
    if value is None and is_graded:
        return [None]
    if scorer in NEEDS_NO_ANSWER:
        absent = [key for key in NEEDS_NO_ANSWER[scorer] if key not in metadata]
        if absent:
            raise BadRow(f"scorer {scorer} needs {', '.join(absent)} in metadata")
        if value is None:
            return [None]
    if value is None:
        raise _absence(row, "answer", "answer", "Final answer")
    if not isinstance(value, list | tuple):
        return [_answer(value, row)]
    if not 0 < len(value) <= MAX_ANSWERS:
        raise BadRow(f"answer is a list of {len(value)}; 1 to {MAX_ANSWERS} right answers are allowed")
    return list(dict.fromkeys(_answer(one, row) for one in value))


def _answer(value: object, row: Mapping[Any, Any]) -> str:
    answer = cell_text(plain(value), "answer", MAX_ANSWER_BYTES)
    if not answer.strip():
        raise BadRow("the answer is blank")
    if answer.strip() == _HIDDEN and "Final answer" in row:
        raise BadRow("the answer is hidden, as in GAIA's test split: nothing to score against")
    return answer


def _level(row: Mapping[Any, Any]) -> str | None:
    value = _first(row, "level", "Level")
    if value is None:
        return None
    level = cell_text(value, "level", 4 * MAX_LEVEL_CHARS).strip()
    if len(level) > MAX_LEVEL_CHARS:
        raise BadRow(f"level has {len(level)} characters, at most {MAX_LEVEL_CHARS} are allowed")
    return level or None


def _metadata(row: Mapping[Any, Any]) -> Mapping[str, Any]:
    return storable(_mapping(row, "metadata", "Annotator Metadata"))


def _attachments(row: Mapping[Any, Any], root: Path | None) -> tuple[Attachment, ...]:
    value = _first(row, "files", "file_name")
    names = [value] if isinstance(value, str | bytes) else ([] if value is None else value)
    if not isinstance(names, list | tuple) or not all(isinstance(name, str | bytes) for name in names):
        raise BadRow("files must be a list of file names")
    if names and root is None:
        raise BadRow("the row names files, and this kind of dataset has no folder to find them in")
    return attach(root, names) if root is not None and names else ()


def _image(row: Mapping[Any, Any], root: Path | None) -> str | None:
    """A name, or the absolute path of a file or folder below `root`, which the row gives as `./PATH`."""
    value = _first(row, "image")
    if value is not None and not (isinstance(value, str) and (IMAGE.fullmatch(value) or value.startswith("./"))):
        raise BadRow(f"image {ascii(value)[:60]} is no image name")
    if value is None or not value.startswith("./"):
        return value
    return str(_beside("image", value, root))


def _workspace(row: Mapping[Any, Any], root: Path | None) -> str | None:
    """The absolute path of a folder or archive below `root`. What is in it is checked when it is unpacked."""
    if (value := _name(row, "workspace", "a folder or archive")) is None:
        return None
    if _first(row, "root") == "read-only":
        raise BadRow("workspace needs a writable root: leave `root` out")
    place = _beside("workspace", value, root)
    assert root is not None
    if root.resolve().is_relative_to(place):
        raise BadRow(f"workspace {ascii(value)[:60]} holds the tasks and their answers: give it a folder")
    return str(place)


def _dockerfile(row: Mapping[Any, Any], root: Path | None) -> str | None:
    """The absolute path of a Dockerfile below `root`, which the row gives by its own name or its folder's."""
    if (value := _name(row, "dockerfile", "a file or folder")) is None:
        return None
    if _first(row, "image") is not None:
        raise BadRow("image and dockerfile both say what the sandbox is made of: leave one out")
    place = _beside("dockerfile", value, root)
    if place.is_dir():
        place = _beside("dockerfile", os.path.join(value, "Dockerfile"), root)
    assert root is not None
    # All that is in its folder can be copied into the image: the answers would be, too.
    if place.parent == root.resolve():
        raise BadRow(f"dockerfile {ascii(value)[:60]} lies beside the tasks and their answers: give it a folder")
    return str(place)


def _services(row: Mapping[Any, Any], root: Path | None) -> tuple[Service, ...]:
    """As compose has them, but for `image`, which is as the row's own, and `dockerfile` in place of `build`."""

    def made_of(name: str, fields: Mapping[str, Any]) -> Mapping[str, str | None]:
        if fields.get("build") is not None:
            raise BadRow(f"services: {name} has a build: a row names its Dockerfile by `dockerfile`")
        made = {"image": _image(fields, root), "dockerfile": _dockerfile(fields, root)}
        if not any(made.values()):
            raise BadRow(f"services: {name} has neither an image nor a dockerfile")
        return made

    value = _mapping(row, "services")
    if not value:
        return ()
    if _first(row, "root") == "read-only":
        raise BadRow("services need a writable root: leave `root` out")
    fields = {name: plain(one) for name, one in value.items()}
    demand_own_volumes(list(fields.values()))
    return services_of(fields, made_of)


def _name(row: Mapping[Any, Any], column: str, what: str) -> str | None:
    """The text in the column, which names `what` below the dataset's folder."""
    value = _first(row, column)
    if value is not None and not isinstance(value, str):
        raise BadRow(f"{column} must be the name of {what}, not {kind_of(value)}")
    return value


def _beside(what: str, name: str, root: Path | None) -> Path:
    """The file or folder `name` below `root`, without links."""
    shown = f"{what} {ascii(name)[:60]}"
    if root is None:
        raise BadRow(f"the row's {what} is a file, and this kind of dataset has no folder to find it in")
    try:
        place = (root / name).resolve(strict=True)
    except (OSError, ValueError):
        raise BadRow(f"{shown} is not beside the dataset") from None
    if not place.is_relative_to(root.resolve()):
        raise BadRow(f"{shown} leads out of the dataset's folder")
    if place.is_file() and (pointer := pointer_in(place)) is not None:
        raise BadRow(f"{shown} is {pointer}")
    return place


def _limits(row: Mapping[Any, Any]) -> Mapping[str, float]:
    value = _mapping(row, "limits")
    for name, number in value.items():
        if name not in LIMITS:
            raise BadRow(f"limit {ascii(name)[:60]} is unknown; valid are {', '.join(LIMITS)}")
        if isinstance(number, bool) or not isinstance(number, int if name in _COUNTS else int | float):
            expected = "a whole number" if name in _COUNTS else "a number of seconds"
            raise BadRow(f"limit {name} must be {expected}, not {kind_of(number)}")
        if not 0 < number <= LIMITS[name]:
            raise BadRow(f"limit {name} must be above 0 and at most {LIMITS[name]:g}")
    return dict(value)
