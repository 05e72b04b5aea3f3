"""Replaces the tool calls that an agent sends back by the text that the model sampled.

Programs get a completion's calls as data, and send them back in their own way: other spaces, another order of
keys, other ids, without the text beside them. What was sampled is on record, so here the completion itself takes
the place of what came back, and the id line goes on behind it. Calls that nobody sampled are written out.
smolagents' agents send back what they got, ids and all; those of one team may make the same calls.
"""

from bisect import bisect_left
from collections.abc import Hashable, Sequence

from orchestrator.calls.formats import written
from orchestrator.calls.parsed import ParsedText, parsed, plain_calls
from orchestrator.proxy.requests import CallMessage, Refusal, RequestRefused
from orchestrator.types import CallFormat, Message, Wishes


class Talk:
    """What an agent, or a team of them, was served so far. `format` None: its model calls no tools."""

    def __init__(self, format: CallFormat | None) -> None:
        self.format = format
        self._served: list[str] = []  # the sampled texts that had calls
        # Their places by what a program may send back: the calls with the text beside them or without, and either
        # of the two with the calls' ids.
        self._places: dict[Hashable, list[int]] = {}

    def parsed_text(self, text: str, wishes: Wishes, sequence: int) -> ParsedText:
        """What the agent gets of a sampled text."""
        if self.format is None or not wishes.tools or wishes.tool_choice == "none":
            return ParsedText(text, ())
        result = parsed(text, self.format, wishes.tools, sequence)
        if result.calls:
            self._served.append(text)
            calls, ids = plain_calls(result.calls), tuple(call.id for call in result.calls)
            for content in {"", result.content.strip()}:
                for key in ((calls, content), (calls, content, ids)):
                    self._places.setdefault(key, []).append(len(self._served) - 1)
        return result

    def plain(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The same conversation without calls as data; results stand in the order of their calls. Raises
        RequestRefused for results that would stand in another call's place."""
        plain_messages: list[Message] = []
        places: dict[str, int] = {}
        answers: list[tuple[int, Message]] = []
        served = 0  # the next completion that can come back: programs keep their order
        for message in messages:
            spoken = message if isinstance(message, CallMessage) else CallMessage(message.role, message.content)
            if spoken.role == "tool":
                place = places.get(spoken.call_id, len(places))
                answers.append((place, Message("tool", spoken.content)))
                continue
            plain_messages += _in_order(answers, len(places))
            places, answers = {call.id: place for place, call in enumerate(spoken.calls)}, []
            content = spoken.content
            if spoken.calls:
                content, served = self._text(spoken, served)
            plain_messages.append(Message(spoken.role, content, name=message.name))
        return (*plain_messages, *_in_order(answers, len(places)))

    def _text(self, spoken: CallMessage, since: int) -> tuple[str, int]:
        """(the text of an assistant's message with calls, the number of the next completion that can come
        back)."""
        calls, content = plain_calls(spoken.calls), spoken.content.strip()
        ids = tuple(call.id for call in spoken.calls)
        if places := self._places.get((calls, content, ids)) or self._places.get((calls, content)):
            place = places[bisect_left(places, since) % len(places)]  # behind the last one there comes the first
            return self._served[place], place + 1
        return written(spoken.content, spoken.calls, self.format or "hermes"), since


def _in_order(answers: list[tuple[int, Message]], calls: int) -> list[Message]:
    """The results in the order of the calls before them. From here on a result's place alone says what it answers,
    so none may be left out before another. Raises RequestRefused."""
    answers = sorted(answers, key=lambda pair: pair[0])
    if calls and [place for place, _ in answers] != list(range(len(answers))):
        text = "results must answer the calls before them, each once, and none may be left out before another"
        raise RequestRefused(Refusal(text, "messages"))
    return [answer for _, answer in answers]
