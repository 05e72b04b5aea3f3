"""Which proxy an address is asked through, by the environment alone."""

from __future__ import annotations

import pytest

from orchestrator.errors import EnvironmentUnusable
from orchestrator.network import proxy_of

NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
PROXY = "http://proxy:3128"


@pytest.fixture(autouse=True)
def no_proxies_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, *map(str.upper, NAMES)):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("no_proxy", "url", "direct"),
    [
        ("example.org", "http://example.org", True),
        ("example.org", "http://EXAMPLE.org.", True),
        ("Example.ORG", "http://example.org", True),
        ("example.org", "http://a.b.example.org", True),
        ("example.org", "http://notexample.org", False),
        ("example.org", "http://example.org.evil.test", False),
        (".example.org", "http://example.org", True),
        ("*.example.org", "http://a.example.org", True),
        ("example.org.", "http://example.org", True),
        ("*", "http://anything.test", True),
        ("", "http://example.org", False),
        (",  ,", "http://example.org", False),
        ("*.", "http://example.org", False),
        ("a.test example.org,b.test", "http://example.org", True),
        ("example.org:8000", "http://example.org:8000", True),
        ("example.org:8000", "http://example.org", False),
        ("example.org:80", "http://example.org", True),
        ("example.org:443", "https://example.org", True),
        ("example.org:80", "https://example.org", False),
        ("*:8000", "http://example.org:8000", True),
        ("*:8000", "http://example.org", False),
        ("10.0.0.0/8", "http://10.1.2.3", True),
        ("10.0.0.0/8", "http://11.1.2.3", False),
        ("10.1.2.3/8", "http://10.9.9.9", True),
        ("10.1.2.3", "http://10.1.2.3", True),
        ("10.1.2.3:81", "http://10.1.2.3", False),
        ("10.0.0.0/8", "http://10.example.org", False),
        ("2.3", "http://1.2.3.4", False),
        ("10.0.0.0/8", "http://[::ffff:10.1.2.3]", True),
        ("::1", "http://[::1]", True),
        ("[::1]", "http://[::1]:8000", True),
        ("[::1]:8000", "http://[::1]:8000", True),
        ("[::1]:8000", "http://[::1]", False),
        ("fe80::/10", "http://[fe80::1%25eth0]", True),
        ("[fe80::]/10", "http://[fe80::1]", True),
        ("[fe80::]/10:80", "http://[fe80::1]", True),
        ("no network/8", "http://10.1.2.3", False),
    ],
)
def test_no_proxy_names_hosts_as_curl_reads_it(
    no_proxy: str, url: str, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", PROXY)
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert proxy_of(url) == (None if direct else PROXY)


def test_a_scheme_s_own_proxy_goes_before_the_one_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert proxy_of("http://e.test") is None
    monkeypatch.setenv("ALL_PROXY", PROXY)
    monkeypatch.setenv("HTTPS_PROXY", "secure:3129")
    assert proxy_of("http://e.test") == PROXY
    assert proxy_of("https://e.test") == "http://secure:3129", "an address without a scheme is one for HTTP"
    monkeypatch.setenv("HTTPS_PROXY", "")
    assert proxy_of("https://e.test") == PROXY


@pytest.mark.parametrize(
    "proxy", ["http://", "http://proxy:port", "http://proxy:70000", "ftp://proxy:21", "http://[::1"]
)
def test_what_is_no_proxy_is_said_without_its_password(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy.replace("proxy", "me:geheim@proxy"))
    with pytest.raises(
        EnvironmentUnusable, match=r"HTTP_PROXY: must be an address like .* e\.test in NO_PROXY"
    ) as told:
        proxy_of("http://e.test")
    assert "geheim" not in str(told.value)


def test_a_socks_proxy_is_told_what_can_stand_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5h://proxy:1080")
    with pytest.raises(EnvironmentUnusable, match=r"ALL_PROXY: SOCKS proxies cannot be used .*privoxy"):
        proxy_of("http://e.test")
