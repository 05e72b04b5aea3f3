"""The operator's network, as the environment describes it to curl: proxies, hosts without one, certificates.

HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY hold for every endpoint that a run asks, also for one on this
machine. SSL_CERT_FILE, SSL_CERT_DIR, REQUESTS_CA_BUNDLE and CURL_CA_BUNDLE name certificates of own authorities.
"""

import os
import re
import socket
import ssl
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

from orchestrator.errors import EnvironmentUnusable
from orchestrator.rules.redact import redact

CA_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_PORTS = {"http": 80, "https": 443}
_LOCAL = (".localhost", ".localdomain", ".local", ".internal")
_UNICAST = IPv6Network("2000::/3")  # other addresses are private, translated from IPv4, or not routed


def proxy_of(url: str) -> str | None:
    """The proxy through which this URL is asked for; None: it is asked for directly. Raises EnvironmentUnusable
    for a proxy that cannot be used."""
    parts = urlsplit(url)
    proxies = getproxies_environment()
    name = next((name for name in (parts.scheme, "all") if proxies.get(name)), None)
    if name is None or without_proxy(parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 0)):
        return None
    proxy = proxies[name] if "://" in proxies[name] else f"http://{proxies[name]}"
    scheme = proxy.partition("://")[0].lower()
    try:
        usable = scheme in _PORTS and bool(urlsplit(proxy).hostname)
        urlsplit(proxy).port  # noqa: B018 - raises ValueError
    except ValueError:
        usable = False
    if not usable:
        if scheme.startswith("socks"):
            raise EnvironmentUnusable(
                f"{name.upper()}_PROXY: SOCKS proxies cannot be used ({redact(proxy)[:100]}); put an HTTP proxy "
                "before it (privoxy or pproxy can be one), set HTTP_PROXY and HTTPS_PROXY to that, or name "
                f"{parts.hostname} in NO_PROXY"
            )
        raise EnvironmentUnusable(
            f"{name.upper()}_PROXY: must be an address like http://proxy:3128, not {redact(proxy)[:100]}; or name "
            f"{parts.hostname} in NO_PROXY"
        )
    return proxy


def without_proxy(host: str, port: int) -> bool:
    """Whether NO_PROXY names the host, which comes in small letters: by name, as a part of a domain, by address or
    network, with or without a port; `*` names all."""
    host = host.rstrip(".")
    address = _address(host)
    for entry in re.split(r"[,\s]+", getproxies_environment().get("no", "").lower()):
        name, wanted = _split_port(entry)
        if not name or wanted not in (None, port):
            continue
        if name == "*":
            return True
        if address is not None:
            if _holds(name.strip("[]"), address):
                return True
        else:
            domain = name.removeprefix("*").strip(".")
            if domain and (host == domain or host.endswith(f".{domain}")):
                return True
    return False


def _split_port(entry: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"(\[[^]]*\](?:/\d+)?|[^:]*):(\d{1,5})", entry)
    return (match[1], int(match[2])) if match else (entry, None)


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _holds(entry: str, address: IPv4Address | IPv6Address) -> bool:
    """Whether an address or network of NO_PROXY holds the address."""
    try:
        return address in ip_network(entry.replace("]", ""), strict=False)
    except ValueError:
        return False


def is_public(host: str) -> bool:
    """Whether the name or address has a meaning beyond one machine or network. Addresses are known in every
    spelling: the C library also reads 2130706433, 0x7f.1 and 0177.0.0.1."""
    address: IPv4Address | IPv6Address
    try:
        address = ip_address(host)
    except ValueError:
        try:
            address = IPv4Address(socket.inet_aton(host))
        except (OSError, ValueError):
            return "." in host and not host.endswith(_LOCAL)
    if isinstance(address, IPv6Address) and (address not in _UNICAST or address.sixtofour or address.teredo):
        return False
    return address.is_global and not address.is_multicast


def trust() -> ssl.SSLContext:
    """Whose certificates are believed: the system's authorities, and those that the environment names. Blocks for
    some milliseconds, once. Raises EnvironmentUnusable for a name without certificates."""
    return _context(tuple(os.environ.get(name, "") for name in CA_VARIABLES))


@lru_cache(maxsize=4)
def _context(paths: tuple[str, ...]) -> ssl.SSLContext:
    context = ssl.create_default_context()
    for name, path in zip(CA_VARIABLES, paths, strict=True):
        if not path:
            continue
        try:
            if Path(path).is_dir():
                context.load_verify_locations(capath=path)
            else:
                context.load_verify_locations(cafile=path)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise EnvironmentUnusable(f"{name}: no certificates can be read from {path}: {why}") from None
    return context
