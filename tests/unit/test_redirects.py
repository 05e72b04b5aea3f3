"""Which redirects that keep a request are followed: never one that shows a key, or the request, to others."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.completion.base import Endpoint
from orchestrator.completion.http import HttpClient

SECRETS: list[dict[str, Any]] = [{"api_key": "k"}, {"headers": {"api-key": "k"}}, {"query": "?api-key=k"}]


@pytest.mark.parametrize(
    ("url", "target", "without", "with_key"),
    [
        ("http://a/v1/x", "http://a/v1/x/", True, True),
        ("http://a/v1/x", "http://a:80/v1/x", True, True),
        ("http://a/v1/x", "https://a/v1/x", True, True),
        ("http://a/v1/x", "https://b/v1/x", True, False),
        ("http://a/v1/x", "http://a:81/v1/x", True, False),
        ("http://a/v1/x", "http://b/v1/x", True, False),
        ("https://a/v1/x", "https://a:443/v1/x", True, True),
        ("https://a/v1/x", "http://a/v1/x", False, False),
        ("http://a/v1/x", "file:///etc/passwd", False, False),
        ("http://a/v1/x", "ftp://a/v1/x", False, False),
    ],
)
def test_where_a_request_may_go(url: str, target: str, without: bool, with_key: bool) -> None:
    base = url.removesuffix("/x")
    assert HttpClient(Endpoint(base, "m"))._may_follow(url, target) is without
    for secret in SECRETS:
        more = {name: value for name, value in secret.items() if name != "query"}
        client = HttpClient(Endpoint(base + secret.get("query", ""), "m", **more))
        assert client._may_follow(url, target) is with_key
