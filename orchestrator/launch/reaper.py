"""Removes what dead orchestrators have left: containers, directories, images of builds.

Each of these names the process that made it. Nothing of a live process is touched, nor anything without such a
name. Runs at every start and as `orchestrator cleanup`.
"""

import asyncio
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from orchestrator.errors import DockerError
from orchestrator.launch.channels import DRAFT_PREFIX, OWNER_FILE, PREFIX, remove_owned_directory
from orchestrator.launch.docker.calls import Engine
from orchestrator.launch.docker.request import VOLUME
from orchestrator.launch.names import (
    LABEL_DEADLINE,
    LABEL_OWNER,
    LABEL_PROJECT,
    LABEL_RUN,
    LABEL_STAGE,
    LABEL_TASK,
    PROJECT,
    TASK_REPOSITORY,
)
from orchestrator.launch.oci.leftovers import remove_containers
from orchestrator.launch.owner import Owner, this_process
from orchestrator.launch.uses import BuiltImage, images_in_use, unwanted
from orchestrator.rules.backoff import Backoff

log = logging.getLogger(__name__)

_OWNER_FILE_BYTES = 4096
_THREADS = 4
_REMOVALS = 7
_BETWEEN_REMOVALS = Backoff(first_s=0.1, most_s=2.0)


@dataclass(frozen=True, slots=True)
class Reaped:
    """How many of each were removed."""

    containers: int
    directories: int
    images: int


async def reap(*, old_images: bool = False) -> Reaped:
    """Removes leftovers of dead orchestrators.

    `old_images`: also sandbox images whose name a newer build has taken. Not done at every start: a run may use
    such an image by its id.
    What cannot be removed is logged and left. Raises EnvironmentUnusable, DockerError if the Engine does not
    answer; the directories are removed before.
    """
    local = await asyncio.to_thread(reap_directories)
    engine = Engine(threads=_THREADS)
    try:
        containers = [c for c in await engine.containers(f"{LABEL_PROJECT}={PROJECT}") if _is_left(c)]
        builds = [c for c in await engine.containers(LABEL_STAGE) if _is_dead(c["Labels"][LABEL_STAGE])]
        removed = await _remove_containers(engine, [*containers, *builds])
        images = await _remove_stages(engine)
        if old_images:
            images += await _remove_old_images(engine)
            await _remove_volumes(engine)
    finally:
        await engine.aclose()
    return Reaped(local.containers + removed, local.directories, images)


def reap_directories() -> Reaped:
    """Removes socket and temporary directories of dead orchestrators, and the containers that an OCI runtime has
    for them. Blocks, for seconds if one resists."""
    leftovers, containers = [], 0
    for directory in _owned_directories():
        if _is_left_directory(directory):
            removed, resisting = remove_containers(directory)
            containers += removed
            if not resisting:  # else the directory is needed to find them
                leftovers.append(directory)
    remaining = leftovers
    for failures in range(_REMOVALS):
        # A sandbox that is just ending may still write files into its directory.
        time.sleep(_BETWEEN_REMOVALS.pause_s(failures) if remaining else 0.0)
        remaining = [now for directory in remaining if (now := remove_owned_directory(directory)) is not None]
    return Reaped(containers, len(leftovers) - len(remaining), 0)


# ---------------------------------------------------------------- containers


def _is_left(container: Mapping[str, Any]) -> bool:
    labels = container["Labels"]
    owner = Owner.parse(labels.get(LABEL_OWNER, ""))
    if owner is None:
        return False
    if owner.is_of_this_host:  # then the deadline, which depends on the wall clock, is not needed
        return owner.is_dead
    deadline = labels.get(LABEL_DEADLINE, "")
    return deadline.isdecimal() and int(deadline) < time.time()


async def _remove_containers(engine: Engine, containers: list[dict[str, Any]]) -> int:
    removals = await asyncio.gather(*(engine.remove(c["Id"]) for c in containers), return_exceptions=True)
    for container, result in zip(containers, removals, strict=True):
        if isinstance(result, DockerError):
            log.warning("container %s could not be removed: %s", container["Id"][:12], result)
        elif isinstance(result, BaseException):
            raise result
    return removals.count(True)


# ---------------------------------------------------------------- stages of image builds


async def _remove_stages(engine: Engine) -> int:
    """Removes stages in rounds until none can be removed: the Engine keeps an image that another is built on.

    A plain `docker build` names no builder: its stages are kept.
    """
    count = 0
    while True:
        stages = [image for image in await engine.images(LABEL_STAGE) if _is_dead(image["Labels"][LABEL_STAGE])]
        removed = await _remove_images(engine, stages)
        if not removed:
            return count
        count += removed


async def _remove_old_images(engine: Engine) -> int:
    """Removes nameless sandbox images without containers. Not during a build: its last stages look the same.

    A plain `docker build` is not noticed, as its stages name no owner. If it loses a stage here, it fails and
    has to be repeated. Layers of tasks' Dockerfiles that did not come to their end are among them.
    """
    if await asyncio.to_thread(images_in_use) is not None:
        return 0
    builders = [Owner.parse(stage["Labels"][LABEL_STAGE]) for stage in await engine.images(LABEL_STAGE)]
    if any(builder is not None and not builder.is_dead for builder in builders):
        return 0
    return await _remove_images(engine, await engine.images(f"{LABEL_PROJECT}={PROJECT}", nameless=True))


async def _remove_volumes(engine: Engine) -> None:
    """Removes volumes of runtimes and images: they come again with the next sandbox. Those of a remote Engine's
    runtime are held by a container that was never started, and go if there is no sandbox."""
    label = f"{LABEL_PROJECT}={PROJECT}"
    containers = await engine.containers(label)
    if not any(LABEL_RUN in container["Labels"] for container in containers):
        for container in containers:
            if any(name.startswith(f"/{VOLUME}") for name in container["Names"]):
                await engine.remove(container["Id"])
        await engine.remove_volumes(label)


async def remove_built(*, used_before: float, keep_bytes: int | None) -> int:
    """Removes images of tasks' Dockerfiles as `uses.unwanted` says, except those of containers. Returns how many.
    Raises EnvironmentUnusable, DockerError."""
    engine = Engine(threads=_THREADS)
    try:
        built = [
            BuiltImage(tag, image["Id"], _used_at(await engine.image(tag) or image), int(image["Size"]))
            for image in await engine.images(LABEL_TASK)
            for tag in image.get("RepoTags") or ()
            if tag == f"{TASK_REPOSITORY}:{image['Labels'][LABEL_TASK]}"
        ]
        in_use = await asyncio.to_thread(images_in_use) or set()
        old = unwanted(built, used_before=used_before, keep_bytes=keep_bytes, in_use=in_use)
        return await _remove_images(engine, [{"Id": image.tag} for image in old])
    finally:
        await engine.aclose()


def _used_at(image: Mapping[str, Any]) -> float:
    """When it was used last: each use gives it its tag anew. Podman keeps only when it was made."""
    text = str((image.get("Metadata") or {}).get("LastTagTime") or "")
    if text.startswith("0001") or not text:
        text = str(image["Created"])
    return float(text) if text.isdecimal() else datetime.fromisoformat(text).timestamp()


async def _remove_images(engine: Engine, images: list[dict[str, Any]]) -> int:
    """Returns how many could be removed."""
    count = 0
    for image in images:
        try:
            await engine.remove_image(image["Id"])
        except DockerError as error:
            log.debug("image %s stays: %s", image["Id"], error)
        else:
            count += 1
    return count


# ---------------------------------------------------------------- directories


def _owned_directories() -> Iterator[Path]:
    """Candidates: our prefix, real directories, of this user."""
    for parent in {Path(tempfile.gettempdir()), Path("/tmp")}:  # noqa: S108
        for directory in parent.glob(f"{PREFIX}*"):
            with suppress(OSError):  # its run has just ended, or another reaper was faster
                status = directory.lstat()
                if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                    yield directory


def _is_left_directory(directory: Path) -> bool:
    if directory.name.startswith(DRAFT_PREFIX):  # its name holds its owner
        pid, _, rest = directory.name.removeprefix(DRAFT_PREFIX).partition("-")
        return _is_dead(f"{this_process().host}:{pid}:{rest.partition('-')[0]}")
    try:
        with open(os.open(directory / OWNER_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return False
            return _is_dead(str(json.loads(file.read(_OWNER_FILE_BYTES))["owner"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _is_dead(name: str) -> bool:
    """Whether `name` is an owner's that is known to have ended."""
    owner = Owner.parse(name)
    return owner is not None and owner.is_dead
