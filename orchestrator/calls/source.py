"""A text read from the left: marks of a format, and JSON values, whose ends the JSON decoder finds.

So a mark inside a JSON string is a part of that string. The text may be hostile: every method is linear in what it
reads, and raises ValueError or RecursionError where the text is not as asked for.
"""

import json
import math
import re
from functools import cache
from typing import Any, TypeAlias

_SPACE = re.compile(r"[ \t\n\r]*")
_DIGITS = 4000  # of a number; Python turns longer ones into text and back in quadratic time, or refuses to
_MISSES = 100  # values that are no JSON after all; each costs a pass over the text, whose lines the decoder counts
_MISSED_CHARS = 4096  # that such values had when they turned out to be none, besides as many as the text has


Called: TypeAlias = tuple[str, str]  # a call's name, and the text of its arguments


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError("a number of too many digits")
    return int(digits)


def _decimal(digits: str) -> float:
    value = float(digits) if len(digits) <= _DIGITS else math.inf
    if math.isinf(value):
        raise ValueError("a number that is too large or too long")
    return value


def _constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_int=_integer, parse_float=_decimal, parse_constant=_constant)


@cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))


class Source:
    """A text, and how far it was read. White space before a mark or a value is passed over."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._misses = self._missed = 0

    def before(self, *marks: str) -> str:
        """The text up to the first of the marks, which comes next then; without any, the whole rest."""
        match = _any_of(marks).search(self._text, self._at)
        start, self._at = self._at, match.start() if match else len(self._text)
        return self._text[start : self._at]

    def until(self, mark: str) -> str:
        """The text up to the mark, which is read too and must be there. Without space around."""
        text = self.before(mark)
        self.take(mark)
        return text.strip()

    def through(self, mark: re.Pattern[str]) -> str:
        """The text up to what the pattern finds, which is read too and must be there."""
        match = mark.search(self._text, self._at)
        if not match:
            raise ValueError(f"no {mark.pattern} follows")
        start, self._at = self._at, match.end()
        return self._text[start : match.start()]

    def comes(self, *marks: str) -> bool:
        """Whether one of the marks comes next."""
        return self._text.startswith(marks, self._behind_space())

    def has(self, mark: str) -> bool:
        """Whether the mark comes next. It is read then."""
        at = self._behind_space()
        if not self._text.startswith(mark, at):
            return False
        self._at = at + len(mark)
        return True

    def take(self, mark: str) -> None:
        """Reads the mark, which must come next."""
        if not self.has(mark):
            raise ValueError(f"no {mark} where one must be")

    def close(self, *marks: str) -> None:
        """Reads one of the marks, which must come next unless the text ends: some models end their turn instead of
        closing their last call."""
        if not any(map(self.has, marks)) and not self.ended():
            raise ValueError(f"no {marks[0]} where one must be")

    def ended(self) -> bool:
        """Whether nothing but white space is left."""
        return self._behind_space() == len(self._text)

    def json(self) -> tuple[Any, str]:
        """(a JSON value, its text)."""
        start = self._behind_space()
        value, self._at = _DECODER.raw_decode(self._text, start)
        return value, self._text[start : self._at]

    def json_before(self, mark: str) -> str | None:
        """The text of a JSON value that the mark follows. None: there is none, and nothing was read."""
        start = self._at
        try:
            text = self.json()[1]
            self.take(mark)
        except (ValueError, RecursionError) as error:
            read = getattr(error, "pos", self._at) - start
            self._missed += read or len(self._text) // 16  # unknown, as of a number that is too large
            self._at = start
            self._misses += 1
            if self._misses > _MISSES or self._missed > len(self._text) + _MISSED_CHARS:
                raise
            return None
        return text

    def arguments(self) -> str:
        """The text of a JSON object."""
        return _arguments(*self.json())

    def call(self, *keys: str) -> Called:
        """(name, arguments) of a JSON object that has a name, and the arguments under the first of `keys` that is
        there. Of equal keys the last counts, as with `json.loads`."""
        members: dict[str, tuple[Any, str]] = {}
        self.take("{")
        going = not self.has("}")
        while going:
            key, _ = self.json()
            if not isinstance(key, str):
                raise ValueError("a key is not a text")
            self.take(":")
            members[key] = self.json()
            if going := not self.has("}"):
                self.take(",")
        name = members.get("name", (None, ""))[0]
        arguments = next((members[key] for key in keys if key in members), None)
        if not isinstance(name, str) or arguments is None:
            raise ValueError("a call without a name or arguments")
        return name, _arguments(*arguments)

    def _behind_space(self) -> int:
        match = _SPACE.match(self._text, self._at)
        return match.end() if match else self._at


def _arguments(value: Any, text: str) -> str:
    """The text of the object. Some models write it as a JSON string that holds the object."""
    if isinstance(value, str):
        value, text = json_value(value)
    if not isinstance(value, dict):
        raise ValueError("the arguments are not an object")
    return text


def json_value(text: str) -> tuple[Any, str]:
    """(the JSON value that the whole text is, its text without space around)."""
    source = Source(text)
    value = source.json()
    if not source.ended():
        raise ValueError("text behind a JSON value")
    return value
