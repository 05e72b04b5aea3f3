"""The base of the sandbox image: the one asked for, else the usual slim Python, else a Debian made here."""

import asyncio
import json
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from threading import Event

import docker
import requests
from docker.errors import APIError, DockerException

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.docker.client import connect, inspect_image, one_line, why_refused
from orchestrator.launch.image.debian import RECIPE_HASH, SUITE, debian_root
from orchestrator.launch.image.wheels import ImagePython
from orchestrator.launch.names import BASE_REPOSITORY, LABEL_OWNER, LABEL_PROJECT, PROJECT
from orchestrator.launch.owner import this_process

DEFAULT_BASE = "python:3.13-slim-trixie"  # Dockerfile.sandbox says the same
DEBIAN_BASE = f"{BASE_REPOSITORY}:{SUITE}-{RECIPE_HASH}"
REGISTRY_TIMEOUT_S = 10  # for the registry to say whether it has the image, not to send it
_PROBE_TIMEOUT_S = 60
_OLDEST_PYTHON = (3, 11)
PROBE = (  # what Python is there: `parse_probe` reads its answer
    "import json, platform, sys; "
    "print(json.dumps([list(sys.version_info[:3]), platform.machine(), *platform.libc_ver()]))"
)


async def choose_base(engine: docker.APIClient, choice: str | None, progress: Callable[[str], None]) -> str:
    """Name of a base image, which is present when this returns. Raises EnvironmentUnusable."""
    if choice is not None:
        if not await asyncio.to_thread(inspect_image, engine, choice) and (
            why := await pull(engine, choice, progress)
        ):
            raise EnvironmentUnusable(f"base image {choice} is not here and cannot be pulled: {why}")
        return choice
    for name in (DEFAULT_BASE, DEBIAN_BASE):
        if await asyncio.to_thread(inspect_image, engine, name):
            return name
    if why := await pull(engine, DEFAULT_BASE, progress):
        progress(f"{DEFAULT_BASE} cannot be pulled ({why}): making a Debian base instead")
        with tempfile.TemporaryDirectory(prefix="orchestrator-base-") as scratch:
            tar = Path(scratch) / "root.tar"
            await debian_root(tar, progress)
            progress(f"importing {DEBIAN_BASE}")
            await asyncio.to_thread(_import, engine, tar)
        return DEBIAN_BASE
    return DEFAULT_BASE


async def pull(engine: docker.APIClient, name: str, progress: Callable[[str], None]) -> str | None:
    """Pulls `name`. Returns the reason if that fails. Raises what an Engine that is away does."""
    progress(f"pulling {name}")
    stop = Event()
    try:
        return await asyncio.to_thread(_pull_stream, engine, name, stop)
    finally:
        stop.set()  # if cancelled, the thread ends at its next line


def _pull_stream(engine: docker.APIClient, name: str, stop: Event) -> str | None:
    try:  # the registry must answer in time; the pull itself has no time limit
        with closing(connect(REGISTRY_TIMEOUT_S)) as registry:
            registry.inspect_distribution(name)  # type: ignore[no-untyped-call]
    except (APIError, requests.RequestException) as error:
        return one_line(str(getattr(error, "explanation", None) or error))
    repository, tag = docker.utils.parse_repository_tag(name)
    for line in engine.pull(repository, tag=tag or "latest", stream=True, decode=True):
        if stop.is_set():
            return "interrupted"
        if "error" in line:
            return why_refused(line["error"])
    return None


def _import(engine: docker.APIClient, tar: Path) -> None:
    repository, tag = DEBIAN_BASE.split(":")
    engine.import_image(str(tar), repository=repository, tag=tag, changes=[f"LABEL {LABEL_PROJECT}={PROJECT}"])
    if inspect_image(engine, DEBIAN_BASE) is None:
        raise EnvironmentUnusable(f"Docker did not take {DEBIAN_BASE}: is there room where it keeps its images?")


def probe_python(engine: docker.APIClient, base: str) -> ImagePython:
    """Version and platform of the `python3` in `base`. Blocks. Raises EnvironmentUnusable."""
    container = engine.create_container(
        base,
        command=[PROBE],
        entrypoint=["python3", "-c"],
        network_disabled=True,
        labels={LABEL_PROJECT: PROJECT, LABEL_OWNER: str(this_process())},
        host_config=engine.create_host_config(network_mode="none", cap_drop=["ALL"]),
    )["Id"]
    try:
        engine.start(container)
        engine.wait(container, timeout=_PROBE_TIMEOUT_S)
        output = engine.logs(container, stdout=True, stderr=False)
    except (APIError, requests.RequestException):
        output = b""  # no python3 to start
    finally:
        with suppress(DockerException):
            engine.remove_container(container, force=True, v=True)
    return parse_probe(base, output)


def parse_probe(base: str, output: bytes) -> ImagePython:
    """Raises EnvironmentUnusable: no Python, one that is too old, or a C library without wheels for it."""
    try:
        (major, minor, micro), machine, libc, libc_version = json.loads(output)
    except (TypeError, ValueError):
        raise EnvironmentUnusable(f"base image {base} has no working python3: choose another") from None
    if (major, minor) < _OLDEST_PYTHON:
        raise EnvironmentUnusable(f"base image {base} has Python {major}.{minor}; 3.11 or later is needed")
    if libc != "glibc":
        raise EnvironmentUnusable(f"base image {base} has no glibc: choose one made from Debian or the like")
    glibc_major, glibc_minor = map(int, libc_version.split(".")[:2])
    return ImagePython((major, minor, micro), machine, (glibc_major, glibc_minor))
