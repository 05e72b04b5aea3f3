"""Which tokens end a turn, and what the chat template prints where one ends.

No single place names them all: the tokenizer's end of text, the model's generation_config.json, the added tokens
with the flag `special`, what the template prints, the server's word about what stopped it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import orjson

from orchestrator.calls.formats import CALL_ENDS, written
from orchestrator.completion.shape import CALL, TOOLS
from orchestrator.completion.template import ChatTemplate
from orchestrator.errors import EnvironmentUnusable, RecordError
from orchestrator.types import CallFormat, Message

_USER, _SAID, _NEXT = Message("user", "31415"), Message("assistant", "14142"), Message("user", "22360")


class Ends:
    """The tokens that end a turn. What the template prints is looked at when it is first needed."""

    def __init__(
        self,
        added: Mapping[int, Any],
        special: Iterable[int],
        declared: Iterable[int],
        template: ChatTemplate,
        call_format: CallFormat | None,
        *,
        complete: bool = False,
    ) -> None:
        """`added`: the tokenizer's added tokens. `declared`: what the model's files call an end of text;
        `complete`: a server stops at those alone."""
        self._ids = {token.content: number for number, token in added.items() if token.content.strip()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._token = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._declared = frozenset(declared)
        self._special = frozenset(special) | {number for number, token in added.items() if token.special}
        self._template = template
        self._call_format = call_format
        self._complete = complete
        self._learned: set[int] = set()

    def __contains__(self, token: int) -> bool:
        """Whether a turn ended that ends with this token."""
        return token in self._special or self.stops(token) or token in self._printed

    def stops(self, token: int) -> bool:
        """Whether a server samples nothing behind it: `<|end|>` of gpt-oss ends a thought, too."""
        printed = not self._complete and token in self._printed
        return token in self._declared or token in self._learned or printed

    def learn(self, token: int) -> bool:
        """The server says that this token ended a turn. Returns whether nothing else says so. A piece of text is
        no such token."""
        if token not in self._ids.values():
            return False
        self._learned.add(token)
        return token not in self._declared and (self._complete or token not in self._printed)

    @cached_property
    def declared(self) -> frozenset[int]:
        """By the model's files and the tokenizer's flags."""
        return self._declared | self._special

    def last_in(self, text: str) -> int | None:
        """Where the token begins that ends a text; None: the text does not end with such a token."""
        text = text.rstrip()
        ends = [end for end in self._texts if text.endswith(end)]
        return len(text) - max(map(len, ends)) if ends else None

    @cached_property
    def _texts(self) -> tuple[str, ...]:
        return (*self.printed, *(text for text, number in self._ids.items() if number in self.declared))

    @cached_property
    def closing(self) -> str:
        """What the template prints behind an assistant's text, up to the token that ends the turn. Empty: it
        prints none there, as GLM's, where the next header is the end."""
        going, last, answer = self._behind(_NEXT), self._behind(), self._behind(generation_prompt=True)
        common = list(takewhile(lambda token: last.startswith(going[: token.end()]), self._tokens(going)))
        if not common:  # the last turn ends in another way, or not at all
            common = [t for t in self._tokens(going) if answer.startswith(going[: t.end()])][:1]
        ends = [token for token in common if self._ids[token[0]] in self._declared]
        return going[: (ends or common)[0 if ends else -1].end()] if common else ""

    @cached_property
    def printed(self) -> tuple[str, ...]:
        """The tokens in that text, and the one that the template prints behind a call."""
        tokens = [token[0] for token in self._tokens(self.closing)]
        return (*tokens, *self._behind_call())

    @cached_property
    def _printed(self) -> frozenset[int]:
        return frozenset(self._ids[text] for text in self.printed)

    def _behind_call(self) -> list[str]:
        """The template's end of a turn that calls a tool. Marks of the call itself do not count."""
        if self._call_format is None:
            return []
        call = written("", (CALL,), self._call_format)
        try:
            talk = (_USER, Message("assistant", call))
            text = self._template.render(talk, generation_prompt=False, tools=TOOLS).rstrip()
        except RecordError:
            return []
        marks = call.removesuffix(CALL_ENDS)
        ends = [token[0] for token in self._tokens(text) if token.end() == len(text)]
        return [end for end in ends if end not in marks]

    def _behind(self, *following: Message, generation_prompt: bool = False) -> str:
        """What the template prints behind an assistant's text, up to the next message's."""
        try:
            talk = (_USER, _SAID, *following)
            text = self._template.render(talk, generation_prompt=generation_prompt)
        except RecordError:
            return ""
        _, match, behind = text.rpartition(_SAID.content)
        return behind.partition(_NEXT.content)[0] if match else ""

    def _tokens(self, text: str) -> Iterator[re.Match[str]]:
        return self._token.finditer(text) if self._token else iter(())


def ends_in(file: Path | None) -> frozenset[int] | None:
    """The ids that a model's file names as ends of a text. None: there is no file, or it names none. Raises
    EnvironmentUnusable for a file that cannot be read."""
    if file is None or not file.is_file():
        return None
    try:
        content = orjson.loads(file.read_bytes())
        ids = content.get("eos_token_id", (content.get("text_config") or {}).get("eos_token_id"))
    except (OSError, ValueError, AttributeError) as error:
        raise EnvironmentUnusable(f"{file} is no JSON object ({error}); mend it or remove it") from error
    listed = ids if isinstance(ids, list) else [ids]
    if ids is not None and not all(type(one) is int for one in listed):
        raise EnvironmentUnusable(f"{file}: eos_token_id must be an id or a list of ids; mend it or remove it")
    return None if ids is None else frozenset(listed)
