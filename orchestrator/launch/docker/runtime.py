"""The runtime of sandboxes where a Docker Engine can mount it.

It is the folder of this machine if the Engine sees it. An Engine elsewhere fills a volume of its own, once: the
first container that mounts an empty volume fills it with what its image has there. That container stays, not
started: it says that the volume is complete, and keeps it from being pruned.
"""

import secrets
import tarfile
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import docker
import requests
from docker.errors import APIError, DockerException, NotFound

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.docker.client import connect, why_refused, why_unreachable
from orchestrator.launch.docker.request import VOLUME
from orchestrator.launch.names import LABEL_OWNER, LABEL_PROJECT, LABEL_RUNTIME, PROJECT, RUNTIME_MOUNT
from orchestrator.launch.oci.store import ImageStore
from orchestrator.launch.owner import this_process
from orchestrator.launch.runtime_folder import NOT_HERE, RuntimeFolder, find_runtime, our_context, put_runtime

_TIMEOUT_S = 600
_NOT_SEEN = "bind source path does not exist"  # the Engine's words
_NOT_A_PROGRAM = ["-"]  # these containers are never started


def engine_runtime(image: str) -> str:
    """The path, on the Engine's machine, of the folder that sandboxes mount. `image`: any that the Engine has.
    Blocks. Raises EnvironmentUnusable."""
    try:
        with closing(connect(_TIMEOUT_S)) as engine:
            folder = find_runtime(ImageStore()) or extract_runtime(engine, _own_image(engine))
            return str(folder.path) if _sees(engine, image, folder.path) else _filled_volume(engine, folder.digest)
    except APIError as error:
        reason = why_refused(error.explanation or error)
        raise EnvironmentUnusable(reason if reason.startswith("Docker") else f"Docker refused: {reason}") from None
    except (DockerException, requests.RequestException) as error:
        raise EnvironmentUnusable(why_unreachable(error)) from None


def extract_runtime(engine: docker.APIClient, image: str) -> RuntimeFolder:
    """Copies it out of an image that was built of these sources. Blocks. Raises EnvironmentUnusable,
    DockerException."""

    def fill(target: Path) -> None:
        container = never_started(engine, image)
        try:
            packed = target.with_suffix(".tar")
            with packed.open("wb") as file:
                file.writelines(engine.get_archive(container, RUNTIME_MOUNT)[0])
        finally:
            with suppress(DockerException):
                engine.remove_container(container, force=True)
        with tarfile.open(packed) as tar:
            tar.extractall(unpacked := target.with_suffix(".unpacked"), filter="tar")
        (unpacked / RUNTIME_MOUNT.rpartition("/")[2]).rename(target)

    return put_runtime(ImageStore(), fill)


def never_started(engine: docker.APIClient, image: str, *mounts: Mapping[str, Any]) -> str:
    """The id of a container that shows an image's files, and what the Engine can mount. Remove it. Blocks."""
    return _create(engine, image, f"files-{secrets.token_hex(8)}", {LABEL_OWNER: str(this_process())}, *mounts)


def _own_image(engine: docker.APIClient) -> str:
    """The first image of these sources: later ones were made from it."""
    images = engine.images(filters={"label": f"{LABEL_RUNTIME}={our_context()}"})
    if not images:
        raise EnvironmentUnusable(NOT_HERE.format(""))
    return str(min(images, key=lambda image: image["Created"])["Id"])


def _sees(engine: docker.APIClient, image: str, folder: Path) -> bool:
    mount = {"Type": "bind", "Source": str(folder), "Target": RUNTIME_MOUNT, "ReadOnly": True}
    try:
        container = never_started(engine, image, mount)
    except APIError as error:
        if _NOT_SEEN in str(error.explanation):
            return False
        raise
    engine.remove_container(container, force=True)
    return True


def _filled_volume(engine: docker.APIClient, digest: str) -> str:
    name = f"{VOLUME}{digest[:16]}"
    try:
        engine.inspect_container(name)
    except NotFound:
        image = _own_image(engine)
        with suppress(NotFound):
            engine.remove_volume(name)  # somebody was interrupted
        engine.create_volume(name, labels={LABEL_PROJECT: PROJECT})
        _create(engine, image, name, {}, {"Type": "volume", "Source": name, "Target": RUNTIME_MOUNT})
    return str(engine.inspect_volume(name)["Mountpoint"])


def _create(
    engine: docker.APIClient, image: str, name: str, labels: Mapping[str, str], *mounts: Mapping[str, Any]
) -> str:
    config = {
        "Image": image,
        "Cmd": _NOT_A_PROGRAM,
        "Labels": {LABEL_PROJECT: PROJECT, **labels},
        "NetworkDisabled": True,
        "HostConfig": {"Mounts": list(mounts)},
    }
    return str(engine.create_container_from_config(config, name)["Id"])  # type: ignore[no-untyped-call]
