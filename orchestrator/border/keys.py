"""Keys that are put in at the border, and the redaction of answers that send them back.

A key is put into requests to one host, over TLS that was verified here. What comes back is searched for it, also
over the bounds of pieces: as it is, with characters written as %XX, \\u00XX or &#..;, in base64 at any place of a
longer text, and in hexadecimal digits. A find is overwritten by as many asterisks, so that lengths stay true. Who
runs the host can hide the key in other ways: name hosts that may know it.
"""

import base64
import os
import re
from binascii import Error as NotBase64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from urllib.parse import quote, unquote_plus

from orchestrator.errors import ConfigError
from orchestrator.named_keys import read_key
from orchestrator.rules.border_keys import KeyEntry
from orchestrator.rules.egress import Entry
from orchestrator.rules.redact import Secret

MIN_CHARS = 8  # a shorter one cannot be told from other text
_MAX_CHARS = 8 << 10


@dataclass(frozen=True, slots=True)
class BorderKey:
    """A key with its place. Its repr does not show it."""

    entry: KeyEntry
    value: Secret

    def put_in(self, headers: list[tuple[str, str]], target: str) -> tuple[list[tuple[str, str]], str]:
        """(headers, path and query) with the key, in place of all that had its name."""
        text = self.entry.format.replace("{}", self.value.reveal())
        if name := self.entry.header:
            return [*((n, v) for n, v in headers if n.lower() != name.lower()), (name, text)], target
        path, _, query = target.partition("?")
        own = f"{self.entry.query}={quote(text, safe='')}"
        kept = [part for part in query.split("&") if part and not self._is_named(part)]
        return headers, f"{path}?{'&'.join([*kept, own])}"

    def _is_named(self, part: str) -> bool:
        return unquote_plus(part.partition("=")[0]).strip().lower() == self.entry.query.lower()


def read_keys(entries: Sequence[KeyEntry], environment: Mapping[str, str] = os.environ) -> tuple[BorderKey, ...]:
    """Blocks. Raises ConfigError, which names what is missing, and no key."""
    keys = []
    for entry in entries:
        where = f"env.secrets: the key for {entry.host}"
        value = entry.value or read_key(entry.source, where, environment)
        if not MIN_CHARS <= len(value.reveal()) <= _MAX_CHARS or not value.reveal().isascii():
            raise ConfigError(f"{where}: {entry.source} must have {MIN_CHARS} to {_MAX_CHARS} ASCII characters")
        keys.append(BorderKey(entry, value))
    return tuple(keys)


def with_values(entries: Sequence[KeyEntry]) -> tuple[KeyEntry, ...]:
    """The entries with their keys, for another machine: variables and files are this one's. As `read_keys`."""
    return tuple(replace(key.entry, value=key.value) for key in read_keys(entries))


def keys_for(keys: Iterable[BorderKey], scheme: str, entry: Entry) -> tuple[BorderKey, ...]:
    """Those that a request gets which leaves by this entry: one of the operator's for exactly the key's host. What
    leaves by another one is beyond the methods and paths that were named beside the key."""
    return tuple(key for key in keys if scheme == "https" and key.entry.host == entry.host and not entry.of_task)


# ---------------------------------------------------------------- what comes back


class Redaction:
    """Of one answer's head and body. `count`: what was found so far."""

    def __init__(self, keys: Iterable[BorderKey]) -> None:
        self._forms, self._searches = _sought(tuple(keys))
        self._longest = max(form.longest for form in self._forms)
        self._begins = frozenset(byte for form in self._forms for byte in form.begins)
        self._kept = b""
        self.count = 0

    def text(self, text: str) -> str:
        """All of a header."""
        return self._redacted(text.encode("latin-1")).decode("latin-1")

    def feed(self, piece: bytes) -> bytes:
        """What may be handed on of all that came so far."""
        data = self._redacted(self._kept + piece)
        at = self._begun(data)
        self._kept = data[at:]
        return data[:at]

    def end(self) -> bytes:
        """The rest, which is no key."""
        rest, self._kept = self._kept, b""
        return rest

    def _redacted(self, data: bytes) -> bytes:
        for needle, pattern in self._searches:
            if needle in data:
                data, found = pattern.subn(_asterisks, data)
                self.count += found
        return data

    def _begun(self, data: bytes) -> int:
        """Where a key may have begun that has not ended; the length if none has."""
        for at in range(max(0, len(data) - self._longest + 1), len(data)):
            if data[at] in self._begins and any(form.is_begun(data, at) for form in self._forms):
                return at
        return len(data)


@lru_cache(1_000)  # milliseconds for a long key, which every request to its host would take
def _sought(keys: tuple[BorderKey, ...]) -> "tuple[list[_Form], list[tuple[bytes, re.Pattern[bytes]]]]":
    forms = [form for key in keys for form in _forms(key)]
    # One after the other: of each, the first characters are then found without trying all of it.
    return forms, [(form.needle, re.compile(form.pattern)) for form in forms]


def _asterisks(match: re.Match[bytes]) -> bytes:
    return b"*" * len(match[0])


@dataclass(frozen=True, slots=True)
class _Form:
    """One writing of a key: for each of its characters, the ways in which it may be written. Ways of several
    characters are in small letters, and may come in great ones."""

    units: tuple[tuple[bytes, ...], ...]

    @property
    def pattern(self) -> bytes:
        return b"".join(b"(?:" + b"|".join(map(_any_case, ways)) + b")" for ways in self.units)

    @property
    def needle(self) -> bytes:
        """The longest part of it that is always the same; empty: there is none."""
        same = "".join(chr(ways[0][0]) if len(ways) == 1 else "\0" for ways in self.units)
        return max(same.split("\0"), key=len).encode("latin-1")

    @property
    def longest(self) -> int:
        return sum(max(map(len, ways)) for ways in self.units)

    @property
    def begins(self) -> frozenset[int]:
        return frozenset(way[0] for way in self.units[0])

    def is_begun(self, data: bytes, at: int) -> bool:
        """Whether all from here to the end may be its beginning."""
        places = {at}
        for ways in self.units:
            following = set[int]()
            for place in places:
                for way in ways:
                    piece = data[place : place + len(way)]
                    if way[: len(piece)] != (piece.lower() if len(way) > 1 else piece):
                        continue
                    if len(piece) < len(way):
                        return True
                    following.add(place + len(way))
            if len(data) in following:
                return True
            if not following:  # as mostly: the key may be long
                return False
            places = following
        return False


def _any_case(way: bytes) -> bytes:
    one = way.decode("ascii")
    if len(one) > 1:
        one = "".join(f"[{c}{c.upper()}]" if c.isalpha() else re.escape(c) for c in one)
    return (one if len(way) > 1 else re.escape(one)).encode()


def _ways(character: str) -> tuple[bytes, ...]:
    number = ord(character)
    spelled = (
        f"%{number:02x}", f"%25{number:02x}", f"\\u{number:04x}", f"\\x{number:02x}", f"&#{number};",
        f"&#x{number:x};",
        *((f"\\{character}",) if character in "/\\\"'" else ()), *(("+",) if character == " " else ()),
        *((named,) if (named := _NAMED.get(character)) else ()),
    )  # fmt: skip
    return tuple(text.encode() for text in (character, *spelled))


_NAMED = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&apos;"}


def _forms(key: BorderKey) -> list[_Form]:
    value = key.value.reveal()
    plain = [value]
    if key.entry.format.startswith("Basic "):  # what a server decodes of it, it may send back too
        try:
            decoded = base64.b64decode(value, validate=True).decode("ascii")
            parts = (decoded, decoded.partition(":")[2])
            plain += [part for part in parts if len(part) >= MIN_CHARS and part.isprintable()]
        except (NotBase64, UnicodeDecodeError):
            pass
    forms = []
    for text in plain:
        forms.append(_Form(tuple(_ways(character) for character in text)))
        forms += [_same(text.encode().hex()), _same(text.encode().hex().upper())]
        for before in range(3):
            # The characters of base64 that follow from the key alone, whatever stands before it and behind.
            packed = base64.b64encode(b"\0" * before + text.encode()).rstrip(b"=")
            core = packed[(0, 2, 3)[before] : (before + len(text)) * 8 // 6]
            forms.append(_Form(tuple(_base64_ways(byte) for byte in core)))
    return forms


def _same(text: str) -> _Form:
    return _Form(tuple((character.encode(),) for character in text))


def _base64_ways(byte: int) -> tuple[bytes, ...]:
    one = bytes((byte,))
    return {b"+": (b"+", b"-", b"%2b"), b"/": (b"/", b"_", b"%2f", b"\\/")}.get(one, (one,))
