"""Whether the accepted answer is right, by the grader that the task names (default: GAIA's rules)."""

from collections.abc import Callable, Mapping

from orchestrator.errors import ScorerError
from orchestrator.scorers.gaia import question_scorer
from orchestrator.types import Ended, EndedName, Record, Task

Grader = Callable[[str, Task], bool]


def correctness(task: Task, record: Record, ended: Ended) -> float:
    """1.0 or 0.0. Raises ScorerError if the task cannot be graded."""
    if ended.name is not EndedName.FINISHED or record.answer is None:
        return 0.0
    grader = _GRADERS.get(task.scorer or "gaia")
    if grader is None:
        raise ScorerError(f"task {task.task_id!r} names the scorer {task.scorer!r}, which does not exist")
    return 1.0 if grader(record.answer, task) else 0.0


def _references(task: Task) -> tuple[str, ...]:
    if task.answer is None:
        raise ScorerError(f"task {task.task_id!r} has no reference answer to score against")
    return task.answer, *task.other_answers


def _gaia(answer: str, task: Task) -> bool:
    return any(question_scorer(answer, reference) for reference in _references(task))


def _exact(answer: str, task: Task) -> bool:
    """Equal except for white space at the ends."""
    return any(answer.strip() == reference.strip() for reference in _references(task))


def _reasoning_gym(answer: str, task: Task) -> bool:
    from orchestrator.scorers.reasoning_gym import is_correct

    return is_correct(answer, task)


# One for each name in scorers.base.ROW_SCORERS.
_GRADERS: Mapping[str, Grader] = {"gaia": _gaia, "exact": _exact, "reasoning_gym": _reasoning_gym}
