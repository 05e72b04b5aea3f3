"""Makes the sandbox image for the store: saved from a Docker Engine, or, where none answers, without one.

Without one, buildah carries Dockerfile.sandbox out on a base of Debian packages. Wheels and build arguments are
those that an Engine would get (`launch/image`).
"""

import asyncio
import shutil
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import requests
from docker.errors import DockerException

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.docker.client import connect, why_unreachable
from orchestrator.launch.image.base import DEBIAN_BASE, PROBE, parse_probe
from orchestrator.launch.image.build import (
    ENGINE_TIMEOUT_S,
    BuiltImage,
    Progress,
    ensure_image,
    is_current,
    wheels_and_arguments,
)
from orchestrator.launch.image.context import DOCKERFILE, BuildContext, context_root
from orchestrator.launch.image.debian import debian_root
from orchestrator.launch.names import is_gvisor, is_path
from orchestrator.launch.oci.archive import Archive
from orchestrator.launch.oci.buildah import Buildah, missing_packages
from orchestrator.launch.oci.layers import Layers
from orchestrator.launch.oci.program import USUAL, find_oci_runtime
from orchestrator.launch.oci.store import ImageStore, StoredImage
from orchestrator.launch.oci.user_namespace import user_namespace
from orchestrator.launch.runtime_folder import stored_runtime
from orchestrator.rules.waits import uninterrupted

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
            await uninterrupted(asyncio.to_thread(save_to_store, store, built.tag, built.image_id))
            return built
    started = time.monotonic()
    context = await asyncio.to_thread(lambda: BuildContext.read(context_root(), extras))
    image = store.find(tag)
    fresh = force or image is None or not is_current(_labels(image), context.digest, base_image)
    if image is not None and not fresh:
        progress(f"{tag} is up to date")
    else:
        image = await _build(tag, store, runtime, context, base_image, extras, progress)
    await asyncio.to_thread(stored_runtime, store)
    image_id = f"sha256:{image.digest}"
    return BuiltImage.of(tag, image_id, image.size_bytes, _labels(image), fresh=fresh, started_s=started)


def save_to_store(store: ImageStore, tag: str, image_id: str) -> None:
    """Puts what `docker save` writes into the store, unless it is there. Blocks. Raises EnvironmentUnusable."""
    there = store.find(tag)
    if there is not None and image_id == f"sha256:{there.digest}":
        return
    try:
        with store.draft() as draft, closing(connect(ENGINE_TIMEOUT_S)) as engine:
            saved = draft / "saved.tar"
            with saved.open("wb") as file:
                file.writelines(engine.get_image(image_id, chunk_size=_CHUNK_BYTES))
            store.put(saved, tag)
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
    user_namespace()  # or why there can be none
    # gVisor may keep to itself what a step writes into the root.
    program = find_oci_runtime(USUAL[0] if is_gvisor(runtime) else runtime)
    demand_programs(debian=base_image is None and not store.base(DEBIAN_BASE).exists())
    name = base_image or DEBIAN_BASE
    with store.draft() as draft:
        builder = Buildah(draft, program, progress)
        if base_image is None:
            await builder.begin(None, await _debian(store, draft, progress))
        elif is_path(base_image):
            unpacking = asyncio.to_thread(_unpacked, base_image, draft / "base")
            root, environment = await uninterrupted(unpacking)
            await builder.begin(None, root, [f"--env={entry}" for entry in environment])
        else:
            try:
                await builder.begin(base_image)
            except EnvironmentUnusable as error:
                raise EnvironmentUnusable(
                    f"base image {base_image} cannot be pulled: {str(error).partition(': ')[2]}; where Docker has "
                    f"it, run `docker save -o base.tar {base_image}`, and give --base-image ./base.tar here"
                ) from error
        probed = await builder.run(["/bin/sh", "-c", 'exec python3 -c "$1"', "sh", PROBE])
        python = parse_probe(name, probed.encode())
        progress(f"base {name}, Python {python} on {python.machine}")
        wheels, arguments = await wheels_and_arguments(context, name, python, extras, progress)
        with (draft / "context.tar").open("w+b") as packed:
            await uninterrupted(asyncio.to_thread(context.pack, wheels, packed))
            await builder.build(packed, DOCKERFILE, arguments, draft / "image.tar")
        return await uninterrupted(asyncio.to_thread(store.put, draft / "image.tar", tag))


def demand_programs(*, debian: bool) -> None:
    """`debian`: a base is made of its packages. Raises EnvironmentUnusable, which names the command that helps."""
    missing = missing_packages()
    if debian and shutil.which("mmdebstrap") is None:
        missing = ["mmdebstrap", "debian-archive-keyring", *missing]
    if missing:
        raise EnvironmentUnusable(
            f"making an image without Docker needs {' and '.join(missing)}: "
            f"run `sudo apt-get install -y {' '.join(missing)}`"
        )


async def _debian(store: ImageStore, scratch: Path, progress: Progress) -> Path:
    """The tar of a Debian with Python, made once."""
    tar = store.base(DEBIAN_BASE)
    if not tar.exists():
        await debian_root(scratch / "root.tar", progress, rootless=user_namespace() is not None)
        tar.parent.mkdir(mode=0o700, exist_ok=True)
        (scratch / "root.tar").rename(tar)
    return tar


def _unpacked(name: str, root: Path) -> tuple[Path, list[str]]:
    """The files of the image in the file or folder `name`, and its environment."""
    root.mkdir(mode=0o755)
    with Archive(Path(name).expanduser()) as image_file:
        image_file.unpack(root, Layers(root.with_name("layers")), root.with_name("layer"))
    return root, image_file.config["Env"]


def _labels(image: StoredImage) -> Mapping[str, str]:
    return image.config.get("Labels") or {}
