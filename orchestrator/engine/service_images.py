"""What the image of a service says of it: its program, its ports, when it is healthy. Pure."""

import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from orchestrator.services.places import ports_named
from orchestrator.types import Healthcheck, Service, health_command

MAX_PORTS = 64
_SECOND = 1_000_000_000  # of an image's times
_LONGEST_S = 3_600.0


def of_image(service: Service, image: str, config: Mapping[str, Any]) -> Service:
    """The service as it is run. `config`: the image's, as the store keeps it. Raises ValueError, which says what
    it lacks."""
    serving = config.get("Serving") or {}
    entrypoint = service.entrypoint
    if entrypoint is None:
        entrypoint = _words(config.get("Entrypoint"))
    # As in compose: another entrypoint drops the image's command.
    command = service.command
    if command is None:
        command = () if service.entrypoint else _words(serving.get("Cmd"))
    if not entrypoint + command:
        raise ValueError(f"the service {service.name} has no command, and its image names none")
    healthcheck = service.healthcheck
    if healthcheck is None and service.checked:
        healthcheck = _healthcheck(serving.get("Healthcheck"))
    ports = {*service.ports, *_exposed(serving.get("ExposedPorts"))}
    ports |= {*ports_named(healthcheck.command)} if healthcheck else set()
    place = config.get("WorkingDir")
    usual = posixpath.normpath(f"/{place.lstrip('/')}") if isinstance(place, str) and place.isprintable() else "/"
    return replace(
        service,
        image=image,
        entrypoint=entrypoint,
        command=command,
        cwd=service.cwd or usual,
        healthcheck=healthcheck,
        ports=tuple(sorted(ports))[:MAX_PORTS],
    )


def _words(value: Any) -> tuple[str, ...]:
    return tuple(one for one in value if isinstance(one, str)) if isinstance(value, list) else ()


def _exposed(value: Any) -> Iterator[int]:
    for name in value if isinstance(value, list) else ():
        number, _, kind = str(name).partition("/")
        if number.isdecimal() and kind in ("", "tcp") and 0 < int(number[:6]) < 1 << 16:
            yield int(number)


def _healthcheck(value: Any) -> Healthcheck | None:
    if not isinstance(value, Mapping) or (command := health_command(value.get("Test"))) is None:
        return None

    def seconds(key: str, usual: float) -> float:
        number = value.get(key)
        return min(number / _SECOND, _LONGEST_S) if isinstance(number, int) and number > 0 else usual

    retries = value.get("Retries")
    return Healthcheck(
        command,
        interval_s=seconds("Interval", 30.0),
        timeout_s=seconds("Timeout", 30.0),
        start_period_s=seconds("StartPeriod", 0.0),
        start_interval_s=seconds("StartInterval", 5.0),
        retries=min(retries, 1_000) if isinstance(retries, int) and retries > 0 else 3,
    )
