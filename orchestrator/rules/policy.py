"""Which versions of the policy there were, and which one is served now.

A version is any text. Two that end in a number and are the same before it (`7` and `9`, `step-7` and `step-9`) are
as far apart as their numbers; others by how many versions were heard of between them.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from orchestrator.errors import ConfigError
from orchestrator.rules.redact import shown
from orchestrator.types import PolicySpan

_NUMBERED = re.compile(r"(.*?)(\d{1,18})")
MOST_KNOWN = 100_000  # versions; the oldest ones are forgotten
MOST_CHARS = 200  # of a version, and of a model's name


@dataclass(frozen=True, slots=True)
class Served:
    """What a trainer said it serves. `model`: the name to ask the endpoint for, where each version has its own;
    None: the run's."""

    version: str | None = None
    model: str | None = None


class Policy:
    """The policy of one run. `served` is what the trainer said last; endpoints' own words are `seen`."""

    def __init__(self) -> None:
        self.served = Served()
        self._known: dict[str, int] = {}  # versions in the order in which they were heard of
        self._count = 0
        self._heard: str | None = None  # the newest one of them
        self._listeners: list[Callable[[Served], Awaitable[None]]] = []

    async def serve(self, version: str | int, model: str | None = None) -> None:
        """A trainer's weights of this version are served from now on, `model` by that name. Returns when all hosts
        know it. Raises ConfigError for what is no version or name; then nothing has changed.

        To be called when the endpoint has the new weights and before it goes on sampling. Otherwise what is
        sampled in between is taken for the older version's.
        """
        named = str(version) if type(version) is int else version
        self.served = Served(_name("version", named), None if model is None else _name("model", model))
        self.saw(self.served.version)
        await asyncio.gather(*(call(self.served) for call in self._listeners))

    def changed(self, call: Callable[[Served], Awaitable[None]]) -> None:
        """`call` is called with what is served, each time that changes."""
        self._listeners.append(call)

    def saw(self, version: str | None) -> None:
        """A completion was sampled by this version, or a trainer named it."""
        if version is None or version in self._known:
            return
        self._known[version] = self._count
        self._count += 1
        ours, theirs = _numbered(version), None if self._heard is None else _numbered(self._heard)
        if ours is None or theirs is None or ours[0] != theirs[0] or ours[1] > theirs[1]:
            self._heard = version
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]

    def saw_all(self, spans: Iterable[PolicySpan]) -> None:
        """`saw` for every version of these spans, the older ones first."""
        for span in spans:
            self.saw(span.oldest)
            self.saw(span.newest)

    @property
    def newest(self) -> str | None:
        """The version that a trainer named last, else the newest one heard of."""
        return self._heard if self.served.version is None else self.served.version

    def behind(self, version: str | None) -> int | None:
        """How many versions this one is behind the newest. None: it, or the newest, is not known."""
        newest = self.newest
        if version is None or newest is None:
            return None
        ours, theirs = _numbered(version), _numbered(newest)
        if ours is not None and theirs is not None and ours[0] == theirs[0]:
            return max(0, theirs[1] - ours[1])
        if version not in self._known or newest not in self._known:
            return None
        return max(0, self._known[newest] - self._known[version])

    def staleness(self, spans: Iterable[PolicySpan]) -> int | None:
        """How many versions the oldest policy that sampled some of it is behind. None: not known of every span.

        Where a server went back to older weights, a span's `newest` is the older one.
        """
        ends = ((span.oldest, span.newest or span.oldest) for span in spans if span.tokens)
        distances = [self.behind(version) for both in ends for version in both]
        if not distances or None in distances:
            return None
        return max(number for number in distances if number is not None)


def joined(spans: Sequence[PolicySpan], tokens: int) -> tuple[PolicySpan, ...]:
    """The spans of the first `tokens` tokens, with neighbours of the same policy as one."""
    merged: list[PolicySpan] = []
    for span in spans:
        count = min(span.tokens, tokens)
        tokens -= count
        if count and merged and (merged[-1].oldest, merged[-1].newest) == (span.oldest, span.newest):
            merged[-1] = PolicySpan(merged[-1].tokens + count, span.oldest, span.newest)
        elif count:
            merged.append(PolicySpan(count, span.oldest, span.newest))
    return tuple(merged)


def _name(what: str, value: object) -> str:
    if isinstance(value, str) and 1 <= len(value) <= MOST_CHARS and value.isprintable() and value == value.strip():
        return value
    raise ConfigError(f"a policy's {what} is text of 1 to {MOST_CHARS} characters, not {shown(value)}")


def _numbered(version: str) -> tuple[str, int] | None:
    match = _NUMBERED.fullmatch(version)
    return None if match is None else (match[1], int(match[2]))
