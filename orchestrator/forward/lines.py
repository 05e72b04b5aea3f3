"""The trained lines of a groups file: which tokens there are to recompute, and what is on record for each.

A line's tokens, trained places and log-probs come from the groups file, as a trainer gets them. The record beside
it only says where in the episode a token stands. Files may come from anybody: a member that is not of the right
shape is counted and left out; the checks before have named it.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice, pairwise
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

import orjson

from orchestrator.completion.trajectory import in_lines
from orchestrator.run.groups import MASKED
from orchestrator.run.line import read_attempt
from orchestrator.run.lines import loads, texts
from orchestrator.types import Completion, Turn

_MOST_ID = (1 << 31) - 1
SEED = 0  # of the choice of rollouts
_STOP_CHARS = 200  # stop strings are shorter, with what the last token holds beyond them


class Place(StrEnum):
    """Where in the episode a trained token stands. The first that fits."""

    FIRST = "first of a turn"
    END = "end token"
    STOP = "stop string"
    REST = "rest"


class Vocabulary(Protocol):
    """What the model's ids mean."""

    def decode(self, ids: tuple[int, ...]) -> str:
        """Text of `ids`, special tokens included."""

    def is_end(self, token_id: int) -> bool:
        """Whether this id ends a turn or the text."""


@dataclass(frozen=True, slots=True)
class TrainedLine:
    """One rollout's line as it is trained on. P: trained places, in order.

    `completions`: the line's completions as recorded, if the record has them and they make this line. `turns_P`
    count from 1. `versions_P`: the policy version that sampled the token, if known.
    """

    where: str
    tokens: Sequence[int]
    places_P: Sequence[int]
    logprobs_P: Sequence[float]
    turns_P: Sequence[int]
    kinds_P: Sequence[Place]
    versions_P: Sequence[str | None]
    temperature: float
    completions: tuple[Completion, ...] = ()


class LeftOut(StrEnum):
    """Why a rollout cannot be compared."""

    RETOKENIZED = "without log-probs (their ids were made from text)"
    UNTRAINED = "with nothing that is trained"
    INVALID = "not of the right shape"


@dataclass(slots=True)
class Survey:
    """What a groups file holds. `lengths` and `trained`: tokens and trained tokens of each line that can be
    compared."""

    lengths: array[int] = field(default_factory=lambda: array("l"))
    trained: array[int] = field(default_factory=lambda: array("l"))
    highest_id: int = 0
    left_out: Counter[LeftOut] = field(default_factory=Counter)

    @property
    def why_left_out(self) -> str:
        """How many rollouts cannot be compared, and why; empty if none."""
        return ", ".join(f"{count:,} {why}" for why, count in self.left_out.items())


def survey(groups_file: Path) -> Survey:
    """Counts what there is to compare. Raises OSError."""
    counts = Survey()
    for _, group in _groups(groups_file):
        for index in range(_size(group)):
            member = _member(group, index)
            if isinstance(member, LeftOut):
                counts.left_out[member] += 1
                continue
            counts.lengths.append(len(member.tokens))
            counts.trained.append(len(member.places))
            counts.highest_id = max(counts.highest_id, *member.tokens)
        if not _size(group):
            counts.left_out[LeftOut.INVALID] += 1
    return counts


def chosen(count: int, wanted: int | None) -> Container[int]:
    """Which of `count` lines to take: all, or one from each of `wanted` equal stretches, drawn with `SEED`."""
    if wanted is None or wanted >= count:
        return range(count)
    draw = random.Random(SEED)  # noqa: S311 - no secret
    borders = [count * part // wanted for part in range(wanted + 1)]
    return {draw.randrange(start, end) for start, end in pairwise(borders)}


def trained_lines(
    groups_file: Path, rollouts: Mapping[str, bytes] | None, numbers: Container[int], vocabulary: Vocabulary | None
) -> Iterator[TrainedLine]:
    """The lines with these numbers, counted as in the survey. Raises OSError."""
    number = -1
    for where, group in _groups(groups_file):
        for index in range(_size(group)):
            member = _member(group, index)
            if isinstance(member, _Member):
                number += 1
                if number in numbers:
                    yield _line(where, member, _runs(member, rollouts), vocabulary)


@dataclass(frozen=True, slots=True)
class _Member:
    tokens: list[int]
    places: list[int]
    logprobs: list[float]
    facts: Mapping[str, Any]
    temperature: float


def _groups(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(file and line number, group) of each line. A line that is not a group has no members."""
    for line in texts(path):
        try:
            group = loads(line.text)
        except orjson.JSONDecodeError:
            group = {}
        yield f"{path.name}:{line.number}", group if isinstance(group, dict) else {}


def _size(group: Mapping[str, Any]) -> int:
    tokens = group.get("tokens")
    return len(tokens) if isinstance(tokens, list) else 0


def _member(group: Mapping[str, Any], index: int) -> _Member | LeftOut:
    """One member of a group."""
    tokens, mask = group["tokens"][index], _at(group, "masks", index)
    facts = _at(group, "overrides", index)
    facts = facts if isinstance(facts, dict) else {}
    if not _are_ids(tokens) or not isinstance(mask, list) or len(mask) != len(tokens):
        return LeftOut.INVALID
    # Nothing predicts the first token of a line.
    places = [place for place, masked in enumerate(mask) if masked != MASKED and place]
    if not places:
        return LeftOut.UNTRAINED
    column = _at(group, "inference_logprobs", index)
    if column is None:
        return LeftOut.RETOKENIZED
    if not isinstance(column, list) or len(column) != len(tokens):
        return LeftOut.INVALID
    logprobs = [column[place] for place in places]
    if not all(isinstance(p, int | float) and not isinstance(p, bool) and isfinite(p) for p in logprobs):
        return LeftOut.INVALID
    sampling = group.get("generation_params")
    temperature = sampling.get("temperature") if isinstance(sampling, dict) else None
    if not isinstance(temperature, int | float) or not 0 < temperature < 100:
        temperature = 1.0
    return _Member(tokens, places, logprobs, facts, float(temperature))


def _at(group: Mapping[str, Any], name: str, index: int) -> Any:
    values = group.get(name)
    return values[index] if isinstance(values, list) and index < len(values) else None


def _are_ids(tokens: Any) -> bool:
    return isinstance(tokens, list) and all(type(t) is int and 0 <= t <= _MOST_ID for t in tokens)


@dataclass(frozen=True, slots=True)
class _Run:
    """Tokens of one completion, in the place where they stand. `completion` None: not on record."""

    start: int
    ids: Sequence[int]
    completion: Completion | None

    def versions(self) -> list[str | None]:
        """Which policy version sampled each token. None: not known, as where weights changed at an unknown one."""
        if self.completion is None:
            return [None] * len(self.ids)
        spans = self.completion.sampled_by
        return list(islice((span.version for span in spans for _ in range(span.tokens)), len(self.ids)))


def _line(where: str, member: _Member, runs: Sequence[_Run], vocabulary: Vocabulary | None) -> TrainedLine:
    by_place = {
        run.start + at: (number, kind, version)
        for number, run in enumerate(runs, 1)
        for at, (kind, version) in enumerate(zip(_kinds(run, vocabulary), run.versions(), strict=True))
    }
    turns, kinds, versions = zip(*(by_place[place] for place in member.places), strict=True)
    return TrainedLine(
        where=f"{where}, {member.facts.get('rollout_id')}",
        tokens=member.tokens,
        places_P=member.places,
        logprobs_P=member.logprobs,
        turns_P=turns,
        kinds_P=kinds,
        versions_P=versions,
        temperature=member.temperature,
        completions=tuple(run.completion for run in runs if run.completion is not None),
    )


def _runs(member: _Member, rollouts: Mapping[str, bytes] | None) -> list[_Run]:
    """The completions of the line: from the record if it makes this line, else the stretches that are trained."""
    text = rollouts.get(str(member.facts.get("rollout_id"))) if rollouts is not None else None
    recorded = _recorded(text, member.facts.get("segment", 0)) if text is not None else []
    line: list[int] = []
    runs = []
    for turn in recorded:
        line += turn.prompt_ids or ()
        runs.append(_Run(len(line), turn.completion.tokens_T or (), turn.completion))
        line += turn.completion.tokens_T or ()
    sampled = {run.start + at for run in runs for at in range(len(run.ids))}
    if line == member.tokens and sampled.issuperset(member.places):
        return runs
    borders = [at for at, place in enumerate(member.places) if not at or place != member.places[at - 1] + 1]
    stretches = zip(borders, [*borders[1:], len(member.places)], strict=True)
    return [
        _Run(member.places[first], [member.tokens[p] for p in member.places[first:end]], None)
        for first, end in stretches
    ]


def _recorded(text: bytes, segment: Any) -> list[Turn]:
    try:
        return [turn for turn, _ in in_lines(read_attempt(text).record.turns) if turn.segment == segment]
    except ValueError:  # the checks before have named it
        return []


def _kinds(run: _Run, vocabulary: Vocabulary | None) -> list[Place]:
    """Where each token of a completion stands. Without a vocabulary only the first token is told from the rest."""
    kinds = [Place.REST] * len(run.ids)
    if vocabulary is not None and run.ids:
        for at in range(_unseen_from(run, vocabulary), len(run.ids)):
            kinds[at] = Place.STOP
        if vocabulary.is_end(run.ids[-1]):
            kinds[-1] = Place.END
    return [Place.FIRST, *kinds[1:]] if kinds else kinds


def _unseen_from(run: _Run, vocabulary: Vocabulary) -> int:
    """The first token of the stop string; their number if none ended the completion."""
    end, completion = len(run.ids), run.completion
    if completion is None or completion.finish_reason != "stop" or len(completion.unseen) > _STOP_CHARS:
        return end
    while end > 0 and len(vocabulary.decode(tuple(run.ids[end:]))) < len(completion.unseen):
        end -= 1
    return end
