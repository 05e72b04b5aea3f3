"""A task's docker-compose.yaml: what it says of `main`, the agent's container, and the services beside it.

Harbor lays the file over its own, which builds `main` of environment/Dockerfile and lets it sleep. What of compose
is had here is in `tasks.services`; volumes of the host, devices and the like are what a sandbox does not have.
"""

import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.tasks.base import BadRow
from orchestrator.tasks.harbor.refusal import Refusal
from orchestrator.tasks.services import NotTaken, demand_one_meaning, demand_own_volumes, one_service, services_of
from orchestrator.types import MAX_SERVICES, Service

FILE = "docker-compose.yaml"
MAIN = "main"
MAX_BYTES = 64 << 10
MAX_INCLUDES = 8
_MAX_VALUES = 20_000  # of one file: a few lines of aliases are more than any memory holds
_MAX_DEPTH = 32
_SLEEP = re.compile(r"((/usr)?(/bin/)?(ba)?sh -l?c )?['\"]?(sleep (infinity|inf)|tail -f /dev/null)['\"]?")
_OURS = re.compile(r"\$\{[A-Z_]*(LOGS|ARTIFACTS)[A-Z_]*\}:.*")  # Harbor's own folders for results
_CONTEXTS = (".", "./", "${CONTEXT_DIR}")
_IMAGES = ("${MAIN_IMAGE_NAME}", "${PREBUILT_IMAGE_NAME}")
_TEMPLATE = re.compile(r"\$(?:\$|\{([A-Za-z_]\w*)(:?[-+?]([^{}]*))?\}|([A-Za-z_]\w*))")
_TOP = {"services", "networks", "volumes", "version", "name", "include"}

Load = Callable[[str], str | None]  # a path below the task's folder → the text of the file


@dataclass(frozen=True, slots=True)
class Compose:
    """`image`: that the file names for `main`; `dockerfile`: the path that it names, below the task's folder;
    None: as without the file. `main`: what else it says of it. `services`: the others, each behind those that it
    needs."""

    image: str | None
    dockerfile: str | None
    main: Service
    services: tuple[Service, ...] = ()


def read_compose(text: str, place: str, load: Load, has: Callable[[str], bool], *, main: str = MAIN) -> Compose:
    """`place`: the path of the file below the task's folder. `main`: what the agent's service is called. Paths of
    Dockerfiles are below the task's folder, too. Raises BadRow; Refusal for what is not had here."""
    try:
        services = _all_services(text, place, load, main, set())
        own = services.pop(main, ("", {}))
        demand_own_volumes([one for _, one in (own, *services.values())])
        if len(services) > MAX_SERVICES:
            raise BadRow(f"{place} has {len(services)} services, at most {MAX_SERVICES} are had")

        def made_of(name: str, fields: Mapping[str, Any]) -> Mapping[str, str | None]:
            return {"dockerfile": _dockerfile(name, fields, posixpath.dirname(services[name][0]), has)}

        fields = {name: _without(main, one) for name, (_, one) in services.items()}
        others = services_of(fields, made_of, place)
        told, image = _main(own[1], place)
        demand_one_meaning((told, *others), place)
        built = None
        if "build" in own[1]:
            built, image = _dockerfile(MAIN, own[1], posixpath.dirname(own[0]), has), None
    except NotTaken as error:
        raise Refusal(f"{error.what} in compose", f"it needs compose: {error}") from None
    reached = {*told.networks}
    return Compose(
        image, built, told, tuple(replace(one, for_agent=bool(reached & {*one.networks})) for one in others)
    )


def _all_services(
    text: str, place: str, load: Load, main: str, seen: set[str]
) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """The services of the file and of those that it includes: by name, where it is and what is said there."""
    seen.add(place)
    if len(seen) > MAX_INCLUDES:
        raise BadRow(f"{place} includes more than {MAX_INCLUDES} files")
    document = _document(text, place)
    if odd := sorted(key for key in document if key not in _TOP and not key.startswith("x-")):
        raise NotTaken(odd[0], f"{place} has {ascii(odd[0])[:40]}")
    for kind in ("networks", "volumes"):
        for name, one in _named(document.get(kind) or {}, place).items():
            if isinstance(one, Mapping) and one.get("external"):
                raise NotTaken(f"external {kind}", f"{place}: {ascii(name)[:40]} of {kind} is external")
    found: dict[str, tuple[str, Mapping[str, Any]]] = {}
    included = document.get("include") or []
    for one in included if isinstance(included, list) else [included]:
        paths = one.get("path") if isinstance(one, Mapping) else one
        for path in paths if isinstance(paths, list) else [paths]:
            if not isinstance(path, str):
                raise BadRow(f"{place} includes something that is no path of a file")
            name = _beside(posixpath.dirname(place), path[:1024], "include")
            if name in seen:
                continue
            if (other := load(name)) is None:
                raise BadRow(f"{place} includes {ascii(path)[:60]}, which is not there")
            found |= _all_services(other, name, load, main, seen)
    for name, one in _named(document.get("services") or {}, place).items():
        fields = _named(one or {}, place)
        if name == main:
            fields = {key: value for key, value in fields.items() if not _is_silent(key, value)}
        found[name] = place, {key: _filled(value, f"{place}: {name}", [0], 0) for key, value in fields.items()}
    if not found:
        raise BadRow(f"{place} has no services of the usual form")
    return found


def _without(main: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Nothing waits for the agent's service, which begins last."""
    needs = fields.get("depends_on")
    if isinstance(needs, Mapping):
        return {**fields, "depends_on": {name: how for name, how in needs.items() if name != main}}
    if isinstance(needs, list):
        return {**fields, "depends_on": [name for name in needs if name != main]}
    return fields


def _document(text: str, place: str) -> Mapping[str, Any]:
    import yaml  # tasks with such a file are few

    if "<<" in text:  # a few lines of merges are more than any memory holds
        raise BadRow(f"{place} merges mappings by `<<`, which is not read")
    try:
        return _named(yaml.safe_load(text), place)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise BadRow(f"{place} is no YAML") from None


def _main(fields: Mapping[str, Any], place: str) -> tuple[Service, str | None]:
    """What is said of `main`, and the image that is named for it."""
    image = fields.get("image")
    if image is not None and not isinstance(image, str):
        raise BadRow(f"{place}: main has an image that is no name")
    told = one_service(MAIN, fields, lambda name, fields: {}, place)
    if told.entrypoint or told.command:
        what = "command" if told.command else "entrypoint"
        raise NotTaken(f"{what} of main", f"{place} sets {what!r} of main, where the agent works")
    return told, image


def _dockerfile(name: str, fields: Mapping[str, Any], folder: str, has: Callable[[str], bool]) -> str:
    """As a Task's: `FROM IMAGE`, or a path below the task's folder."""
    image, build = fields.get("image"), fields.get("build")
    if build is None:
        if not isinstance(image, str) or not image or not image.isprintable() or " " in image or len(image) > 255:
            raise BadRow(f"services: {name} has neither a build nor the name of an image")
        return f"FROM {image}"
    build = {"context": build} if isinstance(build, str) else build
    if not isinstance(build, Mapping):
        raise BadRow(f"services: {name} has a build that is no folder and no object")
    for key in sorted(build.keys() - {"context", "dockerfile"}):
        if build[key]:
            raise NotTaken(f"build {ascii(key)[1:-1][:30]}", f"services: {name} is built with {ascii(key)[:40]}")
    context = _beside(folder, str(build.get("context", ".")), f"the build of {name}")
    path = _beside(context, str(build.get("dockerfile", "Dockerfile")), f"the build of {name}")
    if posixpath.dirname(path) != context:
        raise NotTaken("a Dockerfile outside its context", f"services: {name} has its Dockerfile elsewhere")
    if not has(path):
        raise BadRow(f"services: {name} is built of {ascii(path)[:80]}, which is not there")
    return path


def _beside(folder: str, path: str, what: str) -> str:
    """The path below the task's folder."""
    joined = posixpath.normpath(posixpath.join(folder, path))
    if path.startswith("/") or joined.split("/")[0] == ".." or "\0" in path or "://" in path:
        raise NotTaken(
            "files outside the task", f"{what} is at {ascii(path)[:60]}, which is not in the task's folder"
        )
    return "" if joined == "." else joined


def _named(value: Any, place: str) -> Mapping[str, Any]:
    """Raises BadRow for anything but an object whose keys are text."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise BadRow(f"{place} has no services of the usual form")
    return value


def _filled(value: Any, where: str, count: list[int], depth: int) -> Any:
    """With the defaults of `${VAR:-default}` in their places. Raises NotTaken for one without, BadRow for a value
    that is too large."""
    count[0] += 1
    if count[0] > _MAX_VALUES or depth > _MAX_DEPTH:
        raise BadRow(f"{where} has more than {_MAX_VALUES} values, or nests deeper than {_MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        return {key: _filled(one, where, count, depth + 1) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, where, count, depth + 1) for one in value]
    return _TEMPLATE.sub(lambda match: _default(match, where), value) if isinstance(value, str) else value


def _default(match: re.Match[str], where: str) -> str:
    name, how = match[1] or match[4], match[2] or ""
    if name is None:
        return "$"
    if how.lstrip(":").startswith("-"):
        return match[3] or ""
    if how.lstrip(":").startswith("+"):  # the variable is not set
        return ""
    raise NotTaken(
        "a variable of the host", f"{where} takes {match[0][:60]!a} from the host, whose variables no sandbox gets"
    )


def _is_silent(key: str, value: Any) -> bool:
    """Whether it says nothing of `main` but what holds without the file."""
    match key:
        case "build":
            usual = {"dockerfile": "Dockerfile"}
            return any(value in (one, {"context": one}, {"context": one, **usual}) for one in _CONTEXTS)
        case "image":
            return value in _IMAGES
        case "command":
            words = value if isinstance(value, list) else [value]
            return all(isinstance(word, str) for word in words) and bool(_SLEEP.fullmatch(" ".join(words)))
        case "volumes":
            return isinstance(value, list) and all(isinstance(v, str) and _OURS.fullmatch(v) for v in value)
        case "deploy":  # Harbor's own variables say the limits
            parts = value.values() if isinstance(value, Mapping) and value.keys() <= {"resources"} else ()
            limits = [one.get("limits") for one in parts if isinstance(one, Mapping)]
            return bool(limits) and all(
                isinstance(one, Mapping) and one and all("${" in str(text)[:64] for text in one.values())
                for one in limits
            )
    return False
