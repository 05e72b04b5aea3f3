"""Reads back what an earlier process of a run has finished, from the run directory.

Turns, outcome and score of a recorded attempt come from its line; its trajectory is made again from the turns. The
engine goes through the same tasks in the same order: it skips groups on disk, and runs only what others lack.
"""

import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.completion.base import Tokenizer
from orchestrator.completion.trajectory import main_line
from orchestrator.errors import ConfigError, RecordError, os_error_as
from orchestrator.run.excerpts import Counted, CountedBadTask, WrittenGroup, read_counted, read_written_group
from orchestrator.run.frames import is_compressed
from orchestrator.run.line import RecordedAttempt, read_attempt
from orchestrator.run.lines import MAX_LINE_BYTES, LinesById, TextLine, texts
from orchestrator.run.repair import set_end_aside, set_torn_end_aside
from orchestrator.run.under_way import files_in
from orchestrator.types import Attempt, FailedName, Member, RolloutPlan

_ROLLOUT_ID = re.compile(r"g(\d+)(?:-r\d+-a\d+)?")
_GROUP_BEGINS = b'{"tokens":'  # of a line that `groups.scored_data_group` made


@dataclass(frozen=True, slots=True)
class Earlier:
    """What is done. `written`: the groups on disk, by number. `bad`: numbers of bad tasks reported.

    `lines`: lines of attempts whose groups are not on disk, by rollout id.
    """

    written: Mapping[int, WrittenGroup] = field(default_factory=dict)
    bad: frozenset[int] = frozenset()
    lines: Mapping[str, bytes] = field(default_factory=dict)

    def result(self, plan: RolloutPlan, tokenizer: Tokenizer | None) -> Member | Attempt | None:
        """The result of this attempt; None: it is not on record. Raises ConfigError."""
        text = self.lines.get(plan.rollout_id)
        if text is None:
            return None
        try:
            return restored(read_attempt(text), plan, tokenizer)
        except (ValueError, RecordError) as error:
            raise ConfigError(f"rollout {plan.rollout_id} cannot be read back, no resume: {error}") from error


def read_earlier(rollouts: Path, groups: Path, counted: Callable[[Counted | CountedBadTask], None]) -> Earlier:
    """Reads both files line by line; `counted` is called for every line of `rollouts`. What is kept of rollouts
    under way whose line is there is removed. Raises ConfigError."""
    under_way = files_in(rollouts.parent)
    written: dict[int, WrittenGroup] = {}
    last: int | None = None
    for line in _texts(groups):
        number, group = _group_head(line.place, line.text)
        if number in written and number != last:  # side lines of one group follow each other
            raise ConfigError(f"{line.place}: group {number} is there twice; put one of them aside to resume")
        written[number] = group
        last = number
    bad: set[int] = set()
    lines = LinesById(rollouts)
    ids: set[str] = set()
    for line in _texts(rollouts):
        try:
            head = read_counted(line.text)
            rollout_id = head.rollout_id
            number = _group(rollout_id)
        except ValueError as error:
            raise ConfigError(
                f"{line.place} is not a rollout of this version ({error}); finish the run with the version that "
                "began it, or put that line aside to resume"
            ) from error
        if rollout_id in ids:
            raise ConfigError(f"{line.place}: {rollout_id} is there twice; put one of them aside to resume")
        ids.add(rollout_id)
        if rollout_id in under_way and (number in written or not _lacks_turns(head)):
            under_way[rollout_id].unlink(missing_ok=True)
        if isinstance(head, CountedBadTask):
            bad.add(number)
        elif number not in written:
            lines.offsets[rollout_id] = line.offset
        counted(head)
    return Earlier(written, frozenset(bad), lines)


def _lacks_turns(line: Counted | CountedBadTask) -> bool:
    """As of an attempt: whether another one may go on with what is kept of it."""
    if isinstance(line, CountedBadTask) or line.outcome != FailedName.CANCELLED:
        return False
    return not line.ungraded and not line.sampled_tokens


def repair_groups(groups: Path, *, several_lines: bool) -> None:
    """Sets aside an unfinished end of the groups file. Raises ConfigError, also if it is no groups file.

    `several_lines`: groups have side lines, so the last group may lack some although its lines are complete. It
    is set aside as well, and written anew from the record.
    """
    _demand_groups(groups)
    set_torn_end_aside(groups)
    if not several_lines:
        return
    start, last = 0, None
    for line in _texts(groups):
        number = group_number(line.place, line.text)
        if number != last:
            start, last = line.offset, number
    if last is not None:
        set_end_aside(groups, start)


def restored(recorded: RecordedAttempt, plan: RolloutPlan, tokenizer: Tokenizer | None) -> Member | Attempt:
    """The recorded attempt, with the plan it was made from.

    Raises ConfigError if the plan's task is another one, RecordError if no trajectory can be made.
    """
    if recorded.task_id != plan.task.task_id:
        raise ConfigError(
            f"group {plan.group} was task {recorded.task_id!r} and is {plan.task.task_id!r} now: "
            "the dataset has changed, the run cannot be resumed"
        )
    plan = replace(plan, sampling=replace(plan.sampling, seed=recorded.sampling.seed))
    attempt = Attempt(plan, recorded.record, recorded.outcome, recorded.ungraded)
    if recorded.score is None:
        return attempt
    return Member(attempt, main_line(plan, recorded.record, tokenizer, recorded.segment), recorded.score)


def group_number(place: str, text: bytes) -> int:
    """The number of the group of a line of the groups file. Raises ConfigError."""
    return _group_head(place, text)[0]


def _group_head(place: str, text: bytes) -> tuple[int, WrittenGroup]:
    """(number, what is counted of it)."""
    try:
        group = read_written_group(text)
        (number,) = set(map(_group, group.rollout_ids))
    except ValueError as error:
        raise ConfigError(f"{place} is not a group of this run ({error})") from error
    return number, group


def _group(rollout_id: str) -> int:
    match = _ROLLOUT_ID.fullmatch(rollout_id)
    if match is None:
        raise ValueError(f"{rollout_id!r} is not a rollout id")
    return int(match[1])


def _demand_groups(path: Path) -> None:
    """Raises ConfigError unless `path` is a groups file: run.json names it and may have been edited."""
    place = f"{path}:1"
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{path} is not a file; name the run's groups file in run.json to resume")
        if is_compressed(path):
            first = next(texts(path), None)
            if first is None or not first.is_whole:
                return  # nothing yet, or the first group half written
            line = first.text
        else:
            line = _first_line(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    torn = not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES
    if torn and _GROUP_BEGINS.startswith(line[: len(_GROUP_BEGINS)]):
        return  # nothing yet, or the first group half written
    try:
        group_number(place, line)
    except ConfigError as error:
        raise ConfigError(
            f"{place} is not a group of this run; name the run's groups file in run.json, or put that file aside "
            "to have its groups written anew"
        ) from error


def _first_line(path: Path) -> bytes:
    """The first line of a plain file, or what stands where a group would begin."""
    with path.open("rb") as file:
        line = file.read(len(_GROUP_BEGINS))
        # Otherwise the line may be anything, of any length.
        return line + file.readline(MAX_LINE_BYTES) if line == _GROUP_BEGINS else line


def _texts(path: Path) -> Iterator[TextLine]:
    """Raises ConfigError."""
    with os_error_as(ConfigError, f"cannot read {path}"):
        yield from texts(path)
