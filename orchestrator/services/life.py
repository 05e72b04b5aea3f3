"""The services of one rollout, from their start to their end: each in a sandbox of its own, sealed as a grader's.

All sandboxes are made at once. In each, what its service may reach is listened for; then the programs begin, each
behind what it needs, and all are there when each that has a healthcheck is healthy.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from orchestrator.errors import EnvironmentUnusable, LaunchError, SandboxLostError
from orchestrator.launch.base import CommandEnd, Launcher, Program, SavedLayer, ServingSandbox
from orchestrator.rules.outcome import ServiceEnd
from orchestrator.rules.redact import redact
from orchestrator.rules.text import valid
from orchestrator.rules.waits import first_error, first_of, standstill, stood_still
from orchestrator.services.places import AGENT, addresses, completes, neighbours
from orchestrator.services.ways import ServiceWay, served
from orchestrator.types import (
    MIN_MEMORY_BYTES,
    Collect,
    Healthcheck,
    Listener,
    SandboxExit,
    SandboxSpec,
    Service,
    ServiceRecord,
    Task,
    Way,
    in_order,
)

log = logging.getLogger(__name__)

LOG_CHARS = 4_000  # of each service, on record
PRINTED = "/logs/services"  # in it, a folder of each, with what the commands print that collect its state
PUBLISHED = "/logs/artifacts"
_LOOK_S = 0.5  # between two healthchecks of a service that begins
_WORDS_CHARS = 600
_MIN_PIDS = 64


class Unready(Exception):
    """A service of the task cannot be had as the task has it; `str(error)` says why. Nothing of a policy's was
    there, and it was not the machine's doing."""

    def __init__(self, reason: str, records: tuple[ServiceRecord, ...] = ()) -> None:
        super().__init__(reason)
        self.records = records


class _Running:
    """One service. `healthy`: it can be used, or has ended as it was to."""

    def __init__(self, service: Service, sandbox: ServingSandbox, began_s: float) -> None:
        self.service, self.sandbox = service, sandbox
        self.began, self.healthy = asyncio.Event(), asyncio.Event()
        self.record = ServiceRecord(service.name, str(service.image), 0.0)
        self.asked_s, self.begun_s = began_s, began_s

    async def live(self, needed: Mapping[str, "_Running"], is_to_end: bool) -> None:
        """Begins it, and returns when it can be used. Raises Unready, RolloutError."""
        loop = asyncio.get_running_loop()
        for need in self.service.needs:
            other = needed[need.name]
            await (other.began if need.condition == "service_started" else other.healthy).wait()
        self.begun_s = loop.time()
        self.record = replace(self.record, started_s=round(self.begun_s - self.asked_s, 3))
        await self.sandbox.begin()
        self.began.set()
        if is_to_end:
            end = await self.sandbox.program_end()
            if end.status != 0:
                raise Unready(f"the service {self.service.name} was to succeed: {await self._how(end)}")
        elif self.service.healthcheck is not None:
            why = await self._unhealthy(self.service.healthcheck)
            if why:
                raise Unready(f"the service {self.service.name} is not there: {why}")
        self.record = replace(self.record, healthy_s=round(loop.time() - self.begun_s, 3))
        self.healthy.set()

    async def end(self) -> ServiceEnd:
        """Waits until it has ended. Raises SandboxLostError if that was somebody else's doing."""
        program = await self.sandbox.program_end()
        how: SandboxExit = await self.sandbox.exited()
        out_of_memory = how.oom_killed and program.status in (-9, 137)
        detail = await self._how(program) + (", killed for memory" if out_of_memory else "")
        self.record = replace(self.record, ended=detail)
        return ServiceEnd(
            self.service.name, detail, out_of_memory, asyncio.get_running_loop().time() - self.begun_s
        )

    async def with_log(self) -> ServiceRecord:
        """What is known of it now."""
        words = redact(valid(await self.sandbox.log()))
        return replace(self.record, log=words[-LOG_CHARS:])

    async def _unhealthy(self, check: Healthcheck) -> str:
        """Why it is not ready; empty: it is. Raises SandboxLostError."""
        try:
            came = await first_of(self.sandbox.check(patient(check)), self._ended())
        except SandboxLostError:
            came = await self.sandbox.program_end()  # it ended while it was asked
        return came if isinstance(came, str) else await self._how(came)

    async def _ended(self) -> CommandEnd:
        return await self.sandbox.program_end()

    async def _how(self, end: CommandEnd) -> str:
        how = end.error or (
            f"it ended by the signal {-end.status}"
            if end.status is not None and end.status < 0
            else f"it ended with {end.status}"
        )
        words = " ".join(redact(valid(await self.sandbox.log())).split())[-_WORDS_CHARS:]
        return f"{how} and printed: {words}" if words else f"{how} and printed nothing"


def patient(check: Healthcheck) -> Healthcheck:
    """The same for one that begins: it is asked more often, and given up no sooner."""
    tries_s = check.retries * check.interval_s
    look_s = min(_LOOK_S, check.interval_s)
    return replace(
        check,
        start_period_s=check.start_period_s + tries_s,
        start_interval_s=look_s,
        interval_s=look_s,
        retries=1,
    )


class Services:
    """Those of one rollout, while they run."""

    def __init__(self, running: Sequence[_Running], services: Sequence[Service]) -> None:
        self._running = {one.service.name: one for one in running}
        self._services = services
        places = addresses(services)
        self.ways: tuple[Way, ...] = tuple(
            ServiceWay(Listener(places[one.service.name], port), one.sandbox, port, AGENT)
            for one in running
            if one.service.for_agent
            for port in one.service.ports
        )
        self._first: asyncio.Task[ServiceEnd] | None = None

    async def records(self) -> tuple[ServiceRecord, ...]:
        """What is known of each so far. Raises nothing."""
        return tuple([await one.with_log() for one in self._running.values()])

    async def ended(self) -> ServiceEnd:
        """Waits until one has ended that was to go on. Raises SandboxLostError if that is somebody else's
        doing."""
        if self._first is None:
            self._first = asyncio.create_task(self._first_end(), name="services")
        return await asyncio.shield(self._first)

    @property
    def has_ended(self) -> bool:
        """Whether one has, by now, that was to go on."""
        return self._first is not None and self._first.done()

    async def _first_end(self) -> ServiceEnd:
        goes_on = [one for name, one in self._running.items() if not completes(name, self._services)]
        if not goes_on:
            await asyncio.Event().wait()
        end = await first_of(*(one.end() for one in goes_on))
        assert isinstance(end, ServiceEnd)
        return end

    async def collect(self, commands: Sequence[Collect]) -> list[str]:
        """Runs them where they say, one after the other. What went wrong, for people: it is for the tests to find.
        Raises nothing."""
        trouble = []
        for number, one in enumerate(commands):
            running = self._running[one.service]
            place = f"{PRINTED}/{one.service}/{number}"
            line = f"exec > {place}.txt 2> {place}.err\n{one.command}"
            once = Healthcheck(line, 0.0, one.timeout_s, 0.0, 0.0, 1)
            try:
                why = await running.sandbox.check(once, one.user)
            except SandboxLostError as error:  # by the rule of blame it is not the machine's
                why = str(error)
            if why:
                words = why.partition("the last time ")[2] or why
                trouble.append(f"the state of {one.service} cannot be had: {words[:_WORDS_CHARS]}")
        return trouble

    def save(self, name: str, folder: Path, dropped: str, merged: str) -> SavedLayer:
        """As `save_layer` of its sandbox, which has ended or stands still. Blocks."""
        return self._running[name].sandbox.save_layer(folder, dropped, merged)

    def sandbox(self, name: str) -> ServingSandbox:
        """Of one of them."""
        return self._running[name].sandbox

    async def aclose(self) -> None:
        """Nobody waits for their ends any more. Idempotent."""
        if self._first is not None:
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)


@asynccontextmanager
async def services(task: Task, spec: SandboxSpec, launcher: Launcher) -> AsyncIterator[Services]:
    """Those of the task, ready to be used. `spec`: of the task's sandbox. On any exit they are removed. Raises
    Unready, LaunchError, SandboxLostError."""
    ordered, places = in_order(task.services), addresses(task.services)
    asked_s = asyncio.get_running_loop().time()
    async with AsyncExitStack() as stack:
        try:
            sandboxes = await _launched(ordered, task, spec, launcher, stack)
            running = {one.name: _Running(one, sandboxes[one.name], asked_s) for one in ordered}
            for one in ordered:
                ways = [
                    ServiceWay(Listener(places[other.name], port), sandboxes[other.name], port, places[one.name])
                    for other, port in neighbours(one, ordered)
                ]
                await stack.enter_async_context(served(sandboxes[one.name], ways))
            came = await first_of(_all_live(list(running.values()), ordered), standstill())
        except EnvironmentUnusable as error:
            raise LaunchError(str(error)) from error
        if isinstance(came, float):
            raise stood_still(came)
        if isinstance(came, Unready):
            raise Unready(str(came), tuple([await one.with_log() for one in running.values()]))
        found = Services(list(running.values()), ordered)
        stack.push_async_callback(found.aclose)
        yield found


async def _all_live(running: Sequence[_Running], ordered: Sequence[Service]) -> Unready | None:
    """Raises RolloutError."""
    needed = {one.service.name: one for one in running}
    try:
        async with asyncio.TaskGroup() as group:
            for one in running:
                group.create_task(one.live(needed, completes(one.service.name, ordered)))
    except BaseExceptionGroup as errors:
        error = first_error(errors)
        if isinstance(error, Unready):
            return error
        raise error from errors
    return None


async def _launched(
    ordered: Sequence[Service], task: Task, spec: SandboxSpec, launcher: Launcher, stack: AsyncExitStack
) -> dict[str, ServingSandbox]:
    """Their sandboxes, by name, which `stack` removes. Raises RolloutError."""

    async def launched(service: Service) -> ServingSandbox:
        program = Program(
            (*(service.entrypoint or ()), *(service.command or ())),
            service.cwd or "/",
            service.environment,
            (*service.folders, f"{PRINTED}/{service.name}", PUBLISHED),
            service.volumes,
            service.name,
        )
        block = launcher.serve(spec_of(service, task, spec), program)
        sandbox = await block.__aenter__()
        stack.push_async_exit(block.__aexit__)
        return sandbox

    try:
        async with asyncio.TaskGroup() as group:
            made = {one.name: group.create_task(launched(one)) for one in ordered}
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
    return {name: one.result() for name, one in made.items()}


def spec_of(service: Service, task: Task, spec: SandboxSpec) -> SandboxSpec:
    """The sandbox of a service. `spec`: of the task's."""
    memory = max(service.memory_bytes or spec.memory_bytes, MIN_MEMORY_BYTES)
    return replace(
        spec,
        image=str(service.image),
        memory_bytes=memory,
        storage_bytes=spec.storage_bytes if spec.is_on_disk else min(spec.storage_bytes, memory),
        cpus=service.cpus or spec.cpus,
        pids=max(service.pids or spec.pids, _MIN_PIDS),
        layers=() if task.hosts is None else (task.hosts,),
        user=service.user,
        preload=(),
    )
