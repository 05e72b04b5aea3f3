"""A client of the Docker Engine, and texts for its failures: one line each, which says what to do."""

import re
from dataclasses import dataclass
from typing import Any

import docker
from docker.errors import DockerException, ImageNotFound

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.docker.context import engine_address


def connect(timeout_s: int) -> docker.APIClient:
    """A client that is connected to the Engine. Blocks. Raises EnvironmentUnusable."""
    try:
        return docker.APIClient(**engine_address(), timeout=timeout_s)
    except DockerException as error:
        raise EnvironmentUnusable(why_unreachable(error)) from None


def engine_info(engine: docker.APIClient) -> dict[str, Any]:
    """Facts about the Engine itself, of the types that it documents; `Podman`: its version, if it is Podman that
    answers, else None. Blocks. Raises KeyError, TypeError, ValueError where facts are missing that a run needs."""
    facts, version = engine.info(), engine.version()
    if not isinstance(facts, dict) or not isinstance(version, dict):
        raise TypeError("the Engine's description of itself is not an object")
    options, parts = facts.get("SecurityOptions"), version.get("Components")
    names = [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    podman = [str(part.get("Version") or "?") for part in names if "podman" in str(part.get("Name")).lower()]
    return {
        **facts,
        "MemTotal": int(facts["MemTotal"]),
        "NCPU": int(facts["NCPU"]),
        "SecurityOptions": [str(option) for option in options] if isinstance(options, list) else [],
        **{name: facts[name] if isinstance(facts.get(name), dict) else {} for name in ("Runtimes", "RuncCommit")},
        "Podman": podman[0] if podman else None,
    }


def inspect_image(engine: docker.APIClient, name: str) -> dict[str, Any] | None:
    """The Engine's description of the image `name` (a tag or an id); None: there is none. Blocks."""
    try:
        return engine.inspect_image(name)  # type: ignore[no-any-return, no-untyped-call]
    except ImageNotFound:
        return None


def why_unreachable(error: BaseException) -> str:
    """Why the Engine cannot be reached. Told by the text: the exceptions are nested four deep."""
    text = str(error)
    if "PermissionError" in text or "Permission denied" in text:
        return (
            "no permission to use Docker: run `sudo usermod -aG docker $USER` and log in again "
            "(a user who may use Docker is root on this machine)"
        )
    if "FileNotFoundError" in text or "ConnectionRefusedError" in text or "Connection refused" in text:
        return (
            "Docker is not running here: run `sudo systemctl start docker`, or point DOCKER_HOST or "
            "`docker context use` to an Engine"
        )
    return f"Docker cannot be used: {one_line(text)}"


def why_refused(error: BaseException | str) -> str:
    """Why the Engine refused, and what to do, where that is known."""
    text = one_line(str(error))
    refusal = _refusal(text)
    return text if refusal is None else refusal.message.format(text=text)


def is_lasting(error: BaseException | str) -> bool:
    """Whether the Engine will refuse again, however long one waits."""
    refusal = _refusal(one_line(str(error)))
    return refusal is not None and refusal.lasting


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Words in the Engine's text, in lower case, and the text shown in its place."""

    words: re.Pattern[str]
    message: str
    lasting: bool = True


_DRIVER = r"overlay|graphdriver|storage.driver|devicemapper|btrfs|zfs|/var/lib/docker|\blayer"
_BROKEN = (
    "permission denied|operation not permitted|not supported|invalid argument|no such (?:file|device)|not exist"
)
_REFUSALS = (
    _Refusal(
        re.compile("no space left on device|disk quota exceeded"),
        "Docker's storage fails: no space left where Docker keeps its images: run `docker system prune`, or "
        "make room",
        lasting=False,  # other processes may free space
    ),
    _Refusal(
        re.compile("read-only file system"),
        "Docker's storage fails: its disk has become read-only ({text}): see `dmesg`, mend it and restart Docker",
    ),
    _Refusal(
        re.compile("input/output error|structure needs cleaning|stale (?:nfs )?file handle|not connected"),
        "Docker's storage fails: its disk fails ({text}): see `dmesg`, mend it and restart Docker",
    ),
    _Refusal(
        re.compile(
            rf"/dev/fuse|fuse(?:-overlayfs)?:|fusermount|unknown parent image|(?:{_DRIVER}).*(?:{_BROKEN})"
        ),
        "Docker's storage fails: its driver cannot mount or read a layer ({text}): see `docker info` for the "
        "driver and the daemon's log for more; with fuse-overlayfs the daemon needs /dev/fuse",
    ),
    _Refusal(
        re.compile(r'"bind": stat .*permission denied'),
        "the Docker Engine cannot reach the sandbox's sockets ({text}): a rootless Engine runs as another user; "
        "run the orchestrator as that user",
    ),
    _Refusal(
        re.compile("unknown (?:or invalid )?runtime"),
        "the Docker Engine lacks the runtime ({text}): register it in /etc/docker/daemon.json",
    ),
)


def _refusal(text: str) -> _Refusal | None:
    """The refusal that the text matches. None also for most texts of the runtime: they are about the container.
    And for accounts that an image lacks (`COPY --chown`): the path of its layer is in that text."""
    text = text.lower()
    if "oci runtime" in text or "runc" in text or "chown string" in text:
        return None if "no space left" not in text else _REFUSALS[0]
    return next((refusal for refusal in _REFUSALS if refusal.words.search(text)), None)


def one_line(text: str) -> str:
    return " ".join(text.split())[:400]
