"""Kinds of settings that are given as JSON text, or as such a value in YAML or Python. See `kinds`."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.rules.redact import Secret
from orchestrator.settings.kinds import Key, Kind, Number, Text

_OPTIONS_CHARS = 8_192
HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_EVERY_REQUESTS = frozenset(
    (
        "host",
        "content-type",
        "content-length",
        "connection",
        "accept-encoding",
        "transfer-encoding",
        "te",
        "upgrade",
    )
)


class Json(Kind):
    """Base of the kinds that are given as JSON text, or as such a value in YAML or Python."""

    metavar = "JSON"

    def show(self, value: Any) -> str:
        return json.dumps(value)


@dataclass(frozen=True, slots=True)
class Words(Json):
    """Some of the given words, as a JSON list."""

    words: tuple[str, ...]

    @property
    def valid(self) -> str:
        return f'a JSON list like ["{self.words[0]}"] of ' + ", ".join(self.words)

    def read(self, raw: object) -> tuple[str, ...]:
        raw = json_value(raw)
        if not isinstance(raw, Collection) or isinstance(raw, str | bytes | dict):
            raise ValueError
        if not all(isinstance(word, str) and word in self.words for word in raw):
            raise ValueError
        return tuple(dict.fromkeys(raw))


@dataclass(frozen=True, slots=True)
class Texts(Json):
    """Several texts of one kind, as a JSON list."""

    each: Text

    @property
    def valid(self) -> str:
        return f"a JSON list, each item {self.each.valid}"

    def read(self, raw: object) -> tuple[str, ...]:
        raw = json_value(raw)
        if not isinstance(raw, list | tuple):
            raise ValueError
        return tuple(dict.fromkeys(self.each.read(text) for text in raw))


@dataclass(frozen=True, slots=True)
class Listed(Json):
    """Several texts of one kind without commas, with commas between them, or as a JSON list."""

    each: Text

    @property
    def metavar(self) -> str:  # type: ignore[override]
        return f"{self.each.metavar},.."

    @property
    def valid(self) -> str:
        return f"{self.each.metavar},{self.each.metavar} or a JSON list, each item {self.each.valid}"

    def read(self, raw: object) -> tuple[str, ...]:
        if isinstance(raw, str) and not raw.lstrip().startswith("["):
            raw = [text.strip() for text in raw.split(",")] if raw.strip() not in ("", "none") else []
        return Texts(self.each).read(raw)

    def show(self, value: Any) -> str:
        return ",".join(value)


@dataclass(frozen=True, slots=True)
class Table(Json):
    """Values of one kind by known names, as a JSON object."""

    names: tuple[str, ...]
    each: Text | Number

    @property
    def valid(self) -> str:
        return f"a JSON object, each value {self.each.valid}, with names out of {', '.join(self.names)}"

    def read(self, raw: object) -> dict[str, Any]:
        raw = json_value(raw)
        if not isinstance(raw, Mapping) or not raw or not set(raw) <= set(self.names):
            raise ValueError
        return {name: self.each.read(raw[name]) for name in self.names if name in raw}


@dataclass(frozen=True, slots=True)
class Pairs(Json):
    """Texts of one kind by names of that kind: a JSON object, or NAME=TEXT,NAME=TEXT."""

    each: Text

    @property
    def metavar(self) -> str:  # type: ignore[override]
        return f"NAME={self.each.metavar},.."

    @property
    def valid(self) -> str:
        return f"NAME={self.each.metavar},NAME={self.each.metavar} or a JSON object, each part {self.each.valid}"

    def read(self, raw: object) -> dict[str, str]:
        if isinstance(raw, str) and not raw.lstrip().startswith("{"):
            parts = [part.partition("=") for part in raw.split(",")]
            raw = {name.strip(): text for name, _, text in parts}
            if len(raw) != len(parts):
                raise ValueError
        raw = json_value(raw)
        if not isinstance(raw, Mapping) or not raw:
            raise ValueError
        return {self.each.read(name): self.each.read(text) for name, text in raw.items()}


@dataclass(frozen=True, slots=True)
class Options(Json):
    """Any values by any names, as a JSON object."""

    valid: str = f"a JSON object of at most {_OPTIONS_CHARS} characters"

    def read(self, raw: object) -> dict[str, Any]:
        raw = json_value(raw)
        if not isinstance(raw, Mapping) or not raw or not all(isinstance(name, str) for name in raw):
            raise ValueError
        try:
            text = json.dumps(dict(raw), allow_nan=False)
        except TypeError:  # no JSON
            raise ValueError from None
        if len(text) > _OPTIONS_CHARS:
            raise ValueError
        return dict(raw)


@dataclass(frozen=True, slots=True)
class Headers(Key):
    """HTTP headers by name, a secret: they often hold a key. The value is their JSON text."""

    valid: str = (
        'a JSON object like {"api-key": "KEY"} of names and texts, without those that every request has '
        "(Host, Content-Type, Content-Length, Connection, Accept-Encoding, Transfer-Encoding)"
    )
    metavar: str = "JSON"

    def read(self, raw: object) -> Secret:
        text = raw.reveal() if isinstance(raw, Secret) else raw
        headers = json_value(text) if text else {}
        if not isinstance(headers, Mapping) or not all(_is_header(name, value) for name, value in headers.items()):
            raise ValueError
        if len({name.lower() for name in headers}) != len(headers):
            raise ValueError
        return Secret(json.dumps(dict(headers)) if headers else "")


def json_value(raw: object) -> Any:
    """The value of JSON text; any other value as it is. Raises ValueError, also for NaN and Infinity, which JSON
    does not have."""

    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        return json.loads(raw, parse_constant=refuse) if isinstance(raw, str) else raw
    except RecursionError:
        raise ValueError from None


def _is_header(name: object, value: object) -> bool:
    if not isinstance(name, str) or not isinstance(value, str):
        return False
    return (
        HEADER.fullmatch(name) is not None
        and name.lower() not in _EVERY_REQUESTS
        and value.isascii()
        and value.isprintable()
        and value == value.strip()
    )
