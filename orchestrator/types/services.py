"""What runs beside an agent and serves it: databases, queues, sites. And what became of it."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.types.healthcheck import Healthcheck

# What has come to pass of a service before one that depends on it begins, in compose's words.
Condition = Literal["service_started", "service_healthy", "service_completed_successfully"]
MAX_SERVICES = 16


@dataclass(frozen=True, slots=True)
class Need:
    """That another service of the task is there first."""

    name: str
    condition: Condition = "service_started"


@dataclass(frozen=True, slots=True)
class Service:
    """A program in a sandbox of its own, which the agent finds as `NAME:PORT`.

    `image`, `dockerfile`: as a Task's. `entrypoint`, `command`: None: the image's; an entrypoint without a command
    is all of it. `environment`: on top of the image's. `cwd`, `user`: None: the image's. `healthcheck`: what
    succeeds when it is ready, in its sandbox; None: the image's, unless `checked` is False. `ports`: that it
    listens at; with its image's own when rollouts begin. `folders`: absolute paths that it finds there, for
    everybody to write to; `volumes`: as its image has them, if it has. `aliases`: other names that lead to it;
    `extra_hosts`: names, each with the address of its own loopback that it leads to there.
    `networks`: whoever has one of them finds it; `for_agent`: the agent does. `cpus`, `memory_bytes`, `pids`: of
    its sandbox; None: as the run's sandboxes."""

    name: str
    image: str | None = None
    dockerfile: str | None = None
    entrypoint: tuple[str, ...] | None = None
    command: tuple[str, ...] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    user: str | None = None
    healthcheck: Healthcheck | None = None
    checked: bool = True
    needs: tuple[Need, ...] = ()
    ports: tuple[int, ...] = ()
    folders: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    extra_hosts: tuple[tuple[str, str], ...] = ()
    networks: tuple[str, ...] = ("default",)
    for_agent: bool = True
    cpus: float | None = None
    memory_bytes: int | None = None
    pids: int | None = None


@dataclass(frozen=True, slots=True)
class ServiceRecord:
    """What became of one service of a rollout. Times in seconds: `started_s` since its services were asked for,
    `healthy_s` since this one began; None: it never was. `ended`: how it ended by itself; empty: it did not.
    `log`: the last that it printed, without keys. Untrusted: the agent's requests may have written it."""

    name: str
    image: str
    started_s: float
    healthy_s: float | None = None
    ended: str = ""
    log: str = ""


def in_order(services: Sequence[Service]) -> tuple[Service, ...]:
    """Each behind those that it needs. Raises ValueError, which says what is wrong with the names or the needs."""
    names = [service.name for service in services]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two services have the name {twice}")
    ordered: list[Service] = []
    left = list(services)
    while left:
        there = {service.name for service in ordered}
        ready = [one for one in left if all(need.name in there for need in one.needs)]
        if not ready:
            lacking = next((need.name for one in left for need in one.needs if need.name not in names), None)
            if lacking is not None:
                raise ValueError(f"a service depends on {lacking}, which there is not")
            raise ValueError(f"the services {', '.join(sorted(one.name for one in left))} wait for each other")
        ordered += ready
        left = [one for one in left if one not in ready]
    return tuple(ordered)


def health_command(test: Any) -> str | None:
    """As the shell runs it, of a healthcheck's test as compose and images have it; None: it is none."""
    if isinstance(test, str):
        return test or None
    if not isinstance(test, list | tuple) or not all(isinstance(one, str) for one in test) or len(test) < 2:
        return None
    if test[0] == "CMD-SHELL":
        return str(test[1])
    return shlex.join(test[1:]) if test[0] == "CMD" else None
