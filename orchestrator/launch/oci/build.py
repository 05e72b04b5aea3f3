"""Makes the sandbox image for the store: saved from a Docker Engine, or, where none answers, without one.

Without one, `recipe` carries Dockerfile.sandbox out on a base of Debian packages. Wheels and build arguments are
those that an Engine would get (`launch/image`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import stat
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import requests
from docker.errors import DockerException

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.docker.client import connect, why_unreachable
from orchestrator.launch.image.base import DEBIAN_BASE, PROBE, parse_probe
from orchestrator.launch.image.build import (
    ENGINE_TIMEOUT_S,
    LABEL_BASE,
    LABEL_PYTHON,
    BuiltImage,
    Progress,
    ensure_image,
    is_current,
    wheels_and_arguments,
)
from orchestrator.launch.image.context import DOCKERFILE, BuildContext, context_root
from orchestrator.launch.image.debian import debian_root
from orchestrator.launch.image.wheels import ImagePython
from orchestrator.launch.names import is_gvisor, is_path
from orchestrator.launch.oci.archive import Archive, unpack_root
from orchestrator.launch.oci.program import USUAL, find_runtime
from orchestrator.launch.oci.recipe import Files, Recipe, Stage
from orchestrator.launch.oci.steps import Steps
from orchestrator.launch.oci.store import ROOT, ImageStore, StoredImage
from orchestrator.launch.oci.user_namespace import user_namespace
from orchestrator.waits import uninterrupted

_ASK_S = 10  # for the Engine to say that it is there
_CHUNK_BYTES = 1 << 20


async def ensure_stored(
    tag: str,
    *,
    store: ImageStore,
    runtime: str,
    base_image: str | None = None,
    extras: tuple[str, ...] = (),
    force: bool = False,
    progress: Progress,
) -> BuiltImage:
    """The image as this installation builds it, in the store. It is built only if the present one differs.

    `runtime`: the OCI runtime's name or path. `base_image` may be the path of an image's file or folder; then no
    Engine is asked. Raises EnvironmentUnusable. On any exit, cancellation included, nothing of the build is left,
    and `tag` still names a complete image if it did before.
    """
    if is_path(tag):
        raise EnvironmentUnusable(f"{tag} is a path: an image that is built needs a name")
    if base_image is None or not is_path(base_image):
        try:
            (await asyncio.to_thread(connect, _ASK_S)).close()
        except EnvironmentUnusable as error:
            progress(f"{error}; going on without Docker")
        else:
            built = await ensure_image(tag, base_image=base_image, extras=extras, force=force, progress=progress)
            await uninterrupted(asyncio.to_thread(_save, store, built, progress))
            return built
    started = time.monotonic()
    context = await asyncio.to_thread(lambda: BuildContext.read(context_root(), extras))
    image = store.find(tag)
    fresh = force or image is None or not is_current(_labels(image), context.digest, base_image)
    if image is not None and not fresh:
        progress(f"{tag} is up to date")
    else:
        image = await _build(tag, store, runtime, context, base_image, extras, progress)
    return BuiltImage(
        tag=tag,
        image_id=f"sha256:{image.digest}",
        size_bytes=image.size_bytes,
        python=_labels(image).get(LABEL_PYTHON, ""),
        base=_labels(image).get(LABEL_BASE, ""),
        fresh=fresh,
        seconds=time.monotonic() - started,
    )


def _save(store: ImageStore, built: BuiltImage, progress: Progress) -> None:
    """Puts what `docker save` writes into the store, unless it is there."""
    there = store.find(built.tag)
    if there is not None and built.image_id == f"sha256:{there.digest}":
        return
    try:
        with store.draft() as draft, closing(connect(ENGINE_TIMEOUT_S)) as engine:
            saved = draft / "saved.tar"
            with saved.open("wb") as file:
                file.writelines(engine.get_image(built.image_id, chunk_size=_CHUNK_BYTES))
            store.put(saved, built.tag)
    except (DockerException, requests.RequestException) as error:
        raise EnvironmentUnusable(why_unreachable(error)) from None


async def _build(
    tag: str,
    store: ImageStore,
    runtime: str,
    context: BuildContext,
    base_image: str | None,
    extras: tuple[str, ...],
    progress: Progress,
) -> StoredImage:
    if base_image is not None and not is_path(base_image):
        raise EnvironmentUnusable(
            f"base image {base_image} cannot be pulled without a Docker Engine: where there is one, run "
            f"`docker save -o base.tar {base_image}`, and give --base-image ./base.tar here"
        )
    user_namespace()  # or why there can be none
    # gVisor may keep to itself what a step writes into the root.
    command = [find_runtime(USUAL[0] if is_gvisor(runtime) else runtime)]
    name = base_image or DEBIAN_BASE
    with store.draft() as scratch, store.draft() as draft:
        tar = None if base_image else await _debian(store, scratch, progress)
        base = await uninterrupted(asyncio.to_thread(_unpacked, tar, name, scratch / "base"))
        async with Steps(command, scratch) as steps:
            python = await _probe_python(steps, name, base)
            progress(f"base {name}, Python {python} on {python.machine}")
            wheels, arguments = await wheels_and_arguments(context, name, python, extras, progress)
            files: Files = {**dict(context.files), **{f"wheels/{wheel.name}": wheel for wheel in wheels}}
            recipe = Recipe(steps, scratch, base, files, arguments)
            stage = await recipe.carry_out(context[DOCKERFILE].decode(), progress)
        stage.root.rename(draft / ROOT)
        return await uninterrupted(asyncio.to_thread(_keep, store, draft, stage.config, tag))


async def _debian(store: ImageStore, scratch: Path, progress: Progress) -> Path:
    """The tar of a Debian with Python, made once."""
    tar = store.base(DEBIAN_BASE)
    if not tar.exists():
        await debian_root(scratch / "root.tar", progress, rootless=user_namespace() is not None)
        tar.parent.mkdir(exist_ok=True)
        (scratch / "root.tar").rename(tar)
    return tar


def _unpacked(tar: Path | None, name: str, root: Path) -> Stage:
    """The base in the new folder `root`: from the tar of a root file system, else from the image's file `name`."""
    root.mkdir()
    if tar is not None:
        unpack_root(tar, root)
        return Stage(root)
    with Archive(Path(name).expanduser()) as found:
        found.unpack(root)
    return Stage.of(root, found.config)


async def _probe_python(steps: Steps, name: str, base: Stage) -> ImagePython:
    """Raises EnvironmentUnusable."""
    argv = ["/bin/sh", "-c", 'exec python3 -c "$1"', "sh", PROBE]
    _, said = await steps.run(base.root, argv, base.variables, read_only=True)
    return parse_probe(name, said.strip().rpartition("\n")[2].encode())


def _keep(store: ImageStore, draft: Path, config: Mapping[str, Any], name: str) -> StoredImage:
    digest, size = fingerprint(draft / ROOT, config)
    return store.keep(draft, digest, config, size, name)


def fingerprint(root: Path, config: Mapping[str, Any]) -> tuple[str, int]:
    """(SHA-256 of the configuration and of all that matters in a folder, the size of its files in bytes).

    Times do not matter, nor which names are links to the same file: two builds of the same content are one image.
    """
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    seen: set[int] = set()
    size = 0
    for folder, folders, names in os.walk(os.fsencode(root)):
        folders.sort()
        for path in (os.path.join(folder, name) for name in sorted([*folders, *names])):
            found = os.lstat(path)
            digest.update(os.path.relpath(path, os.fsencode(root)))
            digest.update(f"\0{found.st_mode:o} {found.st_uid}:{found.st_gid}\0".encode())
            if stat.S_ISLNK(found.st_mode):
                digest.update(os.readlink(path))
            elif stat.S_ISREG(found.st_mode):
                with open(path, "rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
                size += found.st_size if found.st_ino not in seen else 0
                seen.add(found.st_ino)
            digest.update(b"\0")
    return digest.hexdigest(), size


def _labels(image: StoredImage) -> Mapping[str, str]:
    return image.config.get("Labels") or {}
