"""Which services of compose are had, and what they become."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.services.places import hosts
from orchestrator.tasks.base import BadRow
from orchestrator.tasks.harbor.compose import Compose, read_compose
from orchestrator.tasks.harbor.refusal import Refusal
from orchestrator.tasks.services import NotTaken, services_of
from orchestrator.types import Need, Service

PLACE = "environment/docker-compose.yaml"
WHOLE = """
services:
  main:
    depends_on: {db: {condition: service_healthy}, web: {condition: service_started}}
    environment: {DATABASE_URL: "postgres://db:${PORT:-5432}/app"}
    command: ["sh", "-c", "sleep infinity"]
  db:
    image: postgres:${VERSION:-16}
    command: postgres -c 'max_connections=20'
    environment: [POSTGRES_PASSWORD=secret, "PRICE=5$$"]
    healthcheck: {test: ["CMD", "pg_isready", "-U", "a b"], interval: 1m30s, timeout: 500ms, retries: 4}
    expose: ["5432", 5433]
    mem_limit: 1gb
    cpus: "0.5"
    pids_limit: 90
    volumes: [data:/var/lib/postgresql/data]
    tmpfs: /scratch:size=1m
    restart: always
    x-anything: [1]
  web:
    build: ./web
    entrypoint: []
    ports: ["127.0.0.1:80:8080", {target: 9000}, "7000-7002"]
    depends_on: [db, main]
    user: "1000:1000"
    working_dir: /srv/app
    hostname: site.example
    networks: {front: {aliases: [www]}, default: null}
    healthcheck: {disable: true}
volumes: {data: {}}
networks: {front: {}}
x-top: 1
"""


def read(text: str, *files: str, **others: str) -> Compose:
    return read_compose(text, PLACE, others.get, {"environment/web/Dockerfile", *files}.__contains__)


def test_a_compose_file_becomes_services() -> None:
    found = read(WHOLE)
    assert found.image is None
    assert found.main.environment == {"DATABASE_URL": "postgres://db:5432/app"}
    db, web = found.services
    assert db.healthcheck is not None
    assert (db.healthcheck.command, db.healthcheck.interval_s, db.healthcheck.timeout_s) == (
        "pg_isready -U 'a b'",
        90.0,
        0.5,
    )
    assert (db.dockerfile, db.command, db.entrypoint) == (
        "FROM postgres:16",
        ("postgres", "-c", "max_connections=20"),
        None,
    )
    assert db.environment == {"POSTGRES_PASSWORD": "secret", "PRICE": "5$"}
    assert (db.ports, db.memory_bytes, db.cpus, db.pids) == ((5432, 5433), 1 << 30, 0.5, 90)
    assert (db.folders, db.volumes) == (("/scratch",), ("/var/lib/postgresql/data",))
    assert web.dockerfile == "environment/web/Dockerfile"
    assert web.ports == (7000, 7001, 7002, 8080, 9000)
    assert web.needs == (Need("db"),)
    assert (web.entrypoint, web.checked, web.user, web.cwd) == ((), False, "1000:1000", "/srv/app")
    assert web.aliases == ("www", "site.example")


def test_who_shares_no_network_is_not_found() -> None:
    services = "main: {networks: [a]}, web: {image: w, networks: [a, b]}, db: {image: d, networks: [b]}"
    found = read(f"services: {{{services}}}")
    assert {one.name: one.for_agent for one in found.services} == {"web": True, "db": False}


def test_names_may_lead_to_the_loopback() -> None:
    found = read("services: {main: {extra_hosts: ['a.b:127.0.0.1']}, db: {image: d, extra_hosts: {c: '[::1]'}}}")
    assert found.main.extra_hosts == (("a.b", "127.0.0.1"),)
    assert hosts(found.services, found.main.extra_hosts).splitlines()[2:] == [
        "127.0.2.1\tdb",
        "127.0.0.1\ta.b",
        "::1\tc",
    ]


NOT_TAKEN = {
    "privileged": "privileged: true",
    "devices": "devices: ['/dev/kvm:/dev/kvm']",
    "cap_add": "cap_add: [SYS_PTRACE]",
    "network_mode host": "network_mode: host",
    "network_mode service": "network_mode: 'service:main'",
    "a host mount": "volumes: ['./data:/data']",
    "secrets": "secrets: [key]",
    "configs": "configs: [file]",
    "a GPU": "deploy: {resources: {reservations: {devices: [{capabilities: [gpu]}]}}}",
    "profiles": "profiles: [debug]",
    "extends": "extends: {service: other}",
    "env_file": "env_file: .env",
    "extra_hosts host-gateway": "extra_hosts: ['a:host-gateway']",
    "extra_hosts of an outside address": "extra_hosts: {a: 192.0.2.1}",
    "extra_hosts with two meanings": "extra_hosts: ['db=127.0.0.1']",
    "ulimits": "ulimits: {stack: -1}",
    "security_opt": "security_opt: ['seccomp=unconfined']",
    "UDP": "expose: ['53/udp']",
    "a variable of the host": "environment: {KEY: '${KEY}'}",
    "build args": "build: {context: web, args: {A: 1}}",
    "a Dockerfile outside its context": "build: {context: ., dockerfile: web/Dockerfile}",
    "files outside the task": "build: ../../../etc",
}


@pytest.mark.parametrize("what", NOT_TAKEN)
def test_what_no_sandbox_has_is_refused_by_name(what: str) -> None:
    with pytest.raises(Refusal) as refused:
        read(
            f"services: {{main: {{}}, db: {{image: d, {NOT_TAKEN[what]}}}}}"
            if "build" not in NOT_TAKEN[what]
            else f"services: {{main: {{}}, db: {{{NOT_TAKEN[what]}}}}}"
        )
    assert refused.value.need == f"{what} in compose"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            "services: {main: {}, a: {image: x, volumes: ['v:/a']}, b: {image: x, volumes: ['v:/b']}}",
            "a shared volume",
        ),
        ("services: {main: {}}\nnetworks: {n: {external: true}}", "external networks"),
        ("services: {main: {}}\nsecrets: {}", "secrets"),
        ("services: {main: {}, a: {image: x, networks: {n: {ipv4_address: 10.1.2.3}}}}", "ipv4_address"),
        ("services: {main: {networks: {n: {mac_address: 'a:b'}}}}", "mac_address"),
        ("services: {main: {command: nginx}}", "command of main"),
    ],
)
def test_so_is_what_the_whole_file_says(text: str, what: str) -> None:
    with pytest.raises(Refusal) as refused:
        read(text)
    assert refused.value.need == f"{what} in compose"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"a": {"image": "x", "depends_on": ["b"]}}, "depends on b, which there is not"),
        ({n: {"image": "x", "depends_on": [m]} for n, m in ("ab", "ba")}, "wait for each other"),
        ({"a b": {"image": "x"}}, "no name of a service"),
        ({f"s{n}": {"image": "x"} for n in range(17)}, "17 services"),
        ({"a": {"image": "x", "mem_limit": "much"}}, "no size"),
        ({"a": {"image": "x", "expose": [0]}}, "no port"),
        ({"a": {"image": "x", "expose": ["1-60000"]}}, "more than"),
        ({"a": {"image": "x", "healthcheck": {"test": ["true"]}}}, "CMD"),
        ({"a": {"image": "x", "environment": ["A B=1"]}}, "no name of a variable"),
        ({"a": {"image": "x", "depends_on": {"a": {"condition": "maybe"}}}}, "no condition"),
        ({"a": {"image": "x", "extra_hosts": ["a"]}}, "no NAME:ADDRESS"),
        ({"a": {"image": "x", "extra_hosts": {"a": "b"}}}, "no address"),
        ({"a": 5}, "no object"),
        ({"a": {"image": "x", "networks": {"n": {"aliases": 5}}}}, "no list of names"),
        *(
            ({"a": {"image": "x", field: value}}, "out of bounds")
            for field in ("cpus", "pids_limit", "mem_limit", "user", "command", "ports", "environment", "volumes")
            for value in (10**5000, [10**5000], {"A": 10**5000})
        ),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRow, match=says) as wrong:
        services_of(fields, lambda name, one: {"image": one["image"]})
    assert not isinstance(wrong.value, NotTaken)


@pytest.mark.parametrize("include", ["5", "[5]", "{path: [[a]]}", f"[0x{'f' * 5000}]"])
def test_what_is_included_is_a_file(include: str) -> None:
    with pytest.raises(BadRow, match="no path of a file"):
        read(f"include: {include}\nservices: {{main: {{image: x}}}}")


def test_aliases_larger_than_memory_are_refused() -> None:
    bomb = "\n".join(
        ["x-a0: &a0 [1]", *(f"x-a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))]
    )
    with pytest.raises(BadRow, match="more than 20000 values"):
        read(f"{bomb}\nservices: {{main: {{}}, db: {{image: x, command: *a11}}}}")


def test_other_files_are_included_once() -> None:
    other = {"environment/more.yaml": f"include: [{PLACE.rpartition('/')[2]}]\nservices: {{db: {{image: d}}}}"}
    found = read("include: [more.yaml]\nservices: {main: {}}", **other)
    assert [one.name for one in found.services] == ["db"]


def test_services_come_behind_what_they_need() -> None:
    fields = {"c": {"depends_on": ["b"]}, "b": {"depends_on": ["a"]}, "a": {}}
    found: tuple[Service, ...] = services_of(fields, lambda name, one: {"image": "x"})
    assert [one.name for one in found] == ["a", "b", "c"]
