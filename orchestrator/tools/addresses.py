"""Checks addresses of web pages: http(s), public hosts, no credentials.

The service that fetches the page resolves the name on another machine. So only the address itself is checked: IP
addresses in every spelling, and names that stand for private places.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit, urlunsplit

from orchestrator.errors import ToolError

MAX_ADDRESS_CHARS = 2_048
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\\u0085\u00a0\u2028\u2029\ud800-\udfff]")
_PRIVATE_SUFFIXES = (
    "localhost", "localdomain", "local", "internal", "intranet", "private", "corp", "home", "lan", "arpa",
    "onion", "test", "invalid",
)  # fmt: skip
# Public names that resolve to the IP address in the name, or to localhost.
_REBINDING_SUFFIXES = ("nip.io", "sslip.io", "xip.io", "localtest.me", "lvh.me", "vcap.me", "rbndr.us", "1u.ms")
_REFUSED_NAMES = re.compile(
    rf"(?:.+\.)?(?:{'|'.join(map(re.escape, (*_PRIVATE_SUFFIXES, *_REBINDING_SUFFIXES)))})"
)
_UNICAST = IPv6Network("2000::/3")  # other addresses are private, translated from IPv4, or not routed


@dataclass(frozen=True, slots=True)
class WebAddress:
    """A checked address. `text` is put together from its parsed parts, so that it can be read in one way only."""

    text: str
    host: str


def web_address(text: str) -> WebAddress:
    """The checked address. Raises ToolError, which says what is wrong."""
    if len(text) > MAX_ADDRESS_CHARS:
        raise ToolError(f"the url has {len(text)} characters; at most {MAX_ADDRESS_CHARS} are accepted")
    if _UNSAFE.search(text):
        raise ToolError("the url holds a space, a backslash or a control character")
    try:
        parts = urlsplit(text)
        port, host = parts.port, parts.hostname or ""
    except ValueError:
        raise ToolError("the url cannot be read") from None
    if parts.scheme not in ("http", "https"):
        raise ToolError("only urls that begin with http:// or https:// can be visited")
    if parts.username is not None or parts.password is not None:
        raise ToolError("a url with a user name or password cannot be visited")
    host = _ascii_host(host)
    if not is_public_host(host):
        raise ToolError("private, local and reserved addresses cannot be visited")
    place = f"[{host}]" if ":" in host else host
    if port is not None:
        place += f":{port}"
    return WebAddress(urlunsplit((parts.scheme, place, parts.path, parts.query, "")), host)


def is_public_host(host: str) -> bool:
    """Whether a host, in ASCII, is no private IP address and no known name of a private place."""
    address = _literal_address(host)
    if isinstance(address, IPv4Address):
        return address.is_global and not address.is_multicast
    if isinstance(address, IPv6Address):
        tunnelled = address.sixtofour is not None or address.teredo is not None
        return address in _UNICAST and address.is_global and not tunnelled
    return "." in host and _REFUSED_NAMES.fullmatch(host) is None


def _ascii_host(host: str) -> str:
    host = host.rstrip(".")
    if not host or len(host) > 253 or "%" in host:
        raise ToolError("the url names no host")
    if ":" in host:
        return host  # IPv6; urlsplit has removed the brackets
    try:
        return host.encode("idna").decode("ascii").rstrip(".")
    except UnicodeError:
        raise ToolError("the url names no host") from None


def _literal_address(host: str) -> IPv4Address | IPv6Address | None:
    """The IP address; None for a name. Also of 2130706433, 0x7f.1 and 0177.0.0.1, as the C library reads them."""
    try:
        return ip_address(host)
    except ValueError:
        pass
    try:
        return IPv4Address(socket.inet_aton(host))
    except (OSError, ValueError):
        return None
