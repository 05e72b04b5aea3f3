"""Which rollouts are exported: the best of their group, those above a threshold, pairs by their margin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from orchestrator.completion.trajectory import in_lines
from orchestrator.engine.group import GroupPolicy
from orchestrator.exporting.record import LeftOut, Scored, Survey
from orchestrator.run.groups import GroupFormat
from orchestrator.run.line import RecordedAttempt, read_attempt
from orchestrator.run.lines import text_at
from orchestrator.run.rows import Row, recorded_rows
from orchestrator.run.trees import InTree, places
from orchestrator.types import Message

_NEAR = 1e-9  # in binary, 0.95 less 0.45 is not quite 0.5


@dataclass(frozen=True, slots=True)
class Choice:
    """`best`: only so many rollouts, or pairs, of a group. `threshold`: the lowest score, in pairs of the chosen.

    `margin`: what the scores of a pair differ by at least; equal ones are no preference, whatever it is.
    `max_tokens`: prompt and completion together.
    `exact`: only rollouts whose ids are those that were sampled.
    `solved`: only solved rollouts, in pairs a solved one and one that is not.
    """

    best: int | None = None
    threshold: float | None = None
    margin: float | None = None
    max_tokens: int | None = None
    exact: bool = True
    solved: bool = False

    def refusal(self, one: Scored) -> LeftOut | None:
        """Why the rollout is not chosen, by its score; None: it is."""
        if self.solved and not one.solved:
            return LeftOut.UNSOLVED
        low = self.threshold is not None and one.score < self.threshold - _NEAR
        return LeftOut.BELOW if low else None

    def pair_refusal(self, chosen: Scored, rejected: Scored) -> LeftOut | None:
        """Why the two are no pair, by their scores; None: they are."""
        if self.solved and not is_lesson(chosen, rejected):
            return LeftOut.ALIKE
        if reason := self.refusal(chosen):
            return reason
        gap = chosen.score - rejected.score
        return None if gap > _NEAR and gap >= (self.margin or 0.0) - _NEAR else LeftOut.NO_PAIR


def is_lesson(chosen: Scored, rejected: Scored) -> bool:
    """Whether the pair prefers what is solved to what is not."""
    return chosen.solved and not rejected.solved


@dataclass(frozen=True, slots=True)
class Pair:
    """Two rollouts of a group; `prompt` is how both begin."""

    prompt: tuple[Message, ...]
    chosen: Row
    rejected: Row


@dataclass(frozen=True, eq=False, slots=True)
class _Line:
    """A rollout's main line. `prompt_size`: how many messages it began with, inherited ones among them."""

    of: Scored
    row: Row
    prompt_size: int


@dataclass(eq=False, slots=True)
class Chooser:
    """Reads the chosen rollouts of a record. What is left out is counted in the survey. `wrong`: rows of rollouts
    that are not solved, and pairs of other than a solved rollout and one that is not."""

    record: Path
    survey: Survey
    policy: GroupPolicy
    group_size: int
    form: GroupFormat
    choice: Choice
    wrong: int = 0

    def rollouts(self) -> Iterator[list[Row]]:
        """The rows of each group, in the order of their places; side lines where the run trains on them. Raises
        OSError."""
        for members in self.survey.drawn_groups(self.policy, self.group_size):
            trees = places([member.leaf for member in members])
            kept: list[tuple[int, list[Row]]] = []
            for place in sorted(range(len(members)), key=lambda place: -members[place].score):
                if reason := self.choice.refusal(members[place]):
                    self._leave_out(reason)
                elif len(kept) == self.choice.best:
                    self._leave_out(LeftOut.NOT_BEST)
                elif rows := self._rows(members[place], trees)[0]:
                    kept.append((place, rows))
                    self.wrong += len(rows) * (not members[place].solved)
            yield [row for _, rows in sorted(kept, key=lambda one: one[0]) for row in rows]

    def pairs(self) -> Iterator[list[Pair]]:
        """The pairs of each group: of rollouts that part at one turn first, latest turns before others, then of
        all that are left. Each time the best one is with the worst, the second best with the second worst. No
        rollout is in two pairs. Raises OSError."""
        for members in self.survey.drawn_groups(self.policy, self.group_size):
            lines: list[_Line] = []
            for member in members:
                rows, prompt_size = self._rows(member)
                if rows:
                    lines.append(_Line(member, rows[0], prompt_size))
            pairs: list[Pair] = []
            for siblings in _forks(lines):
                for high, low in self._matched([line for line in siblings if line in lines]):
                    pair = self._pair(high, low)
                    if isinstance(pair, Pair) and len(pairs) != self.choice.best:
                        self._take(pairs, pair, high, low)
                        lines = [line for line in lines if line not in (high, low)]
            for high, low in self._matched(lines):
                pair = self._pair(high, low)
                if isinstance(pair, LeftOut):
                    self._leave_out(pair, 2)
                elif len(pairs) == self.choice.best:
                    self._leave_out(LeftOut.NOT_BEST, 2)
                else:
                    self._take(pairs, pair, high, low)
            self._leave_out(LeftOut.ODD, len(lines) % 2)
            yield pairs

    def _matched(self, lines: Sequence[_Line]) -> list[tuple[_Line, _Line]]:
        """The best with the worst, and so on."""
        down = sorted(lines, key=lambda line: (self.choice.solved and line.of.solved, line.of.score), reverse=True)
        return [(high, down[-1 - number]) for number, high in enumerate(down[: len(down) // 2])]

    def _pair(self, high: _Line, low: _Line) -> Pair | LeftOut:
        """Why the two are no pair, or the pair."""
        if reason := self.choice.pair_refusal(high.of, low.of):
            return reason
        common = max(high.prompt_size, low.prompt_size)  # what one of them inherited is context of both
        prompt = high.row.messages[:common]
        if (prompt, high.row.tools) != (low.row.messages[:common], low.row.tools):
            return LeftOut.OTHER_PROMPT
        size = max(len(high.row.prompt_ids), len(low.row.prompt_ids))
        return Pair(prompt, _from(high.row, size), _from(low.row, size))

    def _take(self, pairs: list[Pair], pair: Pair, high: _Line, low: _Line) -> None:
        pairs.append(pair)
        self.wrong += not is_lesson(high.of, low.of)

    def _rows(self, member: Scored, trees: Mapping[str, InTree] = MappingProxyType({})) -> tuple[list[Row], int]:
        """(the rollout's rows, how many messages its main line began with). No rows: the reason is counted."""
        place = f"{self.record}, byte {member.offset}"
        try:
            attempt = read_attempt(text_at(self.record, member.offset))
        except ValueError as error:
            self.survey.refuse(place, str(error))
            return [], 0
        main, *sides = recorded_rows(attempt, self.form, place=trees.get(attempt.rollout_id))
        if not main.messages and attempt.record.turns:
            self.survey.refuse(place, main.reason)
            return [], 0
        reason = self._reason(attempt, main)
        if reason is not None:
            self._leave_out(reason)
            return [], 0
        wanted = sides if self.form.trains_sides(attempt.agent.kind) else []
        fitting = [main, *(row for row in wanted if row.messages and self._fits(row))]
        self._leave_out(LeftOut.SIDE, len(wanted) + 1 - len(fitting))
        weight = sum(row.weight for row in fitting) or 1.0  # of a rollout whose other lines do not fit
        return [replace(row, weight=row.weight / weight) for row in fitting], _prompt_size(attempt, main.segment)

    def _reason(self, attempt: RecordedAttempt, main: Row) -> LeftOut | None:
        if not main.messages:
            return LeftOut.NO_LINE
        if not self._is_exact(main):
            return LeftOut.RETOKENIZED
        if not self.form.trains(attempt.outcome, attempt.record):
            return LeftOut.UNTRAINED
        return LeftOut.TOO_LONG if self._is_long(main) else None

    def _fits(self, row: Row) -> bool:
        return self._is_exact(row) and not self._is_long(row)

    def _is_exact(self, row: Row) -> bool:
        return row.token_source == "sampled" or not self.choice.exact

    def _is_long(self, row: Row) -> bool:
        most = self.choice.max_tokens
        return most is not None and len(row.prompt_ids) + len(row.completion_ids) > most

    def _leave_out(self, reason: LeftOut, count: int = 1) -> None:
        self.survey.left_out[reason] += count


def _forks(lines: Sequence[_Line]) -> Iterator[list[_Line]]:
    """The rollouts that part at one turn: those that branched there, and the one that they branched from. The
    latest turn comes first."""
    trunks = {line.row.rollout_id: line for line in lines}
    forks: dict[tuple[int, str], list[_Line]] = {}
    for line in lines:
        if line.row.parent is not None and line.row.turn is not None:
            forks.setdefault((-line.row.turn, line.row.parent), []).append(line)
    for (_, parent), siblings in sorted(forks.items(), key=lambda one: one[0]):
        yield [*([trunks[parent]] if parent in trunks else ()), *siblings]


def _from(row: Row, size: int) -> Row:
    """The row with at least so many ids of its line as prompt: of a trunk, all before the turn of the fork."""
    more = size - len(row.prompt_ids)
    if more <= 0:
        return row
    return replace(
        row,
        prompt_ids=(*row.prompt_ids, *row.completion_ids[:more]),
        completion_ids=row.completion_ids[more:],
        env_mask=row.env_mask[more:],
        logprobs=None if row.logprobs is None else row.logprobs[more:],
        advantages=None if row.advantages is None else row.advantages[more:],
    )


def _prompt_size(attempt: RecordedAttempt, segment: int) -> int:
    """How many messages the prompt of the segment's first own completion has. Some may be the assistant's: what
    was inherited, or examples that an agent's program writes."""
    pairs = [(turn, talk) for turn, talk in in_lines(attempt.record.turns) if turn.segment == segment]
    return next((len(talk) for turn, talk in pairs if not turn.inherited), len(pairs[0][1]))
