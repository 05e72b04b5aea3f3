"""Builds tasks' Dockerfiles for the launcher oci: with a Docker Engine where one answers, else with buildah.

Images go to the store of images; what an Engine has built is saved from it.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.docker.client import connect
from orchestrator.launch.image.docker_builder import DockerBuilder, no_space
from orchestrator.launch.image.site import CA_PLACE, Site
from orchestrator.launch.image.task_context import REWRITTEN
from orchestrator.launch.image.task_images import OURS, Builder, Network, failed_step, no_base
from orchestrator.launch.image.without_ca import without_ca
from orchestrator.launch.names import LABEL_TASK, is_gvisor
from orchestrator.launch.oci.build import demand_programs, save_to_store
from orchestrator.launch.oci.buildah import FAILED_STEP, STEP, Buildah, why_failed
from orchestrator.launch.oci.program import USUAL, find_oci_runtime
from orchestrator.launch.oci.stand_in import write_stand_in
from orchestrator.launch.oci.store import ImageStore
from orchestrator.launch.oci.user_namespace import user_namespace
from orchestrator.rules.waits import uninterrupted

_ASK_S = 10  # for the Engine to say that it is there
_NO_LIMIT_S = 365 * 86_400.0  # `TaskImages` has the time limit
_OUTPUT_LINES = 20


async def open_builder(network: Network, site: Site, runtime: str, *, parallel: int) -> Builder:
    """`runtime`: the OCI runtime's name or path. Raises EnvironmentUnusable where nothing here can build."""
    store = ImageStore()
    try:
        (await asyncio.to_thread(connect, _ASK_S)).close()
    except EnvironmentUnusable:
        await asyncio.to_thread(user_namespace)  # or why there can be none
        demand_programs(debian=False)
        # gVisor may keep to itself what a step writes into the root.
        return BuildahBuilder(store, find_oci_runtime(USUAL[0] if is_gvisor(runtime) else runtime), network, site)
    return StoringBuilder(DockerBuilder(network, site, parallel=parallel), store)


class StoringBuilder:
    """Has `builder`, Docker's, build, and saves what it has built."""

    def __init__(self, builder: DockerBuilder, store: ImageStore) -> None:
        self._builder = builder
        self._store = store
        self.base, self.name_in_build = builder.base, builder.name_in_build

    @property
    def first(self) -> str:
        return self._builder.first

    async def find(self, tag: str) -> str | None:
        return await _found(self._store, tag) or await self._saved(tag, await self._builder.find(tag))

    async def build(self, context: IO[bytes], bases: tuple[str, ...], tag: str, labels: Mapping[str, str]) -> str:
        image = await self._saved(tag, await self._builder.build(context, bases, tag, labels))
        assert image is not None
        return image

    async def _saved(self, tag: str, image: str | None) -> str | None:
        if image is not None:
            await uninterrupted(asyncio.to_thread(save_to_store, self._store, tag, image))
        return image


class BuildahBuilder:
    """`runtime`: the path of what runs the steps."""

    def __init__(self, store: ImageStore, runtime: str, network: Network, site: Site) -> None:
        self._store = store
        self._runtime = runtime
        self._network = network
        self._site = site

    @property
    def first(self) -> str:
        return OURS if self._site.ca is None else f"{OURS}\n{self._site.instruction}"

    async def base(self, image: str) -> str:
        if (found := await asyncio.to_thread(self._store.find, image)) is not None:
            return found.digest
        with self._store.draft() as draft:
            buildah = Buildah(draft, self._runtime, lambda line: None, timeout_s=_NO_LIMIT_S)
            try:
                await buildah.begin(image)
            except EnvironmentUnusable as error:
                raise no_base(image, str(error).partition(": ")[2]) from error
            await buildah.save(draft / "image.tar")
            pulled = await uninterrupted(asyncio.to_thread(self._store.put, draft / "image.tar", image))
        return pulled.digest

    def name_in_build(self, image: str) -> str:
        return f"localhost/base-{hashlib.sha256(image.encode()).hexdigest()[:16]}"

    async def find(self, tag: str) -> str | None:
        return await _found(self._store, tag)

    async def build(self, context: IO[bytes], bases: tuple[str, ...], tag: str, labels: Mapping[str, str]) -> str:
        step, output = "its first line", deque[str](maxlen=_OUTPUT_LINES)

        def progress(line: str) -> None:
            nonlocal step
            if match := STEP.match(line):
                step = line[match.end() :]
                output.clear()
            elif not line.startswith("Error: "):
                output.append(line)

        stand_ins: dict[str, tuple[str, ...]] = {}
        with self._store.draft() as draft, ExitStack() as in_use:
            buildah = Buildah(draft, self._runtime, progress, timeout_s=_NO_LIMIT_S)
            for number, base in enumerate(bases):
                image = await asyncio.to_thread(self._store.find, base)
                if image is None:
                    raise EnvironmentUnusable(f"the image {base} was removed meanwhile: try again")
                in_use.enter_context(self._store.using(image))
                saved = draft / f"{number}.tar"
                layer = await asyncio.to_thread(write_stand_in, image, self.name_in_build(base), saved)
                await buildah.stand_in(saved, layer, image.root)
                stand_ins[layer] = image.layers
            made = draft / "image.tar"
            code, tail = await buildah.try_build(context, REWRITTEN, self._options(labels), made)
            if code != 0:
                error = next((line for line in tail if line.startswith("Error: ")), "")
                if no_space("\n".join((error, *output))):
                    raise EnvironmentUnusable(f"no space left on device in {self._store.folder}: make room")
                if failed := FAILED_STEP.search(error):
                    raise failed_step(step, f"exit code {failed[1]}", list(output))
                raise failed_step(step, why_failed(tail) or f"buildah's exit code {code}", [])
            if self._site.ca is not None:
                await uninterrupted(asyncio.to_thread(_clean, made, draft / "clean.tar", tag))
                made = draft / "clean.tar"
            built = await uninterrupted(asyncio.to_thread(self._store.put, made, tag, stand_ins))
        return f"sha256:{built.digest}"

    def _options(self, labels: Mapping[str, str]) -> list[str]:
        # Without a daemon there is no bridge: the host's network is the only one.
        network = "none" if self._network == "none" else "host"
        options = [f"--network={network}", f"--http-proxy={'false' if network == 'none' else 'true'}"]
        options += [f"--label={name}={value}" for name, value in labels.items()]
        if self._site.ca is not None:
            options.append(f"--volume={self._site.ca.absolute()}:{CA_PLACE}:ro")
        return options


def _clean(made: Path, clean: Path, tag: str) -> None:
    """Writes the image without the variables that name authorities. Blocks. Raises OSError."""
    with made.open("rb") as saved, clean.open("wb") as out:
        without_ca(saved, out, tag)


async def _found(store: ImageStore, tag: str) -> str | None:
    """The id of an image that was built as `tag`, which from now on counts as used now."""
    image = await asyncio.to_thread(store.find, tag)
    if image is None or (image.config.get("Labels") or {}).get(LABEL_TASK) != tag.partition(":")[2]:
        return None
    await asyncio.to_thread(store.use, image)
    return f"sha256:{image.digest}"
