"""Runs the programs of an image build in the image's root folder: as root of a container, without a network.

They need more than a sandbox does, and it is not a model's code that runs here: the capabilities are those of a
step of `docker build`, as far as Dockerfile.sandbox needs them, and system calls are not filtered. Should this
process be killed, the keeper ends them.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

from orchestrator.errors import EnvironmentUnusable, RolloutError
from orchestrator.launch.hardening import HOST_NAME, MASKED_PATHS, READ_ONLY_PATHS
from orchestrator.launch.oci.bundle import NAMESPACES, id_map
from orchestrator.launch.oci.runtime import Runtime
from orchestrator.launch.oci.user_namespace import UserNamespace, user_namespace
from orchestrator.waits import uninterrupted

STEP_TIMEOUT_S = 900.0
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETGID", "SETUID")
_CLOSED = ["nosuid", "nodev", "noexec"]
_LOST = -1  # instead of a wait status


class Steps(AbstractAsyncContextManager["Steps"]):
    """One program after another. `folder`: for bundles and the runtime's own files. EnvironmentUnusable: this user
    cannot make containers."""

    def __init__(self, runtime: Sequence[str], folder: Path) -> None:
        self._folder = folder
        self._users = user_namespace()
        self._ends: dict[str, asyncio.Future[tuple[int, str]]] = {}
        self._runtime = Runtime([*runtime, "--root", str(folder / "state")], self._ended, self._lost)

    async def __aexit__(self, *exception: object) -> None:
        """Nothing runs any more after this, whatever happened before."""
        await uninterrupted(self._runtime.aclose())

    async def run(
        self, root: Path, argv: Sequence[str], environment: Mapping[str, str], *, read_only: bool = False
    ) -> tuple[int, str]:
        """Exit code, and the end of what the program printed. EnvironmentUnusable: the runtime refused, or it took
        too long. On any exit it and all that it began have ended."""
        name = f"build-{secrets.token_hex(8)}"
        ended = self._ends[name] = asyncio.get_running_loop().create_future()
        (bundle := self._folder / name).mkdir()
        asked = step_bundle(root, argv, environment, name, users=self._users, read_only=read_only)
        (bundle / "config.json").write_text(json.dumps(asked))
        try:
            async with asyncio.timeout(STEP_TIMEOUT_S):
                await self._runtime.start(name, bundle)
                status, said = await ended
        except TimeoutError:
            raise EnvironmentUnusable(
                f"a step of the build was not done after {STEP_TIMEOUT_S:g} s: try again"
            ) from None
        except RolloutError as error:
            raise EnvironmentUnusable(f"the image could not be built: {error}") from error
        finally:
            with suppress(RolloutError):  # what is left goes when the runtime is closed
                await uninterrupted(self._runtime.remove(name))
            del self._ends[name]
        if status == _LOST:
            raise EnvironmentUnusable("the process that watches the build was killed: build the image again")
        return os.waitstatus_to_exitcode(status), said

    def _ended(self, name: str, status: int, said: str) -> None:
        if (ended := self._ends.get(name)) is not None and not ended.done():
            ended.set_result((status, said))

    def _lost(self) -> None:
        for name in self._ends:
            self._ended(name, _LOST, "")


def step_bundle(
    root: Path,
    argv: Sequence[str],
    environment: Mapping[str, str],
    name: str,
    *,
    users: UserNamespace | None = None,
    read_only: bool = False,
) -> dict[str, Any]:
    """The `config.json` of the bundle. Pure. /tmp is the image's own, as in `docker build`. `users`: where an
    ordinary user builds; it need not have control groups."""
    capabilities = [f"CAP_{capability}" for capability in _CAPABILITIES]
    mounts: dict[str, tuple[str, list[str]]] = {
        "/proc": ("proc", _CLOSED),
        "/dev": ("tmpfs", ["nosuid", "noexec", "strictatime", "mode=755"]),
        "/dev/shm": ("tmpfs", [*_CLOSED, "mode=1777"]),  # noqa: S108 - the container's own
        "/sys": ("sysfs", [*_CLOSED, "ro"]),
    }
    return {
        "ociVersion": "1.0.2",
        "root": {"path": str(root), "readonly": read_only},
        "hostname": HOST_NAME,
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0, "umask": 0o022},
            "args": list(argv),
            "env": [f"{variable}={value}" for variable, value in environment.items()],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            "noNewPrivileges": True,
        },
        "mounts": [
            {"destination": target, "type": kind, "source": kind, "options": options}
            for target, (kind, options) in mounts.items()
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in (*NAMESPACES, *(("user",) if users is not None else ()))],
            **({} if users is None else {"uidMappings": id_map(users.users), "gidMappings": id_map(users.groups)}),
            **({"cgroupsPath": name} if users is None else {}),
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
            "maskedPaths": list(MASKED_PATHS),
            "readonlyPaths": list(READ_ONLY_PATHS),
        },
    }
