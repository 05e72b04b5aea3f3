"""What the web tools neither search for nor show: above all the benchmark's own answers.

A policy in training learns to find published answers sooner than to work them out. The same rules hold for
queries, for results, and for pages, also after redirects.
"""

import posixpath
import re
from collections.abc import Iterable
from urllib.parse import unquote, unquote_plus, urlsplit

from orchestrator.rules.text import normal_form

# Where GAIA is published; DENIED_WORDS is against mirrors, archives and copies.
DENIED_HOSTS = (
    "huggingface.co/datasets/gaia-benchmark",
    "huggingface.co/spaces/gaia-benchmark",
    "hf.co/datasets/gaia-benchmark",
    "hf.co/spaces/gaia-benchmark",
    "datasets-server.huggingface.co",
)
# Without "gaia dataset" and the like: astronomers have one too.
DENIED_WORDS = (
    "gaia benchmark",
    "gaia leaderboard",
    "gaia validation set",
    "gaia test set",
    "gaia answers",
    "gaia 2023 all",
)

HOST_RULE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9-]*(?:\.[a-zA-Z0-9-]+)+(?:/[^\s?#]*)?")
_SEPARATORS = re.compile(r"[\W_]+")
_INVISIBLE = re.compile(r"[\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufe00-\ufe0f\ufeff]")


class WebRules:
    """A deny-list of hosts (subdomains included), of hosts with the beginning of a path, and of phrases."""

    def __init__(self, hosts: Iterable[str] = DENIED_HOSTS, words: Iterable[str] = DENIED_WORDS) -> None:
        self._hosts = [_host_pattern(host) for host in hosts]
        self._words = [phrase for word in words if (phrase := _plain(word)).strip()]

    def deny_query(self, query: str) -> bool:
        """Whether a query asks for something denied, `site:` included."""
        return self._names_host(query.lower()) or self.deny_text(query)

    def deny_address(self, address: str) -> bool:
        """Whether an address is denied, or contains a denied one (archives, translators, caches)."""
        flat = _flat(address)
        return self._names_host(flat) or self.deny_text(flat)

    def deny_text(self, *texts: str) -> bool:
        """Whether one of the texts holds a denied phrase, whatever its spacing and punctuation."""
        plain = [_plain(text) for text in texts]
        return any(phrase in text for text in plain for phrase in self._words)

    def _names_host(self, text: str) -> bool:
        return any(host.search(text) for host in self._hosts)


def _host_pattern(rule: str) -> re.Pattern[str]:
    host, _, path = rule.lower().strip("/").partition("/")
    ending = rf"/{re.escape(path)}(?![\w-])" if path else r"(?![\w-]|\.\w)"
    return re.compile(rf"(?<![\w-]){re.escape(host)}\.?(?::\d+)?{ending}")


def _plain(text: str) -> str:
    """Lower-case words with one space around each."""
    text = _INVISIBLE.sub("", normal_form("NFKC", text)).casefold()
    return f" {_SEPARATORS.sub(' ', text).strip()} "


def _flat(address: str) -> str:
    """Host, path and query with escapes decoded, twice as archives escape twice, and the path normalized."""
    try:
        parts = urlsplit(address)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return unquote_plus(address).lower()
    path = posixpath.normpath(unquote(unquote(parts.path)) or "/")
    rest = unquote_plus(unquote_plus(parts.query))
    return f"{host}/{path.lstrip('/')}?{rest}#{unquote(parts.fragment)}".lower()
