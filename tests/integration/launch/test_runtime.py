"""The runtime where nobody has unpacked it yet, and on an Engine that does not see this machine's files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from docker.errors import NotFound

from orchestrator.errors import LaunchError
from orchestrator.launch.docker.request import VOLUME, runtime_volume
from orchestrator.launch.names import DEFAULT_IMAGE, LABEL_PROJECT, LABEL_RUN, PROJECT
from orchestrator.launch.oci.store import ImageStore
from orchestrator.launch.runtime_folder import find_runtime
from tests.integration.launch.probes import launcher_for, output_of, probed

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]

CHECK = (
    "import sys; from orchestrator.cli import main; sys.exit(main())",
    *("image", "check", DEFAULT_IMAGE, "--env.launcher", "docker"),
)


@pytest.fixture
def holder(engine: docker.APIClient) -> Iterator[str]:
    """The name that an Engine elsewhere has for the container that holds the runtime's volume."""
    runtime = find_runtime(ImageStore())
    assert runtime is not None, "`orchestrator image build` unpacks it"
    name = f"{VOLUME}{runtime.digest[:16]}"
    remove(engine, name)
    yield name
    remove(engine, name)


def remove(engine: docker.APIClient, name: str) -> None:
    try:
        folder = engine.inspect_volume(name)["Mountpoint"]
    except NotFound:
        return
    engine.remove_container(name)
    for volume in (runtime_volume(folder), name):
        engine.remove_volume(volume)


def check(cache: Path, *before: str) -> str:
    """What `image check` says with another cache, where nothing is."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    argv = [*before, sys.executable, "-c", *CHECK]
    ended = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    return ended.stdout


@pytest.mark.slow
def test_a_machine_that_only_has_the_image_takes_the_runtime_out_of_it(
    engine: docker.APIClient, tmp_path: Path
) -> None:
    assert "started, confined and ready" in check(tmp_path)
    ours = find_runtime(ImageStore())
    (made,) = (
        path for path in (tmp_path / "rollout-orchestrator/oci/runtimes").iterdir() if not path.is_symlink()
    )
    assert ours is not None
    assert made.name == ours.digest, "the same, wherever it is unpacked"
    assert not any((tmp_path / "rollout-orchestrator/oci/drafts").iterdir())
    engine.remove_volume(runtime_volume(str(made)))


@pytest.mark.slow
def test_an_engine_elsewhere_has_it_in_a_volume_that_is_filled_once(
    engine: docker.APIClient, holder: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root can hide its files from the Engine")
    hidden = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"', str(tmp_path))
    # Else a `cleanup` of another test might remove the volume as there is no sandbox.
    sandbox = engine.create_container(DEFAULT_IMAGE, ["-"], labels={LABEL_PROJECT: PROJECT, LABEL_RUN: "once"})
    request.addfinalizer(lambda: engine.remove_container(sandbox))
    assert "started, confined and ready" in check(tmp_path, *hidden)
    filled = engine.inspect_container(holder)
    assert filled["State"]["Status"] == "created", "it never runs"
    assert [(mount["Name"], mount["Destination"]) for mount in filled["Mounts"]] == [(holder, "/opt/sandbox")]
    assert "started, confined and ready" in check(tmp_path, *hidden)
    assert engine.inspect_container(holder)["Id"] == filled["Id"], "once"
    assert engine.inspect_volume(holder)["Labels"] == {LABEL_PROJECT: PROJECT}


@pytest.mark.slow
async def test_a_run_finds_it_again_where_a_cleanup_removed_it(
    engine: docker.APIClient, holder: str, probe: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.launch.docker.runtime._sees", lambda *_: False)
    hello = "print('hello')"
    async with launcher_for(run) as launcher:
        async with probed(launcher, probe, hello) as sandbox:
            assert "hello" in await output_of(engine, sandbox)
        remove(engine, holder)
        with pytest.raises(LaunchError, match="no such file or directory"):
            async with probed(launcher, probe, hello):
                pass
        async with probed(launcher, probe, hello) as sandbox:
            assert "hello" in await output_of(engine, sandbox)
