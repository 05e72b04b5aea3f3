"""Brings a fresh sandbox to where a record stands: serves the recorded completions and tool results to it.

The sandbox runs the same code again. What it then asks is compared with what the record says was asked. Where only
harmless things differ (`likeness`), the record's words take the place of the sandbox' own, now and in every later
prompt: so the ids of the line are the recorded ones. Any other difference ends the rollout as `record_error`.

A rollout that goes on parts from its record instead, and is on its own from there: all that it sampled before is
kept. What differs can follow only from what was sampled before it, so nobody gains another draw of that by it.
A program asks in any order, beside completions that it still awaits or gives up: what it asks for and the record
does not have says nothing of what it asks for later. So all of its record stays, tools' answers too, to be served
whenever asked for, and what it gave up is served like the rest: no luck of later completions shows in what comes,
or when.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from orchestrator.errors import RecordError
from orchestrator.proxy.requests import AgentRequest
from orchestrator.rules.likeness import first_difference, talk_likeness
from orchestrator.types import (
    Continued,
    Ended,
    Failed,
    FailedName,
    Message,
    Parting,
    Prefix,
    Record,
    ToolCall,
    Tools,
    Turn,
    beginnings,
    conversations,
    gathered,
)
from orchestrator.types.prefix import parted, said, unsaid


class OtherState(RecordError):
    """The sandbox is not what the record says: it cannot be brought to where that stands."""


_MANY = 16  # conversations: to compare them all with a prompt may take milliseconds
_Place = tuple[int, Message]  # a hash of the conversation up to a message, and that as the sandbox has it


class Playback:
    """What is left to be served of one prefix."""

    def __init__(self, prefix: Prefix, *, program: bool) -> None:
        """`program`: its requests may come in another order than the recorded ones."""
        self.prefix = prefix
        self.differences: Counter[str] = Counter()  # harmless ones, by name
        self._program = program
        self._left = [
            (turn, talk, at)
            for at, (turn, talk) in enumerate(zip(prefix.turns, conversations(prefix.turns), strict=True))
        ]
        self._numbers = {turn.sequence for turn in prefix.turns}
        # Whether some requests have no completion on record: they were given up, on their way, or refused.
        self.lacks_some = max(self._numbers, default=0) > len(prefix.turns)
        ends = sorted(turn.ended_s for turn in prefix.turns)  # how many turns had ended when a call was begun
        self._calls = [
            (bisect_right(ends, call.started_s), _key(call.name, call.arguments), call)
            for call in prefix.tool_calls
        ]
        self._recorded: dict[_Place, tuple[Message, ...]] = {}  # what stands for the sandbox' own messages
        self._elsewhere: dict[Message, Message] = {}  # the same, where another conversation has it, as for a plan
        self._awaited = prefix.prompt
        self.unlike = ""  # what a sandbox that is on its own asked for first, or did, and the record does not have
        self.parting: Parting | None = None
        self._given: list[ToolCall] = []

    @property
    def served(self) -> bool:
        """Whether every recorded completion was served."""
        return not self._left

    @property
    def over(self) -> bool:
        """Whether the sandbox stands where the record stands: from here on it is on its own."""
        return not self._left and self._awaited is None

    @property
    def turn(self) -> int:
        """How many of the completions were served."""
        return len(self.prefix.turns) - len(self._left)

    @property
    def segments(self) -> tuple[int, ...]:
        """Those of the completions that are left."""
        return tuple({turn.segment for turn, *_ in self._left})

    @property
    def is_slow(self) -> bool:
        """Whether it may take long to find what answers a prompt."""
        return self._program and len(self._left) > _MANY

    @property
    def note(self) -> str:
        """How the sandbox was brought there, for people."""
        differences = ", ".join(f"{name} ({count})" for name, count in sorted(self.differences.items()))
        parting = f"; from there on its own: {self.unlike}" if self.parting or self._left else ""
        return f"brought to turn {self.turn + 1} from its record{parting}" + (
            f"; harmless differences: {differences}" if differences else ""
        )

    @property
    def continued(self) -> tuple[Continued, ...]:
        """How often the rollout went on, with what came of the last time."""
        if self.parting is None:
            return self.prefix.continued
        return parted(self.prefix.continued, self.prefix.turns, self.parting.why)

    @property
    def stand(self) -> Prefix:
        """What was served so far."""
        left = {at for _, _, at in self._left}
        turns = tuple(turn for at, turn in enumerate(self.prefix.turns) if at not in left)
        return replace(self.prefix, turns=turns)

    def part(self, why: str) -> bool:
        """From here on the sandbox is on its own, behind what it was served so far. What is left stays there for a
        program. False: it may not be on its own, as a branch on its way to its turn."""
        if not self.prefix.continued or any(turn.inherited for turn, *_ in self._left):
            return False
        self.unlike = self.unlike or why
        if not self._program:
            self.cut()
        return True

    def cut(self) -> None:
        """What is left is served to nobody any more."""
        left = {at for _, _, at in self._left}
        kept = tuple(at for at in range(len(self.prefix.turns)) if at not in left)
        self.prefix, self.parting = self.stand, Parting(kept, self.unlike)
        self._left, self._calls = [], []

    def with_rest(self, record: Record) -> Record:
        """The record of a sandbox that is lost, with what another one may still ask for."""
        if not self.prefix.continued:
            return record
        before = replace(record, turns=self.prefix.turns, crossings=self.prefix.crossings)
        calls = (*record.tool_calls, *(call for *_, call in self._calls))
        before = replace(before, tool_calls=tuple(sorted(calls, key=attrgetter("started_s"))))
        return gathered((*record.turns, *record.crossings), before)

    def is_early(self, ended_s: float) -> bool:
        """Whether completions are left that were asked for before this time."""
        return any(turn.started_s < ended_s for turn, *_ in self._left)

    def refused(self, outcome: Ended) -> Failed:
        """What a rollout that ended on the way there ended by: nothing that happened is its own."""
        told = f"{outcome.name}: {outcome.detail}" if outcome.detail else str(outcome.name)
        reason = f"it ended before turn {self.turn + 1} of the record: {told}"
        return Failed(FailedName.RECORD_ERROR, reason)

    def recorded(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """The conversation with the record's words in place of the sandbox' own."""
        if not self._recorded:
            return messages
        return tuple(said for place in _places(messages) for said in self._standing(place))

    def _standing(self, place: _Place) -> tuple[Message, ...]:
        return self._recorded.get(place) or (self._elsewhere.get(place[1], place[1]),)

    def next(
        self, ask: AgentRequest, messages: tuple[Message, ...], tools: Tools, busy: Collection[int] = ()
    ) -> tuple[Turn | None, tuple[Message, ...]]:
        """(the completion to serve, the conversation of its prompt). No completion: the sandbox is on its own.
        `messages`, `tools`: of the request, as they are kept. `busy`: segments of requests under way. Raises
        OtherState for a request that is not the recorded one."""
        if self.over:
            if not self._program:  # what it did not call for again, it does not call for any more
                self._calls.clear()
            return None, self.recorded(messages)
        self._demand_calls()
        if not self._left:
            assert self._awaited is not None
            self._demand_like(self._awaited, messages, f"prompt {self.turn + 1}")
            self._say(messages, self.prefix.words_at(self.turn + 1))
            self._awaited = None
            return None, self.recorded(messages)
        place = self._place(ask.sequence, messages)
        turn, talk, _ = self._left[place]
        word = self.prefix.words_at(self.turn + 1)
        self._demand_like(unsaid(talk, word), messages, f"prompt {turn.sequence}")
        self._demand_form(turn, ask, tools)
        if turn.segment in busy:
            raise OtherState(f"prompt {turn.sequence} came before the answer that it follows: state")
        self._say(messages, word)
        del self._left[place]
        return turn, talk

    def _place(self, sequence: int, messages: tuple[Message, ...]) -> int:
        """Which completion that is left answers these messages. Of a program, one with the very same prompt, or
        with one that is alike, with its number if there is such a one; each behind those before it in its
        segment."""
        if not self._program:
            return 0
        first: dict[int, int] = {}
        for place, (turn, *_) in enumerate(self._left):
            first.setdefault(turn.segment, place)
        places = [place for place in first.values() if self._left[place][1] == messages]
        known = self.recorded(messages)
        places = places or [at for at in first.values() if talk_likeness(self._left[at][1], known) is not None]
        return min(places, key=lambda place: self._left[place][0].sequence != sequence, default=0)

    def _demand_form(self, turn: Turn, ask: AgentRequest, tools: Tools) -> None:
        """Raises OtherState for a request that is not of the recorded kind, or with a number that none had: the
        seeds of later completions follow from the numbers, and the steps left from the kinds. Which numbers a
        program's completions have may follow from what it gave up."""
        if (turn.kind, turn.agent) != (ask.kind, ask.agent):
            then, now = f"{turn.kind} of {turn.agent or 'the agent'}", f"{ask.kind} of {ask.agent or 'the agent'}"
            raise OtherState(f"prompt {turn.sequence} is for {then}, now for {now}: state")
        if turn.tools != tools:
            raise OtherState(f"prompt {turn.sequence} offers other tools than the recorded one: state")
        goes_on = self.prefix.continued or ask.sequence in self._numbers
        if ask.sequence != turn.sequence and not (self._program and goes_on):
            raise OtherState(f"prompt {turn.sequence} came as request {ask.sequence}: state")

    def _demand_calls(self) -> None:
        """Raises OtherState where the sandbox did not call a tool that was called by now. What programs ask for
        side by side comes in any order."""
        if (
            not self._program
            and (call := next((c for at, _, c in self._calls if at <= self.turn), None)) is not None
        ):
            raise OtherState(
                f"there was a call of {call.name[:80]} before prompt {self.turn + 1}, now none: state"
            )

    def _demand_like(self, recorded: tuple[Message, ...], live: tuple[Message, ...], what: str) -> None:
        """Raises OtherState. Else the recorded messages stand for those that differ."""
        names = talk_likeness(recorded, self.recorded(live))
        if names is None:
            difference = first_difference(recorded, self.recorded(live))
            raise OtherState(f"{what} is not the recorded one: {difference}")
        self.differences.update(names)
        begin = 0
        for place in _places(live):  # one message stands for several where a user's word follows it
            end = begin + len(self._standing(place))
            then = recorded[begin:end]
            if self._standing(place) != then:
                self._recorded[place] = then
                self._elsewhere.setdefault(place[1], then[0])
            begin = end

    def _say(self, messages: tuple[Message, ...], word: str) -> None:
        """A user's word behind this conversation."""
        if word:
            last = _places(messages)[-1]
            (message,) = self._standing(last)
            self._recorded[last] = said(message, word)

    @property
    def given(self) -> list[ToolCall]:
        """The recorded answers to calls behind the last completion that is kept: a parting cuts them off."""
        return [call for call in self._given if call.ended_s > self.prefix.elapsed_s]

    def tool_call(self, sequence: int, name: str, arguments: Mapping[str, Any]) -> ToolCall | None:
        """The recorded answer to such a call; equal ones have theirs in the order of then. None: it is to be made.
        Raises OtherState for one that the record does not have there, while the sandbox is still brought there."""
        key = _key(name, arguments)
        for place, (at, known, call) in enumerate(self._calls):
            if known == key and (self._program or at <= self.turn):
                del self._calls[place]
                self._given.append(replace(call, sequence=sequence))
                return self._given[-1]
        why = f"a call of {name[:80]} that the record does not have there: state"
        if not (self.over or self.part(why)):
            raise OtherState(why)
        return None


def _key(name: str, arguments: Mapping[str, Any]) -> str:
    """The same for equal calls alone: to Python, True is 1."""
    return json.dumps([name, dict(arguments)], sort_keys=True)


def _places(messages: tuple[Message, ...]) -> list[_Place]:
    """The same text stands for other recorded ones in other conversations of a program."""
    return list(zip(beginnings(messages)[1:], messages, strict=True))
