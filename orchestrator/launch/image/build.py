"""Builds the sandbox image: base, wheels and context brought together, then one offline build.

`context`, `wheels` and `base` prepare what goes in; Dockerfile.sandbox says what is done with it.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import docker
import requests
from docker.errors import APIError, DockerException

from orchestrator import __version__
from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.docker.client import connect, inspect_image, why_refused, why_unreachable
from orchestrator.launch.docker.runtime import extract_runtime
from orchestrator.launch.image.base import choose_base, probe_python
from orchestrator.launch.image.context import (
    BUILD_REQUIREMENTS,
    DOCKERFILE,
    REQUIREMENTS,
    BuildContext,
    context_root,
    extra_requirements,
)
from orchestrator.launch.image.wheels import ImagePython, fetch_wheels, wheels_cache
from orchestrator.launch.names import DEFAULT_IMAGE, LABEL_CONTEXT, LABEL_VERSION
from orchestrator.launch.oci.store import ImageStore
from orchestrator.launch.owner import this_process
from orchestrator.launch.runtime_folder import find_runtime
from orchestrator.rules.waits import uninterrupted

# Written by Dockerfile.sandbox.
LABEL_BASE = "orchestrator.base"
LABEL_PYTHON = "orchestrator.python"
LABEL_BUILD = "orchestrator.build"  # on the stages only, which have LABEL_STAGE too

# The Engine is silent while it copies a stage: a few hundred megabytes, perhaps on a slow disk.
ENGINE_TIMEOUT_S = 600
# Dockerfile.sandbox says so of a file that was there before the last copy. With fuse-overlayfs it was seen once in
# some twenty builds: one compiled module of 9,000 files was gone, without an error.
LOST = "the Engine lost"
TRIES = 3
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """A sandbox image that exists. `fresh`: it was built by this call, not found up to date."""

    tag: str
    image_id: str
    size_bytes: int
    python: str
    base: str
    fresh: bool
    seconds: float

    @classmethod
    def of(
        cls, tag: str, image_id: str, size_bytes: int, labels: Mapping[str, str], *, fresh: bool, started_s: float
    ) -> BuiltImage:
        """`labels`: the image's. `started_s`: when the call began, by time.monotonic."""
        python, base = labels.get(LABEL_PYTHON, ""), labels.get(LABEL_BASE, "")
        return cls(tag, image_id, size_bytes, python, base, fresh, time.monotonic() - started_s)


async def ensure_image(
    tag: str = DEFAULT_IMAGE,
    *,
    base_image: str | None = None,
    extras: tuple[str, ...] = (),
    force: bool = False,
    progress: Progress,
) -> BuiltImage:
    """The image as this installation builds it. It is built only if the present one differs.

    Raises EnvironmentUnusable. On any exit, cancellation included, no stage of the build is left, and
    `tag` still names a complete image if it did before.
    """
    started = time.monotonic()
    context = await asyncio.to_thread(lambda: BuildContext.read(context_root(), extras))
    engine = await asyncio.to_thread(connect, ENGINE_TIMEOUT_S)
    try:
        before = await asyncio.to_thread(inspect_image, engine, tag)
        fresh = force or before is None or not is_current(_labels(before), context.digest, base_image)
        if fresh:
            await _build(engine, tag, context, base_image, extras, progress)
            if before is not None:
                await asyncio.to_thread(_remove_if_unnamed, engine, before["Id"])
        else:
            progress(f"{tag} is up to date")
        image = await asyncio.to_thread(inspect_image, engine, tag)
        if image is not None and (fresh or find_runtime(ImageStore()) is None):
            await uninterrupted(asyncio.to_thread(extract_runtime, engine, image["Id"]))
    except APIError as error:
        raise EnvironmentUnusable(f"Docker refused: {why_refused(error.explanation or error)}") from None
    except (DockerException, requests.RequestException) as error:
        raise EnvironmentUnusable(why_unreachable(error)) from None
    except OSError as error:
        raise EnvironmentUnusable(
            f"{error.strerror} in {tempfile.gettempdir()}: make room, or set TMPDIR"
        ) from None
    finally:
        engine.close()
    if image is None:
        raise EnvironmentUnusable(
            f"{tag} was removed while it was being built: run `orchestrator image build` again"
        )
    return BuiltImage.of(tag, image["Id"], image["Size"], _labels(image), fresh=fresh, started_s=started)


def is_current(labels: Mapping[str, str], context_digest: str, base_image: str | None) -> bool:
    """Whether an image with `labels` is what this installation would build."""
    if base_image is not None and labels.get(LABEL_BASE) != base_image:
        return False
    return labels.get(LABEL_CONTEXT) == context_digest and labels.get(LABEL_VERSION) == __version__


async def _build(
    engine: docker.APIClient,
    tag: str,
    context: BuildContext,
    base_image: str | None,
    extras: tuple[str, ...],
    progress: Progress,
) -> None:
    base = await choose_base(engine, base_image, progress)
    python = await asyncio.to_thread(probe_python, engine, base)
    progress(f"base {base}, Python {python} on {python.machine}")
    wheels, arguments = await wheels_and_arguments(context, base, python, extras, progress)
    for tries_left in reversed(range(TRIES)):
        try:
            await _build_once(engine, tag, context, wheels, arguments, progress)
            return
        except EnvironmentUnusable as error:
            if LOST not in str(error) or not tries_left:
                raise
            progress(f"{error}; it is built again")


async def wheels_and_arguments(
    context: BuildContext, base: str, python: ImagePython, extras: tuple[str, ...], progress: Progress
) -> tuple[list[Path], dict[str, str]]:
    """What a build needs besides the context, which it is told by Dockerfile.sandbox' build arguments. Raises
    EnvironmentUnusable."""
    wheels: list[Path] = []
    for name in (BUILD_REQUIREMENTS, REQUIREMENTS, *map(extra_requirements, extras)):
        wheels += await fetch_wheels(context[name], python, cache=wheels_cache(), progress=progress)
    return wheels, {
        "BASE_IMAGE": base,
        "EXTRAS": " ".join(extras),
        "CONTEXT_DIGEST": context.digest,
        "RUNTIME_DIGEST": context.runtime_digest,
        "PYTHON_VERSION": str(python),
        "ORCHESTRATOR_VERSION": __version__,
    }


async def _build_once(
    engine: docker.APIClient,
    tag: str,
    context: BuildContext,
    wheels: list[Path],
    arguments: Mapping[str, str],
    progress: Progress,
) -> None:
    build_id = uuid.uuid4().hex
    # For the reaper, if this process is killed.
    owned = {**arguments, "STAGE_OWNER": str(this_process()), "BUILD_ID": build_id}
    loop = asyncio.get_running_loop()
    stop = Event()

    def build() -> None:
        last_line = ""
        try:
            with tempfile.TemporaryFile() as packed:
                context.pack(wheels, packed)
                lines = engine.build(
                    fileobj=packed,
                    custom_context=True,
                    dockerfile=DOCKERFILE,
                    tag=tag,
                    buildargs=owned,
                    network_mode="none",
                    rm=True,
                    forcerm=True,
                    decode=True,
                )
                for line in lines:
                    if stop.is_set():
                        _remove_stage_containers(engine, build_id)
                    if "error" in line:
                        raise EnvironmentUnusable(f"the image could not be built: {why_failed(line, last_line)}")
                    for text in lines_of(line):
                        last_line = text
                        loop.call_soon_threadsafe(progress, text)
        finally:
            _remove_stages(engine, build_id)

    # The thread cleans up, as a second cancel cannot interrupt it. It reads the stream to the end, so that the
    # Engine is done before the stages are removed; a step whose container is removed ends at once.
    building = asyncio.ensure_future(asyncio.to_thread(build))
    try:
        await asyncio.shield(building)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.to_thread(_remove_stage_containers, engine, build_id)
        await asyncio.gather(building, return_exceptions=True)
        raise


def lines_of(line: Mapping[str, Any]) -> list[str]:
    """The lines of one message of the Engine that are worth showing, without colours, ids and whole scripts."""
    texts = [_COLOUR.sub("", text).strip() for text in str(line.get("stream", "")).splitlines()]
    return [
        text.partition(";")[0] if text.startswith("Step ") else text
        for text in texts
        if text and not text.startswith(("--->", "Removing intermediate container"))
    ]


def why_failed(line: Mapping[str, Any], last_line: str) -> str:
    """The Engine's reason; for a failed step its last line, as the Engine's text would be the whole script."""
    error = str(line["error"])
    return why_refused(last_line if last_line and "returned a non-zero code" in error else error)


def _remove_stages(engine: docker.APIClient, build_id: str) -> None:
    """Removes stages in rounds until none can be removed: the Engine keeps an image that another is built on."""
    removed = True
    while removed:
        removed = False
        for image in engine.images(all=True, filters={"label": f"{LABEL_BUILD}={build_id}"}):
            with suppress(APIError):
                engine.remove_image(image["Id"])
                removed = True


def _remove_stage_containers(engine: docker.APIClient, build_id: str) -> None:
    for container in engine.containers(all=True, filters={"label": f"{LABEL_BUILD}={build_id}"}):
        with suppress(APIError):
            engine.remove_container(container["Id"], force=True)


def _remove_if_unnamed(engine: docker.APIClient, image_id: str) -> None:
    """Removes the image that had the tag before, unless it has another name or a sandbox runs in it."""
    with suppress(APIError):
        image = inspect_image(engine, image_id)
        if image is not None and not image["RepoTags"]:
            engine.remove_image(image_id)


def _labels(image: Mapping[str, Any]) -> Mapping[str, str]:
    return image["Config"].get("Labels") or {}
