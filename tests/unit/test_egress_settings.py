"""`env.egress` and `env.secrets`: as they are written, and what is refused by name."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest

from orchestrator.errors import ConfigError
from orchestrator.host.egress import RunEgress
from orchestrator.rules.egress import Entry, Place, Refused
from orchestrator.settings.config import STREAM_ROOM_BYTES, Config
from orchestrator.settings.table import EnvSettings
from orchestrator.types import Task

KEY = {"host": "api.example", "header": "Authorization", "from": "env:KEY", "format": "Bearer {}"}


@pytest.mark.parametrize(
    ("raw", "entries"),
    [
        ("", ()),
        ("none", ()),
        ("pypi.org, *.example.org:8443", (Entry("pypi.org"), Entry("*.example.org", (8443,)))),
        ('["pypi.org", "PyPI.org."]', (Entry("pypi.org"),)),
        ('{"host": "a.example", "methods": ["GET"]}', (Entry("a.example", methods=("GET",)),)),
        ([{"host": "a.example", "tls": "tunnel"}], (Entry("a.example", tls="tunnel"),)),
    ],
)
def test_hosts_are_read_from_words_json_and_values(raw: object, entries: tuple[Entry, ...]) -> None:
    env = EnvSettings(egress=raw)  # type: ignore[arg-type]
    assert env.egress_entries == entries
    assert EnvSettings(egress=tuple(json.loads(json.dumps(env.egress)))).egress == env.egress
    assert env.needs_localhost_tcp == bool(entries)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"egress": "127.0.0.1"}, r'env\.egress: 127\.0\.0\.1 is a private address: it needs "private": true'),
        ({"egress": [{"host": "a.example", "port": 1}]}, "env.egress: 'port' is unknown"),
        ({"egress": 7}, "env.egress: must be HOST"),
        ({"egress": ["replay:/run", "a.example"]}, "stands alone"),
        ({"secrets": [KEY]}, r"env\.secrets: api\.example must be in env\.egress"),
        ({"secrets": [KEY], "egress": "*.example"}, "by name"),
        ({"secrets": [KEY], "egress": [{"host": "api.example", "tls": "tunnel"}]}, "without tls: tunnel"),
        ({"secrets": [{**KEY, "from": "KEY"}], "egress": "api.example"}, "from is env:NAME or file:PATH"),
        ({"egress": "replay:/run", "cluster": "ray"}, "env.cluster"),
    ],
)
def test_what_cannot_be_is_one_line_that_names_the_setting(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as error:
        EnvSettings(**settings)
    assert "\n" not in str(error.value)


def test_keys_belong_to_hosts_that_are_named() -> None:
    env = EnvSettings(egress=("api.example",), secrets=(KEY,))
    (entry,) = env.key_entries
    assert (entry.host, entry.header, entry.source, entry.format) == (
        "api.example",
        "Authorization",
        "env:KEY",
        "Bearer {}",
    )
    assert env.public()["secrets"] == [KEY]  # where the key is, not the key


@pytest.mark.parametrize(
    ("egress", "network", "reached"),
    [
        ("task", ("a.example",), {"a.example"}),
        ("task, b.example", ("a.example",), {"a.example", "b.example"}),
        ("b.example", ("a.example", "*"), {"b.example"}),
        ("task", ("*",), {"a.example", "b.example"}),
        ("task", (), set()),
    ],
)
def test_a_task_has_its_hosts_where_the_operator_says_so(
    egress: str, network: tuple[str, ...], reached: set[str]
) -> None:
    env = EnvSettings(egress=egress)  # type: ignore[arg-type]
    assert env.needs_localhost_tcp
    rules = RunEgress(env).rules_of(Task("t", "?", network=network))
    found = set()
    for host in ("a.example", "b.example"):
        with suppress(Refused):
            assert rules.judge(Place(host, 443), "GET", "/").of_task is (host not in egress)
            found.add(host)
    assert found == reached


def test_what_streams_may_carry_follows_from_what_egress_may() -> None:
    """A rollout whose egress is used up is answered 429, and not ended, while it asks on."""
    for size in (64 << 10, 1 << 40):
        limits = Config(env=EnvSettings(max_egress_bytes=size)).limits()
        assert limits.stream_bytes == size + STREAM_ROOM_BYTES
    assert Config().limits().stream_bytes == 4 << 30
