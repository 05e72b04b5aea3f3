"""Images of one's own: made from ours by a small Dockerfile, and what `image check` says of good and broken."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Callable, Iterator

import docker
import pytest

from orchestrator.launch.image.build import ensure_image
from orchestrator.launch.names import DEFAULT_IMAGE

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

Build = Callable[..., str]
GOOD = f"""\
FROM {DEFAULT_IMAGE}
COPY packages /opt/sandbox/packages
RUN chmod -R a+rX /opt/sandbox/packages && python -m compileall -q /opt/sandbox/packages
"""
TOLD = f"""\
FROM {DEFAULT_IMAGE}
VOLUME /data
ENV PYTHONPATH=/elsewhere
ENTRYPOINT ["python", "-m", "http.server"]
"""
INSIDE = f"""\
FROM {DEFAULT_IMAGE}
COPY packages /opt/sandbox/packages
RUN chmod 0600 /opt/sandbox/packages/greeting.py && chmod 0755 /run/channel && rmdir /workspace \\
 && chmod u+s /usr/bin/env && rm /opt/sandbox/app/sandbox/runner/__pycache__/wire.* \\
 && sed -i 's/^CONTRACT = .*/CONTRACT = 99/' /opt/sandbox/app/sandbox/runner/wire.py
"""
SHADOWED = f"""\
FROM {DEFAULT_IMAGE}
RUN echo 'raise RuntimeError("another grpc")' > /opt/sandbox/app/grpc.py
"""
NOT_STARTING = f"""\
FROM {DEFAULT_IMAGE}
RUN rm /opt/sandbox/app/sandbox/runner/__pycache__/runner.* \\
 && echo 'raise SystemExit("a broken runner")' > /opt/sandbox/app/sandbox/runner/runner.py
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


def check(image: str) -> tuple[int, str]:
    command = [sys.executable, "-c", "import sys; from orchestrator.cli import main; sys.exit(main())"]
    ended = subprocess.run(
        [*command, "image", "check", image], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.stderr == ""
    return ended.returncode, ended.stdout


def wrong(said: str) -> set[str]:
    return {line[7:].split("  ")[0] for line in said.splitlines() if line.startswith("WRONG")}


def test_an_image_with_more_packages_can_serve(build: Build) -> None:
    image = build(GOOD)
    code, said = check(image)
    assert (code, wrong(said)) == (0, set()), said
    assert "started, confined and ready" in said
    assert said.endswith(f"{image} can serve\n")


@pytest.mark.long
@pytest.mark.parametrize(
    ("dockerfile", "names"),
    [
        (TOLD, {"entry point", "volumes", "PYTHONPATH", "packages"}),
        (INSIDE, {"readable", "channel", "places", "setuid", "contract"}),
        (SHADOWED, {"packages"}),
        (NOT_STARTING, {"sandbox"}),
        ("FROM scratch\nCOPY packages /x\n", {"made from ours", "entry point", "PYTHONPATH", "python"}),
    ],
    ids=["told", "inside", "shadowed", "not starting", "nothing of ours"],
)
def test_a_broken_image_is_told_what_to_do(build: Build, dockerfile: str, names: set[str]) -> None:
    code, said = check(build(dockerfile))
    assert (code, wrong(said)) == (1, names), said
    assert said.count("  -> ") == len(names)
    assert dockerfile != NOT_STARTING or "a broken runner" in said
