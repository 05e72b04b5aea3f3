"""A Docker Engine of a test's own, to be killed and started again: other data, other network namespace."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from pathlib import Path
from types import TracebackType

import docker
from docker.errors import DockerException

START_S = 120.0


def why_not() -> str | None:
    """Why there can be no such Engine here; None: there can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in ("dockerd", "unshare") if shutil.which(name) is None]
    return f"there is no {missing[0]}" if missing else None


class OwnEngine:
    """`async with OwnEngine(directory, image) as engine`: DOCKER_HOST is `engine.url`; it has that one image, or
    none."""

    def __init__(self, directory: Path, image: str | None = None) -> None:
        self.url = f"unix://{directory / 'own.sock'}"
        self._directory = directory
        self._image = image
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> OwnEngine:
        (self._directory / "daemon.json").write_text("{}")
        await self.start()
        if self._image is not None:
            await asyncio.to_thread(self._copy_image, self._image)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.end(signal.SIGTERM)
        # What a storage driver has mounted keeps the directory from being removed.
        for line in reversed(Path("/proc/mounts").read_text().splitlines()):
            if (place := line.split()[1]).startswith(str(self._directory)):
                subprocess.run(["umount", "-l", place], check=False)

    async def start(self) -> None:
        """Returns when it answers."""
        # Names of temporary directories may end in an underscore, which containerd takes for no name.
        name = f"test-{self._directory.name.encode().hex()}"
        with (self._directory / "own.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *("unshare", "--net", "dockerd", "--config-file", str(self._directory / "daemon.json")),
                *("--data-root", str(self._directory / "data"), "--exec-root", str(self._directory / "exec")),
                *("--pidfile", str(self._directory / "own.pid"), "--host", self.url),
                *("--bridge", "none", "--iptables=false", "--ip6tables=false"),
                *("--containerd-namespace", name, "--containerd-plugins-namespace", f"{name}-plugins"),
                *("--storage-driver", _driver()),
                stdout=log,
                stderr=log,
            )
        async with asyncio.timeout(START_S):
            while not await asyncio.to_thread(self._answers):
                assert self._process.returncode is None, (self._directory / "own.log").read_text()[-2000:]
                await asyncio.sleep(0.1)

    async def end(self, number: int) -> None:
        """By this signal. SIGKILL leaves its containers running, as a crash does."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)
            async with asyncio.timeout(START_S):
                await self._process.wait()
        (self._directory / "own.pid").unlink(missing_ok=True)

    def containers(self) -> list[str]:
        """Names of all it has."""
        client = docker.APIClient(self.url)
        try:
            return [name for container in client.containers(all=True) for name in container["Names"]]
        finally:
            client.close()

    def _copy_image(self, image: str) -> None:
        source, target = docker.APIClient(timeout=300), docker.APIClient(self.url, timeout=300)
        with (self._directory / "image.tar").open("w+b") as file:
            for chunk in source.get_image(image):
                file.write(chunk)
            file.seek(0)
            for line in target.load_image(file):
                assert "error" not in line, line
        (self._directory / "image.tar").unlink()
        source.close()
        target.close()

    def _answers(self) -> bool:
        try:
            client = docker.APIClient(self.url)
        except DockerException:
            return False
        client.close()
        return True


def _driver() -> str:
    client = docker.APIClient()
    try:
        return str(client.info()["Driver"])
    finally:
        client.close()
