"""Sandboxes as containers of the Docker Engine: created, verified, watched, removed.

`request` asks for their confinement; `verification` and `launch/confinement` check it. `reaper` removes what a
killed process leaves. Four calls of the Engine per sandbox: create, start, inspect, remove.
"""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Collection, Mapping
from typing import Any

from orchestrator.errors import DockerError, EnvironmentUnusable, ImageUnusable, LaunchError, SandboxLostError
from orchestrator.launch.container import STARTS_AT_ONCE, ContainerLauncher
from orchestrator.launch.contents import Contents
from orchestrator.launch.cpu_clock import CpuClock
from orchestrator.launch.docker.calls import CALL_TIMEOUT_S, Engine
from orchestrator.launch.docker.events import ContainerEvent, EngineEvents
from orchestrator.launch.docker.facts import advice, describe, engine_problem, image_problem, missing_features
from orchestrator.launch.docker.request import create_body, used_of_image
from orchestrator.launch.docker.runtime import engine_runtime
from orchestrator.launch.docker.sandbox import PAUSED, DockerSandbox
from orchestrator.launch.docker.verification import verify
from orchestrator.launch.hardening import Hardening, demand, writable_places
from orchestrator.launch.names import LABEL_DEADLINE, LABEL_OWNER, LABEL_PROJECT, LABEL_RUN, PROJECT
from orchestrator.launch.owner import this_process
from orchestrator.launch.uids import UidPair
from orchestrator.rules.backoff import Backoff
from orchestrator.rules.waits import uninterrupted
from orchestrator.types import SandboxSpec

log = logging.getLogger(__name__)

ENGINE_GRACE_S = 15.0  # an Engine that restarts is away for some seconds
NO_WRITABLE_ROOT = "a writable root needs --env.launcher oci: Docker cannot limit what is written to it"
_SPARE_THREADS = 2  # removals must not wait behind starts
_REMOVALS = 4
_BETWEEN_REMOVALS = Backoff(first_s=0.3, most_s=3.0)


class DockerLauncher(ContainerLauncher[DockerSandbox]):
    """A `Launcher`.

    `lifetime_s`: afterwards reapers of other hosts, which cannot see whether this process lives, may remove a
    container. `engine_grace_s`: how long the Engine may be away before sandboxes are given up.
    """

    def __init__(
        self,
        run_id: str,
        *,
        max_sandboxes: int,
        lifetime_s: float = 48 * 3600.0,
        call_timeout_s: int = CALL_TIMEOUT_S,
        engine_grace_s: float = ENGINE_GRACE_S,
        **options: Any,
    ) -> None:
        super().__init__(run_id, max_sandboxes=max_sandboxes, **options)
        self._lifetime_s = lifetime_s
        self._engine_grace_s = engine_grace_s
        threads = min(max_sandboxes, STARTS_AT_ONCE) + _SPARE_THREADS
        self._engine = Engine(threads=threads, timeout_s=call_timeout_s)
        self._call_timeout_s = call_timeout_s
        self._cpus = os.cpu_count() or 1
        self._contents: dict[str, Contents] = {}  # by image
        self._runtime = ""
        self._preparing = asyncio.Lock()
        self._unremoved: dict[str, UidPair | None] = {}  # containers that may still exist, by name
        self._sweeping: asyncio.Task[None] | None = None
        self._events: EngineEvents | None = None
        self._giving_up: asyncio.TimerHandle | None = None

    async def check(self, spec: SandboxSpec) -> None:
        """Raises EnvironmentUnusable (no Docker, no image, a limit that cannot be enforced); ConfigError for too
        little memory."""
        writable_places(spec.memory_bytes, UidPair(0, 0))
        if spec.is_writable:
            raise EnvironmentUnusable(NO_WRITABLE_ROOT)
        try:
            await self._engine.open()
            info = await self._engine.info()
            image = await self._engine.image(spec.image)
        except DockerError as error:
            raise EnvironmentUnusable(str(error)) from None
        self._cpus = max(self._cpus, info["NCPU"])  # the Engine may be on another machine
        if (reason := engine_problem(info)) is not None:
            raise EnvironmentUnusable(reason)
        demand(missing_features(info, self._waived))
        if problem := image_problem(spec, info, image):
            raise EnvironmentUnusable(problem)
        await self.check_image(spec)
        for line in advice(info, spec, self._max_sandboxes):
            self._advise(line)

    async def check_image(self, spec: SandboxSpec) -> None:
        """Raises ImageUnusable; EnvironmentUnusable, DockerError for what is not the image's doing."""
        await self._contents_of(spec.image)

    async def describe(self, spec: SandboxSpec) -> dict[str, str]:
        """Versions and image digest. Raises DockerError."""
        facts = describe(await self._engine.info(), await self._engine.image(spec.image), spec)
        return {**facts, "localhost_tcp": "allowed"} if self._allow_localhost_tcp else facts

    async def ready(self, spec: SandboxSpec) -> None:
        """Creates a container without starting it, and removes it. No other call would show that the Engine lacks
        space or the image.

        Raises LaunchError, DockerError, EnvironmentUnusable.
        """
        name = f"ready-{secrets.token_hex(8)}"
        self._unremoved[name] = None
        try:
            body = {"Image": spec.image, "Cmd": ["-"], "Labels": self._labels(), "HostConfig": {}}
            await self._engine.create(body, name)
            await uninterrupted(self._try_removal(name))
        except LaunchError:
            self._unremoved.pop(name, None)
            raise
        # After another error the container may exist, or come to exist: it is removed when the Engine is back.
        self._unremoved.pop(name, None)

    async def _open(self) -> None:
        await self._engine.open()
        if self._events is None:
            self._events = EngineEvents(f"{LABEL_RUN}={self.run_id}", self, timeout_s=self._call_timeout_s)
            self._events.start()

    async def _contents_of(self, image: str) -> Contents:
        """Looked up once. Raises ImageUnusable, EnvironmentUnusable, DockerError."""
        async with self._preparing:
            if image not in self._contents or not self._runtime:
                if (
                    answer := await self._engine.read_image(image, lambda told: used_of_image(image, told))
                ) is None:
                    raise ImageUnusable(f"the sandbox image {image} is not here: pull or build it")
                image_id, environment, volumes = answer
                self._runtime = self._runtime or await asyncio.to_thread(engine_runtime, image_id)
                self._contents[image] = Contents(self._runtime, environment, self._program, volumes)
            return self._contents[image]

    def _volumes(self, image: str) -> Collection[str]:
        return self._contents[image].volumes

    def _sandbox(self, uids: UidPair) -> DockerSandbox:
        return DockerSandbox(self._engine, uids)

    async def _close(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
        if self._events is not None:
            await self._events.aclose()
            self._events = None
        if self._sweeping is not None:
            await asyncio.wait([self._sweeping])
        await self._sweep()
        await self._engine.aclose()

    def _labels(self) -> dict[str, str]:
        """Labels that tell the reaper which process made the container."""
        return {
            LABEL_PROJECT: PROJECT,
            LABEL_RUN: self.run_id,
            LABEL_OWNER: str(this_process()),
            LABEL_DEADLINE: str(int(time.time() + self._lifetime_s)),
        }

    # ------------------------------------------------------------ one container

    async def _start(self, sandbox: DockerSandbox, spec: SandboxSpec, hardening: Hardening) -> None:
        if spec.is_writable:
            raise LaunchError(NO_WRITABLE_ROOT)
        try:
            contents = await self._contents_of(spec.image)
        except EnvironmentUnusable as error:  # of a task's own image, that `check_image` had no word of
            raise LaunchError(str(error)) from error
        config = create_body(spec, contents, hardening, self._labels(), self._waived)
        try:
            sandbox.in_doubt = True
            sandbox.sandbox_id = await self._engine.create(config, sandbox.name)
            sandbox.in_doubt = False
        except LaunchError:
            sandbox.in_doubt = False
            raise
        sandbox.begun_s = asyncio.get_running_loop().time()
        try:
            await self._engine.start(sandbox.sandbox_id)
        except LaunchError:
            self._runtime = ""  # an Engine elsewhere may have lost it by a `cleanup`: the next sandbox looks again
            raise
        state = await self._engine.inspect(
            sandbox.sandbox_id, lambda answer: (int(answer["State"]["Pid"]), verify(answer, config, self._waived))
        )
        if state is None:
            raise LaunchError("the container was removed by somebody else while it started")
        sandbox.running_since_s = asyncio.get_running_loop().time()
        pid, problems = state
        demand(problems)
        sandbox.cpu_clock = CpuClock.of(pid, sandbox.sandbox_id, self._cpus)
        self._warn_of_cpu(sandbox.cpu_clock)

    async def _remove(self, sandbox: DockerSandbox) -> None:
        """The removal is tried again when the Engine is back and in `aclose`, and is then left to the reaper."""
        try:
            existed = await self._try_removal(sandbox.name)
        except DockerError as error:
            self._unremoved[sandbox.name] = sandbox.uids
            log.error(
                "container %s (%s) could not be removed, `orchestrator cleanup` will: %s",
                sandbox.name,
                sandbox.sandbox_id[:12] or "id unknown",
                error,
            )
        else:
            if existed or not sandbox.in_doubt:
                self._uids.release(sandbox.uids)
            else:  # the create call without an answer may still be on its way
                self._unremoved[sandbox.name] = sandbox.uids
        finally:
            del self._live[sandbox.name]

    async def _try_removal(self, name: str) -> bool:
        """Removes the container; whether it existed. Raises DockerError if the Engine does not do it in time."""
        failure = DockerError("the Docker Engine did not answer in time (remove)")
        try:
            async with asyncio.timeout(self._call_timeout_s * 1.5):
                for failures in range(_REMOVALS):
                    await asyncio.sleep(_BETWEEN_REMOVALS.pause_s(failures))
                    try:
                        return await self._engine.remove(name)
                    except DockerError as error:
                        failure = error
        except TimeoutError:
            pass
        raise failure

    async def _sweep(self) -> None:
        """Tries once more to remove everything in `_unremoved`, all at once."""
        names = list(self._unremoved)
        results = await asyncio.gather(*(self._engine.remove(n) for n in names), return_exceptions=True)
        for name, result in zip(names, results, strict=True):
            if isinstance(result, bool):
                if (uids := self._unremoved.pop(name, None)) is not None:
                    self._uids.release(uids)
            elif not isinstance(result, DockerError):
                raise result

    # ------------------------------------------------------------ events, in the loop

    def on_event(self, event: ContainerEvent) -> None:
        """Hands the event to its sandbox. Events of other containers, and of removed ones, are ignored."""
        if (sandbox := self._live.get(event.name)) is not None:
            sandbox.on_event(event)

    def on_listing(self, states: Mapping[str, str], asked_s: float) -> None:
        """The Engine answers (again): catch up with what happened meanwhile."""
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        for name, sandbox in self._live.items():
            if sandbox.running_since_s is None or sandbox.running_since_s > asked_s:
                continue
            if name not in states:
                sandbox.lose(SandboxLostError("the container was removed by somebody else"))
            elif states[name] in ("exited", "dead"):
                sandbox.end()
            elif states[name] == "paused":
                sandbox.lose(SandboxLostError(PAUSED))
        if self._unremoved and (self._sweeping is None or self._sweeping.done()):
            self._sweeping = asyncio.create_task(self._sweep(), name="remove leftovers")

    def on_interruption(self, error: str) -> None:
        """Sandboxes go on without the Engine. They are given up only if it stays away."""
        if self._giving_up is None:
            log.warning("no events from the Docker Engine: %s", error)
            loop = asyncio.get_running_loop()
            self._giving_up = loop.call_later(self._engine_grace_s, self._give_up, error)

    def _give_up(self, error: str) -> None:
        for sandbox in self._live.values():
            sandbox.lose(DockerError(f"the Docker Engine went away: {error}"))
