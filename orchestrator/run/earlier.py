"""What an earlier process of a run has finished, read back from the run directory.

Every attempt on record counts as it was: its turns, its outcome and its score come from its line, its
trajectory is made from its turns again. So the engine goes through the same tasks in the same order and
finds done what is done: groups on disk are passed over, of half-done ones only what is missing is run.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from orchestrator.completion.base import Tokenizer
from orchestrator.completion.trajectory import main_line
from orchestrator.errors import ConfigError, RecordError
from orchestrator.run.directory import SCHEMA
from orchestrator.run.lines import MAX_LINE_BYTES, loads, set_end_aside, set_torn_end_aside
from orchestrator.run.typed import typed
from orchestrator.types import (
    Attempt,
    Completion,
    CompletionKind,
    Ended,
    EndedName,
    Failed,
    FailedName,
    Member,
    Message,
    Outcome,
    Output,
    OutputFile,
    Record,
    RolloutPlan,
    SandboxExit,
    Score,
    Step,
    ToolCall,
    Turn,
)

_ROLLOUT_ID = re.compile(r"g(\d+)(?:-r\d+-a\d+)?")
_GROUP_BEGINS = b'{"tokens":'  # as `writers.scored_data_group` has it
Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Earlier:
    """What is done. `written`: scores of the groups on disk, by number. `bad`: numbers of bad tasks reported.

    `lines`: attempts of groups that are not on disk, by rollout id, as they stand in the file.
    """

    written: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    bad: frozenset[int] = frozenset()
    lines: Mapping[str, bytes] = field(default_factory=dict)

    def result(self, plan: RolloutPlan, tokenizer: Tokenizer | None) -> Member | Attempt | None:
        """What became of this attempt; None: it is not on record. Raises ConfigError."""
        text = self.lines.get(plan.rollout_id)
        if text is None:
            return None
        try:
            return read_attempt(loads(text), plan, tokenizer)
        except (KeyError, TypeError, ValueError, AttributeError, RecordError) as error:
            raise ConfigError(f"rollout {plan.rollout_id} cannot be read back, no resume: {error}") from error


def read_earlier(rollouts: Path, groups: Path, counted: Callable[[Line], None]) -> Earlier:
    """Reads both files line by line; `counted` is given every line of `rollouts`. Raises ConfigError."""
    written: dict[int, tuple[float, ...]] = {}
    last: int | None = None
    for place, line, _ in _lines(groups):
        number = group_number(place, line)
        if number in written and number != last:  # side lines of one group follow each other
            raise ConfigError(f"{place}: group {number} is there twice; put one of them aside to resume")
        written[number] = tuple(float(score) for score in line["scores"])
        last = number
    bad: set[int] = set()
    kept = _LinesInFile(rollouts)
    seen: set[str] = set()
    offset = 0
    for place, line, text in _lines(rollouts):
        start, offset = offset, offset + len(text)
        try:
            if line["schema"] != SCHEMA:
                raise ConfigError(f"{place} was written by another version; finish the run with that one")
            number, rollout_id = _group(line["rollout_id"]), line["rollout_id"]
            if rollout_id in seen:
                raise ConfigError(f"{place}: {rollout_id} is there twice; put one of them aside to resume")
            seen.add(rollout_id)
            if "index" not in line:
                bad.add(number)
            elif number not in written:
                kept.places[rollout_id] = (start, len(text))
            counted(line)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{place} is no rollout") from error
    return Earlier(written, frozenset(bad), kept)


def repair_groups(groups: Path, *, several_lines: bool) -> None:
    """Sets aside what is unfinished at the end of the groups file. Raises ConfigError, also for another file.

    `several_lines`: groups have side lines, so the last one may be whole line by line and still lack some:
    it is set aside as well, to be written anew from the record.
    """
    _demand_groups(groups)
    set_torn_end_aside(groups)
    if not several_lines:
        return
    start, offset, last = 0, 0, None
    for place, line, text in _lines(groups):
        number = group_number(place, line)
        if number != last:
            start, last = offset, number
        offset += len(text)
    if last is not None:
        set_end_aside(groups, start)


def read_attempt(line: Line, plan: RolloutPlan, tokenizer: Tokenizer | None) -> Member | Attempt:
    """The inverse of `rundir.rollout_line`, for the plan it was made of.

    Raises ConfigError where the task is another one; KeyError, TypeError, ValueError, RecordError for
    what is no such line.
    """
    if line["task_id"] != plan.task.task_id:
        raise ConfigError(
            f"group {plan.group} was task {line['task_id']!r} and is {plan.task.task_id!r} now: "
            "the dataset has changed, the run cannot be resumed"
        )
    plan = replace(plan, sampling=replace(plan.sampling, seed=int(line["plan"]["sampling"]["seed"])))
    outcome = _outcome(line["outcome"], line["reason"])
    attempt = Attempt(plan, read_record(line), outcome, _ungraded(line.get("ungraded")))
    if line["score"] is None:
        return attempt
    parts = {str(k): float(v) for k, v in line["score_parts"].items()}
    score = Score(float(line["score"]), parts, line.get("score_evidence") or {})
    return Member(attempt, main_line(plan, attempt.record, tokenizer), score)


def read_record(line: Line) -> Record:
    """What was seen of an attempt. Raises KeyError, TypeError, ValueError for what is no such line."""
    how = line["sandbox"]["exit"]
    record = Record(
        started_at=line["started_at"],
        turns=tuple(typed(_turn(c)) for c in line["completions"]),
        tool_calls=tuple(ToolCall(**call) for call in line["tool_calls"]),
        steps=tuple(Step(**step) for step in line["steps"]),
        answer=line["answer"],
        sandbox_id=line["sandbox"]["id"],
        exit=SandboxExit(**how) if how else None,
        launch_s=line["launch_s"],
        duration_s=line["duration_s"],
        waiting_s=line["waiting_s"],
        cpu_s=line["cpu_s"],
        notes=tuple(line["notes"]),
        output=_output(line.get("output")),
    )
    return typed(record)


def _output(told: Line | None) -> Output | None:
    if told is None:
        return None
    files = tuple(OutputFile(str(f["path"]), int(f["size_bytes"])) for f in told["files"])
    return Output(files, int(told["left_out"]), bool(told["complete"]))


def _turn(c: Line) -> Turn:
    return Turn(
        sequence=c["sequence"],
        kind=CompletionKind(c["kind"]),
        kept=c["kept"],
        messages=tuple(typed(Message(m["role"], m["content"])) for m in c["messages"]),
        segment=c["segment"],
        prompt_ids=_tuple(c["prompt_ids"]),
        closing=c["closing"],
        completion=typed(
            Completion(
                text=c["text"],
                visible=c["visible"],
                finish_reason=c["finish_reason"],
                tokens_T=_tuple(c["token_ids"]),
                logprobs_T=_tuple(c["logprobs"]),
                prompt_tokens=c["prompt_tokens"],
                completion_tokens=c["completion_tokens"],
                policy_version=c["policy_version"],
                retries=c["retries"],
            )
        ),
        started_s=c["started_s"],
        ended_s=c["ended_s"],
        agent=c.get("agent", ""),
    )


def _outcome(name: str, reason: str) -> Outcome:
    if name in {str(ended) for ended in EndedName}:
        return Ended(EndedName(name), reason)
    return Failed(FailedName(name), reason)


def _ungraded(told: Line | None) -> Ended | None:
    return None if told is None else Ended(EndedName(told["outcome"]), str(told["reason"]))


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def group_number(place: str, line: Any) -> int:
    """The group a line of the groups file is of. Raises ConfigError."""
    try:
        (number,) = {_group(facts["rollout_id"]) for facts in line["overrides"]}
        if not all(isinstance(score, int | float) for score in line["scores"]):
            raise TypeError
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{place} is no group of this run") from error
    return number


def _group(rollout_id: str) -> int:
    found = _ROLLOUT_ID.fullmatch(rollout_id)
    if found is None:
        raise ValueError(f"{rollout_id!r} is no rollout id")
    return int(found[1])


def _demand_groups(path: Path) -> None:
    """run.json names the file and may have been edited: no other file is cut. Raises ConfigError."""
    place = f"{path}:1"
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{path} is no file; name the run's groups file in run.json to resume")
        with path.open("rb") as file:
            line = file.read(len(_GROUP_BEGINS))
            if line == _GROUP_BEGINS:  # else it may be anything, and of any length
                line += file.readline(MAX_LINE_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    torn = not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES
    if torn and _GROUP_BEGINS.startswith(line[: len(_GROUP_BEGINS)]):
        return  # nothing yet, or the first group half written
    try:
        group_number(place, loads(line))
    except (ConfigError, orjson.JSONDecodeError) as error:
        raise ConfigError(
            f"{place} is no group of this run; name the run's groups file in run.json, or put that file aside "
            "to have its groups written anew"
        ) from error


class _LinesInFile(Mapping[str, bytes]):
    """Lines by rollout id, read when they are asked for: only where they lie is kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.places: dict[str, tuple[int, int]] = {}

    def __getitem__(self, rollout_id: str) -> bytes:
        start, length = self.places[rollout_id]
        with self._path.open("rb") as file:
            file.seek(start)
            return file.read(length)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def _lines(path: Path) -> Iterator[tuple[str, Any, bytes]]:
    """(place, value, its text). A file that is not there holds nothing. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            number = 0
            while text := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                place = f"{path}:{number}"
                try:
                    yield place, loads(text), text
                except orjson.JSONDecodeError as error:
                    raise ConfigError(
                        f"{place} is no JSON of a run ({error.msg}); put that line aside to resume"
                    ) from error
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
