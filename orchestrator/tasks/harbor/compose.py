"""A task's docker-compose.yaml: what it says of `main`, the agent's container, if that is all that it says.

Harbor lays the file over its own, which builds `main` of environment/Dockerfile and lets it sleep. A file that
only repeats this is read. Other services, volumes, devices and the like are what a sandbox does not have.
"""

import re
from collections.abc import Mapping
from typing import Any

from orchestrator.tasks.base import BadRow
from orchestrator.tasks.harbor.refusal import Refusal

FILE = "docker-compose.yaml"
MAX_BYTES = 64 << 10
_NEED = "compose"
_LIMITS = {"cpus", "memory", "pids"}
_SILENT = {"container_name", "init", "platform", "pull_policy", "restart", "stdin_open", "tty"}
_SLEEP = re.compile(r"((/usr)?(/bin/)?(ba)?sh -l?c )?['\"]?(sleep infinity|tail -f /dev/null)['\"]?")
_OURS = re.compile(r"\$\{[A-Z_]*(LOGS|ARTIFACTS)[A-Z_]*\}:.*")  # Harbor's own folders for results
_CONTEXTS = (".", "./", "${CONTEXT_DIR}")
_IMAGES = ("${MAIN_IMAGE_NAME}", "${PREBUILT_IMAGE_NAME}")


def image_of_main(text: str) -> str | None:
    """The image that the file names for `main`; None: as without the file. Raises BadRow."""
    import yaml  # tasks with such a file are few

    if "<<" in text:  # a few lines of merges are more than any memory holds
        raise BadRow(f"environment/{FILE} merges mappings by `<<`, which is not read")
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise BadRow(f"environment/{FILE} is no YAML") from None
    services = _named(_named(document).get("services"))
    if others := services.keys() - {"main"}:
        names = ", ".join(ascii(name)[:40] for name in sorted(others)[:4])
        raise Refusal(_NEED, f"it needs compose: environment/{FILE} has the services {names}")
    main = _named(services.get("main") or {})
    for key, value in main.items():
        if not _is_silent(key, value):
            raise Refusal(_NEED, f"it needs compose: environment/{FILE} sets {ascii(key)[:40]} of main")
    image = main.get("image")
    return None if image in (None, *_IMAGES) else image


def _named(value: Any) -> Mapping[str, Any]:
    """Raises BadRow for anything but an object whose keys are text."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise BadRow(f"environment/{FILE} has no services of the usual form")
    return value


def _is_silent(key: str, value: Any) -> bool:
    """Whether it says nothing but what holds without the file. A value may be larger than memory when it is
    printed: few lines of aliases do that."""
    match key:
        case "build":
            return any(value in (usual, {"context": usual}) for usual in _CONTEXTS)
        case "image":
            return isinstance(value, str)
        case "command":
            words = value if isinstance(value, list) else [value]
            return all(isinstance(word, str) for word in words) and bool(_SLEEP.fullmatch(" ".join(words)))
        case "volumes":
            return isinstance(value, list) and all(isinstance(v, str) and _OURS.fullmatch(v) for v in value)
        case "deploy":
            parts = _named(_named(value).get("resources") or {}).values()
            return value.keys() <= {"resources"} and all(_named(part).keys() <= _LIMITS for part in parts)
    return key in _SILENT
