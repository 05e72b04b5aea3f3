"""Real Podman behind DOCKER_HOST: told by name, with what to use instead."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.runs import place, run, until

pytestmark = [
    pytest.mark.long,
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
    flags = ["--env.dataset", "reasoning_gym:chain_sum?size=2", "--openai.base_url", "http://127.0.0.1:1/v1"]
    flags += ["--openai.model_name", "m", "--env.tokenizer_name", "none"]  # else its absence may be told first
    refused = await run(*flags, directory=tmp_path, environ=environ)
    assert refused.code == 3
    assert "leads to Podman" in refused.stderr
    assert not (tmp_path / "runs").exists()
