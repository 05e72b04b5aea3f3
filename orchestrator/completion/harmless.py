"""Control tokens that the chat template completes: it prints `<` and `>` around a key, and the key is `|im_end|`.

No text spells such a token by itself. So what is printed is compared with what the template prints of the same
conversation with harmless words in place of all texts that may be pieces of a token. Few texts are, so nearly
always nothing is printed for it.
"""

import json
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

from orchestrator.calls.formats import written
from orchestrator.calls.structured import calls_in
from orchestrator.completion.base import Tokenizer
from orchestrator.errors import RecordError
from orchestrator.types import Call, Message, Role, Tools

# Words of OpenAI's API and of JSON Schema. Templates look for them, so they stay: outside of names for properties.
_WORDS = frozenset(
    {
        *("type", "function", "name", "description", "parameters", "strict", "properties", "required", "items"),
        *("enum", "const", "default", "format", "title", "anyOf", "oneOf", "allOf", "not", "$ref", "$defs"),
        *("additionalProperties", "patternProperties", "definitions", "prefixItems", "examples", "nullable"),
        *("minimum", "maximum", "minItems", "maxItems", "minLength", "maxLength", "pattern"),
        *("string", "number", "integer", "boolean", "object", "array", "null"),
    }
)
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # of their keys


class Words:
    """Harmless words for texts that may be pieces of a control token: the same word for the same text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words: dict[str, str] = {}

    @property
    def any(self) -> bool:
        """Whether one was needed."""
        return bool(self._words)

    def text(self, text: str) -> str:
        if text not in self._words:
            if not self._tokenizer.may_hold_control(text):
                return text
            self._words[text] = f"word_{63914 + len(self._words)}"
        return self._words[text]

    def value(self, value: Any, spare: Container[str] = (), *, names: bool = False) -> Any:
        """A JSON value with harmless texts and keys, but for those to `spare`. `names`: its keys are names that
        somebody chose, as those of a schema's properties."""
        if isinstance(value, str):
            return value if value in spare else self.text(value)
        if isinstance(value, Mapping):
            return {
                key if key in spare and not names else self.text(key): self.value(
                    item, spare, names=bool(spare) and key in _NAMED and not names
                )
                for key, item in value.items()
            }
        return [self.value(item, spare) for item in value] if isinstance(value, list | tuple) else value

    def message(self, messages: Sequence[Message], place: int, tools: Tools) -> Message:
        """A message with a harmless content, or with harmless arguments of its calls."""
        message, format = messages[place], self._tokenizer.call_format
        parsed = calls_in(messages, place, tools, format) if tools else None
        if parsed is None or format is None:
            content = self.text(message.content)
            return message if content == message.content else replace(message, content=content)
        calls = [(call, json.loads(call.arguments)) for call in parsed.calls]
        harmless = [(call, self.value(arguments)) for call, arguments in calls]
        content = self.text(parsed.content)
        if content == parsed.content and calls == harmless:
            return message
        replaced = [replace(call, arguments=json.dumps(arguments)) for call, arguments in harmless]
        return Message("assistant", written(content, replaced, format))


def completed(
    tokenizer: Tokenizer, messages: Mapping[int, Message], conversation: tuple[Message, ...], tools: Tools
) -> bool:
    """Whether the template makes control tokens of these messages, of which none spells one. `messages`: them with
    harmless words, by their places in `conversation`. Raises RecordError."""
    printed = tokenizer.render(conversation, generation_prompt=False, tools=tools)
    replaced = tuple(messages.get(place, message) for place, message in enumerate(conversation))
    try:
        harmless = tokenizer.render(replaced, generation_prompt=False, tools=tools)
    except RecordError:
        return True
    return tokenizer.controls(printed) != tokenizer.controls(harmless)


def prints_name(tokenizer: Tokenizer | None, role: Role, name: str) -> bool:
    """Whether the template prints names of this role's messages, and makes no control token of this one."""
    if tokenizer is None or role not in tokenizer.shape.names:
        return False
    if not tokenizer.may_hold_control(name):
        return True
    message, question = Message(role, "word", name=name), Message("user", "word")
    talk = (message,) if role == "user" else (message, question)
    try:
        return not completed(tokenizer, {0: replace(message, name="word_63914")}, talk, ())
    except RecordError:
        return False


def completed_by_tools(tokenizer: Tokenizer, tools: Tools) -> bool:
    """Whether the template, or the beginning of a call that is demanded, makes control tokens of the tools."""
    words = Words(tokenizer)
    harmless = tuple(words.value(tool, _WORDS) for tool in tools)
    if not words.any:
        return False
    question, answer = Message("user", "word"), Message("assistant", "word")

    def calls(offered: Tools) -> tuple[Message, ...]:
        format, names = tokenizer.call_format, [str(tool["function"]["name"]) for tool in offered]
        texts = [written("", (Call("", name, "{}"),), format) for name in names] if format else []
        called = ((Message("assistant", text), Message("tool", "word"), answer, question) for text in texts)
        return (question, *chain.from_iterable(called))

    for talk in (calls, lambda offered: (question,)):  # some templates refuse such calls
        with suppress(RecordError):
            printed = tokenizer.render(talk(tools), generation_prompt=True, tools=tools)
            other = tokenizer.render(talk(harmless), generation_prompt=True, tools=harmless)
            openings = [
                [tokenizer.controls(tokenizer.call_opening(str(tool["function"]["name"]))) for tool in offered]
                for offered in (tools, harmless)
            ]
            return tokenizer.controls(printed) != tokenizer.controls(other) or openings[0] != openings[1]
    return False
