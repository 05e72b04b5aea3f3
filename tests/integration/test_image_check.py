"""Images of one's own: made from ours by a small Dockerfile, and what `image check` says of good and broken."""

from __future__ import annotations

import asyncio
import io
import json
import re
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import docker
import pytest
from docker.errors import APIError
from docker.utils import kwargs_from_env

from orchestrator.launch.docker.request import VOLUME
from orchestrator.launch.image.build import ensure_image
from orchestrator.launch.names import DEFAULT_IMAGE, LABEL_PROJECT, PROJECT

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

Build = Callable[..., str]
GOOD = f"""\
FROM {DEFAULT_IMAGE}
COPY packages /opt/packages
RUN chmod -R a+rX /opt/packages && python -m compileall -q /opt/packages
"""
ODD = f"""\
FROM {DEFAULT_IMAGE}
RUN mkdir /data && chmod u+s /usr/bin/env
VOLUME /data
ENV PYTHONPATH=/elsewhere LD_PRELOAD=/lib/none.so PYTHONHOME=/usr
USER nobody
HEALTHCHECK CMD true
ENTRYPOINT ["python", "-m", "http.server"]
"""
UNREADABLE = f"""\
FROM {DEFAULT_IMAGE}
COPY packages /opt/packages
RUN chmod 0600 /opt/packages/greeting.py
"""
OLD = f"""\
FROM {DEFAULT_IMAGE}
COPY packages /opt/sandbox/packages
"""
IN_THE_WAY = f"""\
FROM {DEFAULT_IMAGE}
RUN rm -rf /tmp && ln -s /usr /tmp
"""


@pytest.fixture(scope="module")
def build() -> Iterator[Build]:
    """Builds a Dockerfile beside a folder `packages` with one module; the images are removed afterwards."""
    asyncio.run(ensure_image(progress=print))
    engine, tags = docker.from_env(timeout=600), []

    def make(dockerfile: str) -> str:
        files = {"Dockerfile": dockerfile, "packages/greeting.py": "def hello():\n    return 'from a package'\n"}
        context = io.BytesIO()
        with tarfile.open(fileobj=context, mode="w") as tar:
            for name, text in files.items():
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(text), 0o600  # as a careful umask leaves it
                tar.addfile(entry, io.BytesIO(text.encode()))
        context.seek(0)
        tags.append(f"test-{uuid.uuid4().hex[:12]}:1")
        engine.images.build(fileobj=context, custom_context=True, tag=tags[-1], network_mode="none", rm=True)
        return tags[-1]

    yield make
    for tag in tags:
        engine.images.remove(tag, force=True)
    engine.close()


def checked(image: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from orchestrator.cli import main; sys.exit(main())"]
    return subprocess.run(
        [*command, "image", "check", image], capture_output=True, text=True, timeout=300, check=False
    )


def check(image: str) -> tuple[int, str]:
    ended = checked(image)
    assert ended.stderr == ""
    return ended.returncode, ended.stdout


def changed(image: str, config: dict[str, str]) -> str:
    """The same image with another configuration, under the same name."""
    with closing(docker.APIClient(**kwargs_from_env())) as engine:
        files = {}
        with tarfile.open(fileobj=io.BytesIO(b"".join(engine.get_image(image)))) as saved:
            for member in saved:
                if (file := saved.extractfile(member)) is not None:
                    files[member.name] = file.read()
        manifest = json.loads(files["manifest.json"])
        files[manifest[0]["Config"]] = json.dumps(json.loads(files[manifest[0]["Config"]]) | config).encode()
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        engine.remove_image(image)
        for line in engine.load_image(packed.getvalue()):
            assert "error" not in line, line
    return image


def remove_volumes() -> None:
    """Those of images that the test has made."""
    with closing(docker.APIClient(**kwargs_from_env())) as engine:
        for volume in engine.volumes(filters={"label": f"{LABEL_PROJECT}={PROJECT}"})["Volumes"]:
            if volume["Name"].startswith(f"{VOLUME}image-"):
                with suppress(APIError):  # another test uses it
                    engine.remove_volume(volume["Name"])


def wrong(said: str) -> set[str]:
    return {line[7:].split("  ")[0] for line in said.splitlines() if line.startswith("WRONG")}


@pytest.mark.slow
def test_an_image_with_more_packages_can_serve(build: Build) -> None:
    image = build(GOOD)
    code, said = check(image)
    assert (code, wrong(said)) == (0, set()), said
    assert "started, confined and ready" in said
    assert said.endswith(f"{image} can serve\n")


@pytest.mark.slow
def test_what_is_not_used_of_an_image_is_told(build: Build) -> None:
    code, said = check(build(ODD))
    assert (code, wrong(said)) == (0, set()), said
    unused = r"Entrypoint, Volumes, Healthcheck, User \(but with a writable root\)"
    assert re.search(rf"not used of it +{unused}\n", said), said
    assert "the agent's, without LD_PRELOAD, PYTHONHOME" in said
    remove_volumes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dockerfile", "name", "cure"),
    [
        (UNREADABLE, "packages", "chmod -R a+rX /opt/packages"),
        (OLD, "packages", "packages go to /opt/packages now"),
        (IN_THE_WAY, "sandbox", "may have no links"),
    ],
    ids=["unreadable", "old", "in the way"],
)
def test_a_broken_image_is_told_what_to_do(build: Build, dockerfile: str, name: str, cure: str) -> None:
    code, said = check(build(dockerfile))
    assert (code, wrong(said)) == (1, {name}), said
    assert said.count("  -> ") == 1
    assert cure in said


def test_an_image_of_another_machine_or_without_files_is_refused_in_one_line(build: Build) -> None:
    for dockerfile, change, words in (
        ("FROM scratch\nLABEL a=b\n", {}, "has no root file system"),
        (
            "FROM scratch\nCOPY packages /x\n",
            {"architecture": "s390x"},
            "is for linux/s390x, this machine is linux/",
        ),
    ):
        image = changed(build(dockerfile), change) if change else build(dockerfile)
        ended = checked(image)
        assert ended.returncode == 3, ended
        assert words in ended.stderr
        assert ended.stderr.count("\n") == 1
