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
_SILENT = {"container_name", "deploy", "init", "platform", "pull_policy", "restart", "stdin_open", "tty"}
_SLEEP = re.compile(r"((/usr)?(/bin/)?(ba)?sh -l?c )?['\"]?(sleep infinity|tail -f /dev/null)['\"]?")
_OURS = re.compile(r"\$\{[A-Z_]*(LOGS|ARTIFACTS)[A-Z_]*\}:.*")  # Harbor's own folders for results
_CONTEXTS = (".", "./", "${CONTEXT_DIR}")
_IMAGES = ("${MAIN_IMAGE_NAME}", "${PREBUILT_IMAGE_NAME}")


def image_of_main(text: str) -> str | None:
    """The image that the file names for `main`; None: as without the file. Raises BadRow."""
    import yaml  # tasks with such a file are few

    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise BadRow(f"environment/{FILE} is no YAML") from None
    services = document.get("services") if isinstance(document, Mapping) else None
    if not isinstance(services, Mapping):
        raise BadRow(f"environment/{FILE} has no services")
    others = [ascii(name)[:40] for name in services if name != "main"]
    if others:
        raise Refusal(_NEED, f"it needs compose: environment/{FILE} has the services {', '.join(others[:4])}")
    main = services["main"] or {}
    if not isinstance(main, Mapping):
        raise BadRow(f"environment/{FILE}: main is no service")
    for key, value in main.items():
        if not _is_silent(key, value):
            raise Refusal(_NEED, f"it needs compose: environment/{FILE} sets {ascii(key)[:40]} of main")
    image = main.get("image")
    return None if image in (None, *_IMAGES) else image


def _is_silent(key: object, value: Any) -> bool:
    """Whether it says nothing but what holds without the file."""
    match key:
        case "build":
            return any(value in (usual, {"context": usual}) for usual in _CONTEXTS)
        case "image":
            return isinstance(value, str)
        case "command":
            words = value if isinstance(value, list) else [value]
            return _SLEEP.fullmatch(" ".join(map(str, words)).strip()) is not None
        case "volumes":
            return isinstance(value, list) and all(isinstance(v, str) and _OURS.fullmatch(v) for v in value)
    return key in _SILENT
