"""What may leave a sandbox, by rules alone; with properties, as names have many writings."""

from __future__ import annotations

import socket
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address
from random import Random
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.network import is_public
from orchestrator.rules.egress import (
    Entry,
    Place,
    Refused,
    Rules,
    absolute,
    entry_of,
    is_address,
    normal_host,
    origin,
    place_of,
)

LABEL = st.from_regex(r"[a-z]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)
NAME = st.lists(LABEL, min_size=1, max_size=4).map(".".join)
ADDRESS = st.integers(0, (1 << 32) - 1)


@pytest.mark.parametrize(
    ("raw", "entry"),
    [
        ("example.org", Entry("example.org")),
        (" Example.ORG. ", Entry("example.org")),
        ("*.example.org", Entry("*.example.org")),
        ("*", Entry("*")),
        ("example.org:8443", Entry("example.org", (8443,))),
        ("1.1.1.1", Entry("1.1.1.1")),
        ("[2606:4700::1111]:443", Entry("2606:4700::1111", (443,))),
        ("bücher.example", Entry("xn--bcher-kva.example")),
        ({"host": "a.example", "ports": [80], "methods": ["GET"]}, Entry("a.example", (80,), ("GET",))),
        ({"host": "a.example", "paths": ["/simple/"]}, Entry("a.example", paths=("/simple/",))),
        ({"host": "10.0.0.1", "private": True, "tls": "tunnel"}, Entry("10.0.0.1", tls="tunnel", private=True)),
        ({"host": "[::1]", "private": True}, Entry("::1", private=True)),
    ],
)
def test_entries_are_read_and_written_back(raw: object, entry: Entry) -> None:
    assert entry_of(raw) == entry
    assert entry_of(entry.as_setting()) == entry


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ("", "no host"),
        ("a b", "no host"),
        ("http://example.org", "neither HOST"),
        ("example.org/path", "no host"),
        ("example.org:0", "ports"),
        ("example.org:99999", "ports"),
        ("**.example.org", "no host"),
        ("a.*.example.org", "no host"),
        ("*.1.1.1.1", "below"),
        ("127.0.0.1", '"private": true'),
        ("169.254.169.254", '"private": true'),
        ("2130706433", '"private": true'),
        ("[::1]", '"private": true'),
        ("[fe80::1%eth0]", "zone"),
        (7, "a text or an object"),
        ({}, "a text or an object"),
        ({"host": "a.example", "port": 80}, "'port' is unknown"),
        ({"host": "a.example", "ports": ["80"]}, "numbers"),
        ({"host": "a.example", "ports": [True]}, "numbers"),
        ({"host": "a.example", "methods": ["get"]}, "capital"),
        ({"host": "a.example", "methods": ["CONNECT"]}, "capital"),
        ({"host": "a.example", "paths": ["x"]}, "paths"),
        ({"host": "a.example", "paths": ["/a/../b"]}, "paths"),
        ({"host": "a.example", "paths": ["/a%20b"]}, "paths"),
        ({"host": "a.example", "tls": "none"}, "tls"),
        ({"host": "a.example", "tls": "tunnel", "methods": ["GET"]}, "tunnel"),
        ({"host": "*", "private": True}, "public"),
        ({"host": "a.example", "private": 1}, "true or false"),
    ],
)
def test_a_bad_entry_says_what_is_wrong(raw: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        entry_of(raw)


@pytest.mark.parametrize(
    ("entry", "place", "leads"),
    [
        ("example.org", ("example.org", 443), True),
        ("example.org", ("example.org", 80), True),
        ("example.org", ("example.org", 8080), False),
        ("example.org", ("a.example.org", 443), False),
        ("example.org:8080", ("example.org", 8080), True),
        ("example.org:8080", ("example.org", 443), False),
        ("*.example.org", ("a.example.org", 443), True),
        ("*.example.org", ("a.b.example.org", 443), True),
        ("*.example.org", ("example.org", 443), False),
        ("*.example.org", ("evilexample.org", 443), False),
        ("*", ("anything.example", 443), True),
        ("*", ("1.1.1.1", 443), False),  # an address only if it is named
        ("*", ("localhost", 443), False),
        ("*", ("metadata.google.internal", 80), False),
        ("1.1.1.1", ("1.1.1.1", 443), True),
    ],
)
def test_which_places_an_entry_names(entry: str, place: tuple[str, int], leads: bool) -> None:
    assert entry_of(entry).leads_to(Place(*place)) is leads


def test_the_most_exact_entry_says_whether_a_tunnel_is_opened() -> None:
    rules = Rules((Entry("*"), Entry("*.example.org", tls="tunnel"), Entry("a.example.org")))
    assert [entry.host for entry in rules.at(Place("a.example.org", 443))] == [
        "a.example.org",
        "*.example.org",
        "*",
    ]
    assert rules.at(Place("b.example.org", 443))[0].tls == "tunnel"


def test_a_refusal_says_what_to_do_on_one_line() -> None:
    with pytest.raises(Refused, match=r"evil\.example:443 is not in env\.egress: .* can add it") as refused:
        Rules((Entry("a.example"),)).at(Place("evil.example", 443))
    assert "\n" not in str(refused.value)


@given(NAME, st.randoms(use_true_random=False))
def test_a_name_has_one_form_whatever_its_letters(name: str, random: Random) -> None:
    written = "".join(random.choice((c, c.upper())) for c in name) + random.choice(("", "."))
    try:
        host = normal_host(name)
    except ValueError:
        return  # as `0x1`
    assert normal_host(written) == host == normal_host(host)


@given(ADDRESS)
def test_every_writing_of_an_ipv4_address_is_that_address(number: int) -> None:
    address = IPv4Address(number)
    a, b, c, d = address.packed
    writings = [
        str(address), f"{number}", f"{number:#x}", f"0{number:o}", f"{a}.{number & 0xFFFFFF}",
        f"{a}.{b}.{c << 8 | d}",
        f"{a:#x}.{b:#x}.{c:#x}.{d:#x}", f"0{a:o}.0{b:o}.0{c:o}.0{d:o}", f"{a:#X}.{b}.0{c:o}.{d}", f"{address}.",
        f"[::ffff:{address}]", f"::ffff:{address}", f"[{IPv6Address((0xFFFF << 32) | number).exploded}]",
    ]  # fmt: skip
    assert {normal_host(writing) for writing in writings} == {str(address)}
    assert is_address(str(address))


@given(st.text(max_size=40))
def test_any_text_is_a_host_in_its_one_form_or_refused(text: str) -> None:
    try:
        host = normal_host(text)
    except ValueError:
        return
    assert normal_host(host) == host
    assert host.isascii()
    assert host == host.lower()
    try:  # whatever the C library reads as an address is known to be one
        known = str(IPv4Address(socket.inet_aton(host)))
    except OSError:
        return
    assert host == known


@given(st.text("0123456789abcdefxX.:%[]", max_size=30))
def test_what_looks_like_an_address_is_one_or_refused(text: str) -> None:
    try:
        place = place_of(text, "http")
    except Refused:
        return
    if is_address(place.host) and not is_public(place.host):
        with pytest.raises(Refused):
            Rules((Entry("*"),)).at(place)


@given(st.text(max_size=60))
def test_no_target_makes_the_rules_fail(text: str) -> None:
    for read in (absolute, lambda one: origin("GET", one), lambda one: place_of(one, None)):
        with suppress(Refused):
            read(text)


RULES = Rules((Entry("a.example", paths=("/public",)),))


@given(
    st.lists(
        st.sampled_from(["/", "..", ".", "public", "private", "%2e", "%2f", "%25", ";", "\\", "x", "?", "%5c"])
    )
)
def test_no_path_climbs_out_of_an_allowed_one(pieces: list[str]) -> None:
    """As a server reads it that decodes twice, takes backslashes for slashes, and drops `;` and empty parts."""
    target = "/public/" + "".join(pieces)
    try:
        RULES.judge(Place("a.example", 443), "GET", target)
    except Refused:
        return
    depth = 0
    for part in unquote(unquote(target.partition("?")[0])).replace("\\", "/").split("/"):
        part = part.partition(";")[0]
        depth += -1 if part == ".." else 0 if part in ("", ".") else 1
        assert depth >= 0
    assert depth >= 1
