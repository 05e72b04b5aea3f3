"""Kinds of settings: how a value is read from text, YAML or Python, and a text that says what is valid.

`read` returns the value of what was given, or raises ValueError. Reading a value again does not change it. The
error has no text of its own: help and errors show `valid`.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol
from urllib.parse import urlsplit

from orchestrator.rules.redact import Secret
from orchestrator.rules.text import path_of

MEBIBYTE = 1 << 20
MAX_TOKENS = 100_000_000  # of a setting that counts tokens
OBJECT = r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*"  # MODULE:NAME in Python
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

_WHOLE = re.compile(r"[+-]?[0-9]{1,19}")
_DURATION = re.compile(r"([0-9.]+)\s*(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


class Kind(Protocol):
    """One way of reading a value. `hidden`: a refused one is not shown, as it may hold a key."""

    hidden: ClassVar[bool] = False

    @property
    def metavar(self) -> str:
        """The placeholder for the value in help."""

    @property
    def valid(self) -> str:
        """What may be given, in words."""

    def read(self, raw: object) -> Any:
        """The value. Raises ValueError."""

    def show(self, value: Any) -> str:
        """The value as it could be given on a command line."""
        return str(value)


@dataclass(frozen=True, slots=True)
class Integer(Kind):
    """A whole number. `special` are allowed outside the range."""

    at_least: int | None = None
    at_most: int | None = None
    special: tuple[int, ...] = ()
    metavar: str = "N"

    @property
    def valid(self) -> str:
        return f"{_first(self.special)}a whole number{_range(self.at_least, self.at_most)}"

    def read(self, raw: object) -> int:
        if isinstance(raw, str) and _WHOLE.fullmatch(raw.strip()):
            raw = int(raw)
        if not isinstance(raw, int) or isinstance(raw, bool):
            raise ValueError
        if raw not in self.special and not _within(raw, self.at_least, self.at_most):
            raise ValueError
        return raw


@dataclass(frozen=True, slots=True)
class Number(Kind):
    """A finite number."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    special: tuple[float, ...] = ()
    metavar: str = "NUMBER"

    @property
    def valid(self) -> str:
        return f"{_first(self.special)}a number{_range(self.at_least, self.at_most, self.above)}"

    def read(self, raw: object) -> float:
        if isinstance(raw, str):
            raw = self._parse(raw.strip())
        if isinstance(raw, bool) or not isinstance(raw, int | float):
            raise ValueError
        try:
            number = float(raw)
        except OverflowError:
            raise ValueError from None
        if not math.isfinite(number):
            raise ValueError
        if number not in self.special and not _within(number, self.at_least, self.at_most, self.above):
            raise ValueError
        return number

    def show(self, value: float) -> str:
        return f"{value:g}"

    def _parse(self, text: str) -> float:
        return float(text)


class Duration(Number):
    """Seconds, also written 90s, 5m, 1h. At most a year."""

    __slots__ = ()

    @property
    def valid(self) -> str:
        bounds = _range(self.at_least, None, self.above)
        return f"{_first(self.special)}seconds{bounds} (or 90s, 5m, 1h), at most a year"

    def _parse(self, text: str) -> float:
        match = _DURATION.fullmatch(text)
        return float(match[1]) * _SECONDS[match[2]] if match else float(text)


def seconds(
    *, above: float | None = None, at_least: float | None = None, special: tuple[float, ...] = ()
) -> Duration:
    """A duration within these bounds."""
    return Duration(at_least, 365 * _SECONDS["d"], above, special, "SECONDS")


@dataclass(frozen=True, slots=True)
class Size(Kind):
    """Bytes, also written 512m, 1GiB. As in Docker, all units are powers of 1024."""

    at_least: int
    metavar: str = "SIZE"

    @property
    def valid(self) -> str:
        return f"bytes, or a size like 512m or 1.5GiB, at least {self.show(self.at_least)}"

    def read(self, raw: object) -> int:
        if isinstance(raw, str):
            match = _SIZE.fullmatch(raw.strip())
            if match is None:
                raise ValueError
            size = float(match[1]) * 1024 ** _POWERS[match[2].lower()]
            if not math.isfinite(size):
                raise ValueError
            raw = int(size)
        return Integer(self.at_least, 1 << 50).read(raw)

    def show(self, value: int) -> str:
        for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
            if value and value % 1024**power == 0:
                return f"{value // 1024**power}{unit}"
        return str(value)


@dataclass(frozen=True, slots=True)
class Flag(Kind):
    """True or false."""

    metavar: str = "[true|false]"
    valid: str = "true, false, yes, no, 1 or 0"

    def read(self, raw: object) -> bool:
        word = str(raw).strip().lower() if isinstance(raw, str | int) else ""
        if word not in BOOLEANS:
            raise ValueError
        return BOOLEANS[word]

    def show(self, value: bool) -> str:
        return "true" if value else "false"


@dataclass(frozen=True, slots=True)
class Choice(Kind):
    """One word of several."""

    words: tuple[str, ...]

    @property
    def metavar(self) -> str:
        return "|".join(self.words)

    @property
    def valid(self) -> str:
        return "one of " + ", ".join(self.words)

    def read(self, raw: object) -> str:
        if not isinstance(raw, str) or raw.strip() not in self.words:
            raise ValueError
        return raw.strip()


@dataclass(frozen=True, slots=True)
class Text(Kind):
    """Text that `fits` accepts."""

    valid: str = "text"
    metavar: str = "TEXT"
    fits: Callable[[str], Any] = bool

    def read(self, raw: object) -> str:
        if not isinstance(raw, str) or _CONTROL.search(raw) or not self.fits(raw.strip()):
            raise ValueError
        return raw.strip()


@dataclass(frozen=True, slots=True)
class Forms(Text):
    """Text of one of several `forms`: words, or prefixes with a placeholder in capitals, like `jsonl:PATH`."""

    forms: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The words, and the prefixes up to their colon."""
        return tuple(form[: form.index(":") + 1] if ":" in form else form for form in self.forms)


def forms(metavar: str, fits: Callable[[str], Any], *names: str, rest: str = "") -> Forms:
    """One of the forms `names`. `rest`: what to say of them besides."""
    return Forms(f"one of {', '.join(names)}{rest}", metavar, fits, names)


@dataclass(frozen=True, slots=True)
class File(Kind):
    """A path on this machine. Whether it exists is not checked here."""

    valid: str = "a path (`~` of a known user, names of at most 255 bytes)"
    metavar: str = "PATH"

    def read(self, raw: object) -> Path:
        if not isinstance(raw, str | Path) or not str(raw).strip() or _CONTROL.search(str(raw)):
            raise ValueError
        return path_of(str(raw))


@dataclass(frozen=True, slots=True)
class Files(Kind):
    """Several paths, for an argument that repeats."""

    at_least: int
    metavar: str = "PATH"

    @property
    def valid(self) -> str:
        return f"{self.at_least} paths or more"

    def read(self, raw: object) -> tuple[Path, ...]:
        if not isinstance(raw, list | tuple) or len(raw) < self.at_least:
            raise ValueError
        return tuple(File().read(one) for one in raw)


@dataclass(frozen=True, slots=True)
class Only(Kind):
    """A setting of Atropos or the predecessor with one valid value here, and why. None: it must be left open."""

    kind: Kind
    value: Any
    why: str

    @property
    def metavar(self) -> str:
        return self.kind.metavar

    @property
    def valid(self) -> str:
        return f"{'left out' if self.value is None else self.kind.show(self.value)} ({self.why})"

    def read(self, raw: object) -> Any:
        if self.kind.read(raw) != self.value:
            raise ValueError
        return self.value

    def show(self, value: Any) -> str:
        return self.kind.show(value)


@dataclass(frozen=True, slots=True)
class Key(Kind):
    """A key for a service. `x`, `none` and empty text mean that there is none."""

    valid: str = "a key of printable characters without spaces"
    metavar: str = "KEY"

    def read(self, raw: object) -> Secret:
        if raw is None:
            return Secret()
        text = raw.reveal() if isinstance(raw, Secret) else raw
        if not isinstance(text, str):
            raise ValueError
        text = text.strip()
        if text.lower() in ("", "x", "none", "null"):
            return Secret()
        if not (text.isascii() and text.isprintable() and " " not in text):
            raise ValueError
        return Secret(text)

    def show(self, value: Secret) -> str:
        return "none"


def _within(number: float, low: float | None, high: float | None, above: float | None = None) -> bool:
    below = high is None or number <= high
    return below and (low is None or number >= low) and (above is None or number > above)


def _first(special: tuple[float, ...]) -> str:
    return "".join(f"{number:g}, or " for number in special)


def _range(low: float | None, high: float | None, above: float | None = None) -> str:
    """` from 1 to 10`, ` of at least 1`, ` above 0, at most 1`."""
    if low is not None and high is not None:
        return f" from {low} to {high}"
    bounds = {"of at least": low, "above": above, "at most": high}
    words = ", ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)
    return words and f" {words}"


def is_url(text: str) -> bool:
    """Whether it is an address that an HTTP client can open."""
    try:
        parts = urlsplit(text)
        (parts.hostname or "").encode("idna")  # as a resolver does: it refuses an empty label
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


URL = Text("a URL with http:// or https://", "URL", is_url)
NAME = Text("a name", "NAME", re.compile(r"[A-Za-z0-9][\w.-]*").fullmatch)
SHARE = Number(at_least=0, at_most=1)
