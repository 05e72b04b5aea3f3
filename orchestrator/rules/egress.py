"""What may leave a sandbox: hosts, ports, methods and paths, and how their names are written. Pure.

A name has many writings; a rule knows one. Whatever a sandbox writes is brought to that one form, or refused:
small letters, no dot at its end, IPv4 as four decimal numbers, IPv6 in its short form and without a zone. What
goes out is written anew from these parts.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Any, Literal
from urllib.parse import unquote

from orchestrator.network import is_public
from orchestrator.rules.text import one_line

ANY = "*"  # every public host
EGRESS_FOLDER = "egress"  # of a run directory: bodies of requests and answers, by their hashes
USUAL_PORTS = {"http": 80, "https": 443}
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")  # as the last label: the C library may read an IPv4 address
_AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::([0-9]{1,5}))?")
_ABSOLUTE = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#\\]*)([/?].*)?", re.DOTALL)
_TARGET = re.compile(r"[\x21-\x7e]+")
_METHOD = re.compile(r"[A-Z]{1,24}")
_NEVER = {
    "CONNECT": "a tunnel inside a tunnel is not carried",
    "TRACE": "TRACE is not carried: it would send headers back",
    "PRI": "this proxy speaks HTTP/1.1, not HTTP/2",
}
_SHORT = 300  # characters of a host and port that are read once: programs ask few places, often
_TURNS = 4  # of decoding a path, until it must stand still
_KEYS = ("host", "ports", "methods", "paths", "tls", "private")
Tls = Literal["terminate", "tunnel"]


class Refused(Exception):
    """A request that does not leave. The text is one line which says what to do; `status`: of the answer."""

    def __init__(self, text: str, status: int = 403) -> None:
        super().__init__(one_line(text))
        self.status = status


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request leads: a host in its one form, and a port."""

    host: str
    port: int

    @property
    def is_address(self) -> bool:
        """Whether the host is an IP address."""
        return is_address(self.host)

    def __str__(self) -> str:
        """As a URL has it, with the port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def authority(self, scheme: str) -> str:
        """As a URL of this scheme has it: the usual port is left out."""
        return str(self).rpartition(":")[0] if USUAL_PORTS.get(scheme) == self.port else str(self)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of `env.egress`. `host`: a name, an address, `*.NAME` (all names below it), or `*` (every public
    host). `ports`: none: 80 and 443. `methods`, `paths`: none: all; paths are beginnings, by whole segments.
    `private`: its addresses may be private ones. `of_task`: a task asks for it, not the operator. Raises
    ValueError, which says what is wrong."""

    host: str
    ports: tuple[int, ...] = ()
    methods: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    tls: Tls = "terminate"
    private: bool = False
    of_task: bool = False

    def __post_init__(self) -> None:
        if self.host != ANY:
            name = normal_host(self.host.removeprefix("*."))
            if self.host.startswith("*."):
                if is_address(name):
                    raise ValueError(f"{self.host} is no name with names below it")
                name = f"*.{name}"
            elif is_address(name) and not self.private and not is_public(name):
                raise ValueError(f'{name} is a private address: it needs "private": true')
            object.__setattr__(self, "host", name)
        elif self.private:
            raise ValueError("* is every public host: it cannot be private")
        if not all(0 < port < 1 << 16 for port in self.ports):
            raise ValueError("ports are from 1 to 65535")
        if not all(_METHOD.fullmatch(method) and method not in _NEVER for method in self.methods):
            raise ValueError("methods are words in capital letters, without CONNECT, TRACE and PRI")
        if not all(path.startswith("/") and path == _plain_path(path) for path in self.paths):
            raise ValueError("paths begin with / and are written without %, ., .., ; and \\")
        if self.tls == "tunnel" and (self.methods or self.paths):
            raise ValueError(
                "methods and paths cannot be seen in a tunnel: leave them out, or set tls to terminate"
            )

    def leads_to(self, place: Place) -> bool:
        """Whether the entry names this host and port."""
        if place.port not in (self.ports or USUAL_PORTS.values()):
            return False
        if self.host == ANY:
            return is_public(place.host) and not place.is_address
        if self.host.startswith("*."):
            return place.host.endswith(self.host[1:]) and not place.is_address
        return place.host == self.host

    @property
    def exactness(self) -> int:
        """A named host before the names below another one, the longest of these first, before all hosts."""
        return -1 if self.host == ANY else len(self.host) + (0 if self.host.startswith("*.") else 1 << 10)

    def as_setting(self) -> str | dict[str, Any]:
        """As it is written in `env.egress`."""
        if not (self.methods or self.paths or self.private) and self.tls == "terminate" and len(self.ports) < 2:
            place = str(Place(self.host, self.ports[0] if self.ports else 0))
            return place if self.ports else place.removesuffix(":0")
        given = {name: getattr(self, name) for name in _KEYS}
        shown = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
        return {name: value for name, value in shown.items() if value not in ([], False, "terminate")}


def entry_of(raw: object) -> Entry:
    """An entry as it is written: HOST, *.HOST, HOST:PORT, or an object. Raises ValueError with what is wrong."""
    if isinstance(raw, Entry):
        return raw
    if isinstance(raw, str):
        return written(raw)
    if not isinstance(raw, Mapping) or not isinstance(raw.get("host"), str):
        raise ValueError("an entry is a text or an object with a host")
    if unknown := [str(name) for name in raw if name not in _KEYS]:
        raise ValueError(f"{unknown[0][:40]!r} is unknown; there are {', '.join(_KEYS)}")
    lists = {name: raw.get(name, ()) for name in ("ports", "methods", "paths")}
    for name, value in lists.items():
        kind = int if name == "ports" else str
        if not isinstance(value, list | tuple) or not all(type(one) is kind for one in value):
            raise ValueError(f"{name} is a list of {'numbers' if kind is int else 'texts'}")
    tls, private = raw.get("tls", "terminate"), raw.get("private", False)
    if tls not in ("terminate", "tunnel") or not isinstance(private, bool):
        raise ValueError("tls is terminate or tunnel; private is true or false")
    ports, methods, paths = (tuple(value) for value in lists.values())
    return Entry(raw["host"], ports, methods, paths, tls, private)


def written(text: str, *, tls: Tls = "terminate", private: bool = False) -> Entry:
    """HOST or HOST:PORT. Raises ValueError."""
    match = _AUTHORITY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text[:60]!r} is neither HOST nor HOST:PORT")
    return Entry(match[1], () if match[2] is None else (int(match[2]),), tls=tls, private=private)


@dataclass(frozen=True, slots=True)
class Rules:
    """All entries. `setting`: what a refusal names."""

    entries: tuple[Entry, ...]
    setting: str = "env.egress"
    _ranked: tuple[Entry, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ranked", tuple(sorted(self.entries, key=lambda entry: -entry.exactness)))

    def at(self, place: Place) -> tuple[Entry, ...]:
        """The entries that name this place, the most exact first. Raises Refused: there is none."""
        if not (entries := tuple(entry for entry in self._ranked if entry.leads_to(place))):
            raise Refused(f"{place} is not in {self.setting}: who runs this can add it there")
        return entries

    def judge(self, place: Place, method: str, target: str) -> Entry:
        """The entry by which a request that can be read may leave. `target`: path and query. Raises Refused."""
        if (why := _NEVER.get(method)) is not None:
            raise Refused(why, 405)
        if not _METHOD.fullmatch(method):
            raise Refused("the method is none that this proxy knows", 400)
        entries = self.at(place)
        for entry in entries:
            if (not entry.methods or method in entry.methods) and _has_path(entry.paths, target):
                return entry
        allowed = sorted({one for entry in entries for one in (*entry.methods, *entry.paths)})
        raise Refused(f"{place} takes only {', '.join(allowed)[:300]} by {self.setting}")


# ---------------------------------------------------------------- names


def normal_host(text: str) -> str:
    """The one form of a host. Raises ValueError for what is none, which says why."""
    if text.startswith("["):
        return _six(text.removeprefix("[").removesuffix("]")) if text.endswith("]") else _no_host(text)
    if ":" in text:
        return _six(text)
    if not text.isascii():
        try:
            text = text.encode("idna").decode("ascii")
        except UnicodeError:
            _no_host(text)
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        return _no_host(text)
    if _NUMBER.fullmatch(labels[-1]):
        try:
            return str(IPv4Address(socket.inet_aton(name)))  # also 2130706433, 0x7f.1 and 0177.0.0.1
        except (OSError, ValueError):
            return _no_host(text)
    return name


def is_address(host: str) -> bool:
    """Whether a host in its one form is an IP address."""
    return ":" in host or host.rpartition(".")[2].isdigit()


def _six(text: str) -> str:
    if "%" in text:
        raise ValueError(f"{text[:60]!r} names a zone, which means something on one machine alone")
    try:
        address = IPv6Address(text)
    except AddressValueError:
        return _no_host(text)
    return str(address.ipv4_mapped or address)


def _no_host(text: str) -> str:
    raise ValueError(f"{text[:60]!r} is no host")


def place_of(authority: str, scheme: str | None) -> Place:
    """HOST or HOST:PORT as a request has it. `scheme`: whose port is meant where none is given; None: one must be
    given. Raises Refused."""
    if not authority.isascii():
        raise Refused("the host is not ASCII: write it in its xn-- form", 400)
    return (_place if len(authority) < _SHORT else _place.__wrapped__)(authority, scheme)


@lru_cache(1024)
def _place(authority: str, scheme: str | None) -> Place:
    match = _AUTHORITY.fullmatch(authority)
    port = None if match is None else int(match[2]) if match[2] else USUAL_PORTS.get(scheme or "")
    if match is None or port is None or not 0 < port < 1 << 16 or authority.endswith(":"):
        raise Refused("the address is not HOST:PORT, or has a user name in it", 400)
    try:
        return Place(normal_host(match[1]), port)
    except ValueError as error:
        raise Refused(str(error), 400) from None


def absolute(target: str) -> tuple[Place, str]:
    """(where to, path and query) of a plain request to a proxy. Raises Refused."""
    match = _ABSOLUTE.fullmatch(target) if _TARGET.fullmatch(target) else None
    if match is None or "#" in target:
        raise Refused("this is a proxy: a request names a whole address, like http://HOST/PATH", 400)
    scheme, authority, rest = match[1].lower(), match[2], match[3] or "/"
    if scheme != "http":
        raise Refused(f"a proxy is asked for {scheme[:20]} by CONNECT, not so", 400)
    return place_of(authority, "http"), rest if rest.startswith("/") else f"/{rest}"


def origin(method: str, target: str) -> str:
    """Path and query of a request inside a tunnel that was opened here. Raises Refused."""
    if method in _NEVER:
        raise Refused(_NEVER[method], 405)
    if target == "*" and method == "OPTIONS":
        return target
    if not _TARGET.fullmatch(target) or not target.startswith("/") or "#" in target:
        raise Refused("a request inside a tunnel names a path alone, like /PATH", 400)
    return target


# ---------------------------------------------------------------- paths


def _has_path(paths: Sequence[str], target: str) -> bool:
    if not paths:
        return True
    path = _plain_path(target.partition("?")[0])
    return path is not None and any(
        path == begin or path.startswith(begin if begin.endswith("/") else f"{begin}/") for begin in paths
    )


def _plain_path(path: str) -> str | None:
    """The path without percent signs. None: servers may read it in more than one way, as with steps upwards or a
    slash that is written as %2F."""
    for _ in range(_TURNS):
        decoded = unquote(path, errors="strict") if _is_text(path) else None
        if decoded is None or decoded.count("/") != path.count("/"):
            return None
        if decoded == path:
            break
        path = decoded
    else:
        return None
    if (
        "\\" in path
        or not path.isprintable()
        or any(one.partition(";")[0] in (".", "..") for one in path.split("/"))
    ):
        return None
    return path


def _is_text(path: str) -> bool:
    try:
        unquote(path, errors="strict")
    except UnicodeDecodeError:
        return False
    return True
