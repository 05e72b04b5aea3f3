"""Builds tasks' Dockerfiles with a Docker Engine: its classic builder, which every Engine has.

The Engine ends a build whose client hangs up, and removes its container. So a killed orchestrator leaves none, and
a build is cancelled by closing its connection. Layers of a build that did not come to its end stay, nameless, as
they do with `docker build`: the next try uses them, and `orchestrator cleanup` removes them.
"""

import asyncio
import hashlib
import io
import re
import socket
import tarfile
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import IO, Any

from docker.errors import APIError

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.docker.calls import UNREACHABLE
from orchestrator.launch.docker.client import (
    connect,
    inspect_image,
    is_lasting,
    one_line,
    why_refused,
    why_unreachable,
)
from orchestrator.launch.image.base import pull
from orchestrator.launch.image.build import lines_of
from orchestrator.launch.image.site import CA_PLACE, Site
from orchestrator.launch.image.task_context import REWRITTEN
from orchestrator.launch.image.task_images import OURS, Network, failed_step, no_base
from orchestrator.launch.image.without_ca import without_ca
from orchestrator.launch.names import LABEL_PROJECT, LABEL_TASK, PROJECT, TASK_REPOSITORY
from orchestrator.rules.waits import uninterrupted

_SETTLE_S = 20.0  # for the Engine to end a build whose client hung up
_SILENCE_S = 86_400  # a step may print nothing: `TaskImages` has the time limit
_FAILED = re.compile(r"returned a non-zero code: (\d+)")
_NO_SPACE = re.compile("no space left on device|disk quota exceeded", re.IGNORECASE)
_OUTPUT_LINES = 20
_CHUNK_BYTES = 1 << 20


class DockerBuilder:
    """`network`: of the steps of builds. `site`: what they are told of the operator's network."""

    def __init__(self, network: Network, site: Site, *, parallel: int) -> None:
        self._network = network
        self._site = site
        # Builds take minutes each: the threads that all share stay free.
        self._threads = ThreadPoolExecutor(parallel, thread_name_prefix="build")
        self._ca = site.certificates() if site.ca is not None and network != "none" else None

    @property
    def first(self) -> str:
        if self._ca is None:
            return OURS
        # From an image of its own: what lies in the context, a `COPY .` would take along.
        copy = f"COPY --from={TASK_REPOSITORY}:{_ca_tag(self._ca)} {CA_PLACE} {CA_PLACE}"
        return f"{OURS}\n{copy}\n{self._site.instruction}"

    async def base(self, image: str) -> str:
        with _engine_away(), closing(await asyncio.to_thread(connect, _SILENCE_S)) as engine:
            found = await asyncio.to_thread(inspect_image, engine, image)
            if found is None:
                try:
                    why = await pull(engine, image, lambda line: None)
                except APIError as error:
                    why = one_line(str(error.explanation or error))
                if why or (found := await asyncio.to_thread(inspect_image, engine, image)) is None:
                    raise no_base(image, why or "it was removed meanwhile")
            return str(found["Id"])

    def name_in_build(self, image: str) -> str:
        return image

    async def find(self, tag: str) -> str | None:
        with _engine_away():
            return await asyncio.to_thread(_found, tag)

    async def build(self, context: IO[bytes], bases: tuple[str, ...], tag: str, labels: Mapping[str, str]) -> str:
        if self._ca is not None:
            await uninterrupted(asyncio.to_thread(_import_ca, self._ca))
        connection = _Connection()
        options = {
            "fileobj": context,
            "custom_context": True,
            "dockerfile": REWRITTEN,
            "tag": tag if self._ca is None else None,
            "labels": dict(labels),
            "buildargs": dict(self._site.proxies),
            "network_mode": None if self._network == "default" else self._network,
            "use_config_proxy": False,
            "rm": True,
            "forcerm": True,
        }
        building = asyncio.get_running_loop().run_in_executor(self._threads, _build, connection, options)
        # Of a build that was cancelled nobody asks for the error.
        building.add_done_callback(lambda future: future.cancelled() or future.exception())
        try:
            image = await asyncio.shield(building)
        except asyncio.CancelledError:
            await uninterrupted(asyncio.to_thread(connection.hang_up))
            await uninterrupted(asyncio.wait([building], timeout=_SETTLE_S))
            raise
        if self._ca is not None:
            await uninterrupted(asyncio.to_thread(_without_ca, image, tag))
        if (found := await self.find(tag)) is None:
            raise EnvironmentUnusable(f"the image {tag} was removed as soon as it was built: try again")
        return found


class _Connection:
    """The connection of a build, which another thread may close."""

    def __init__(self) -> None:
        self.hung_up = False
        self._response: Any = None

    def opened(self, response: Any, *_: object, **__: object) -> None:
        self._response = response
        if self.hung_up:
            self.hang_up()

    def hang_up(self) -> None:
        self.hung_up = True
        connection = getattr(getattr(self._response, "raw", None), "connection", None)
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)


def _build(connection: _Connection, options: Mapping[str, Any]) -> str:
    """The image's id. Raises BuildError, EnvironmentUnusable. What a build that is hung up raises is nobody's
    concern."""
    with _engine_away(), closing(connect(_SILENCE_S)) as engine:
        engine.hooks["response"].append(connection.opened)
        step, image, output = "its first line", "", deque[str](maxlen=_OUTPUT_LINES)
        try:
            for message in engine.build(**options, decode=True):
                if "error" in message:
                    raise _failure(str(message["error"]), step, list(output))
                image = str((message.get("aux") or {}).get("ID") or image)
                for line in lines_of(message):
                    if line.startswith("Step "):
                        step = line.partition(" : ")[2]
                        output.clear()
                    else:
                        output.append(line)
        except APIError as error:  # before the first step
            raise _failure(str(error.explanation or error), step, []) from None
        return image


def _failure(error: str, step: str, output: list[str]) -> Exception:
    """BuildError, or EnvironmentUnusable where the machine is at fault: then every build would fail."""
    said = "\n".join((error, *output))
    if no_space(said):
        return EnvironmentUnusable(why_refused("no space left on device"))
    if match := _FAILED.search(error):
        return failed_step(step, f"exit code {match[1]}", output)
    if is_lasting(error):
        return EnvironmentUnusable(why_refused(error))
    return failed_step(step, one_line(error), [])


def no_space(text: str) -> bool:
    """Whether a full disk made a build fail: then the next one will fail, too."""
    return _NO_SPACE.search(text) is not None


def _ca_tag(certificates: bytes) -> str:
    return f"ca-{hashlib.sha256(certificates).hexdigest()[:29]}"


def _import_ca(certificates: bytes) -> None:
    """Makes the image that holds the file of authorities alone, unless it is there."""
    tag, root = _ca_tag(certificates), io.BytesIO()
    with _engine_away(), closing(connect(_SILENCE_S)) as engine:
        if inspect_image(engine, f"{TASK_REPOSITORY}:{tag}") is not None:
            return
        with tarfile.open(fileobj=root, mode="w") as tar:
            entry = tarfile.TarInfo(CA_PLACE.removeprefix("/"))
            entry.size, entry.mode = len(certificates), 0o644
            tar.addfile(entry, io.BytesIO(certificates))
        labels = f"LABEL {LABEL_PROJECT}={PROJECT} {LABEL_TASK}={tag}"
        engine.import_image_from_data(root.getvalue(), repository=TASK_REPOSITORY, tag=tag, changes=[labels])


def _without_ca(image: str, tag: str) -> None:
    """Gives the image its name without our file of authorities, and removes the one with it. Raises OSError,
    EnvironmentUnusable."""
    with (
        _engine_away(),
        closing(connect(_SILENCE_S)) as engine,
        tempfile.TemporaryFile(prefix="orchestrator-image-") as saved,
        tempfile.TemporaryFile(prefix="orchestrator-image-") as cleaned,
    ):
        saved.writelines(engine.get_image(image, chunk_size=_CHUNK_BYTES))
        saved.seek(0)
        try:
            without_ca(saved, cleaned, tag)
        except (ValueError, LookupError, tarfile.TarError) as error:
            raise EnvironmentUnusable(f"Docker saves images in an unknown form: {one_line(str(error))}") from error
        for message in engine.load_image(cleaned):  # type: ignore[no-untyped-call]
            if "error" in message:
                raise EnvironmentUnusable(why_refused(str(message["error"])))
        with suppress(APIError):  # other builds go on with its layers
            engine.remove_image(image)


def _found(tag: str) -> str | None:
    """The id of an image that was built as `tag`, which from now on counts as used now."""
    with closing(connect(_SILENCE_S)) as engine:
        image = inspect_image(engine, tag)
        repository, _, digest = tag.partition(":")
        if image is None or (image["Config"].get("Labels") or {}).get(LABEL_TASK) != digest:
            return None
        engine.tag(image["Id"], repository, digest)  # the Engine keeps when: Metadata.LastTagTime
        return str(image["Id"])


@contextmanager
def _engine_away() -> Iterator[None]:
    """An Engine that cannot be reached in this block is an EnvironmentUnusable."""
    try:
        yield
    except UNREACHABLE as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise EnvironmentUnusable(why_unreachable(error)) from error
