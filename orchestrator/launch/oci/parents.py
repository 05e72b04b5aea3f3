"""The parents that sandboxes are forked from, one for each image: started when they are needed, renewed, ended.

A parent is a container like a sandbox, with an image and the runtime, but without a network, a task, a channel and
a place to write to. Its capabilities are those of a user namespace that no other parent has.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import RolloutError
from orchestrator.launch.contents import APP, PYTHON, Contents
from orchestrator.launch.hardening import MIB, SUPERVISOR_PIDS, Hardening
from orchestrator.launch.names import CHANNEL_MOUNT
from orchestrator.launch.oci.bundle import bundle
from orchestrator.launch.oci.store import StoredImage
from orchestrator.launch.oci.user_namespace import Mapping, id_range
from orchestrator.launch.uids import FIRST_OF_RANGES, FIRST_UID, LAST_UID, RANGE_IDS, SLOTS
from orchestrator.rules.waits import uninterrupted

MOST_FORKS = 1000
MOST_S = 1800.0
_OWN_IDS = FIRST_OF_RANGES + SLOTS * RANGE_IDS  # of root in all parents, and of the users of images
_CAPABILITIES = ("NET_ADMIN", "SETGID", "SETPCAP", "SETUID", "SYS_ADMIN")
_MEMORY_BYTES = 2048 * MIB


@dataclass
class _Parent:
    name: str
    begun_s: float
    forks: int = 0
    live: int = 0
    has_ended: bool = False

    def ended(self, status: int, output: str) -> None:
        """Nothing more can be forked from it."""
        self.has_ended = True

    def lose(self, error: RolloutError) -> None:
        """Nor if nobody watches it any more."""
        self.has_ended = True


class Parents:
    """`start` makes a parent and `remove` ends one, by name; both may raise RolloutError."""

    def __init__(
        self,
        start: Callable[[str, StoredImage], Awaitable[object]],
        remove: Callable[[str], Awaitable[object]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start, self._remove, self._clock = start, remove, clock
        self._newest: dict[str, _Parent] = {}  # by the image's digest
        self.all: dict[str, _Parent] = {}  # by name
        self._starting = asyncio.Lock()

    async def lease(self, image: StoredImage) -> str:
        """The name of a parent, until `release`. Raises LaunchError."""
        async with self._starting:
            parent = self._newest.get(image.digest)
            if (
                parent is None
                or parent.has_ended
                or parent.forks >= MOST_FORKS
                or self._clock() - parent.begun_s > MOST_S
            ):
                parent = await self._renewed(image, parent)
            parent.forks += 1
            parent.live += 1
            return parent.name

    async def release(self, name: str) -> None:
        """What was forked from it has been removed. Ends a parent that is not the newest with its last one."""
        parent = self.all[name]
        parent.live -= 1
        if not parent.live and parent not in self._newest.values():
            await self._end(parent)

    async def _renewed(self, image: StoredImage, old: _Parent | None) -> _Parent:
        name = f"parent-{secrets.token_hex(8)}"
        parent = self.all[name] = _Parent(name, self._clock())
        try:
            await self._start(name, image)
        except BaseException:
            await uninterrupted(self._end(parent))
            raise
        self._newest[image.digest] = parent
        if old is not None and not old.live:
            await self._end(old)
        return parent

    async def _end(self, parent: _Parent) -> None:
        del self.all[parent.name]
        await self._remove(parent.name)


def parent_bundle(root: Path, contents: Contents, control_group: str) -> dict[str, Any]:
    """The configuration of a parent's container: a sandbox's without all that is of a task, and with what it takes
    to make others."""
    nowhere = Path("/")
    limits = Hardening((), nowhere, (), _MEMORY_BYTES, 0, 4 * SUPERVISOR_PIDS, {}, False, None, 0)
    config = bundle(root, contents, limits, control_group)
    process, linux = config["process"], config["linux"]
    process["args"] = [PYTHON, "-P", f"{APP}/sandbox/boot/parent.py"]
    capabilities = [f"CAP_{name}" for name in _CAPABILITIES]
    process["capabilities"] = dict.fromkeys(("bounding", "effective", "permitted"), capabilities)
    config["mounts"] = [told for told in config["mounts"] if told["destination"] != CHANNEL_MOUNT]
    linux["namespaces"].append({"type": "user"})
    linux["uidMappings"] = linux["gidMappings"] = ID_RANGES
    del linux["resources"]["cpu"]
    # A process that mounts a /proc of its own must see the whole of one.
    linux["maskedPaths"] = linux["readonlyPaths"] = []
    del linux["seccomp"]
    return config


def _ranges() -> list[Mapping]:
    """The identities of sandboxes are the same numbers outside. All others are nobody's."""
    return [
        id_range(0, _OWN_IDS, FIRST_UID),
        id_range(FIRST_UID, FIRST_UID, LAST_UID + 1 - FIRST_UID),
        id_range(LAST_UID + 1, _OWN_IDS + LAST_UID + 1, RANGE_IDS - LAST_UID - 1),
    ]


ID_RANGES = _ranges()
ID_MAP = "\n".join(" ".join(map(str, ids.values())) for ids in ID_RANGES)
OWNER = _OWN_IDS + LAST_UID  # an id that is mapped to none
