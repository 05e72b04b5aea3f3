"""A conversation as the chat template prints it, in the pieces it is encoded in.

A tokenizer takes for a control token whatever spells one. So a content that spells one (a page, a file, what code
printed) is kept apart from the template's own text and encoded as text. Where it stands is found by rendering the
conversation with a drawn word in its place: one that is known could be written there on purpose.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from secrets import randbelow

from orchestrator.completion.base import Span, Tokenizer
from orchestrator.errors import RecordError
from orchestrator.types import Message

_DRAWN = 20  # digits: no template makes other letters of them
_NUMBER = 6


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of the template and of contents that need no care; or what is printed of one message's content."""

    text: str
    message: int | None = None


@dataclass(frozen=True, slots=True)
class PromptText:
    """What is to be encoded. Nothing in the spans of `plain` is a control token."""

    text: str
    plain: tuple[Span, ...] = ()


def pieces(
    tokenizer: Tokenizer,
    messages: tuple[Message, ...],
    hidden: Set[int] = frozenset(),
    *,
    since: int = 0,
    generation_prompt: bool,
) -> list[Piece]:
    """The template's text and contents by turns, beginning and ending with the template's.

    Contents come apart where they spell a control token, from message `since` on, and where the message is one
    of `hidden`: of these the template sees no more than a word. Raises RecordError for a conversation that the
    template refuses.
    """
    later = range(since, len(messages))
    spelling = {i for i in later if i not in hidden and tokenizer.spells_control(messages[i].content)}
    # Space around a content is left where it is: many templates take it away.
    apart = {i: messages[i].content.strip() for i in spelling} | {i: messages[i].content for i in hidden}
    if not apart:
        return [Piece(tokenizer.render(messages, generation_prompt=generation_prompt))]
    drawn = absent_marker(messages)
    words = {i: f"{drawn}{i:0{_NUMBER}}" for i in apart}

    def rendered(shown: Mapping[int, str]) -> str:
        told = (
            Message(m.role, m.content.replace(apart[i], shown[i], 1)) if i in shown else m
            for i, m in enumerate(messages)
        )
        return tokenizer.render(tuple(told), generation_prompt=generation_prompt)

    own, places = _split(rendered(words), drawn, apart)
    contents = [apart[i] for i in places]
    if spelling.intersection(places):
        ends = {i: apart[i] + word if i in spelling else word for i, word in words.items()}
        with suppress(RecordError):  # the contents themselves may be what the template does not like
            printed = _between(own, [words[i] for i in places], rendered(ends))
            both = list(zip(places, printed, strict=True))
            if not any(text for i, text in both if i in hidden):
                contents = [text if i in spelling else apart[i] for i, text in both]
    result = [Piece(own[0])]
    for i, content, text in zip(places, contents, own[1:], strict=True):
        result += [Piece(content, i), Piece(text)]
    return result


def _split(rendered: str, drawn: str, known: Container[int]) -> tuple[list[str], list[int]]:
    """(the template's own text, the messages whose words stand between)."""
    first, *others = rendered.split(drawn)
    own, places = [first], []
    for text in others:
        number, rest = text[:_NUMBER], text[_NUMBER:]
        if len(number) == _NUMBER and number.isdecimal() and int(number) in known:
            places.append(int(number))
            own.append(rest)
        else:  # a part of a word: the template cuts contents off
            own[-1] += text
    return own, places


def _between(own: list[str], words: list[str], rendered: str) -> list[str]:
    """What the template prints of each content, up to the word that ends it: some leave a part out or change it.
    Raises RecordError where the template's own text is not what it is around mere words."""
    found = []
    at = 0
    for text, word in zip(own, words, strict=False):
        start = at + len(text)
        end = rendered.find(word, start)
        if not rendered.startswith(text, at) or end < 0:
            raise RecordError("the chat template prints other text around other contents")
        found.append(rendered[start:end])
        at = end + len(word)
    if rendered[at:] != own[-1]:
        raise RecordError("the chat template prints other text around other contents")
    return found


def joined(parts: Iterable[Piece]) -> PromptText:
    """Pieces as one text."""
    texts: list[str] = []
    plain: list[Span] = []
    at = 0
    for piece in parts:
        texts.append(piece.text)
        if piece.message is not None:
            plain.append((at, at + len(piece.text)))
        at += len(piece.text)
    return PromptText("".join(texts), tuple(plain))


def prompt_text(tokenizer: Tokenizer, messages: tuple[Message, ...]) -> PromptText:
    """A whole conversation and the beginning of its answer. Raises RecordError."""
    return joined(pieces(tokenizer, messages, generation_prompt=True))


def absent_marker(messages: tuple[Message, ...]) -> str:
    """A word that is in none of the messages, whatever a sandbox has put into them. Its copies with other
    numbers behind them are in none either. Drawn, as one that is known could be put into them on purpose."""
    while True:
        marker = f"{randbelow(10**_DRAWN):0{_DRAWN}}"
        if not any(marker in message.content for message in messages):
            return marker
