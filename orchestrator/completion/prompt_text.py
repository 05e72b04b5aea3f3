"""A conversation as the chat template prints it, in the pieces it is encoded in.

A tokenizer takes any text that spells a control token for that token. So a content that spells one (a page, a
file, what code printed) is kept apart from the template's own text and encoded as text. Its place is found by
rendering the conversation with a random word instead: a known word could be in contents on purpose.
"""

import json
from collections.abc import Container, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from secrets import randbelow

from orchestrator.calls.structured import calls_in
from orchestrator.completion.base import Span, Tokenizer
from orchestrator.completion.harmless import Words, completed
from orchestrator.errors import RecordError
from orchestrator.types import Message, Tools

_DRAWN = 20  # random digits of a word: templates may change letters, but not digits
_NUMBER = 6  # digits of the message's number


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of the template and of contents that need no care; or the printed content of one `message`."""

    text: str
    message: int | None = None


@dataclass(frozen=True, slots=True)
class PromptText:
    """Text to encode. In the spans of `plain` nothing may become a control token."""

    text: str
    plain: tuple[Span, ...] = ()


def pieces(
    tokenizer: Tokenizer,
    messages: tuple[Message, ...],
    hidden: Set[int] = frozenset(),
    *,
    since: int = 0,
    generation_prompt: bool,
    tools: Tools = (),
) -> list[Piece]:
    """The template's text and contents by turns, beginning and ending with the template's.

    A content is a piece of its own if it spells a control token or the template completes one of it (from message
    `since` on), or if its message is in `hidden`; of hidden contents the template sees only a word. Raises
    RecordError for a conversation that the template refuses.
    """
    later = range(since, len(messages))
    spelling = {i for i in later if i not in hidden and _spells_control(tokenizer, messages, i, tools)}
    spelling |= _completed(tokenizer, messages, spelling | hidden, since, tools)
    # Space around a content stays with the template, which may strip it.
    apart = {i: messages[i].content.strip() for i in spelling} | {i: messages[i].content for i in hidden}
    if not apart:
        return [Piece(tokenizer.render(messages, generation_prompt=generation_prompt, tools=tools))]
    marker = absent_marker(messages)
    words = {i: f"{marker}{i:0{_NUMBER}}" for i in apart}

    def rendered(replacements: Mapping[int, str]) -> str:
        conversation = (
            Message(m.role, m.content.replace(apart[i], replacements[i], 1), name=m.name)
            if i in replacements
            else m
            for i, m in enumerate(messages)
        )
        return tokenizer.render(tuple(conversation), generation_prompt=generation_prompt, tools=tools)

    own, places = _split(rendered(words), marker, apart)
    contents = [apart[i] for i in places]
    if spelling.intersection(places):
        ends = {i: apart[i] + word if i in spelling else word for i, word in words.items()}
        with suppress(RecordError):  # the template may refuse the contents themselves
            printed = _between(own, [words[i] for i in places], rendered(ends))
            both = list(zip(places, printed, strict=True))
            if not any(text for i, text in both if i in hidden):
                contents = [text if i in spelling else apart[i] for i, text in both]
    result = [Piece(own[0])]
    for i, content, text in zip(places, contents, own[1:], strict=True):
        result += [Piece(content, i), Piece(text)]
    return result


def _completed(
    tokenizer: Tokenizer, messages: tuple[Message, ...], apart: Set[int], since: int, tools: Tools
) -> set[int]:
    """The messages of which the template may complete control tokens, if it does: see `harmless`. `apart`: those
    that it does not see."""
    words = Words(tokenizer)
    candidates = {i: words.message(messages, i, tools) for i in range(since, len(messages)) if i not in apart}
    changes = {
        i: message for i, message in candidates.items() if message is not messages[i] and message != messages[i]
    }
    if not changes:
        return set()
    conversation = tuple(replace(m, content="word") if i in apart else m for i, m in enumerate(messages))
    return set(changes) if completed(tokenizer, changes, conversation, tools) else set()


def _spells_control(tokenizer: Tokenizer, messages: tuple[Message, ...], place: int, tools: Tools) -> bool:
    """Whether a content spells a control token. The marks around calls are the template's own text."""
    if not tokenizer.spells_control(messages[place].content):
        return False
    parsed = calls_in(messages, place, tools, tokenizer.call_format) if tools else None
    if parsed is None:
        return True
    # Templates print the arguments without the escapes of JSON.
    arguments = (json.dumps(json.loads(call.arguments), ensure_ascii=False) for call in parsed.calls)
    texts = [parsed.content, *(call.name for call in parsed.calls), *arguments]
    return any(map(tokenizer.spells_control, texts))


def _split(rendered: str, marker: str, numbers: Container[int]) -> tuple[list[str], list[int]]:
    """(the template's own texts, the messages whose words stand between them)."""
    first, *others = rendered.split(marker)
    own, places = [first], []
    for text in others:
        number, rest = text[:_NUMBER], text[_NUMBER:]
        if len(number) == _NUMBER and number.isdecimal() and int(number) in numbers:
            places.append(int(number))
            own.append(rest)
        else:  # a part of a word: the template cut the content off
            own[-1] += text
    return own, places


def _between(own: list[str], words: list[str], rendered: str) -> list[str]:
    """What the template prints of each content, up to the word put behind it: some templates leave a part out or
    change it. Raises RecordError where the template's own text differs from that around mere words."""
    contents = []
    at = 0
    for text, word in zip(own, words, strict=False):
        start = at + len(text)
        end = rendered.find(word, start)
        if not rendered.startswith(text, at) or end < 0:
            raise RecordError("the chat template prints other text around other contents")
        contents.append(rendered[start:end])
        at = end + len(word)
    if rendered[at:] != own[-1]:
        raise RecordError("the chat template prints other text around other contents")
    return contents


def joined(parts: Iterable[Piece]) -> PromptText:
    """One text, with the spans of contents."""
    texts: list[str] = []
    plain: list[Span] = []
    at = 0
    for piece in parts:
        texts.append(piece.text)
        if piece.message is not None:
            plain.append((at, at + len(piece.text)))
        at += len(piece.text)
    return PromptText("".join(texts), tuple(plain))


@dataclass(frozen=True, slots=True)
class Opening:
    """How an answer begins before the model goes on with it. `plain`: nothing in it may become a control token."""

    text: str
    plain: bool


def begun(
    tokenizer: Tokenizer,
    messages: tuple[Message, ...],
    opening: Opening | None,
    hidden: Set[int] = frozenset(),
    *,
    since: int = 0,
    tools: Tools = (),
) -> list[Piece]:
    """As `pieces`, up to the generation prompt, or to the end of the answer's opening. Raises RecordError."""
    if opening is None:
        return pieces(tokenizer, messages, hidden, since=since, generation_prompt=True, tools=tools)
    place, answered = len(messages), (*messages, Message("assistant", opening.text))
    parts = pieces(tokenizer, answered, {*hidden, place}, since=since, generation_prompt=False, tools=tools)
    ends = [at for at, part in enumerate(parts) if part.message == place]
    if len(ends) != 1:
        raise RecordError("the model's chat template cannot continue a message of the assistant's")
    return [*parts[: ends[0]], Piece(opening.text, place if opening.plain else None)]


def prompt_text(
    tokenizer: Tokenizer, messages: tuple[Message, ...], tools: Tools = (), opening: Opening | None = None
) -> PromptText:
    """A whole conversation, and the generation prompt or the answer's opening. Raises RecordError."""
    return joined(begun(tokenizer, messages, opening, tools=tools))


def absent_marker(messages: tuple[Message, ...]) -> str:
    """A random word of digits that is in none of the messages. It is random because a sandbox could write a known
    one into them on purpose."""
    while True:
        marker = f"{randbelow(10**_DRAWN):0{_DRAWN}}"
        if not any(marker in message.content for message in messages):
            return marker
