"""The image that has the frameworks: the sandbox image, their wheels, and one file of the modules they import."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from docker import DockerClient
from docker.errors import APIError, BuildError, ImageNotFound
from docker.models.images import Image
from docker.utils import kwargs_from_env

from orchestrator.launch.image.base import probe_python
from orchestrator.launch.image.wheels import ImagePython, fetch_wheels, wheels_cache
from orchestrator.launch.names import DEFAULT_IMAGE
from tests.frameworks import clock
from tests.frameworks.programs import PROGRAMS, REQUIREMENTS, SANDBOX_REQUIREMENTS

IMAGE = "rollout-orchestrator-frameworks:1"
WITHOUT_FILE = f"{IMAGE}-without-file"  # of the modules: for comparison
LABEL = "orchestrator.frameworks"  # digest of what the image is made from
BUILD_S = 1800
# As docs/bring-your-own.md and docs/agents.md have it. litellm's import tries three times to fetch prices, with
# pauses, unless it is told not to.
DOCKERFILE = """\
FROM {base} AS frameworks
ENV LITELLM_LOCAL_MODEL_COST_MAP=True
COPY packages /opt/packages
RUN chmod -R a+rX /opt/packages && \\
    python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/packages
FROM frameworks
RUN PYTHONPATH=/opt/sandbox/app python -m sandbox.boot.packed {modules}
"""


async def frameworks_image() -> str:
    """The name of the image. It and WITHOUT_FILE are built if one is missing, or if they were made from other
    requirements or another sandbox image.

    Raises ImageNotFound where there is no sandbox image; EnvironmentUnusable where wheels cannot be fetched.
    """
    modules = dict.fromkeys(module for program in (*PROGRAMS, *clock.PROGRAMS) for module in program.modules)
    dockerfile = DOCKERFILE.format(base=DEFAULT_IMAGE, modules=" ".join(modules))
    requirements = REQUIREMENTS.read_bytes()
    client = DockerClient(**kwargs_from_env(), timeout=BUILD_S)
    try:
        with _alone():
            base = client.images.get(DEFAULT_IMAGE).id
            digest = hashlib.sha256(f"{base}\0{dockerfile}\0".encode() + requirements).hexdigest()
            there = [image for name in (IMAGE, WITHOUT_FILE) for image in client.images.list(name)]
            if len(there) < 2 or there[0].labels.get(LABEL) != digest:
                python = probe_python(client.api, DEFAULT_IMAGE)
                wheels = await fetch_wheels(requirements, python, cache=wheels_cache(), progress=lambda line: None)
                _build(client, dockerfile, wheels, python, digest)
                _remove_unnamed(client, there)
    finally:
        client.close()
    return IMAGE


@contextmanager
def _alone() -> Iterator[None]:
    """Tests and the benchmark may want the image at the same time: one of them builds it."""
    with (Path(tempfile.gettempdir()) / f"rollout-orchestrator-frameworks-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(
    client: DockerClient, dockerfile: str, wheels: tuple[Path, ...], python: ImagePython, digest: str
) -> None:
    with tempfile.TemporaryDirectory(prefix="frameworks") as context:
        (Path(context) / "Dockerfile").write_text(dockerfile)
        _install(_missing(wheels), python, Path(context) / "packages")
        build = partial(client.images.build, path=context, network_mode="none", rm=True, forcerm=True)
        try:
            build(tag=WITHOUT_FILE, target="frameworks")
            build(tag=IMAGE, labels={LABEL: digest})
        except BuildError as error:
            said = "".join(line.get("stream", "") for line in error.build_log)
            raise RuntimeError(f"{error}\n{said[-2000:]}") from None


def _remove_unnamed(client: DockerClient, before: list[Image]) -> None:
    """Those of these that lost their name to the ones just built."""
    for image in before:
        with suppress(ImageNotFound):  # removing an image also removes its nameless parent
            image.reload()
            if not image.tags:
                with suppress(APIError):  # a sandbox may still use the image
                    client.images.remove(str(image.id))


def _missing(wheels: tuple[Path, ...]) -> list[Path]:
    """Those of packages that the sandbox image does not have."""
    listed = re.findall(r"^([\w.-]+)==", SANDBOX_REQUIREMENTS.read_text(), re.MULTILINE)
    there = {name.replace("-", "_").lower() for name in listed}
    return [wheel for wheel in wheels if wheel.name.partition("-")[0].lower() not in there]


def _install(wheels: list[Path], python: ImagePython, target: Path) -> None:
    """For the image's Python, which need not be this one."""
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    argv += ["--target", str(target), "--only-binary", ":all:", "--python-version", str(python)]
    argv += ["--implementation", "cp"]
    argv += [part for abi in (python.tag, "abi3", "none") for part in ("--abi", abi)]
    argv += [part for platform in python.platforms for part in ("--platform", platform)]
    subprocess.run([*argv, *map(str, wheels)], check=True, timeout=BUILD_S)
