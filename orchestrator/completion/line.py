"""The id lines of one episode: how the next prompt continues the ids that exist already.

Rendering a conversation again gives other ids than were sampled, so a line is only ever appended
to: previous ids + sampled ids + encoded suffix. The suffix is what the chat template prints after
the assistant's text. It is found by rendering a word in place of that text, so the end of a turn comes
from the template. A request that does not continue any line opens a new one (a segment).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from orchestrator.calls.formats import unclosed, written
from orchestrator.calls.structured import calls_in
from orchestrator.completion.base import Ids, Tokenizer, ids_of
from orchestrator.completion.prompt_text import (
    Opening,
    Piece,
    PromptText,
    absent_marker,
    begun,
    joined,
    prompt_text,
)
from orchestrator.completion.reasoning import reasoning_chars
from orchestrator.completion.shape import tools_text
from orchestrator.types import Completion, Message, Tools, beginnings, shared

# Conversations rendered to see whether a segment goes on: some templates print no assistant's text once.
_TRIES = 4


@dataclass(frozen=True, slots=True)
class Segment:
    """One line: the conversation up to its last completion, and its ids if it has any. `completion` None:
    nobody got one. `hash`: of that conversation."""

    number: int
    messages: tuple[Message, ...] = ()
    tools: Tools = ()
    completion: Completion | None = None
    ids: Ids = field(default_factory=ids_of)
    opening: str = ""
    hash: int = 0


class Segments:
    """All lines of one episode, by number. May be read in a thread while it is changed: a change is one
    assignment."""

    def __init__(self) -> None:
        self.first = 0  # the number of the first one
        self._all: dict[int, Segment] = {}
        self._earlier: dict[int, Segment] = {}  # each without its last completion and the prompt of that
        self._hashed: tuple[tuple[Message, ...], list[int]] = (), [0]  # the last conversation, and its beginnings

    def get(self, number: int) -> Segment | None:
        return self._all.get(number)

    def opened(self, busy: Collection[int]) -> int:
        """The number of the next new line. `busy`: of those that requests under way continue or open."""
        return max((*self._all, *busy), default=self.first - 1) + 1

    def begin(
        self, messages: tuple[Message, ...], tools: Tools | None, busy: Collection[int]
    ) -> Iterator[tuple[Segment, Completion]]:
        """The lines, and their last completions, that this conversation may continue: it has one message more at
        least, and (by its hash) begins like theirs. The latest comes first. `tools`: the same object as before
        where they are the same tools; None: whatever they were."""
        hashes = self._hashes(messages)
        for segment in reversed(self._all.values()):
            place = len(segment.messages)
            if (
                segment.completion is None
                or segment.number in busy
                or (tools is not None and segment.tools is not tools)
            ):
                continue
            if place < len(messages) and segment.hash == hashes[place]:
                yield segment, segment.completion

    def append(
        self,
        number: int,
        messages: tuple[Message, ...],
        tools: Tools,
        completion: Completion,
        ids: Ids | None = None,
        opening: str = "",
    ) -> None:
        """Puts a completion with its prompt behind its line. `ids`: with those of the completion."""
        ids = ids_of() if ids is None else ids
        segment = Segment(number, messages, tools, completion, ids, opening, self._hashes(messages)[-1])
        self._earlier[number] = self._all.get(number) or Segment(number)
        self._all = {**self._all, number: segment}

    def abandon(self, number: int, completion: Completion) -> bool:
        """Takes back the line's last completion, which nobody got. False: it is not the last one."""
        segment = self._all[number]
        if segment.completion is not completion:
            return False
        self._all = {**self._all, number: self._earlier.pop(number, Segment(number))}
        return True

    def _hashes(self, messages: tuple[Message, ...]) -> list[int]:
        """As `beginnings`. Most conversations begin as the one before, which was hashed already."""
        known, hashes = self._hashed
        if messages is not known:
            kept = shared(known, messages)
            hashes = beginnings(messages[kept:], hashes[: kept + 1])
            self._hashed = messages, hashes
        return hashes


@dataclass(frozen=True, slots=True)
class Continuation:
    """The text that follows a line's ids, not encoded yet. `closing`: the part of it that the agent appended.
    `after`: the line as it was found; None: it is a new one."""

    segment: int
    ids: Ids
    closing: str
    added: PromptText
    tools: Tools = ()
    opening: str = ""
    after: Segment | None = None

    def prompt(self, added: tuple[int, ...]) -> Prompt:
        """`added`: the ids of that text."""
        return Prompt(self.segment, self.ids + ids_of(added), added, self.closing, self.tools, self.opening)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The next prompt. `ids` is the whole line, with the ids that this turn adds (`added`). `opening`: how the
    answer begins before it is sampled."""

    segment: int
    ids: Ids
    added: tuple[int, ...]
    closing: str
    tools: Tools = ()
    opening: str = ""


class TokenLine:
    """All segments of one episode. `closing_tag` is what the agent may append to a completion."""

    def __init__(self, tokenizer: Tokenizer, closing_tag: str) -> None:
        self._tokenizer = tokenizer
        self._closing_tag = closing_tag
        self.segments = Segments()

    def prompt(self, messages: tuple[Message, ...]) -> Prompt:
        """The ids to sample from. Nothing changes until `append`."""
        following = self.following(messages)
        return following.prompt(tuple(self._tokenizer.encode(following.added.text, following.added.plain)))

    def following(
        self,
        messages: tuple[Message, ...],
        tools: Tools = (),
        opening: Opening | None = None,
        busy: Collection[int] = (),
    ) -> Continuation:
        """The line that this conversation continues, and the text to encode for it. `tools`: the same object as
        before where they are the same tools. `busy`: segments that requests under way continue or open. Raises
        RecordError. May run in a thread, while lines are appended to or abandoned."""
        begins = "" if opening is None else opening.text
        behind: dict[int, list[Piece] | None] = {}  # by the number of messages before
        for segment, completion in self.segments.begin(messages, tools, busy):
            place = len(segment.messages)
            if (appended := self._appended(segment, completion, messages[place])) is None:
                continue
            if place not in behind and len(behind) < _TRIES:
                behind[place] = self._behind(messages, place, tools, opening)
            if (parts := behind.get(place)) is not None and messages[:place] == segment.messages:
                suffix = self._suffix(completion, appended, parts)
                return Continuation(segment.number, segment.ids, *suffix, tools, begins, segment)
        text = prompt_text(self._tokenizer, messages, tools, opening)
        return Continuation(self.segments.opened(busy), ids_of(), "", text, tools, begins)

    def is_after(self, following: Continuation) -> bool:
        """Whether it still follows the line as it is now."""
        return self.segments.get(following.segment) is following.after

    def append(self, prompt: Prompt, messages: tuple[Message, ...], completion: Completion) -> None:
        """Puts the prompt's ids and the sampled ids behind the line."""
        if completion.tokens_T is None:
            raise ValueError("a line grows by sampled ids; this completion has none")
        learn_end(self._tokenizer, completion)
        ids = prompt.ids + ids_of(completion.tokens_T)
        self.segments.append(prompt.segment, messages, prompt.tools, completion, ids, prompt.opening)

    def _appended(self, segment: Segment, completion: Completion, message: Message) -> str | None:
        """What the agent appended to the segment's completion, if the message is that; None: it is another one."""
        if message.role != "assistant":
            return None
        # Agents strip what they got, or do not: models begin with a space or a new line often.
        visible, content = f"{segment.opening}{completion.visible}".strip(), message.content.lstrip()
        if not content.startswith(visible):
            return None
        appended = content[len(visible) :].strip()
        if (
            appended
            and self._ended(completion)
            and appended == unclosed(self._tokenizer.call_format, segment.opening)
        ):
            appended = ""  # a demanded call, kept to its schema, ends with its arguments
        # A program may write the stop string that it asked for, and that was sampled, back behind its text.
        if appended not in ("", self._closing_tag) and (
            self._ended(completion) or not completion.unseen.startswith(appended)
        ):
            return None
        return appended

    def _ended(self, completion: Completion) -> bool:
        """Whether the model ended the turn itself. SGLang calls it a length at the last token asked for."""
        tokens = completion.tokens_T or ()
        return bool(tokens) and self._tokenizer.is_end(tokens[-1])

    def _suffix(self, completion: Completion, appended: str, behind: list[Piece]) -> tuple[str, PromptText]:
        """(text the agent appended, text to encode behind the line)."""
        first, *rest = behind
        if self._ended(completion):
            # The agent's addition has no place behind the end.
            return "", joined(
                [Piece(self._tokenizer.behind_end(first.text, (completion.tokens_T or ())[-1])), *rest]
            )
        if appended and appended in completion.unseen:
            appended = ""  # the stop string was sampled: the ids hold it already
        return appended, joined([Piece(appended + first.text), *rest])

    def _behind(
        self, messages: tuple[Message, ...], index: int, tools: Tools, opening: Opening | None
    ) -> list[Piece] | None:
        """What the template prints from the end of assistant message `index` to the next generation prompt, or to
        the end of the answer's opening.

        Nothing before that is used, so the template gets words for what the model said, which it might refuse.
        """
        format = self._tokenizer.call_format if tools else None
        own_texts = {
            i
            for i, message in enumerate(messages[: index + 1])
            if message.role == "assistant" and calls_in(messages, i, tools, format) is None
        }
        if index not in own_texts:
            return self._behind_calls(messages, index, tools, opening)
        parts = self._shown(begun(self._tokenizer, messages, opening, own_texts, since=index, tools=tools), tools)
        places = [place for place, part in enumerate(parts) if part.message == index]
        return parts[places[0] + 1 :] if len(places) == 1 else None

    def _shown(self, parts: list[Piece], tools: Tools) -> list[Piece]:
        """Without the tools, where the template prints them before each last question: the line has them."""
        if not tools or not self._tokenizer.shape.tools_again:
            return parts
        text = tools_text(self._tokenizer, tools)
        return [part if part.message is not None else Piece(part.text.replace(text, "")) for part in parts]

    def _behind_calls(
        self, messages: tuple[Message, ...], index: int, tools: Tools, opening: Opening | None
    ) -> list[Piece] | None:
        """The same where the message called tools. Templates print results only behind calls that they know, so
        there the template gets the calls themselves. The last one has a word for its arguments: what follows that
        word up to the end of the turn is the same whether the turn is the last one or not. What stands before it
        may differ, as with Qwen3, which prints an empty reasoning in the last turn alone."""
        format, word = self._tokenizer.call_format, absent_marker(messages)
        parsed = calls_in(messages, index, tools, format)
        assert format is not None
        assert parsed is not None
        *others, last = parsed.calls
        text = written("", (*others, replace(last, arguments=f'{{"{word}": "{word}"}}')), format)
        marked = (*messages[:index], Message("assistant", text), *messages[index + 1 :])
        if calls_in(marked, index, tools, format) is None:
            return None
        until = self._tokenizer.render(marked[: index + 1], generation_prompt=False, tools=tools)
        end = self._tokenizer.last_end(until)
        end = len(until.rstrip()) if end is None else end  # the next header ends the turn
        parts = begun(self._tokenizer, marked, opening, since=index + 1, tools=tools)
        first, *rest = self._shown(parts, tools)
        at, there = until.rfind(word), first.text.rfind(word)
        # A template may leave the last call's arguments out, and print them once results follow.
        if at < 0 or there < 0 or not first.text.startswith(until[at:end], there):
            return None
        return [Piece(first.text[there + end - at :]), *rest]


def learn_end(tokenizer: Tokenizer, completion: Completion) -> None:
    """Makes the tokenizer know the end of turn that only the server named for this completion."""
    if completion.server_end and completion.tokens_T:
        tokenizer.learn_end(completion.tokens_T[-1])


def visible_text(
    tokenizer: Tokenizer, tokens_T: tuple[int, ...], stop: tuple[str, ...], opened: str = ""
) -> tuple[str, str, int]:
    """(the sampled text, the text the agent gets, how many characters of the sampled text are reasoning).

    The agent gets the text behind the reasoning, without the end token, cut before the first stop string.
    `opened`: the reasoning tag that the prompt ended with.
    """
    text = tokenizer.decode(tokens_T)
    content = tokenizer.said(tokens_T, text)
    thought = reasoning_chars(content, opened)
    return text, cut_at_stop(content[thought:], stop), thought


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """`text` up to the first of the stop strings."""
    places = [at for s in stop if s and (at := text.find(s)) >= 0]
    return text[: min(places)] if places else text
