"""Gets the images of tasks ready, ahead of their rollouts and in none of their slots: builds and fetches them, and
finds those that no sandbox can be made of."""

from __future__ import annotations

import asyncio
import itertools
import posixpath
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.engine.service_images import of_image
from orchestrator.errors import BuildError, EnvironmentUnusable
from orchestrator.launch.uses import Uses
from orchestrator.rules.backoff import Backoff
from orchestrator.rules.waits import uninterrupted
from orchestrator.services.life import spec_of
from orchestrator.settings.sandbox import SandboxSettings
from orchestrator.types import BadTask, Grader, SandboxSpec, Task

if TYPE_CHECKING:
    from orchestrator.launch.image.task_images import TaskImages

PARALLEL = 2  # builds at a time, and images looked at: they share the disk and the network with rollouts
_TRIES = 3  # where the machine is at fault: its Engine may be restarting
_BETWEEN_TRIES = Backoff(first_s=5.0, most_s=60.0)
_MAX_PATH_CHARS = 1024


class Builds:
    """Of one run; made and closed in its event loop. `why_unfit`: as `Hosts` has it."""

    def __init__(
        self,
        env: SandboxSettings,
        sandbox_of: Callable[[Task], SandboxSpec],
        why_unfit: Callable[[SandboxSpec], Awaitable[str | None]],
        say: Callable[[str], None],
    ) -> None:
        self._env = env
        self._sandbox_of = sandbox_of
        self._why_unfit = why_unfit
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Semaphore(PARALLEL)
        self._room_to_look = asyncio.Semaphore(PARALLEL)  # no look waits for a build
        self._opening = asyncio.Lock()
        self._images: TaskImages | None = None
        self._uses: Uses | None = None
        self._ids: dict[str, asyncio.Task[str]] = {}  # of images, by their tasks' `dockerfile`
        self._unfit: dict[SandboxSpec, str] = {}
        self._looks: set[asyncio.Task[str | None]] = set()  # under way
        self._stopped = False

    def begin(self, task: Task) -> Future[Task | BadTask]:
        """The task with its image, or a BadTask with the reason why there is no sandbox for it. Where the run is
        being stopped, it is cancelled, or the task as it was. Fails with EnvironmentUnusable where the machine
        cannot build. Thread-safe."""
        return asyncio.run_coroutine_threadsafe(self._begun(task), self._loop)

    def stop(self) -> None:
        """Nothing is begun any more, and what is under way is cancelled."""
        self._stopped = True
        for work in (*self._ids.values(), *self._looks):
            work.cancel()

    async def aclose(self) -> None:
        """Returns when nothing of a build is left."""
        self.stop()
        await asyncio.gather(*self._ids.values(), *self._looks, return_exceptions=True)
        if self._uses is not None:
            self._uses.close()

    async def _begun(self, task: Task) -> Task | BadTask:
        if self._stopped:
            return task
        if task.dockerfile is not None:
            built = await self._built(task, task.dockerfile)
            if isinstance(built, BadTask):
                return built
            task = built
        if task.services:
            with_images = await self._with_services(task)
            if isinstance(with_images, BadTask):
                return with_images
            task = with_images
        sandbox = self._sandbox_of(task)
        for spec in dict.fromkeys((sandbox, *_graders_users(task, sandbox))):
            look = asyncio.create_task(self._look(spec), name=f"image of {task.task_id}")
            self._looks.add(look)
            look.add_done_callback(self._looks.discard)
            if (reason := await look) is not None:
                return BadTask(task.task_id, reason if spec == sandbox else f"its grader: {reason}")
        return task

    async def _look(self, spec: SandboxSpec) -> str | None:
        """Only what is wrong with an image is remembered: what is not known now may be known later."""
        async with self._room_to_look:
            reason = self._unfit.get(spec) or await self._why_unfit(spec)
        if reason is not None:
            self._unfit[spec] = reason
        return reason

    async def _with_services(self, task: Task) -> Task | BadTask:
        """The task, its services as their images have them."""
        found = []
        for service in task.services:
            image = service.image
            if service.dockerfile is not None:
                if reason := self._refusal:
                    return BadTask(task.task_id, f"the service {service.name}: {reason}")
                try:
                    image, _ = await self._made(service.dockerfile, None)
                except BuildError as error:
                    return BadTask(task.task_id, f"the service {service.name}: {error}")
            spec = spec_of(replace(service, image=image), task, self._sandbox_of(task))
            if (unfit := await self._look(spec)) is not None:
                return BadTask(task.task_id, f"the service {service.name}: {unfit}")
            try:
                found.append(of_image(service, str(image), await asyncio.to_thread(_config, str(image))))
            except ValueError as error:
                return BadTask(task.task_id, str(error))
        return replace(task, services=tuple(found))

    async def _built(self, task: Task, dockerfile: str) -> Task | BadTask:
        if reason := self._refusal:
            return BadTask(task.task_id, reason)
        try:
            image, cwd = await self._made(dockerfile, task.cwd)
            own = {
                (one.dockerfile, one.cwd): await self._made(one.dockerfile, one.cwd)
                for one in task.graders
                if one.dockerfile is not None
            }
        except BuildError as error:
            return BadTask(task.task_id, str(error))

        def with_image(grader: Grader) -> Grader:
            if grader.dockerfile is None:
                return grader
            image, cwd = own[grader.dockerfile, grader.cwd]
            return replace(grader, image=image, cwd=cwd)

        return replace(task.with_graders(with_image), image=image, cwd=cwd)

    async def _made(self, dockerfile: str, cwd: str | None) -> tuple[str, str | None]:
        """An image's id, and the working directory, the image's own for an empty one. Raises BuildError."""
        if dockerfile not in self._ids:
            self._ids[dockerfile] = asyncio.create_task(self._image(dockerfile), name=f"image of {dockerfile}")
        image = await asyncio.shield(self._ids[dockerfile])  # others may wait for it too
        return image, await asyncio.to_thread(_workdir, image) if cwd == "" else cwd

    @property
    def _refusal(self) -> str:
        """Why no Dockerfile is built in this run; empty: they are."""
        if self._env.launcher == "process":
            return "its image makes a sandbox of its own, which the launcher process has not"
        if not self._env.dockerfiles:
            return "its image is not made: give --env.dockerfiles if you trust where the tasks come from"
        return ""

    async def _image(self, dockerfile: str) -> str:
        async with self._room:
            for failures in itertools.count():
                await asyncio.sleep(_BETWEEN_TRIES.pause_s(failures))
                try:
                    images, uses = await self._opened()
                    image = await images.image(dockerfile)
                    await asyncio.to_thread(uses.add, image)
                    return image
                except EnvironmentUnusable as error:
                    if failures + 1 == _TRIES:
                        raise
                    self._say(f"{dockerfile} cannot be built now, it is tried again: {error}")
        raise AssertionError("there is no last failure but the one that is raised")

    async def _opened(self) -> tuple[TaskImages, Uses]:
        async with self._opening:
            if self._uses is None:
                self._uses = await uninterrupted(asyncio.to_thread(Uses))
            if self._images is None:
                self._images = await _open(self._env, self._say)
            return self._images, self._uses


def _graders_users(task: Task, sandbox: SandboxSpec) -> Iterator[SandboxSpec]:
    """The sandboxes of its own image in which others than its agent grade, or collect what is graded."""
    for grader in task.graders:
        users = [None if grader.image not in (None, sandbox.image) else grader.user]
        users += [one.user for one in grader.collect if not one.service]
        yield from (replace(sandbox, user=user) for user in users if user is not None)


def _config(image: str) -> Mapping[str, Any]:
    """What an image says of itself, which is in the store. Blocks. Raises EnvironmentUnusable."""
    from orchestrator.launch.names import is_path
    from orchestrator.launch.oci.store import ImageStore

    store = ImageStore()
    found = store.put(Path(image).expanduser()) if is_path(image) else store.find(image)
    return {} if found is None else found.config


def _workdir(image: str) -> str:
    """The working directory that an image names, which has been put into the store; `/`: none. Blocks. Raises
    EnvironmentUnusable."""
    from orchestrator.launch.oci.store import ImageStore

    found = ImageStore().find(image)
    place = None if found is None else found.config.get("WorkingDir")
    if not isinstance(place, str) or not place.isprintable() or len(place) > _MAX_PATH_CHARS:
        return "/"
    return posixpath.normpath(f"/{place.lstrip('/')}")


async def _open(env: SandboxSettings, say: Callable[[str], None]) -> TaskImages:
    """What makes images for the run's launcher; imported by runs that need it. Raises EnvironmentUnusable."""
    from orchestrator.launch.image.docker_builder import DockerBuilder
    from orchestrator.launch.image.site import Site
    from orchestrator.launch.image.task_images import Builder, TaskImages
    from orchestrator.launch.oci.task_builder import open_builder

    builder: Builder
    if env.launcher == "docker":
        builder = DockerBuilder(env.build_network, Site.of(), parallel=PARALLEL)
    else:
        builder = await open_builder(env.build_network, Site.of(), env.oci_runtime, parallel=PARALLEL)
    return TaskImages(builder, env.base_images or {}, env.build_timeout, say)
