"""A client of the Docker Engine, and its failures in one line each that says what to do."""

from __future__ import annotations

from typing import Any

import docker
from docker.errors import DockerException, ImageNotFound
from docker.utils import kwargs_from_env

from orchestrator.errors import EnvironmentUnusable


def connect(timeout_s: int) -> docker.APIClient:
    """A client that has spoken with the Engine. Blocks. Raises EnvironmentUnusable."""
    try:
        return docker.APIClient(**kwargs_from_env(), timeout=timeout_s)
    except DockerException as error:
        raise EnvironmentUnusable(why_unreachable(error)) from None


def inspect_image(engine: docker.APIClient, name: str) -> dict[str, Any] | None:
    """What the Engine knows of the image `name` (a tag or an id); None: it is not there. Blocks."""
    try:
        return engine.inspect_image(name)  # type: ignore[no-any-return, no-untyped-call]
    except ImageNotFound:
        return None


def why_unreachable(error: BaseException) -> str:
    """What stands between us and the Engine. The causes are nested four deep: only their text is reliable."""
    text = str(error)
    if "PermissionError" in text or "Permission denied" in text:
        return (
            "no permission to use Docker: run `sudo usermod -aG docker $USER` and log in again "
            "(whoever may use Docker is root on this machine)"
        )
    if "FileNotFoundError" in text or "ConnectionRefusedError" in text or "Connection refused" in text:
        return "Docker is not running here: run `sudo systemctl start docker`, or point DOCKER_HOST to an Engine"
    return f"Docker cannot be used: {one_line(text)}"


def why_refused(error: BaseException | str) -> str:
    """What the Engine objected to, with what to do where that is known."""
    text = one_line(str(error))
    if "no space left on device" in text.lower():
        return "no space left where Docker keeps its images: run `docker system prune`, or make room"
    return text


def one_line(text: str) -> str:
    return " ".join(text.split())[:400]
