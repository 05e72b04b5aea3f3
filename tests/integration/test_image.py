"""The sandbox image itself: built here as `orchestrator image build` does it, then looked into."""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import subprocess
import tarfile
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.contents import APP, ENVIRONMENT
from orchestrator.launch.image.build import LABEL_CONTEXT, BuiltImage, ensure_image
from orchestrator.launch.image.context import BuildContext, context_root
from orchestrator.launch.image.wheels import wheels_cache
from orchestrator.launch.names import IMAGE_REPOSITORY, LABEL_RUNTIME, LABEL_STAGE
from orchestrator.launch.owner import Owner, this_process
from tests.fakes.runs import ROOT
from tests.fakes.wheel import installed_wheel

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def engine() -> Iterator[docker.DockerClient]:
    client = docker.from_env(timeout=600)
    yield client
    client.close()


@pytest.fixture(scope="module")
def image() -> BuiltImage:
    """The default image; rebuilt only where the one at hand is not of this source."""
    return asyncio.run(ensure_image(progress=print))


@pytest.fixture
async def scratch_tag(engine: docker.DockerClient) -> AsyncIterator[str]:
    """A tag for one test. Afterwards neither it nor any stage may be left."""
    stages = _stages(engine)
    tag = f"{IMAGE_REPOSITORY}:test-{uuid.uuid4().hex[:12]}"
    yield tag
    if engine.images.list(tag):
        engine.images.remove(tag)
    assert _stages(engine) <= stages


def _stages(engine: docker.DockerClient) -> set[str]:
    """Those of this process, and of processes that have ended: others may be building now."""
    filters = {"label": LABEL_STAGE}
    there = engine.api.containers(all=True, filters=filters) + engine.api.images(all=True, filters=filters)
    owners = {each["Id"]: Owner.parse(each["Labels"][LABEL_STAGE]) for each in there}
    return {name for name, it in owners.items() if it is None or it == this_process() or it.is_dead}


@dataclass(frozen=True, slots=True)
class FromWheel:
    """An image that the project's wheel built, installed in an environment of its own."""

    tag: str
    planted: str  # in the environment of the build, as a key would be
    folder: Path  # where it was built: empty before
    site: Path
    origin: Path  # where `orchestrator` was imported from
    importable: list[str]
    source_digest: str


@pytest.fixture(scope="module")
def from_wheel(engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FromWheel]:
    root, empty = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("empty")
    digest = BuildContext.read(ROOT).digest
    made = installed_wheel(root)
    tag, planted = f"{IMAGE_REPOSITORY}:test-{uuid.uuid4().hex[:12]}", f"planted-{uuid.uuid4().hex}"
    script = f"""
import asyncio, importlib.util, json, orchestrator
from orchestrator.launch.image.build import ensure_image
asyncio.run(ensure_image({tag!r}, progress=lambda line: None))
names = ["orchestrator", "rollout_api", "sandbox", "proto", "tests"]
print(json.dumps([orchestrator.__file__, [n for n in names if importlib.util.find_spec(n)]]))
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment |= {"OPENAI_API_KEY": planted, "XDG_CACHE_HOME": str(wheels_cache().parents[1])}
    try:
        command = [made.python, "-c", script]
        said = subprocess.run(
            command, cwd=empty, env=environment, check=True, stdout=subprocess.PIPE, timeout=600
        ).stdout
        origin, importable = json.loads(said)
        yield FromWheel(tag, planted, empty, made.site, Path(origin), importable, digest)
    finally:
        if engine.images.list(tag):
            engine.images.remove(tag)


def _inside(engine: docker.DockerClient, image: BuiltImage, script: str, user: str = "0:0") -> Any:
    """What `script` prints as JSON when the image's own Python runs it, sealed."""
    said = engine.containers.run(
        image.image_id,
        entrypoint=["/opt/sandbox/bin/python", "-c"],
        command=[script],
        environment=dict(ENVIRONMENT),
        user=user,
        network_mode="none",
        read_only=True,
        remove=True,
    )
    return json.loads(said)


# ---------------------------------------------------------------- what is inside


def test_an_unprivileged_user_can_import_everything_the_sandbox_needs(
    engine: docker.DockerClient, image: BuiltImage
) -> None:
    script = """
import json, google.protobuf, grpc, sandbox, smolagents
from rollout_api.v1 import sandbox_pb2, sandbox_pb2_grpc
print(json.dumps([smolagents.__version__, grpc.__version__, google.protobuf.__version__, sandbox.__file__]))
"""
    smolagents, grpc, protobuf, sandbox = _inside(engine, image, script, user="20001:20001")
    assert smolagents == "1.26.0"
    assert grpc.startswith("1.85.")
    assert protobuf.startswith("7.")
    assert sandbox == "/opt/sandbox/app/sandbox/__init__.py"


def test_neither_python_of_the_image_has_an_installer_or_our_code(
    engine: docker.DockerClient, image: BuiltImage
) -> None:
    script = """
import json, os, subprocess
base = os.path.realpath("/opt/sandbox/bin/python")
asked = "import importlib.util as u, json; print(json.dumps([n for n in %r if u.find_spec(n)]))"
asked %= ["pip", "ensurepip", "setuptools", "wheel", "pkg_resources", "orchestrator", "atroposlib", "docker"]
pythons = ("/opt/sandbox/bin/python", base)
print(json.dumps([json.loads(subprocess.check_output([python, "-c", asked])) for python in pythons]))
"""
    assert _inside(engine, image, script) == [[], []]


def test_no_installer_lies_in_the_image_under_any_name(engine: docker.DockerClient, image: BuiltImage) -> None:
    script = r"""
import json, os, re
names = re.compile(r"pip([-0-9].*)?|setuptools.*|ensurepip|.*\.whl|apt(-get)?|Dockerfile.*|requirements\.(txt|in)")
print(json.dumps([
    os.path.join(folder, name)
    for root in ("/bin", "/build", "/opt", "/root", "/tmp", "/usr", "/var/cache")
    for folder, folders, files in os.walk(root)
    for name in folders + files
    if names.fullmatch(name)
]))
"""
    found = _inside(engine, image, script)
    assert [path for path in found if not path.startswith("/usr/share/doc/")] == []  # licences may stay


def test_no_file_is_setuid_or_setgid(engine: docker.DockerClient, image: BuiltImage) -> None:
    script = """
import json, os, stat
device = os.stat("/").st_dev
seen, raised = 0, []
for folder, folders, files in os.walk("/"):
    folders[:] = [f for f in folders if os.lstat(os.path.join(folder, f)).st_dev == device]
    for path in [folder, *(os.path.join(folder, f) for f in files)]:
        mode = os.lstat(path).st_mode
        seen += 1
        if not stat.S_ISLNK(mode) and mode & 0o6000:
            raised.append(path)
print(json.dumps([seen, raised]))
"""
    seen, raised = _inside(engine, image, script)
    assert seen > 3000
    assert raised == []


def test_every_module_is_compiled_and_valid_whatever_its_time(
    engine: docker.DockerClient, image: BuiltImage
) -> None:
    script = """
import importlib.util, json, os, sysconfig
UNCHECKED_HASH = (1).to_bytes(4, "little")
seen, stale = 0, []
for root in ("/opt/sandbox/libraries", "/opt/sandbox/app", sysconfig.get_path("stdlib")):
    for folder, _, files in os.walk(root):
        for path in (os.path.join(folder, f) for f in files if f.endswith(".py")):
            seen += 1
            try:
                with open(importlib.util.cache_from_source(path), "rb") as file:
                    header = file.read(8)
            except FileNotFoundError:
                header = b""
            if header != importlib.util.MAGIC_NUMBER + UNCHECKED_HASH:
                stale.append(path)
print(json.dumps([seen, stale]))
"""
    seen, stale = _inside(engine, image, script)
    assert seen > 1000
    assert stale == []


def test_a_start_takes_all_its_modules_out_of_one_file(engine: docker.DockerClient, image: BuiltImage) -> None:
    script = """
import json, sys
from sandbox.boot.packed import PackedImports
before, opened = set(sys.modules), []
sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
with PackedImports():
    from sandbox.boot.imported import imported
    imported()
print(json.dumps([len(set(sys.modules) - before), [path for path in opened if path.endswith((".py", ".pyc"))]]))
"""
    modules, opened = _inside(engine, image, script)
    assert modules > 150
    assert opened == []


def test_the_image_says_how_it_runs(engine: docker.DockerClient, image: BuiltImage) -> None:
    config = engine.images.get(image.image_id).attrs["Config"]
    assert not config["Entrypoint"], "the runtime's program is every sandbox' own"
    assert {"LANG=C.UTF-8", "TZ=UTC"} < set(config["Env"])
    assert not any(APP in entry for entry in config["Env"]), "the agent gets these"
    context = BuildContext.read(context_root()).digest
    assert config["Labels"][LABEL_CONTEXT] == config["Labels"][LABEL_RUNTIME] == context
    assert image.python.startswith("3.")


# ---------------------------------------------------------------- what must not be inside, in no layer


def _own_certificates() -> list[bytes]:
    """First lines of the certificates this machine trusts and its distribution does not ship."""
    bundle = ssl.get_default_verify_paths().cafile
    if bundle is None:
        return []
    shipped = {_first_lines(p) for p in Path("/usr/share/ca-certificates").rglob("*.crt")}
    every = re.findall(rb"-----BEGIN CERTIFICATE-----\n(.+\n.+\n.+\n)", Path(bundle).read_bytes())
    return [lines for lines in every if lines not in shipped] if shipped else []


def _first_lines(path: Path) -> bytes:
    return b"".join(path.read_bytes().splitlines(keepends=True)[1:4])


def _files_of_all_layers(saved: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(saved) as outer:
        layers = json.loads(_read(outer, "manifest.json"))[0]["Layers"]
        for layer in layers:
            with tarfile.open(fileobj=outer.extractfile(layer), mode="r:*") as files:
                for member in files:
                    if member.isfile():
                        yield member.name, _read(files, member)


def _read(tar: tarfile.TarFile, member: str | tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None
    return file.read()


@pytest.mark.full
def test_nothing_of_the_building_machine_is_in_any_layer(
    engine: docker.DockerClient, from_wheel: FromWheel, tmp_path: Path
) -> None:
    forbidden = [from_wheel.planted.encode(), *_own_certificates()]
    saved = tmp_path / "image.tar"
    with saved.open("wb") as file:
        for chunk in engine.images.get(from_wheel.tag).save():
            file.write(chunk)
    names = set()
    found = []
    for name, content in _files_of_all_layers(saved):
        names.add(name)
        found += [name for text in forbidden if text in content]
    assert len(names) > 3000
    assert found == []
    assert not {name for name in names if re.match(r"etc/apt/(sources\.list|apt\.conf\.d/99)", name)}
    described = json.dumps([engine.images.get(from_wheel.tag).attrs, engine.images.get(from_wheel.tag).history()])
    assert from_wheel.planted not in described


# ---------------------------------------------------------------- building


async def test_an_unchanged_image_is_not_built_again(image: BuiltImage) -> None:
    lines: list[str] = []
    again = await ensure_image(progress=lines.append)
    assert not again.fresh
    assert again.image_id == image.image_id
    assert lines == [f"{image.tag} is up to date"]


@pytest.mark.full
async def test_a_cancelled_build_leaves_neither_stage_nor_tag(
    engine: docker.DockerClient, image: BuiltImage, scratch_tag: str
) -> None:
    installing = asyncio.Event()

    def progress(line: str) -> None:
        if re.match(r"Step \d+/\d+ : RUN", line):
            installing.set()

    building = asyncio.create_task(ensure_image(scratch_tag, progress=progress))
    async with asyncio.timeout(300):
        await installing.wait()
        building.cancel()
        with pytest.raises(asyncio.CancelledError):
            await building
    assert not engine.images.list(scratch_tag)  # stages: the fixture looks


@pytest.mark.full
async def test_a_failed_build_says_why_and_leaves_no_stage(
    engine: docker.DockerClient, image: BuiltImage, scratch_tag: str
) -> None:
    # The sandbox image as base of itself: it has a Python, but nothing to install with.
    with pytest.raises(EnvironmentUnusable, match="the image could not be built: ") as caught:
        await ensure_image(scratch_tag, base_image=image.tag, progress=print)
    assert "\n" not in str(caught.value)
    assert "set -eu" not in str(caught.value)
    assert not engine.images.list(scratch_tag)


async def test_a_base_image_that_nobody_has_is_named(scratch_tag: str) -> None:
    with pytest.raises(
        EnvironmentUnusable, match=r"^base image localhost:1/none:1 is not here and cannot be pulled"
    ):
        await ensure_image(scratch_tag, base_image="localhost:1/none:1", progress=print)


async def test_no_engine_at_the_address_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    with pytest.raises(EnvironmentUnusable, match="Docker is not running here"):
        await ensure_image(progress=print)


@pytest.mark.full
def test_an_installed_wheel_builds_the_same_image_from_an_empty_folder(
    engine: docker.DockerClient, from_wheel: FromWheel
) -> None:
    assert from_wheel.origin.is_relative_to(from_wheel.site)
    assert engine.images.get(from_wheel.tag).labels[LABEL_CONTEXT] == from_wheel.source_digest
    assert list(from_wheel.folder.iterdir()) == []


@pytest.mark.full
def test_an_installed_wheel_brings_no_package_of_a_common_name(from_wheel: FromWheel) -> None:
    assert {path.name for path in from_wheel.site.iterdir()} & {"sandbox", "proto", "tests"} == set()
    assert from_wheel.importable == ["orchestrator", "rollout_api"]
