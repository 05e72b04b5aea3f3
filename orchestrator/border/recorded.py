"""Answers that need no network: those of a record, and package files that another rollout of the run has got.

A record answers what it was asked, by method, URL and body, equal requests in the order of then. The cache holds
files that never change under their URL; it is read-only to those who ask, as whoever asks for one gets what the
outside answered to a request without cookies, keys or words of its own.
"""

import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.border.bodies import Bodies
from orchestrator.rules.egress import Refused
from orchestrator.types import Crossing

Request = tuple[str, str, str]  # method, URL, hash of the body
_FILES = re.compile(
    r".+\.(?:whl|whl\.metadata|deb|rpm|apk|tgz|crate|gem|jar|conda|tar\.(?:gz|bz2|xz|zst)|zip)", re.IGNORECASE
)
_HASHED = re.compile(r"(?<![0-9a-f])(?:[0-9a-f]{64}|[0-9a-f]{40}|[0-9a-f]{128})(?![0-9a-f])")
_HARMLESS = frozenset(
    (
        *("host", "user-agent", "accept", "accept-encoding", "accept-language", "connection", "proxy-connection"),
        *("cache-control", "pragma"),
    )
)
_HARMLESS_BEGINS = ("npm-", "pacote-")
_MAX_FILES = 100_000


@dataclass(frozen=True, slots=True)
class Stored:
    """An answer whose body is among `bodies`. `source`: who answered, as it goes on record."""

    status: int
    headers: tuple[tuple[str, str], ...]
    digest: str
    bodies: Bodies
    source: str


class Playback:
    """What one rollout was answered, while it is played again. `bodies`: of the run of the record. `others`: what
    any rollout of that run was answered, for one that is not on record. `goes_on`: it is the same rollout, so its
    record goes on saying who answered first."""

    def __init__(
        self,
        crossings: Sequence[Crossing],
        bodies: Bodies,
        others: Mapping[Request, Crossing] | None = None,
        *,
        goes_on: bool = False,
    ) -> None:
        self._others, self._goes_on = others or {}, goes_on
        self._bodies = bodies
        self._left = defaultdict[Request, deque[Crossing]](deque)
        self._refused = defaultdict[tuple[str, str], deque[Refused]](deque)
        for crossing in crossings:
            if (request := answered(crossing)) is not None:
                self._left[request].append(crossing)
            elif crossing.source == "border" and crossing.status is not None and crossing.host:
                self._refused[crossing.method, crossing.url].append(Refused(crossing.refusal, crossing.status))
        self.tunnels = {
            (one.host, one.port) for one in crossings if one.scheme == "tunnel" and one.status is not None
        }
        self._urls = {(method, url) for method, url, _ in self._left}
        self.served = self.missed = 0

    def knows(self, method: str, url: str) -> bool:
        """Whether such a request is on record, with whatever body."""
        return (method, url) in self._urls

    def refusal(self, method: str, url: str) -> Refused | None:
        """The next one of such a request that did not leave, or found nobody. None: there is none."""
        waiting = self._refused.get((method, url))
        return waiting.popleft() if waiting else None

    def take(self, method: str, url: str, digest: str) -> Stored | str:
        """The next answer to this request, or why there is none."""
        waiting = self._left.get((method, url, digest))
        other = self._others.get((method, url, digest))
        if not waiting and other is None:
            body = "" if not self.knows(method, url) else " with this body, or not so often"
            return f"{method} {url} is not on record{body}"
        crossing = waiting.popleft() if waiting else other
        assert crossing is not None
        digest = crossing.received_sha256 or ""
        if crossing.received_sha256 is None or crossing.status is None or not self._bodies.holds(digest):
            return f"the answer to {method} {url} is on record, but its body was not kept"
        self.served += 1
        source = crossing.source if self._goes_on else "record"
        return Stored(crossing.status, crossing.headers, digest, self._bodies, source)


def answered(crossing: Crossing) -> Request | None:
    """The request that this one answers, if it is played again. None: it had no answer of the outside."""
    if crossing.sent_sha256 is None or crossing.status is None or crossing.source == "border":
        return None
    return crossing.method, crossing.url, crossing.sent_sha256


class Cache:
    """Of one run, shared by its rollouts. `served`, `saved`: answers and bytes that cost no egress."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._files = dict[str, Stored]()
        self.served = self.saved = 0

    def find(self, method: str, url: str, target: str, headers: Sequence[tuple[str, str]]) -> Stored | None:
        """The file, if it is here and the request asks for nothing but it."""
        if method != "GET" or not is_file(target) or not _is_plain(headers):
            return None
        if (found := self._files.get(url)) is not None:
            self.served += 1
        return found

    def add(self, crossing: Crossing, headers: Sequence[tuple[str, str]]) -> None:
        """`headers`: of the request. What is no unchanging file is not added."""
        answer = dict[str, str]()
        for name, value in crossing.headers:
            answer[name.lower()] = ", ".join((*filter(None, [answer.get(name.lower())]), value.lower()))
        if (
            crossing.method == "GET"
            and crossing.status == 200
            and crossing.kept
            and crossing.received_sha256 is not None
            and not crossing.keys
            and is_file(crossing.target)
            and _is_plain(headers)
            and not answer.keys() & {"set-cookie", "content-encoding"}
            and answer.keys() & {"content-length", "transfer-encoding"}  # else it may be the half of a file
            and answer.get("vary", "accept-encoding") == "accept-encoding"
            and not re.search("no-store|private", answer.get("cache-control", ""))
            and len(self._files) < _MAX_FILES
        ):
            stored = Stored(200, crossing.headers, crossing.received_sha256, self._bodies, "cache")
            self._files.setdefault(crossing.url, stored)


def is_file(target: str) -> bool:
    """Whether a path and query name a file that never changes: by its kind, or by a hash in its name."""
    name = target.partition("?")[0].rpartition("/")[2]
    return _FILES.fullmatch(name) is not None or _HASHED.search(name) is not None


def _is_plain(headers: Sequence[tuple[str, str]]) -> bool:
    """Whether a request says nothing that its answer may follow, besides its URL."""
    names = {name.lower() for name, _ in headers}
    return all(name in _HARMLESS or name.startswith(_HARMLESS_BEGINS) for name in names)
