"""The services of a task, each as compose has it: the part of compose that a sealed sandbox can be.

Raises NotTaken for what is well-formed and not had here, BadRow for what is wrong. Values may be larger than
memory when they are printed: few lines of aliases do that."""

import ipaddress
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

from orchestrator.tasks.base import BadRow
from orchestrator.tasks.surroundings import absolute, user_of
from orchestrator.types import MAX_SERVICES, Condition, Healthcheck, Need, Service, health_command, in_order

Fields = Mapping[str, Any]
MadeOf = Callable[[str, Fields], Mapping[str, str | None]]  # a service's name and fields → `image` or `dockerfile`
MAX_VARIABLES, MAX_VALUE_BYTES, MAX_WORDS, MAX_PORTS, MAX_PLACES = 200, 32 << 10, 500, 64, 50
_LONGEST_CHECK_S = 3_600.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?", re.ASCII)
_EXTRA_HOST = re.compile(r"([^:=]{1,253})[:=]\[?([^\[\]]{1,64})\]?")
_VARIABLE = re.compile(r"[A-Za-z_][\w.-]{0,127}", re.ASCII)
_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([bkmgt]?)(?:i?b)?", re.IGNORECASE)
_DURATION = re.compile(r"(?:(\d{1,6}(?:\.\d{1,6})?)(us|ms|s|m|h))+")
_PART = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)(us|ms|s|m|h)")
_PORT = re.compile(r"(?:[^/]*:)?(\d{1,5})(?:-(\d{1,5}))?(?:/(\w+))?")
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_POWERS = {"": 0, "b": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_MOST_BYTES = 1 << 44
_MOST_NUMBER = 1 << 63  # Python writes out no more than 4300 digits, and floats have fewer
# They change nothing that a sandbox has: names for people, what is done when it ends, how much less it may do.
_SILENT = {
    *("attach", "cap_drop", "cpu_shares", "init", "labels", "logging", "mem_reservation", "mem_swappiness"),
    *("memswap_limit", "oom_score_adj", "platform", "pull_policy", "read_only", "restart", "shm_size"),
    *("stdin_open", "stop_grace_period", "stop_signal", "tty"),
}
_ALONE, _USUAL = "none", "default"
_FIXED = frozenset(("ipv4_address", "ipv6_address", "link_local_ips", "mac_address"))  # of one in a network


class NotTaken(BadRow):
    """`what` of compose is not had here, like `privileged`."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(reason)
        self.what = what


def services_of(value: Mapping[Any, Any], made_of: MadeOf, where: str = "services") -> tuple[Service, ...]:
    """All of them, in order: each behind those that it needs. `made_of` takes `image` and what says how it is
    made, and raises BadRow."""
    if len(value) > MAX_SERVICES:
        raise BadRow(f"{where} has {len(value)} services, at most {MAX_SERVICES} are had")
    services = [one_service(name, fields, made_of, where) for name, fields in value.items()]
    demand_one_meaning(services, where)
    try:
        return in_order(services)
    except ValueError as error:
        raise BadRow(f"{where}: {error}") from None


def one_service(name: Any, value: Any, made_of: MadeOf, where: str) -> Service:
    """What one of them says of itself."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadRow(f"{where} names {ascii(name)[:60]}, which is no name of a service")
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise BadRow(f"{where}: {name} is no object")
    fields = {key: one for key, one in value.items() if one is not None and not key.startswith("x-")}
    if not _has_small_numbers(fields):
        raise BadRow(f"{where}: {name} has a number that is out of bounds")
    reading = _Reading(f"{where}: {name}", dict(fields))
    made = dict(made_of(name, fields))
    for key in ("image", "build", "dockerfile"):
        reading.take(key)
    networks, aliases = reading.networks()
    healthcheck, checked = reading.healthcheck()
    limits = reading.limits()
    service = Service(
        name=name,
        image=made.get("image"),
        dockerfile=made.get("dockerfile"),
        entrypoint=reading.words("entrypoint"),
        command=reading.words("command"),
        environment=reading.environment(),
        cwd=reading.place("working_dir"),
        user=user_of({"user": reading.text("user")}),
        healthcheck=healthcheck,
        checked=checked,
        needs=reading.needs(),
        ports=tuple(sorted({*reading.ports("expose"), *reading.ports("ports")})),
        folders=tuple(dict.fromkeys(reading.folders("tmpfs"))),
        volumes=tuple(dict.fromkeys(reading.volumes())),
        aliases=tuple(
            alias
            for alias in dict.fromkeys((*aliases, *reading.names("hostname"), *reading.names("container_name")))
            if alias != name
        ),
        extra_hosts=tuple(dict.fromkeys(reading.extra_hosts())),
        networks=networks,
        cpus=limits.get("cpus"),
        memory_bytes=None if "memory" not in limits else int(limits["memory"]),
        pids=None if "pids" not in limits else int(limits["pids"]),
    )
    reading.demand_nothing_else()
    return service


def demand_one_meaning(services: Sequence[Service], where: str) -> None:
    """Raises NotTaken for a name that leads one sandbox to a service, or elsewhere, and another to itself: all
    sandboxes of a task have the same names."""
    leads = {name: one.name for one in services for name in (one.name, *one.aliases)}
    for name, address in (pair for one in services for pair in one.extra_hosts):
        if leads.setdefault(name, address) != address:
            raise NotTaken(
                "extra_hosts with two meanings", f"{where}: {name} leads to {leads[name]} and {address}"
            )


def demand_own_volumes(fields: Sequence[Any]) -> None:
    """Raises NotTaken where two services share a volume: each has files of its own. `fields`: of all services."""
    names = [
        name
        for one in fields
        if isinstance(one, Mapping) and isinstance(one.get("volumes"), list)
        for name in {_volume(volume)[0] for volume in one["volumes"]}
        if name
    ]
    if shared := next((name for name, count in Counter(names).items() if count > 1), None):
        raise NotTaken("a shared volume", f"services share the volume {ascii(shared)[1:-1][:40]}")


class _Reading:
    """The fields of one service, which are taken one after the other. `where`: of them, for texts."""

    def __init__(self, where: str, fields: dict[str, Any]) -> None:
        self._where, self._left = where, fields

    def take(self, key: str) -> Any:
        return self._left.pop(key, None)

    def text(self, key: str) -> str | None:
        value = self.take(key)
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if value is not None and (not isinstance(value, str) or len(value) > 1024 or "\0" in value):
            raise self._bad(key, "is no short text")
        return value or None

    def place(self, key: str) -> str | None:
        path = self.text(key)
        return None if path is None else absolute(path, f"{self._where}: {key}")

    def names(self, key: str) -> tuple[str, ...]:
        name = self.text(key)
        if name is not None and not _HOST.fullmatch(name):
            raise self._bad(key, f"{ascii(name)[:60]} is no name of a host")
        return (name,) if name and name != "localhost" else ()

    def words(self, key: str) -> tuple[str, ...] | None:
        """A text is split as a shell would."""
        value = self.take(key)
        if value is None:
            return None
        try:
            words = shlex.split(value) if isinstance(value, str) else list(value)
        except (ValueError, TypeError):
            raise self._bad(key, "is no list of words") from None
        words = [str(word) if isinstance(word, int | float) else word for word in words]
        if len(words) > MAX_WORDS or not all(isinstance(one, str) and "\0" not in one for one in words):
            raise self._bad(key, f"is no list of at most {MAX_WORDS} words")
        return tuple(words)

    def environment(self) -> dict[str, str]:
        value = self.take("environment")
        if value is None:
            return {}
        pairs: list[tuple[Any, Any]] = []
        if isinstance(value, Mapping):
            pairs = list(value.items())
        elif isinstance(value, list):
            pairs = [(name, text if equals else None) for name, equals, text in map(_halves, value)]
        else:
            raise self._bad("environment", "is no list and no object")
        variables: dict[str, str] = {}
        for name, text in pairs:
            if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
                raise self._bad("environment", f"{ascii(name)[:60]} is no name of a variable")
            if text is None:
                raise NotTaken(
                    "a variable of the host",
                    f"{self._where}: environment takes {name} from the host, whose variables no sandbox gets",
                )
            if not isinstance(text, str | int | float) or len(str(text)) > MAX_VALUE_BYTES or "\0" in str(text):
                raise self._bad("environment", f"{name} is no text of at most {MAX_VALUE_BYTES} bytes")
            variables[name] = str(text).lower() if isinstance(text, bool) else str(text)
        if len(variables) > MAX_VARIABLES:
            raise self._bad("environment", f"has {len(variables)} variables, at most {MAX_VARIABLES} are had")
        return variables

    def needs(self) -> tuple[Need, ...]:
        value = self.take("depends_on")
        if isinstance(value, list):
            value = {name: {} for name in value} if all(isinstance(one, str) for one in value) else None
        elif value is None:
            return ()
        if not isinstance(value, Mapping):
            raise self._bad("depends_on", "is no list of names and no object")
        needs = []
        for name, how in value.items():
            condition: Any = how.get("condition", "service_started") if isinstance(how, Mapping) else None
            if condition not in get_args(Condition):
                raise self._bad("depends_on", f"{ascii(name)[:40]} has no condition that is known")
            needs.append(Need(str(name), condition))
        return tuple(needs)

    def ports(self, key: str) -> Iterator[int]:
        value = self.take(key)
        if value is None:
            return
        if not isinstance(value, list) or len(value) > MAX_PORTS:
            raise self._bad(key, f"is no list of at most {MAX_PORTS} ports")
        count = 0
        for one in value:
            text = f"{one.get('target')}/{one.get('protocol', 'tcp')}" if isinstance(one, Mapping) else str(one)
            match = _PORT.fullmatch(text[:64])
            if match is None:
                raise self._bad(key, f"{ascii(text)[:40]} is no port")
            if (match[3] or "tcp").lower() != "tcp":
                raise NotTaken(
                    "UDP", f"{self._where}: {key} has {text[:40]}, and only TCP goes through the channel"
                )
            first, last = int(match[1]), int(match[2] or match[1])
            count += last - first + 1
            if not 0 < first <= last < 1 << 16 or count > MAX_PORTS:
                raise self._bad(key, f"{ascii(text)[:40]} is no port, or these are more than {MAX_PORTS}")
            yield from range(first, last + 1)

    def networks(self) -> tuple[tuple[str, ...], list[str]]:
        """Their names, and its own names in them."""
        mode, value = self.text("network_mode"), self.take("networks")
        if mode == _ALONE:
            return (), []
        if mode not in (None, "bridge", _USUAL):
            raise NotTaken(
                f"network_mode {ascii(mode.partition(':')[0])[1:-1][:40]}",
                f"{self._where}: network_mode is {ascii(mode)[:42]}",
            )
        if value is None:
            return (_USUAL,), []
        aliases: list[str] = []
        if isinstance(value, Mapping):
            for one in value.values():
                one = one if isinstance(one, Mapping) else {}
                if fixed := sorted(key for key in one.keys() & _FIXED if one[key]):
                    raise NotTaken(
                        fixed[0],
                        f"{self._where}: leave {fixed[0]} out of networks: services are found by their names",
                    )
                own = one.get("aliases") or []
                aliases += own if isinstance(own, list) else [own]
        if not isinstance(value, list | Mapping) or not all(isinstance(name, str) for name in (*value, *aliases)):
            raise self._bad("networks", "is no list of names")
        if odd := next((name for name in aliases if not _HOST.fullmatch(name)), None):
            raise self._bad("networks", f"{ascii(odd)[:60]} is no name of a host")
        return tuple(value), aliases[:MAX_PLACES]

    def extra_hosts(self) -> Iterator[tuple[str, str]]:
        """Names, each with the address of its own loopback that it leads to."""
        value = self.take("extra_hosts") or []
        if isinstance(value, Mapping):
            value = [f"{name}={one}" if isinstance(one, str) else one for name, one in value.items()]
        if not isinstance(value, list) or len(value) > MAX_PLACES:
            raise self._bad("extra_hosts", f"is no list of at most {MAX_PLACES} names")
        for one in value:
            match = _EXTRA_HOST.fullmatch(one) if isinstance(one, str) else None
            if match is None or not _HOST.fullmatch(match[1]):
                raise self._bad("extra_hosts", "has an entry that is no NAME:ADDRESS")
            name, address = match[1], match[2]
            if address == "host-gateway":
                raise NotTaken(
                    "extra_hosts host-gateway",
                    f"{self._where}: {name} leads to the host, which no sandbox reaches",
                )
            try:
                own = ipaddress.ip_address(address).is_loopback
            except ValueError:
                raise self._bad("extra_hosts", f"{address!a} is no address") from None
            if not own:
                raise NotTaken(
                    "extra_hosts of an outside address",
                    f"{self._where}: {name} leads to {address}, which no sandbox reaches",
                )
            yield name, address

    def healthcheck(self) -> tuple[Healthcheck | None, bool]:
        """None, True: its image's."""
        value = self.take("healthcheck")
        if value is None:
            return None, True
        if not isinstance(value, Mapping):
            raise self._bad("healthcheck", "is no object")
        known = {"test", "interval", "timeout", "retries", "start_period", "start_interval", "disable"}
        if odd := sorted(str(key) for key in value if key not in known):
            raise self._bad("healthcheck", f"{ascii(odd[0])[:40]} is unknown")
        test = value.get("test")
        if value.get("disable") is True or test in ("NONE", ["NONE"]):
            return None, False
        if test is None:
            raise self._bad("healthcheck", "has no test")
        if (command := health_command(test)) is None:
            raise self._bad("healthcheck", "test is no text, and no list that begins with CMD or CMD-SHELL")
        retries = value.get("retries", 3)
        if isinstance(retries, bool) or not isinstance(retries, int) or not 0 <= retries <= 10_000:
            raise self._bad("healthcheck", "retries is no count")
        check = Healthcheck(
            command,
            interval_s=self._seconds(value, "interval", 30.0),
            timeout_s=self._seconds(value, "timeout", 30.0) or 30.0,
            start_period_s=self._seconds(value, "start_period", 0.0),
            start_interval_s=self._seconds(value, "start_interval", 5.0),
            retries=max(1, retries),
        )
        if check.longest_s > _LONGEST_CHECK_S:
            raise self._bad("healthcheck", f"may take {check.longest_s:g} s, at most {_LONGEST_CHECK_S:g}")
        return check, True

    def limits(self) -> dict[str, float]:
        """`cpus`, `memory` in bytes, `pids`: those that are said."""
        found: dict[str, float] = {}
        self._limit(found, "cpus", self.take("cpus"))
        self._limit(found, "memory", self.take("mem_limit"))
        self._limit(found, "pids", self.take("pids_limit"))
        deploy = self.take("deploy") or {}
        resources = deploy.get("resources") or {} if isinstance(deploy, Mapping) else None
        if not isinstance(resources, Mapping) or not all(isinstance(one, Mapping) for one in resources.values()):
            raise self._bad("deploy", "is no object with resources")
        if any("devices" in one for one in resources.values()):
            raise NotTaken("a GPU", f"{self._where}: deploy asks for devices, and a sandbox has none")
        for key, value in (resources.get("limits") or {}).items():
            self._limit(found, key, value)
        return found

    def folders(self, key: str) -> Iterator[str]:
        value = self.take(key)
        value = [value] if isinstance(value, str) else value or []
        if not isinstance(value, list) or len(value) > MAX_PLACES:
            raise self._bad(key, f"is no list of at most {MAX_PLACES} folders")
        for one in value:
            yield absolute(str(one).partition(":")[0][:1024], f"{self._where}: {key}")

    def volumes(self) -> Iterator[str]:
        value = self.take("volumes") or []
        if not isinstance(value, list) or len(value) > MAX_PLACES:
            raise self._bad("volumes", f"is no list of at most {MAX_PLACES} volumes")
        for one in value:
            source, target = _volume(one)
            if source is None:
                raise NotTaken("a host mount", f"{self._where}: volumes mounts files of the host")
            yield absolute(target, f"{self._where}: volumes")

    def demand_nothing_else(self) -> None:
        left = {
            key: value for key, value in self._left.items() if key not in _SILENT and value not in (False, [], {})
        }
        if left.get("runtime") in ("runc", "crun"):
            del left["runtime"]
        if left.get("security_opt") in (["no-new-privileges"], ["no-new-privileges:true"]):
            del left["security_opt"]
        for key in sorted(left):
            what = "a GPU" if key == "gpus" else ascii(key)[1:-1][:40]
            raise NotTaken(what, f"{self._where} sets {ascii(key)[:42]}, which no sandbox has")

    def _limit(self, found: dict[str, float], kind: str, value: Any) -> None:
        if value is None:
            return
        if kind == "memory":
            number = float(self._size(value))
        elif kind in ("cpus", "pids"):
            try:
                number = float(value)
            except (TypeError, ValueError):
                raise self._bad(kind, "is no number") from None
            if kind == "pids" and number <= 0:  # none
                return
        else:
            raise self._bad("deploy", f"{ascii(kind)[:40]} is no limit that is known")
        if not 0 < number < _MOST_BYTES:
            raise self._bad(kind, "is out of bounds")
        found[kind] = number

    def _size(self, value: Any) -> int:
        match = _SIZE.fullmatch(str(value)[:40].strip())
        if match is None:
            raise self._bad("a limit of memory", f"{ascii(value)[:40]} is no size like 512m or 2g")
        return int(float(match[1]) * (1 << _POWERS[match[2].lower()]))

    def _seconds(self, value: Mapping[str, Any], key: str, usual: float) -> float:
        text = value.get(key)
        if text is None:
            return usual
        if isinstance(text, int | float) and not isinstance(text, bool) and 0 <= text < 86_400:
            return float(text)
        if not isinstance(text, str) or not _DURATION.fullmatch(text[:40]):
            raise self._bad("healthcheck", f"{key} is no time like 5s or 1m30s")
        return sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(text))

    def _bad(self, key: str, why: str) -> BadRow:
        return BadRow(f"{self._where}: {key} {why}")


def _has_small_numbers(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_has_small_numbers(one) for pair in value.items() for one in pair)
    if isinstance(value, list | tuple):
        return all(map(_has_small_numbers, value))
    return not isinstance(value, int) or abs(value) < _MOST_NUMBER


def _halves(entry: Any) -> tuple[str, str, str]:
    return str(entry)[: MAX_VALUE_BYTES + 130].partition("=")


def _volume(one: Any) -> tuple[str | None, str]:
    """(its name, empty for one without; None: a place of the host; where it is mounted)."""
    if isinstance(one, Mapping):
        kind, source, target = one.get("type"), one.get("source") or "", one.get("target")
        if kind not in ("volume", "tmpfs") or not isinstance(source, str) or not isinstance(target, str):
            return None, ""
        return source, target
    source, colon, rest = one[:1024].partition(":") if isinstance(one, str) else ("/", ":", "")
    if not colon:
        return "", source
    return (source if _NAME.fullmatch(source) else None), rest.partition(":")[0]
