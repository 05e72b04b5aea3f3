"""Sandboxes as containers of an OCI runtime, without a daemon: created, verified, watched, removed.

`bundle` asks for their confinement; `verification` and `launch/confinement` check it. Their root is a folder of
the image store, mounted read-only and shared by all. `launch/reaper` removes what a killed process leaves.
"""

import asyncio
import json
import logging
import os
import secrets
import shutil
import tempfile
from collections import ChainMap
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from orchestrator.errors import EnvironmentUnusable, ImageUnusable, LaunchError, RolloutError, SandboxLostError
from orchestrator.launch.base import Command, LauncherNow, Program, State
from orchestrator.launch.channels import make_owned_directory, remove_owned_directory
from orchestrator.launch.container import ContainerLauncher
from orchestrator.launch.contents import PYTHON, Contents, image_environment
from orchestrator.launch.control_groups import path_beside_ours
from orchestrator.launch.hardening import NO_MEASURES, Hardening, demand, harden
from orchestrator.launch.listeners import serving
from orchestrator.launch.names import is_gvisor, is_path
from orchestrator.launch.oci.accounts import account, home
from orchestrator.launch.oci.bundle import bundle
from orchestrator.launch.oci.commands import command_arguments, request
from orchestrator.launch.oci.fork_bundles import ParentRoot, fork_config, write_parent
from orchestrator.launch.oci.leftovers import remember, remove_containers, runtime_command
from orchestrator.launch.oci.machine import (
    advice,
    does_not_fit,
    missing_limits,
    missing_ranges,
    runtime_version,
    too_low_limits,
    why_no_containers,
    why_no_forks,
)
from orchestrator.launch.oci.mounts import MERGED, UPPER, WRITTEN
from orchestrator.launch.oci.namespaces import Namespaces
from orchestrator.launch.oci.parents import Parents
from orchestrator.launch.oci.program import USUAL, find_oci_runtime, own_options
from orchestrator.launch.oci.runtime import CLOSED, Runtime, Watched
from orchestrator.launch.oci.sandbox import OciSandbox
from orchestrator.launch.oci.serving import OciServingSandbox, serving_arguments, serving_request
from orchestrator.launch.oci.store import ImageStore, StoredImage
from orchestrator.launch.oci.user_namespace import UserNamespace, user_namespace
from orchestrator.launch.oci.verification import UNTOLD_BY_GVISOR, verify
from orchestrator.launch.oci.writable import agent_arguments, root_request
from orchestrator.launch.runtime_folder import stored_runtime
from orchestrator.launch.uids import UidPair
from orchestrator.rules.backoff import Backoff
from orchestrator.rules.waits import uninterrupted
from orchestrator.types import SandboxSpec

log = logging.getLogger(__name__)

_WEIGHED = 32  # sandboxes whose memory is looked up: a read of a file each
_LOOKS = 3
_ENDING_S = 1.0
_REMOVALS = 3
_BETWEEN_REMOVALS = Backoff(first_s=0.3, most_s=3.0)


class OciLauncher(ContainerLauncher[OciSandbox]):
    """A `Launcher`. `runtime`: the program's name or path. `start`: whether each sandbox is run by it, or forked
    from a parent that was."""

    def __init__(
        self,
        run_id: str,
        *,
        runtime: str = USUAL[0],
        start: Literal["run", "fork"] = "run",
        store: ImageStore | None = None,
        **options: Any,
    ) -> None:
        super().__init__(run_id, **options)
        self._forks = start == "fork"
        self._sharers = 2 * self._max_sandboxes  # of one parent; half of them grade or serve
        self._runtime_folder = ""  # that of all images
        self._parents = Parents(self._start_parent, self._try_removal)
        self._runtime_name = runtime
        self._store = store or ImageStore()
        self._images: dict[str, StoredImage] = {}
        self._contents: dict[str, Contents] = {}  # by the image's digest
        self._using = ExitStack()  # nobody removes an image that is used
        self._directory: Path | None = None  # bundles, and what the runtime remembers of containers
        self._runtime: Runtime | None = None
        self._opening = asyncio.Lock()
        self._is_closed = False
        self._users: UserNamespace | None = None
        self._namespaces = Namespaces()
        self._unlimited = frozenset(line.partition(":")[0] for line in missing_limits()) & self._waived

    async def check(self, spec: SandboxSpec) -> None:
        """Raises EnvironmentUnusable; ConfigError for too little memory."""
        limits = harden(spec, UidPair(0, 0), Path()).ulimits
        if reason := why_no_containers():
            raise EnvironmentUnusable(reason)
        if self._forks and (reason := why_no_forks(self._runtime_name)):
            raise EnvironmentUnusable(reason)
        version = await asyncio.to_thread(runtime_version, find_oci_runtime(self._runtime_name))
        demand([*missing_limits(self._waived), *missing_ranges(spec, self._waived)])
        if problem := does_not_fit(spec) or too_low_limits(limits, forked=self._forks):
            raise EnvironmentUnusable(problem)
        await self.check_image(spec)
        for line in advice(spec, self._max_sandboxes, version):
            self._advise(line)

    async def check_image(self, spec: SandboxSpec) -> None:
        """Unpacks the image, if need be. Raises ImageUnusable; EnvironmentUnusable for what is not the image's
        doing."""
        await self._agent_user(spec, await self._image(spec.image))

    async def describe(self, spec: SandboxSpec) -> dict[str, str]:
        """Versions and image digest."""
        image = await self._image(spec.image)
        return {
            "runtime": await asyncio.to_thread(runtime_version, find_oci_runtime(self._runtime_name)),
            "kernel": os.uname().release,
            "image": spec.image,
            "image_id": f"sha256:{image.digest}",
            **({"localhost_tcp": "allowed"} if self._allow_localhost_tcp else {}),
            **({"memory_limit": f"{spec.memory_limit_bytes} bytes with the root's"} if spec.is_writable else {}),
        }

    async def ready(self, spec: SandboxSpec) -> None:
        """Starts a container that only says which Python it has, and removes it. Raises LaunchError,
        EnvironmentUnusable."""
        image = await self._image(spec.image)
        runtime, name, uids = await self._open(), f"ready-{secrets.token_hex(8)}", self._uids.take()
        contents = replace(self._contents[image.digest], program=(PYTHON, "--version"))
        demands = replace(harden(spec, uids, self._folder(name)), arguments=())
        try:
            more = self._write_bundle(name, image, contents, spec, demands, uids)
            await runtime.start(name, self._folder(name), more)
        finally:
            if await uninterrupted(self._try_removal(name)):
                self._uids.release(uids)

    def now(self) -> LauncherNow:
        used = [used for sandbox in islice(self._live.values(), _WEIGHED) if (used := sandbox.memory_bytes())]
        memory_bytes = sum(used) // len(used) if used else None
        return LauncherNow(len(self._parents.all), self._parents.forks, memory_bytes)

    def _sandbox(self, uids: UidPair) -> OciSandbox:
        return OciSandbox(uids, self._kill, self._pause)

    @asynccontextmanager
    async def run(
        self, spec: SandboxSpec, command: Command, state: State | None = None
    ) -> AsyncIterator[OciSandbox]:
        """Raises LaunchError; EnvironmentUnusable when it is not confined as it must be."""
        host = None if state is None else state.sandboxes[-1]
        assert host is None or isinstance(host, OciSandbox)
        async with self._slots if host is None else nullcontext():
            await self._open()
            uids = self._uids.take() if host is None else host.uids
            sandbox = OciSandbox(uids, self._kill, self._pause, is_guest=host is not None)
            self._live[sandbox.name] = sandbox
            async with AsyncExitStack() as stack:
                try:
                    async with self._starting:
                        await self._start_command(sandbox, spec, command, state, stack)
                    yield sandbox
                finally:
                    await uninterrupted(self._remove(sandbox))

    @asynccontextmanager
    async def serve(self, spec: SandboxSpec, program: Program) -> AsyncIterator[OciServingSandbox]:
        """Raises LaunchError; EnvironmentUnusable when it is not confined as it must be."""
        await self._open()
        sandbox = OciServingSandbox(self._uids.take(), self._kill, self._pause, self._namespaces)
        self._live[sandbox.name] = sandbox
        async with AsyncExitStack() as stack:
            try:
                async with self._starting:
                    await self._start_program(sandbox, spec, program, stack)
                yield sandbox
            finally:
                await uninterrupted(self._remove(sandbox))

    async def _close(self) -> None:
        async with self._opening:  # what is being started finds nothing there any more
            self._is_closed = True
            runtime, directory = self._runtime, self._directory
            self._runtime = self._directory = None
        await self._namespaces.aclose()
        if runtime is not None:
            await runtime.aclose()
        if directory is not None:
            _, resisting = await asyncio.to_thread(remove_containers, directory)
            if resisting:
                log.error("%d containers could not be removed, `orchestrator cleanup` will", resisting)
            else:
                await asyncio.to_thread(remove_owned_directory, directory)
        self._using.close()

    # ------------------------------------------------------------ one container

    async def _start(self, sandbox: OciSandbox, spec: SandboxSpec, hardening: Hardening) -> None:
        image, user = await self._image_and_user(spec)
        if user is not None:
            hardening = replace(hardening, arguments=(*hardening.arguments, *agent_arguments(*user)))
        await self._open()
        contents = self._contents[image.digest]
        more = self._write_bundle(sandbox.name, image, contents, spec, hardening, sandbox.uids)
        await self._start_bundle(sandbox, image, spec, hardening, more)

    async def _start_parent(self, name: str, kind: SandboxSpec | None) -> None:
        """Raises LaunchError."""
        runtime, root = await self._open(), None
        if kind is not None:
            image, user = await self._image_and_user(kind)
            root = ParentRoot(kind, image.root, self._contents[image.digest], user)
        with self._new_folder(name) as folder:
            group, runtime_folder = path_beside_ours(name), self._runtime_folder
            told = write_parent(folder, group, runtime_folder, self._users, root, self._unlimited)
        await runtime.start(name, folder, {"parent": {**told, "sharers": self._sharers}})

    async def _start_command(
        self, sandbox: OciSandbox, spec: SandboxSpec, command: Command, state: State | None, stack: AsyncExitStack
    ) -> None:
        """`stack` ends the sandbox."""
        image, user = await self._image_and_user(spec)
        if user is None:
            raise LaunchError("a command is run in a sandbox with a writable root")
        folder, contents = self._folder(sandbox.name), self._contents[image.digest]
        hardening = harden(spec, sandbox.uids, folder / "request", allow_localhost_tcp=self._allow_localhost_tcp)
        more = root_request(spec, image, hardening, sandbox.uids, self._users, command.layers, state)
        where = await asyncio.to_thread(home, user[0], [*map(Path, spec.layers), image.root])
        environment = {"HOME": where, **contents.for_programs, **command.environment, "PWD": command.cwd}
        config = self._config(sandbox.name, folder / MERGED, contents, hardening, sandbox.uids)
        config["process"]["args"] = command_arguments(command, hardening, sandbox.uids, user)
        of_image = user
        if command.healthcheck is not None:
            of_image = (await self._image_and_user(replace(spec, user=None)))[1] or user
        with self._new_folder(sandbox.name):
            _write_config(folder, config)
            go = stack.enter_context(request(folder / "request", command, environment, of_image))
        await self._start_bundle(sandbox, image, spec, hardening, more)
        for way in command.ways:
            place = way.listener
            listener = await self._namespaces.listening(sandbox.pid, place.address, place.port)
            await stack.enter_async_context(serving(listener, way))
        os.write(go, b"x")

    async def _start_program(
        self, sandbox: OciServingSandbox, spec: SandboxSpec, program: Program, stack: AsyncExitStack
    ) -> None:
        """`stack` ends the sandbox."""
        image, user = await self._image_and_user(spec)
        if user is None:
            raise LaunchError("a service runs in a sandbox with a writable root")
        folder, contents = self._folder(sandbox.name), self._contents[image.digest]
        hardening = harden(spec, sandbox.uids, folder / "request", allow_localhost_tcp=self._allow_localhost_tcp)
        hardening = replace(hardening, shared_memory=True)
        more = root_request(spec, image, hardening, sandbox.uids, self._users)
        folders = [*map(Path, spec.layers), image.root]
        where = await asyncio.to_thread(home, user[0], folders)
        environment = {"HOME": where, **contents.for_programs, **program.environment, "PWD": program.cwd}
        config = self._config(sandbox.name, folder / MERGED, contents, hardening, sandbox.uids)
        config["hostname"] = program.host_name or config["hostname"]
        config["process"]["args"] = serving_arguments(hardening, sandbox.uids, user)

        async def whom(name: str | None) -> tuple[int, int]:
            return user if name is None else await asyncio.to_thread(account, name, folders)

        with self._new_folder(sandbox.name):
            _write_config(folder, config)
            go, said = stack.enter_context(serving_request(folder / "request", program, environment))
        stack.push_async_callback(sandbox.hung_up)
        sandbox.is_told_in(folder / "request", go, said, whom)
        await self._start_bundle(sandbox, image, spec, hardening, more)

    async def _image_and_user(self, spec: SandboxSpec) -> tuple[StoredImage, tuple[int, int] | None]:
        """Raises LaunchError."""
        try:
            image = await self._image(spec.image)
            return image, await self._agent_user(spec, image)
        except EnvironmentUnusable as error:  # a task's own image: the others go on
            raise LaunchError(str(error)) from error

    async def _start_bundle(
        self,
        sandbox: OciSandbox,
        image: StoredImage,
        spec: SandboxSpec,
        hardening: Hardening,
        more: dict[str, Any],
    ) -> None:
        """`more`: what the keeper must know of a writable root."""
        runtime = await self._open()
        if self._forks:
            sandbox.parent = await self._parents.lease_for(spec)
            more = {**(more or {"image": str(image.root)}), "from": sandbox.parent}
        begun_s = asyncio.get_running_loop().time()
        pid = await runtime.start(sandbox.name, self._folder(sandbox.name), more)
        clock = sandbox.runs(pid, begun_s)
        if "root" in more:
            sandbox.upper = runtime.seen_by_keeper(self._folder(sandbox.name) / WRITTEN / UPPER)
            sandbox.lowers = (*map(Path, spec.layers), image.root)
        unseen = UNTOLD_BY_GVISOR if is_gvisor(self._runtime_name) else NO_MEASURES
        for looks_left in reversed(range(_LOOKS)):
            try:
                problems = verify(pid, sandbox.name, hardening, self._waived | unseen)
                break
            except OSError as error:
                if await sandbox.has_ended(_ENDING_S):
                    return  # `exited` says how
                if not looks_left:
                    raise LaunchError(f"the sandbox cannot be inspected: {error.strerror}") from error
        if problems:
            if await sandbox.has_ended(_ENDING_S):
                return
            demand(problems)
        self._warn_of_cpu(clock)

    async def _kill(self, name: str) -> None:
        await self._opened().kill(name)

    async def _pause(self, name: str, still: bool) -> None:
        await self._opened().pause(name, still)

    def _opened(self) -> Runtime:
        """That of a sandbox. Raises SandboxLostError."""
        if self._runtime is None:
            raise SandboxLostError(CLOSED)
        return self._runtime

    async def _remove(self, sandbox: OciSandbox) -> None:
        """The removal is tried again in `aclose`, and is then left to the reaper."""
        del self._live[sandbox.name]
        if await self._try_removal(sandbox.name):
            if not sandbox.is_guest:
                self._uids.release(sandbox.uids)
            if sandbox.parent:
                await self._parents.release(sandbox.parent, sandbox.why_unready)

    async def _try_removal(self, name: str) -> bool:
        for failures in range(_REMOVALS):
            await asyncio.sleep(_BETWEEN_REMOVALS.pause_s(failures))
            if self._runtime is None:  # none was made, or `aclose` removes all of them
                return True
            folder = self._folder(name)
            try:
                await self._runtime.remove(name)
            except RolloutError as error:
                failure = error
            else:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
                return True
        log.error("%s could not be removed; it is tried again at the end: %s", name, failure)
        return False

    async def _open(self) -> Runtime:
        """Raises LaunchError."""
        async with self._opening:
            if self._is_closed:
                raise LaunchError(CLOSED)
            if self._runtime is None:
                program = find_oci_runtime(self._runtime_name)
                options = await asyncio.to_thread(own_options, program)
                self._users = user_namespace()
                self._directory = _make_directory(self.run_id, program)
                command = runtime_command(program, self._directory, options)
                watched: Mapping[str, Watched] = ChainMap[str, Any](self._live, self._parents.all)
                self._runtime = Runtime(command, watched, self._users)
            return self._runtime

    def _folder(self, name: str) -> Path:
        """Raises LaunchError."""
        if self._directory is None:
            raise LaunchError(CLOSED)
        return self._directory / "bundles" / name

    @contextmanager
    def _new_folder(self, name: str) -> Iterator[Path]:
        """Of a container, to be filled within the block. Raises LaunchError."""
        folder = self._folder(name)
        try:
            folder.mkdir()
            yield folder
        except OSError as error:
            raise LaunchError(f"no place for a container in {folder.parent}: {error.strerror}") from error

    async def _agent_user(self, spec: SandboxSpec, image: StoredImage) -> tuple[int, int] | None:
        """(uid, gid) of the agent in its user namespace; None: it has none. Raises ImageUnusable,
        EnvironmentUnusable."""
        if not spec.is_writable:
            return None
        if os.geteuid() != 0 and spec.is_on_disk:
            raise EnvironmentUnusable("only root can have more env.sandbox_storage than env.sandbox_memory")
        if is_gvisor(self._runtime_name):
            raise EnvironmentUnusable(
                "a writable root needs runc (--env.oci_runtime): gVisor joins no user namespace"
            )
        user = str(image.config.get("User") or "") if spec.user is None else spec.user
        return await asyncio.to_thread(account, user, [*map(Path, spec.layers), image.root])

    def _write_bundle(
        self,
        name: str,
        image: StoredImage,
        contents: Contents,
        spec: SandboxSpec,
        demands: Hardening,
        uids: UidPair,
    ) -> dict[str, Any]:
        """Returns what the keeper must know of a writable root. Raises LaunchError."""
        with self._new_folder(name) as folder:
            root, more = image.root, {}
            if demands.root is not None:
                more = root_request(spec, image, demands, uids, self._users)
                root = folder / MERGED
            _write_config(folder, self._config(name, root, contents, demands, uids))
        return more

    def _config(
        self, name: str, root: Path, contents: Contents, demands: Hardening, uids: UidPair
    ) -> dict[str, Any]:
        config = bundle(root, contents, demands, path_beside_ours(name), unlimited=self._unlimited)
        return fork_config(config, uids, self._sharers) if self._forks else config

    def _find(self, name: str) -> StoredImage | None:
        """In the store, or unpacked into it if `name` is the path of an image. Blocks."""
        image = self._store.find(name)
        return self._store.put(Path(name).expanduser()) if image is None and is_path(name) else image

    async def _image(self, name: str) -> StoredImage:
        """Found once, and what runs in it. Raises ImageUnusable, EnvironmentUnusable, LaunchError."""
        if name not in self._images:
            image = await asyncio.to_thread(self._find, name)
            if image is None:
                raise ImageUnusable(
                    f"the sandbox image {name} is not in the store of images: run `orchestrator image build --oci`"
                )
            environment = image_environment(name, image.config.get("Env") or ())
            runtime = await asyncio.to_thread(stored_runtime, self._store)
            if self._is_closed:
                raise LaunchError(CLOSED)
            self._runtime_folder = str(runtime.path)
            self._contents[image.digest] = Contents(self._runtime_folder, environment, self._program)
            self._using.enter_context(self._store.using(image))
            self._images[name] = image
        return self._images[name]


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    """Raises OSError."""
    (folder / "config.json").write_text(json.dumps(config))


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
