"""What a run has in common at its border, and what one rollout is given there."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.border.bodies import Bodies
from orchestrator.border.journal import Journal
from orchestrator.border.keys import BorderKey
from orchestrator.border.reach import Lookups, Reach, There
from orchestrator.border.recorded import Cache, Playback
from orchestrator.rules.egress import Entry, Place, Rules

Contexts = Callable[[str], ssl.SSLContext]  # by a host's name, for the server that it is taken for


@dataclass(frozen=True, slots=True)
class BorderLimits:
    """Of one rollout. `size`: bytes both ways. `request_s`: of one request or tunnel. `streams`: at a time."""

    requests: int = 10_000
    size: int = 4 << 30
    request_s: float = 600.0
    streams: int = 128


@dataclass(frozen=True, slots=True)
class Outside:
    """Of a run. `contexts`: None: TLS never ends here, whatever entries say. `cache`: None: every rollout fetches
    its own files. `network` False: only what is on record is answered."""

    reach: Reach = field(default_factory=Reach)
    contexts: Contexts | None = None
    bodies: Bodies = field(default_factory=lambda: Bodies(None))
    keys: tuple[BorderKey, ...] = ()
    cache: Cache | None = None
    network: bool = True


@dataclass(frozen=True, slots=True)
class Terms:
    """Of one rollout. `playback`: what is answered from a record first; None: nothing is."""

    rules: Rules
    outside: Outside
    limits: BorderLimits
    journal: Journal
    playback: Playback | None = None
    lookups: Lookups = field(default_factory=Lookups)

    async def open(self, scheme: str, place: Place, entry: Entry, *, tls: bool) -> There:
        """As `Reach.open`. Raises Refused."""
        return await self.outside.reach.open(scheme, place, entry, tls=tls, lookups=self.lookups)


class Connection:
    """The connection outside that belongs to one stream of the sandbox: used again for the same place."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._key: tuple[str, Place, bool] | None = None
        self._there: There | None = None

    async def open(self, scheme: str, place: Place, entry: Entry) -> tuple[There, bool]:
        """(the connection, whether it was used before). Raises Refused."""
        key = (scheme, place, entry.private)
        if self._there is not None and self._key == key and self._there.is_quiet:
            return self._there, True
        self.close()
        self._there, self._key = await self._terms.open(scheme, place, entry, tls=scheme == "https"), key
        return self._there, False

    def close(self) -> None:
        """It is not used again. Idempotent."""
        if self._there is not None:
            self._there.stream.close()
        self._there = None
