"""Real Podman behind DOCKER_HOST: told by name, with what to use instead."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import oci_images
from tests.fakes.inference import ScriptedServer
from tests.fakes.runs import answers, flags, outcomes, place, run, until, write_tasks

_WHY_NOT = oci_images.why_not()

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("podman") is None, reason="no Podman on this machine"),
]


@pytest.fixture
def podman() -> Iterator[str]:
    with place() as folder:
        socket = folder / "podman.sock"
        command = ["podman", "--root", str(folder / "root"), "--runroot", str(folder / "run")]
        service = subprocess.Popen([*command, "system", "service", "--time=0", f"unix://{socket}"])
        try:
            yield f"unix://{socket}"
        finally:
            service.terminate()
            service.wait()


async def test_it_is_refused_by_name_before_anything_is_made(podman: str, tmp_path: Path) -> None:
    socket = Path(podman.removeprefix("unix://"))
    await until(socket.exists, "Podman listens")
    environ = {"DOCKER_HOST": podman}
    ended = await run(directory=tmp_path, command="doctor", environ=environ)
    assert "leads to Podman" in ended.stdout
    assert "--env.launcher oci" in ended.stdout
    assert not ended.traceback
    write_tasks(tmp_path / "tasks.jsonl", 1)
    given = flags(tmp_path, "http://127.0.0.1:1/v1", launcher="docker")
    refused = await run(*given, directory=tmp_path, environ=environ)
    assert refused.code == 3
    assert "leads to Podman" in refused.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "")
async def test_auto_makes_sandboxes_without_it_and_says_so(podman: str) -> None:
    socket = Path(podman.removeprefix("unix://"))
    await until(socket.exists, "Podman listens")
    oci_images.stored_image()
    with place() as home:
        write_tasks(home / "tasks.jsonl", 2)
        async with ScriptedServer("vllm", answers(2)) as server:
            given = flags(home, server.base_url, launcher="auto")
            ended = await run(*given, directory=home, environ={"DOCKER_HOST": podman})
        assert ended.code == 0, ended.stderr
        assert "sandboxes are made by runc itself, as DOCKER_HOST leads to Podman" in " ".join(
            ended.stderr.split()
        )
        assert outcomes(home / "run") == {"finished": 4}
