"""Pure rules of services: names and places, what images say of them, how long they are waited for, whose their
ends are, which of their files are handed on."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.engine.service_images import of_image
from orchestrator.rules.outcome import ServiceEnd, decide
from orchestrator.services.life import patient
from orchestrator.services.places import addresses, completes, hosts, neighbours, ports_named
from orchestrator.services.state import all_but
from orchestrator.types import Ended, Failed, Healthcheck, Need, Record, Service
from tests.fakes.plans import a_turn

WEB, DB = Service("web", ports=(80, 8080), aliases=("www", "db")), Service("db", ports=(5432, 80))


def test_places_follow_from_the_names_alone() -> None:
    assert addresses([WEB, DB]) == addresses([DB, WEB]) == {"db": "127.0.2.1", "web": "127.0.2.2"}
    assert hosts([WEB, DB]).splitlines()[2:] == ["127.0.2.1\tdb", "127.0.2.2\tweb www"]


def test_a_service_finds_others_but_at_its_own_ports_and_in_its_networks() -> None:
    assert neighbours(WEB, [WEB, DB]) == [(DB, 5432)]
    assert neighbours(DB, [WEB, DB]) == [(WEB, 8080)]
    assert neighbours(WEB, [WEB, replace(DB, networks=("back",))]) == []


@pytest.mark.parametrize(
    ("command", "ports"),
    [
        ("nc -z localhost 22 || exit 1", [22]),
        ("curl -f http://127.0.0.1:8080/ || exit 1", [8080]),
        ("socat TCP:localhost:1337 -", [1337]),
        ("pg_isready -U admin -p 5433", [5433]),
        ("test -f /tmp/x99", []),
        ("curl localhost:99999", []),
    ],
)
def test_healthchecks_name_ports(command: str, ports: list[int]) -> None:
    assert list(ports_named(command)) == ports


SAYS: dict[str, Any] = {
    "Entrypoint": ["/start"],
    "WorkingDir": "srv/./x",
    "Serving": {
        "Cmd": ["serve"],
        "ExposedPorts": ["80/tcp", "53/udp", "x"],
        "Healthcheck": {"Test": ["CMD", "true"], "Interval": 2_000_000_000, "Retries": 5},
    },
}


def test_what_a_service_does_not_say_its_image_does() -> None:
    found = of_image(Service("a"), "image", SAYS)
    assert (found.entrypoint, found.command, found.cwd, found.ports) == (("/start",), ("serve",), "/srv/x", (80,))
    assert found.healthcheck is not None
    assert (found.healthcheck.interval_s, found.healthcheck.retries) == (2.0, 5)
    own = of_image(Service("a", entrypoint=("/mine",), checked=False, cwd="/", ports=(9,)), "image", SAYS)
    assert (own.entrypoint, own.command, own.healthcheck, own.ports) == (("/mine",), (), None, (9, 80))
    assert of_image(Service("a", command=("x",)), "image", SAYS).command == ("x",)
    with pytest.raises(ValueError, match="no command"):
        of_image(Service("a"), "image", {})


def test_a_beginning_service_is_given_up_no_sooner_than_it_says() -> None:
    check = Healthcheck("x", interval_s=10.0, timeout_s=3.0, start_period_s=7.0, retries=4)
    asked = patient(check)
    assert asked.start_period_s == 47.0
    assert asked.start_interval_s <= 0.5
    assert asked.retries == 1


def test_what_others_wait_for_is_to_end() -> None:
    fill = Service("fill")
    assert completes("fill", [fill, Service("db", needs=(Need("fill", "service_completed_successfully"),))])
    assert not completes("fill", [fill, Service("db", needs=(Need("fill"),))])


END = ServiceEnd("db", "it ended with 1", out_of_memory=False, lived_s=5.0)
SAMPLED = Record(0.0, turns=(a_turn(),))


@pytest.mark.parametrize(
    ("end", "record", "name", "scored"),
    [
        (END, SAMPLED, "sandbox_crashed", True),
        (replace(END, out_of_memory=True), SAMPLED, "out_of_memory", True),
        (replace(END, excuse="left alone, db ends too"), SAMPLED, "sandbox_lost", False),
        (END, Record(0.0), "sandbox_lost", False),
    ],
)
def test_a_services_end_earns_no_other_draw(end: ServiceEnd, record: Record, name: str, scored: bool) -> None:
    outcome, answer = decide(end, record)
    assert isinstance(outcome, Ended if scored else Failed)
    assert outcome.name == name
    assert answer is None
    assert "the service db: it ended with 1" in (outcome.detail if isinstance(outcome, Ended) else outcome.reason)


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("/logs/", True),
        ("/logs/services/", True),
        ("/logs/services/db/", True),
        ("/logs/services/db/0.txt", True),
        ("/logs/services/dbx/", False),
        ("/logs/x", False),
        ("/tmp/", True),
        ("/tmp/dump.sql", True),
        ("/tmp/dump.sql.old", False),
        ("/etc/", False),
        ("/etc/passwd", False),
    ],
)
def test_only_what_is_asked_for_is_handed_on(path: str, kept: bool) -> None:
    assert (re.compile(all_but(["/logs/services/db", "/tmp/dump.sql"])).match(path) is None) is kept
