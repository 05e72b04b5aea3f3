"""The recorded beginning of a rollout, to which a fresh sandbox can be brought."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from orchestrator.types.completions import Turn
from orchestrator.types.messages import Message, conversations, shared
from orchestrator.types.record import Branch, Continued, Crossing, Entry, Parting, Record, ToolCall, Word

_AFTER = "\n\n"  # between a message and a user's word


@dataclass(frozen=True, slots=True)
class Prefix:
    """What is served from the record until the sandbox stands where the record stood.

    `turns`: the completions that are served, in their order. `prompt`: the recorded conversation of the next one;
    None: it was not asked for yet. `tool_calls`: the recorded answers of host tools so far. `started_at`: Unix
    time of the record's begin, which chat templates may print. `elapsed_s`, `waiting_s`: of the record's clock
    when the last of the turns was served. `crossings`: what was asked of the outside so far.

    `branch`: this is another rollout, and the turns are inherited; None: the same rollout goes on, `continued`
    says how often it did. Turns without ids, as for another model, are context as texts: the new line begins
    behind them. The words of users that `branch` names come behind their prompts; `prompt` has none of its own.
    """

    turns: tuple[Turn, ...]
    prompt: tuple[Message, ...] | None
    tool_calls: tuple[ToolCall, ...]
    started_at: float
    branch: Branch | None = None
    continued: tuple[Continued, ...] = ()
    crossings: tuple[Crossing, ...] = ()

    def words_at(self, turn: int) -> str:
        """What users put behind the prompt of this turn, from 1 on; empty: nothing."""
        words = self.branch.words if self.branch else ()
        return _AFTER.join(word.text for word in words if word.turn == turn)

    @property
    def elapsed_s(self) -> float:
        return max((turn.ended_s for turn in self.turns), default=0.0)

    @property
    def waiting_s(self) -> float:
        """Seconds in which the recorded sandbox waited for completions and host tools."""
        return _covered([*self.turns, *self._calls_before])

    @property
    def sampling_s(self) -> float:
        """Seconds of these in which it waited for completions."""
        return _covered(self.turns)

    @property
    def _calls_before(self) -> list[ToolCall]:
        return [call for call in self.tool_calls if call.ended_s <= self.elapsed_s]


def going_on(record: Record, reason: str) -> Prefix | None:
    """Goes on with a rollout whose sandbox is gone, behind its last completion. None: it has none of its own."""
    turns = record.turns
    if all(turn.inherited for turn in turns):
        return None
    kept = Continued(len(turns), max(0, record.sampled_tokens), reason)  # an endpoint counts them
    return Prefix(
        turns,
        None,
        record.tool_calls,
        record.started_at,
        branch=record.branch,
        continued=(*record.continued, kept),
        crossings=record.crossings,
    )


def gathered(served: Iterable[Entry], record: Record) -> Record:
    """The record with what one sandbox was served since, in the order in which it was served; of a completion that
    came twice, the last. Raises ValueError for one that parts from turns which there are not."""
    served = tuple(served)
    for one in served:
        if isinstance(one, Parting):  # it comes before all that the sandbox was served alone
            record = _kept(record, one.kept)
            record = replace(record, continued=parted(record.continued, record.turns, one.why))
    turns = {("before", at): turn for at, turn in enumerate(_whole(record.turns))}
    # A completion of before comes again where its program gave it up later.
    known = {_identity(turn): place for place, turn in turns.items()}
    for turn in _whole([one for one in served if isinstance(one, Turn)]):
        turns[known.get(_identity(turn), ("since", turn.sequence))] = turn
    # A program's may have overtaken each other.
    kept = tuple(_shortened(sorted(turns.values(), key=attrgetter("started_s", "ended_s"))))
    calls = [one for one in served if isinstance(one, ToolCall)]
    crossings = [one for one in served if isinstance(one, Crossing)]
    return replace(
        record,
        turns=kept,
        tool_calls=(*record.tool_calls, *calls),
        crossings=_asked(record.crossings, crossings),
    )


def _asked(before: Sequence[Crossing], since: Sequence[Crossing]) -> tuple[Crossing, ...]:
    """All that was asked of the outside: a sandbox that goes on asks once more, and the record answers."""
    again = Counter(map(_request, since))
    kept = []
    for one in before:
        if again[_request(one)] > 0:
            again[_request(one)] -= 1
        else:
            kept.append(one)
    return (*kept, *since)


def _request(one: Crossing) -> tuple[str, str, str | None]:
    return one.method, one.url, one.sent_sha256


def _identity(turn: Turn) -> tuple[int, float, float]:
    return turn.segment, turn.started_s, turn.ended_s


def _kept(record: Record, places: Sequence[int]) -> Record:
    """The record with these turns alone, and the calls until the last of them. Raises ValueError."""
    whole = list(_whole(record.turns))
    if any(not 0 <= at < len(whole) for at in places) or list(places) != sorted({*places}):
        raise ValueError("it parts from turns that are not there")
    turns = tuple(_shortened(whole[at] for at in places))
    end_s = max((turn.ended_s for turn in turns), default=0.0)
    calls = tuple(call for call in record.tool_calls if call.ended_s <= end_s)
    return replace(record, turns=turns, tool_calls=calls)


def parted(continued: tuple[Continued, ...], turns: Sequence[Turn], why: str) -> tuple[Continued, ...]:
    """Of a rollout whose last sandbox went on with these turns alone."""
    *before, last = continued
    tokens = sum(turn.completion.completion_tokens for turn in turns if not turn.inherited)
    return (*before, Continued(len(turns), max(0, tokens), last.reason, why))


def _whole(turns: Sequence[Turn]) -> Iterator[Turn]:
    """With their whole conversations."""
    for turn, talk in zip(turns, conversations(turns), strict=True):
        yield replace(turn, kept=0, messages=talk)


def _shortened(turns: Iterable[Turn]) -> Iterator[Turn]:
    """Each conversation as a difference to that of the one before."""
    before: tuple[Message, ...] = ()
    for turn in turns:
        at = shared(before, turn.messages)
        before = turn.messages
        yield replace(turn, kept=at, messages=turn.messages[at:])


def branching(
    rollout_id: str, record: Record, turn: int, *, same_ids: bool = True, say: str = "", run: str = ""
) -> Prefix:
    """Another rollout that samples turn `turn` (from 1 on) itself, behind a user's word `say`. `same_ids`: the ids
    of the turns before it stand in its line; else their texts are context. `run`: as in Branch. Raises ValueError
    where the record has no such turn, or a program gave up a completion before it."""
    if not 1 <= turn <= len(record.turns):
        raise ValueError(f"rollout {rollout_id} has {len(record.turns)} completions, no number {turn}")
    before, following = record.turns[: turn - 1], record.turns[turn - 1]
    words = tuple(word for word in record.branch.words if word.turn <= turn) if record.branch else ()
    if any(one.abandoned for one in (*before, following)):
        raise ValueError(f"its program gave up a completion before turn {turn}: nobody knows what it did then")
    if any(one.ended_s > following.started_s for one in before):
        raise ValueError(f"turn {turn} was asked for while another completion was under way")
    here = _AFTER.join(word.text for word in words if word.turn == turn)
    return Prefix(
        tuple(replace(one if same_ids else _text(one), inherited=True) for one in before),
        unsaid(list(conversations(record.turns[:turn]))[-1], here),
        tuple(call for call in record.tool_calls if call.started_s <= following.started_s),
        record.started_at,
        branch=Branch(rollout_id, turn, words + ((Word(turn, say),) if say else ()), run),
        crossings=tuple(one for one in record.crossings if one.started_s <= following.started_s),
    )


def once_more(record: Record) -> Prefix | None:
    """How the rollout of this record began, to play it again. None: with the task, or it cannot be begun so."""
    if (branch := record.branch) is None or len(record.turns) < branch.turn:
        return None
    try:
        return replace(branching(branch.parent, record, branch.turn), branch=branch)
    except ValueError:  # a record that nobody here wrote
        return None


def _text(turn: Turn) -> Turn:
    """The turn without its ids."""
    return replace(turn, prompt_ids=None, completion=replace(turn.completion, tokens_T=None, logprobs_T=None))


def said(message: Message, word: str) -> tuple[Message, ...]:
    """The message with a user's word behind it: not every template prints two of a user in a row."""
    if message.role == "user":
        return (replace(message, content=f"{message.content}{_AFTER}{word}"),)
    return message, Message("user", word)


def unsaid(messages: tuple[Message, ...], word: str) -> tuple[Message, ...]:
    """The conversation without the word that `said` put behind its last message."""
    if not word:
        return messages
    *before, last = messages
    if last.content == word:
        return tuple(before)
    return (*before, replace(last, content=last.content.removesuffix(f"{_AFTER}{word}")))


def _covered(spans: Sequence[Turn | ToolCall]) -> float:
    """Seconds that lie in at least one of them."""
    total = end = 0.0
    for span in sorted(spans, key=lambda span: span.started_s):
        total += max(0.0, span.ended_s - max(end, span.started_s))
        end = max(end, span.ended_s)
    return total
