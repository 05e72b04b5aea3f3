"""Where the services of a task are found: an address of the loopback for each, and the file that names them. Pure.

Each sandbox of a rollout has a loopback of its own. On all of them a service has the same address, which follows
from its place among the names: sandboxes of tasks with services of the same names are alike.
"""

import re
from collections.abc import Iterator, Sequence

from orchestrator.types import Need, Service

AGENT = "127.0.3.1"  # where connections from the agent seem to come from: not 127.0.0.1, which databases trust
HOSTS = "hosts"
FOLDER = "/etc"
_ALWAYS = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
_NAMED = re.compile(r"(?:localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\])[: ](\d{2,5})\b|(?<=\s)-[pP] ?(\d{2,5})\b")


def addresses(services: Sequence[Service]) -> dict[str, str]:
    """By name."""
    names = sorted(service.name for service in services)
    return {name: f"127.0.2.{number}" for number, name in enumerate(names, 1)}


def hosts(services: Sequence[Service], own: Sequence[tuple[str, str]] = ()) -> str:
    """The content of /etc/hosts in all sandboxes of the task. Of two services with one alias the first has it.
    `own`: the agent's extra hosts. Those of one sandbox are in all, as they lead to each one's own loopback."""
    found, taken = addresses(services), {service.name for service in services}
    lines = []
    for service in sorted(services, key=lambda one: one.name):
        aliases = [alias for alias in service.aliases if alias not in taken]
        taken |= {*aliases}
        lines.append(f"{found[service.name]}\t{' '.join((service.name, *aliases))}\n")
    extra = (*own, *(pair for service in services for pair in service.extra_hosts))
    lines += [f"{address}\t{name}\n" for name, address in dict.fromkeys(extra)]
    return _ALWAYS + "".join(lines)


def ports_named(command: str) -> Iterator[int]:
    """The ports of this machine that a healthcheck asks."""
    for match in _NAMED.finditer(command):
        if 0 < (port := int(match[1] or match[2])) < 1 << 16:
            yield port


def neighbours(service: Service, services: Sequence[Service]) -> list[tuple[Service, int]]:
    """The services, each with a port of its own, that this one reaches. Not those at a port where it listens
    itself: a program that listens at all addresses could not, where one of them is taken."""
    return [
        (other, port)
        for other in services
        if other is not service and {*other.networks} & {*service.networks}
        for port in other.ports
        if port not in service.ports
    ]


def completes(name: str, services: Sequence[Service]) -> bool:
    """Whether it is to end before others begin."""
    return any(Need(name, "service_completed_successfully") in service.needs for service in services)
