"""Which keys are put into requests at the border, and from where they come. Pure: no key is read here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.rules.egress import normal_host
from orchestrator.rules.redact import Secret

_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_NOT_OURS = frozenset(("host", "content-length", "transfer-encoding", "connection", "te", "upgrade", "expect"))
_KEYS = ("host", "header", "query", "from", "format")


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One entry of `env.secrets`. `source`: env:NAME or file:PATH. Exactly one of `header` and `query` is named.
    `value`: the key, where it was read on another machine. Raises ValueError, which says what is wrong."""

    host: str
    source: str
    header: str = ""
    query: str = ""
    format: str = "{}"
    value: Secret | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", normal_host(self.host))
        if bool(self.header) == bool(self.query):
            raise ValueError("one of header and query is named")
        if not _NAME.fullmatch(self.header or self.query) or self.header.lower() in _NOT_OURS:
            raise ValueError("the name of the header or of the query's part cannot be used")
        kind, _, where = self.source.partition(":")
        if kind not in ("env", "file") or not where or "\0" in where:
            raise ValueError("from is env:NAME or file:PATH")
        if self.format.count("{}") != 1 or not self.format.isascii() or not self.format.isprintable():
            raise ValueError("format is one line with {} where the key goes, like Bearer {}")

    def as_setting(self) -> dict[str, str]:
        """As it is written in `env.secrets`."""
        given = {"host": self.host, "header": self.header, "query": self.query, "from": self.source}
        shown = {**given, "format": "" if self.format == "{}" else self.format}
        return {name: value for name, value in shown.items() if value}


def key_entry_of(raw: object) -> KeyEntry:
    """Raises ValueError, which says what is wrong."""
    if isinstance(raw, KeyEntry):
        return raw
    if not isinstance(raw, Mapping) or not all(isinstance(value, str) for value in raw.values()):
        raise ValueError("an entry is an object of texts")
    if unknown := [str(name) for name in raw if name not in _KEYS]:
        raise ValueError(f"{unknown[0][:40]!r} is unknown; there are {', '.join(_KEYS)}")
    if "host" not in raw or "from" not in raw:
        raise ValueError("an entry names a host, and from where its key comes")
    more = {name: raw[name] for name in ("header", "query", "format") if name in raw}
    return KeyEntry(raw["host"], raw["from"], **more)
