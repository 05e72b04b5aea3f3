"""Sandboxes and bare containers to measure: ours as a run makes them, and what `docker run` alone costs."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import docker
from docker.utils import kwargs_from_env

from orchestrator.completion.base import Completer, CompletionRequest
from orchestrator.host.resources import Resources
from orchestrator.host.sandbox import ParkedSandbox, parked_sandbox
from orchestrator.launch.channels import Channels
from orchestrator.launch.contents import PYTHON, Contents
from orchestrator.launch.docker.launcher import DockerLauncher
from orchestrator.launch.docker.request import create_body
from orchestrator.launch.docker.runtime import engine_runtime
from orchestrator.launch.hardening import harden
from orchestrator.launch.names import LABEL_DEADLINE, LABEL_OWNER, LABEL_PROJECT, LABEL_RUN, PROJECT
from orchestrator.launch.owner import this_process
from orchestrator.launch.pool import WarmPool
from orchestrator.launch.ramp import Ramp
from orchestrator.launch.uids import UidSlots
from orchestrator.settings.sources import load_config
from orchestrator.types import Completion, SandboxSpec

ANSWER = "Thought: That is it.\n<code>\nfinal_answer(42)\n</code>"
LIFETIME_S = 3600
PARKED_S = 300.0


def sandbox_spec(image: str | None = None) -> SandboxSpec:
    """As the settings have it: defaults, or what the environment says. `image`: another one."""
    spec = load_config([]).sandbox_spec()
    return replace(spec, image=image or spec.image)


class SignallingCompleter:
    """Answers 42 in the agent's first step; tells when each rollout asked for the first time."""

    takes_ids = False
    guides = False

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Future[float]] = {}

    def asked(self, rollout_id: str) -> asyncio.Future[float]:
        """When (time.perf_counter) the rollout's first request was there."""
        return self._asked.setdefault(rollout_id, asyncio.get_running_loop().create_future())

    async def sample(self, request: CompletionRequest) -> Completion:
        asked = self.asked(request.rollout_id)
        if not asked.done():
            asked.set_result(time.perf_counter())
        visible = ANSWER.removesuffix("</code>")
        return Completion(ANSWER, visible, "stop", None, None, prompt_tokens=1000, completion_tokens=20)

    async def aclose(self) -> None:
        """Nothing is open."""


@asynccontextmanager
async def surroundings(completer: Completer, sandboxes: int, warm: int = 0) -> AsyncIterator[Resources]:
    """What rollouts in containers share, without an endpoint; sandboxes come from a pool as in a run."""
    run_id, spec, ramp = secrets.token_hex(8), sandbox_spec(), Ramp()
    launcher = DockerLauncher(run_id, max_sandboxes=sandboxes + warm, advise=lambda line: None)

    with Channels(run_id) as channels:

        def park(spec: SandboxSpec) -> AbstractAsyncContextManager[ParkedSandbox]:
            return parked_sandbox(spec, launcher, channels.directory, ramp)

        try:
            await launcher.check(spec)
            async with WarmPool(park, spec, leased=sandboxes, warm=warm, idle_s=LIFETIME_S) as pool:
                yield Resources(launcher, completer, None, channels.directory, pool=pool)
        finally:
            await launcher.aclose()


async def until_parked(around: Resources, count: int) -> None:
    """Until the pool has so many to hand out. Raises TimeoutError."""
    assert around.pool is not None
    async with asyncio.timeout(PARKED_S):
        while around.pool.parked < count:  # noqa: ASYNC110 - the pool tells nobody
            await asyncio.sleep(0.02)


@dataclass(frozen=True, slots=True)
class BareRun:
    """How long one took. Seconds: created until ended, and its removal."""

    ended_s: float
    removed_s: float


class BareContainers:
    """`docker run --rm IMAGE python -c pass`, through the same client library; blocks.

    hardened: with every measure of a sandbox, set as the options of `docker run` set them, so that it joins the
    network "none"; else with none.
    """

    def __init__(self, channel: Path) -> None:
        self._client = docker.APIClient(**kwargs_from_env(), timeout=60)
        self._spec = sandbox_spec()
        self._channel = channel
        self._uids = UidSlots()
        self._labels = {
            LABEL_PROJECT: PROJECT,
            LABEL_RUN: secrets.token_hex(8),
            LABEL_OWNER: str(this_process()),
            LABEL_DEADLINE: str(int(time.time() + LIFETIME_S)),
        }

    def run(self, *, hardened: bool) -> BareRun:
        uids = self._uids.take()
        config = self._config(uids, hardened=hardened) | {"NetworkDisabled": False}
        name = f"bare-{secrets.token_hex(8)}"
        started = time.perf_counter()
        container = self._client.create_container_from_config(config, name)["Id"]  # type: ignore[no-untyped-call]
        try:
            self._client.start(container)
            status = self._client.wait(container)["StatusCode"]
            ended = time.perf_counter()
        finally:
            self._client.remove_container(container, v=True, force=True)
            self._uids.release(uids)
        if status != 0:
            raise RuntimeError(f"a bare container ended with {status}")
        return BareRun(ended - started, time.perf_counter() - ended)

    def _config(self, uids: Any, *, hardened: bool) -> dict[str, Any]:
        command = {"Entrypoint": [PYTHON, "-c", "pass"], "Cmd": []}
        contents = Contents(engine_runtime(self._spec.image), {})
        if not hardened:
            return {"Image": self._spec.image, "Labels": self._labels, **command}
        hardening = harden(self._spec, uids, self._channel)
        return {**create_body(self._spec, contents, hardening, self._labels), **command}

    def close(self) -> None:
        self._client.close()


@contextmanager
def bare_containers() -> Iterator[BareContainers]:
    """A client and an empty directory in the place of a socket's."""
    with tempfile.TemporaryDirectory(prefix="bare") as channel:
        bare = BareContainers(Path(channel))
        try:
            yield bare
        finally:
            bare.close()
