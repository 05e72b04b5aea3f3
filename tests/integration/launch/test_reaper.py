"""What a killed orchestrator leaves is removed; what is somebody else's is not touched."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
import pytest
from docker.errors import ImageNotFound, NotFound

from orchestrator.launch.channels import PREFIX, Channels
from orchestrator.launch.names import (
    LABEL_DEADLINE,
    LABEL_OWNER,
    LABEL_PROJECT,
    LABEL_RUN,
    LABEL_STAGE,
    PROJECT,
)
from orchestrator.launch.owner import Owner, this_process
from orchestrator.launch.reaper import _owned_directories, reap, reap_directories
from orchestrator.launch.uses import images_in_use
from tests.fakes.runs import cleaning
from tests.integration.launch.probes import containers_of, launcher_for, probed, write_owner

FOREVER = "import signal\nsignal.pause()"
ME = this_process()
DEAD = str(Owner(ME.host, ME.pid, ME.started - 1))  # a pid that has gone to another process since
QUIET_S = 240.0  # until no other test builds images
ELSEWHERE = str(Owner("elsewhere.example", 1, 1))

# An orchestrator to be killed: two containers, then it waits for ever.
VICTIM = """
import asyncio, sys
from tests.integration.launch.probes import launcher_for, probed
async def main(run, image):
    async with launcher_for(run) as launcher:
        forever = "import signal\\nsignal.pause()"
        async with probed(launcher, image, forever), probed(launcher, image, forever):
            print("ready", flush=True)
            await asyncio.Event().wait()
asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """TMPDIR of this test, so that the machine's own is left alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.mark.slow
@pytest.mark.docker
async def test_killed_orchestrator_leaves_nothing_once_the_next_one_starts(
    probe: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        victim = subprocess.Popen(
            [sys.executable, "-c", VICTIM, run, probe],
            stdout=subprocess.PIPE,
            env={**os.environ, "TMPDIR": short, "PYTHONPATH": os.pathsep.join((".", "proto"))},
        )
        assert victim.stdout is not None
        assert await asyncio.to_thread(victim.stdout.readline) == b"ready\n"
        assert len(containers_of(run)) == 2
        other_run = f"{run}-live"
        async with launcher_for(other_run) as launcher, probed(launcher, probe, FOREVER) as mine:
            await reap()
            assert len(containers_of(run)) == 2, "it still lives"
            victim.kill()
            victim.wait()
            # How many it removed is not asked: another test's run, which starts now, removes them as well.
            await reap()
            assert containers_of(run) == []
            assert containers_of(other_run) == [f"/{mine.name}"]
            assert len([p for p in Path(short).iterdir() if p.name.startswith(PREFIX)]) == 1, "ours"


@pytest.mark.docker
async def test_only_what_the_dead_or_overdue_made_is_removed(
    engine: docker.APIClient, probe: str, run: str
) -> None:
    future, past = str(int(time.time()) + 3600), str(int(time.time()) - 1)
    labelled = {
        "dead": ({LABEL_OWNER: DEAD, LABEL_DEADLINE: future}, True),
        "overdue elsewhere": ({LABEL_OWNER: ELSEWHERE, LABEL_DEADLINE: past}, True),
        "elsewhere": ({LABEL_OWNER: ELSEWHERE, LABEL_DEADLINE: future}, False),
        "alive": ({LABEL_OWNER: str(this_process()), LABEL_DEADLINE: past}, False),
        "no owner": ({}, False),
        "strange owner": ({LABEL_OWNER: "x", LABEL_DEADLINE: past}, False),
        "no deadline": ({LABEL_OWNER: ELSEWHERE}, False),
        "somebody's own": ({LABEL_OWNER: DEAD, LABEL_PROJECT: "another"}, False),
    }
    made = {
        what: engine.create_container_from_config(
            {"Image": probe, "Labels": {LABEL_PROJECT: PROJECT, LABEL_RUN: run, **labels}}
        )["Id"]
        for what, (labels, _) in labelled.items()
    }
    try:
        await reap()
        gone = {what for what, container in made.items() if not exists(engine, container)}
        assert gone == {what for what, (_, left) in labelled.items() if left}
    finally:
        for container in made.values():
            if exists(engine, container):
                engine.remove_container(container, force=True)


@pytest.mark.slow
@pytest.mark.docker
async def test_stages_of_dead_builds_go_and_those_of_live_ones_stay(engine: docker.APIClient, probe: str) -> None:
    with (
        stage(engine, probe, DEAD) as dead,
        stage(engine, probe, str(this_process())) as alive,
        stage(engine, probe, "manual") as nobodys,
    ):
        await reap()
        assert not image_exists(engine, dead)
        assert image_exists(engine, alive)
        assert image_exists(engine, nobodys)


@pytest.mark.long
@pytest.mark.docker
async def test_images_that_lost_their_name_to_a_newer_build_go_unless_used(
    engine: docker.APIClient, probe: str
) -> None:
    label = f"{LABEL_PROJECT}={PROJECT}"
    with cleaning(), image_of(engine, probe, label) as old, image_of(engine, probe, label) as used:
        with (
            image_of(engine, probe, label) as named,
            image_of(engine, probe, f"{LABEL_PROJECT}=another") as foreign,
        ):
            engine.tag(named, "rollout-orchestrator-test", named.rpartition(":")[2][:12])
            container = engine.create_container_from_config({"Image": used})["Id"]
            try:
                with image_of(engine, probe, f"{LABEL_STAGE}={this_process()!s}"):
                    await reap(old_images=True)
                    assert image_exists(engine, old), "a build is under way"
                await reap()
                assert image_exists(engine, old), "only cleanup was asked for that"

                async with asyncio.timeout(QUIET_S):
                    while image_exists(engine, old):
                        somebody = builds_go_on(engine)
                        await reap(old_images=True)
                        somebody = somebody or builds_go_on(engine)
                        assert somebody or not image_exists(engine, old)
                        await asyncio.sleep(0.5)
                for other in (used, named, foreign):
                    assert image_exists(engine, other)
            finally:
                engine.remove_container(container)


def builds_go_on(engine: docker.APIClient) -> bool:
    """Of other tests, on this Engine now."""
    stages = engine.images(all=True, quiet=True, filters={"label": LABEL_STAGE})
    return bool(stages) or images_in_use() is not None


@contextmanager
def stage(engine: docker.APIClient, base: str, builder: str) -> Iterator[str]:
    with image_of(engine, base, f"{LABEL_STAGE}={builder}") as image:
        yield image


@contextmanager
def image_of(engine: docker.APIClient, base: str, label: str) -> Iterator[str]:
    """A nameless image with one label."""
    recipe = io.BytesIO(f"FROM {base}\nLABEL {label} x={uuid.uuid4().hex}\n".encode())
    *_, last = engine.build(fileobj=recipe, rm=True, decode=True)
    image = last["stream"].split()[-1]
    try:
        yield image
    finally:
        if image_exists(engine, image):
            engine.remove_image(image, force=True)


def test_directories_of_the_dead_are_removed(temporary: Path) -> None:
    left, alive, elsewhere = (temporary / f"{PREFIX}{n}" for n in "abc")
    for directory, owner in ((left, DEAD), (alive, str(this_process())), (elsewhere, ELSEWHERE)):
        (directory / "box").mkdir(parents=True)
        write_owner(directory, owner, "r")
    reap_directories()
    assert sorted(p.name for p in temporary.iterdir()) == sorted(d.name for d in (alive, elsewhere))


def test_live_channels_are_not_touched(temporary: Path) -> None:
    with Channels("r", temporary) as channels, channels.directory() as directory:
        reap_directories()
        assert directory.exists()


def test_a_directory_that_goes_meanwhile_is_no_error(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs end at any time, and two that start at once reap the same leftovers."""
    going, left = temporary / f"{PREFIX}a", temporary / f"{PREFIX}b"
    for directory in (going, left):
        directory.mkdir()
        write_owner(directory, DEAD, "r")
    entries = Path.glob

    def list_then_lose(parent: Path, pattern: str) -> list[Path]:
        listed = list(entries(parent, pattern))
        if going.exists():
            going.rename(temporary / "gone")
        return listed

    with monkeypatch.context() as patched:
        patched.setattr(Path, "glob", list_then_lose)
        found = list(_owned_directories())
    assert left in found
    assert going not in found


def test_directories_that_are_not_surely_ours_stay(temporary: Path) -> None:
    target = temporary / "precious"
    target.mkdir()
    write_owner(target, DEAD, "r")
    (temporary / f"{PREFIX}link").symlink_to(target)
    linked_owner = temporary / f"{PREFIX}linked-owner"
    linked_owner.mkdir()
    (linked_owner / "owner").symlink_to(target / "owner")
    pipe = temporary / f"{PREFIX}pipe"
    pipe.mkdir()
    os.mkfifo(pipe / "owner")
    garbage = temporary / f"{PREFIX}garbage"
    garbage.mkdir()
    (garbage / "owner").write_bytes(b"\xff{")
    (temporary / f"{PREFIX}new").mkdir()
    before = sorted(p.name for p in temporary.rglob("*"))
    reap_directories()
    assert sorted(p.name for p in temporary.rglob("*")) == before


def exists(engine: docker.APIClient, container: str) -> bool:
    try:
        engine.inspect_container(container)
    except NotFound:
        return False
    return True


def image_exists(engine: docker.APIClient, image: str) -> bool:
    try:
        engine.inspect_image(image)
    except ImageNotFound:
        return False
    return True
