"""A Ray cluster on this machine. Each node is a process tree of its own, with a host name of its own, and on
demand a network and a Docker Engine of its own: it can be killed or stopped as a whole."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tests.fakes.runs import CACHE, ROOT

START_S = 180.0
RAY = str(Path(sys.executable).with_name("ray"))
STORE_BYTES = 100_000_000  # Ray's least, about
LOOPBACK = "127.0.0.1"


def why_not(*, networks: bool = False) -> str | None:
    """Why there can be no such cluster here; None: there can."""
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed"
    if os.geteuid() != 0:
        return "nodes with process trees of their own take root"
    needed = ("unshare", "ip", "nsenter", "dockerd") if networks else ("unshare",)
    missing = [name for name in needed if shutil.which(name) is None]
    return f"there is no {missing[0]}" if missing else None


class Network:
    """A bridge, and network namespaces on it. The host is `address`."""

    def __init__(self) -> None:
        self._tag = uuid.uuid4().hex[:5]
        part = int(self._tag[:2], 16)
        self._prefix = f"10.83.{part}"
        self.address = f"{self._prefix}.1"
        self._bridge = f"tb{self._tag}"
        self._spaces: list[str] = []

    def __enter__(self) -> Network:
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "address", "add", f"{self.address}/24", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")
        return self

    def __exit__(self, *exception: object) -> None:
        for space in self._spaces:
            _run("ip", "netns", "delete", space, check=False)
        _run("ip", "link", "delete", self._bridge, check=False)

    def add(self) -> tuple[str, str]:
        """(path of a new namespace, the address in it)."""
        number = len(self._spaces) + 2
        space, outer, address = f"ts{self._tag}{number}", f"tv{self._tag}{number}", f"{self._prefix}.{number}"
        _run("ip", "netns", "add", space)
        self._spaces.append(space)
        _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
        _run("ip", "link", "set", outer, "master", self._bridge, "up")
        inside = ("nsenter", f"--net=/var/run/netns/{space}", "ip")
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "address", "add", f"{address}/24", "dev", "eth0")
        _run(*inside, "link", "set", "eth0", "up")
        return f"/var/run/netns/{space}", address


class RayNode:
    """One node: `process` is the wrapper that ends all of it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, home: Path) -> None:
        self.name = name
        self.process = process
        self.home = home

    def tree(self) -> list[int]:
        """Process ids of all of it, as seen from here."""
        found, branches = [], [self.process.pid]
        while branches:
            pid = branches.pop()
            with suppress(OSError):
                for task in Path("/proc", str(pid), "task").iterdir():
                    children = [int(child) for child in (task / "children").read_text().split()]
                    found += children
                    branches += children
        return found

    def signal(self, number: int) -> None:
        """To every process of it."""
        for pid in self.tree():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    async def kill(self) -> None:
        """As when the machine loses its power."""
        self.signal(signal.SIGKILL)
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    def terminate(self) -> None:
        """As a cluster's manager ends a node: SIGTERM to `ray start --block`."""
        # The first one: what it starts has its command line until it has become another program.
        ray, *_ = (pid for pid in self.tree() if b"--block" in Path("/proc", str(pid), "cmdline").read_bytes())
        os.kill(ray, signal.SIGTERM)


class RayCluster:
    """`async with RayCluster(directory) as cluster`: a head without the resource `sandbox`. `join` adds nodes."""

    def __init__(self, directory: Path, host: str = LOOPBACK) -> None:
        self._directory = directory
        self._host = host
        with socket.socket() as free:
            free.bind((host, 0))
            self._port = free.getsockname()[1]
        self.address = f"{host}:{self._port}"
        self._head: RayNode | None = None
        self._joining = asyncio.Lock()
        self.nodes: dict[str, RayNode] = {}

    async def __aenter__(self) -> RayCluster:
        self._head = await self._start(
            "head", ["--head", f"--port={self._port}", "--include-dashboard=false"], (), self._host, {}
        )
        return self

    def processes(self) -> list[int]:
        """Of all nodes and the head."""
        return [pid for node in (*self.nodes.values(), self._head) if node is not None for pid in node.tree()]

    async def kill_head(self) -> None:
        assert self._head is not None
        await self._head.kill()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for node in (*self.nodes.values(), self._head):
            if node is not None:
                await node.kill()

    async def join(
        self, name: str, *, network: tuple[str, str] | None = None, environ: Mapping[str, str] | None = None
    ) -> RayNode:
        """A node of this name. `network`: a namespace, and the node's address in it."""
        wrapper = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "sh", "-c"]
        wrapper += ['hostname "$0" && exec "$@"', name]
        if network is not None:
            wrapper = ["nsenter", f"--net={network[0]}", *wrapper]
        resources = '--resources={"sandbox": 1}'
        address = self._host if network is None else network[1]
        told = [f"--address={self.address}", resources]
        async with self._joining:  # nodes of one machine that start at a time take each other's sockets
            self.nodes[name] = await self._start(name, told, wrapper, address, environ or {})
        return self.nodes[name]

    async def _start(
        self, name: str, told: list[str], wrapper: list[str] | tuple[()], address: str, environ: Mapping[str, str]
    ) -> RayNode:
        home = self._directory / name
        (home / "t").mkdir(parents=True)
        log = home / "ray.log"
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *(*wrapper, RAY, "start", "--block", "--disable-usage-stats"),
                # Of any free ports: nodes on one machine would else take each other's.
                *("--min-worker-port=0", "--max-worker-port=0"),
                *(f"--node-ip-address={address}", "--num-cpus=1", f"--object-store-memory={STORE_BYTES}"),
                *(f"--temp-dir={self._directory / 'ray'}", *told),
                env={
                    "PATH": os.environ["PATH"],
                    "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}",
                    "HOME": str(home),
                    "XDG_CACHE_HOME": CACHE,
                    "TMPDIR": str(home / "t"),
                    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
                    # By default Ray gives a node up after 5 checks of 10 to 13 s, so after about a minute. A test
                    # that stops a node for a minute must know which of both it sees.
                    "RAY_health_check_failure_threshold": "20",
                    "RAY_raylet_start_wait_time_s": f"{START_S:.0f}",
                    **environ,
                },
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        for _ in range(int(START_S / 0.1)):
            if b"Ray runtime started" in log.read_bytes():
                break
            assert process.returncode is None, log.read_text()[-3000:]
            await asyncio.sleep(0.1)
        else:
            raise AssertionError(f"node {name} did not start: {log.read_text()[-3000:]}")
        return RayNode(name, process, home)


def _run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=True)
