"""Sandboxes as containers of an OCI runtime, without a daemon: created, verified, watched, removed.

`bundle` asks for their confinement; `verification` and `launch/confinement` check it. Their root is a folder of
the image store, mounted read-only and shared by all. `launch/reaper` removes what a killed process leaves.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from orchestrator.errors import EnvironmentUnusable, LaunchError, RolloutError, SandboxLostError
from orchestrator.launch.channels import make_owned_directory, remove_owned_directory
from orchestrator.launch.confinement import untold_by, verify_confinement
from orchestrator.launch.control_groups import path_beside_ours
from orchestrator.launch.hardening import NO_MEASURES, Hardening, demand, harden, writable_places
from orchestrator.launch.names import is_gvisor, is_path
from orchestrator.launch.oci.bundle import Root, bundle
from orchestrator.launch.oci.leftovers import remember, remove_containers, runtime_command
from orchestrator.launch.oci.machine import (
    advice,
    does_not_fit,
    missing_limits,
    runtime_version,
    why_no_containers,
)
from orchestrator.launch.oci.program import USUAL, find_runtime, own_options
from orchestrator.launch.oci.runtime import LOST, Runtime
from orchestrator.launch.oci.sandbox import OciSandbox
from orchestrator.launch.oci.store import ImageStore, StoredImage
from orchestrator.launch.oci.user_namespace import UserNamespace, user_namespace
from orchestrator.launch.oci.verification import UNTOLD_BY_GVISOR, verify
from orchestrator.launch.uids import UidPair, UidSlots
from orchestrator.rules.backoff import Backoff
from orchestrator.rules.waits import uninterrupted
from orchestrator.types import Confinement, SandboxSpec

log = logging.getLogger(__name__)

_STARTS_AT_ONCE = 8
_LOOKS = 3
_ENDING_S = 1.0
_REMOVALS = 3
_BETWEEN_REMOVALS = Backoff(first_s=0.3, most_s=3.0)


class OciLauncher:
    """A `Launcher`: at most `max_sandboxes` containers at a time, those being created or removed included.

    `runtime`: the program's name or path. `waived`: names of measures (`hardening.MEASURE_NAMES`) that need not
    hold. `advise` gets lines that an operator should know and may ignore.
    """

    def __init__(
        self,
        run_id: str,
        *,
        max_sandboxes: int,
        runtime: str = USUAL[0],
        store: ImageStore | None = None,
        waived: frozenset[str] = NO_MEASURES,
        allow_localhost_tcp: bool = False,
        advise: Callable[[str], None] = log.warning,
    ) -> None:
        self.run_id = run_id
        self._max_sandboxes = max_sandboxes
        self._runtime_name = runtime
        self._store = store or ImageStore()
        self._advise = advise
        self._images: dict[str, StoredImage] = {}
        self._using = ExitStack()  # nobody removes an image that is used
        self._waived = waived
        self._allow_localhost_tcp = allow_localhost_tcp
        self._slots = asyncio.Semaphore(max_sandboxes)
        self._starting = asyncio.Semaphore(min(max_sandboxes, _STARTS_AT_ONCE))
        self._uids = UidSlots()
        self._live: dict[str, OciSandbox] = {}
        self._directory: Path | None = None  # bundles, and what the runtime remembers of containers
        self._runtime: Runtime | None = None
        self._opening = asyncio.Lock()
        self._users: UserNamespace | None = None
        self._unlimited = frozenset(line.partition(":")[0] for line in missing_limits()) & waived
        self._cpu_known = True

    async def check(self, spec: SandboxSpec) -> None:
        """Raises EnvironmentUnusable; ConfigError for too little memory."""
        writable_places(spec.memory_bytes, UidPair(0, 0))
        if reason := why_no_containers():
            raise EnvironmentUnusable(reason)
        version = await asyncio.to_thread(runtime_version, self._program())
        demand(missing_limits(self._waived))
        if problem := does_not_fit(spec):
            raise EnvironmentUnusable(problem)
        await self._image(spec.image)
        for line in advice(spec, self._max_sandboxes, version):
            self._advise(line)

    async def describe(self, spec: SandboxSpec) -> dict[str, str]:
        """Versions and image digest."""
        image = await self._image(spec.image)
        return {
            "runtime": await asyncio.to_thread(runtime_version, self._program()),
            "kernel": os.uname().release,
            "image": spec.image,
            "image_id": f"sha256:{image.digest}",
            **({"localhost_tcp": "allowed"} if self._allow_localhost_tcp else {}),
        }

    def demand_confined(self, seen: Confinement, spec: SandboxSpec) -> None:
        """Raises EnvironmentUnusable, naming every measure that is missing and was not waived."""
        demand(verify_confinement(seen, spec, self._waived | untold_by(spec.runtime)))

    async def ready(self, spec: SandboxSpec) -> None:
        """Starts a container that only says which Python it has, and removes it. Raises LaunchError,
        EnvironmentUnusable."""
        image = await self._image(spec.image)
        runtime, name = await self._open(), f"ready-{secrets.token_hex(8)}"
        root = replace(image.root, entry_point=(*image.root.entry_point[:1], "--version"))
        asked = replace(harden(spec, UidPair(0, 0), self._folder(name)), arguments=())
        try:
            self._write_bundle(name, root, asked)
            await runtime.start(name, self._folder(name))
        finally:
            await uninterrupted(self._removed(name))

    @asynccontextmanager
    async def launch(self, spec: SandboxSpec, channel: Path) -> AsyncIterator[OciSandbox]:
        """A running, verified container. On any exit it is removed, cancellation included.

        Raises LaunchError; EnvironmentUnusable when it is not confined as it must be.
        """
        async with self._slots:
            sandbox = OciSandbox(self._uids.take())
            self._live[sandbox.sandbox_id] = sandbox
            try:
                async with self._starting:
                    await self._start(sandbox, spec, channel)
                yield sandbox
            finally:
                await uninterrupted(self._remove(sandbox))

    async def aclose(self) -> None:
        """Removes what could not be removed, ends the keeper, removes the files. Idempotent."""
        await uninterrupted(self._close())

    async def _close(self) -> None:
        if self._runtime is not None:
            await self._runtime.aclose()
        if self._directory is not None:
            _, resisting = await asyncio.to_thread(remove_containers, self._directory)
            if resisting:
                log.error("%d containers could not be removed, `orchestrator cleanup` will", resisting)
            else:
                await asyncio.to_thread(remove_owned_directory, self._directory)
        self._runtime = self._directory = None
        self._using.close()

    # ------------------------------------------------------------ one container

    async def _start(self, sandbox: OciSandbox, spec: SandboxSpec, channel: Path) -> None:
        asked = harden(spec, sandbox.uids, channel, allow_localhost_tcp=self._allow_localhost_tcp)
        try:
            image = await self._image(spec.image)
        except EnvironmentUnusable as error:  # a task's own image: the others go on
            raise LaunchError(str(error)) from error
        runtime = await self._open()
        folder = self._folder(sandbox.sandbox_id)
        self._write_bundle(sandbox.sandbox_id, image.root, asked)
        begun_s = asyncio.get_running_loop().time()
        pid = await runtime.start(sandbox.sandbox_id, folder)
        sandbox.runs(pid, begun_s)
        untold = UNTOLD_BY_GVISOR if is_gvisor(self._runtime_name) else NO_MEASURES
        for looks_left in reversed(range(_LOOKS)):
            try:
                problems = verify(pid, sandbox.sandbox_id, asked, self._waived | untold)
                break
            except OSError as error:
                if await sandbox.has_ended(_ENDING_S):
                    return  # `exited` says how
                if not looks_left:
                    raise LaunchError(f"the sandbox cannot be looked at: {error.strerror}") from error
        if problems and not await sandbox.has_ended(_ENDING_S):
            demand(problems)
        if not sandbox.cpu_known and self._cpu_known:
            self._cpu_known = False
            log.warning("the CPU time of sandboxes is unknown here, and env.max_cpu_seconds holds nothing back")

    async def _remove(self, sandbox: OciSandbox) -> None:
        """A container that cannot be removed is logged and keeps its uids. Its removal is tried again in `aclose`,
        and is then left to the reaper."""
        del self._live[sandbox.sandbox_id]
        if await self._removed(sandbox.sandbox_id):
            self._uids.release(sandbox.uids)

    async def _removed(self, name: str) -> bool:
        if self._runtime is None:  # none was made
            return True
        for failures in range(_REMOVALS):
            await asyncio.sleep(_BETWEEN_REMOVALS.pause_s(failures))
            try:
                await self._runtime.remove(name)
            except RolloutError as error:
                failure = error
            else:
                await asyncio.to_thread(shutil.rmtree, self._folder(name), ignore_errors=True)
                return True
        log.error("%s could not be removed; it is tried again at the end: %s", name, failure)
        return False

    async def _open(self) -> Runtime:
        async with self._opening:
            if self._runtime is None:
                program = self._program()
                options = await asyncio.to_thread(own_options, program)
                self._users = user_namespace()
                self._directory = _make_directory(self.run_id, program)
                command = runtime_command(program, self._directory, options)
                self._runtime = Runtime(command, self._on_end, self._on_loss)
            return self._runtime

    def _program(self) -> str:
        """Raises EnvironmentUnusable."""
        return find_runtime(self._runtime_name)

    def _folder(self, name: str) -> Path:
        assert self._directory is not None
        return self._directory / "bundles" / name

    def _write_bundle(self, name: str, root: Root, asked: Hardening) -> None:
        """Raises LaunchError."""
        group = path_beside_ours(name)
        config = bundle(root, asked, group, users=self._users, unlimited=self._unlimited)
        folder = self._folder(name)
        try:
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config))
        except OSError as error:
            raise LaunchError(f"no place for a container in {folder.parent}: {error.strerror}") from error

    def _found(self, name: str) -> StoredImage | None:
        """In the store, or unpacked into it if `name` is the path of an image. Blocks."""
        image = self._store.find(name)
        return self._store.put(Path(name).expanduser()) if image is None and is_path(name) else image

    async def _image(self, name: str) -> StoredImage:
        """Found once. Raises EnvironmentUnusable."""
        if name not in self._images:
            image = await asyncio.to_thread(self._found, name)
            if image is None:
                raise EnvironmentUnusable(
                    f"the sandbox image {name} is not in the store of images: run `orchestrator image build --oci`"
                )
            self._using.enter_context(self._store.using(image))
            self._images[name] = image
        return self._images[name]

    # ------------------------------------------------------------ what the keeper tells, in the loop

    def _on_end(self, name: str, status: int, said: str) -> None:
        if (sandbox := self._live.get(name)) is not None:
            sandbox.ended(status, said)

    def _on_loss(self) -> None:
        for sandbox in self._live.values():
            sandbox.lose(SandboxLostError(LOST))


def _make_directory(run_id: str, program: str) -> Path:
    """A launcher's own. Raises LaunchError."""
    with ExitStack() as stack:
        try:
            directory = make_owned_directory(run_id, Path(tempfile.gettempdir()))
            stack.callback(remove_owned_directory, directory)
            (directory / "bundles").mkdir()
            remember(directory, program)
        except OSError as error:
            raise LaunchError(f"no directory for containers: {error.strerror}") from error
        stack.pop_all()
    return directory
