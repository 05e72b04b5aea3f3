"""`python -m sandbox` as a process of this machine, for tests that play the orchestrator."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.fakes.scripted_orchestrator import Script, ScriptedOrchestrator

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Uids:
    """Identities inside; needs root."""

    runner: int
    worker: int
    channel_gid: int


@dataclass
class Places:
    """One sandbox's directories below `root`, which must be short: a socket's path holds about a hundred bytes."""

    root: Path
    uids: Uids | None = None
    preload: tuple[str, ...] = ()
    channel: Path = field(init=False)
    attachments: Path = field(init=False)
    workspace: Path = field(init=False)
    tmp: Path = field(init=False)

    def __post_init__(self) -> None:
        for name in ("channel", "attachments", "workspace", "tmp"):
            place = self.root / name
            place.mkdir()
            setattr(self, name, place)
        self.tmp.chmod(0o1777)
        if self.uids is not None:
            self.root.chmod(0o711)
            self.channel.chmod(0o710)
            os.chown(self.channel, 0, self.uids.channel_gid)
            os.chown(self.attachments, self.uids.runner, self.uids.runner)
            os.chown(self.workspace, self.uids.worker, self.uids.worker)

    def command(self) -> list[str]:
        """What starts the sandbox."""
        uids = self.uids
        identities = (
            {"runner-uid": uids.runner, "worker-uid": uids.worker, "channel-gid": uids.channel_gid} if uids else {}
        )
        return [
            *(sys.executable, "-m", "sandbox", "--channel", str(self.channel)),
            *("--attachments", str(self.attachments), "--workspace", str(self.workspace)),
            *(text for name, value in identities.items() for text in (f"--{name}", str(value))),
            *(text for module in self.preload for text in ("--preload", module)),
        ]


@dataclass
class Ended:
    """What is left of a sandbox."""

    code: int
    stderr: str
    served: ScriptedOrchestrator


@contextlib.asynccontextmanager
async def started(places: Places) -> AsyncIterator[asyncio.subprocess.Process]:
    """The sandbox; killed when the block is left."""
    process = await asyncio.create_subprocess_exec(
        *places.command(),
        env={
            "PATH": os.defpath,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}",
            "PYTHONHASHSEED": "0",
            "TMPDIR": str(places.tmp),
        },
        cwd=places.root,
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def run(places: Places, script: Script) -> Ended:
    """From start to end of one sandbox."""
    async with ScriptedOrchestrator(places.channel, script) as served, started(places) as process:
        return await ended(process, served)


async def ended(process: asyncio.subprocess.Process, served: ScriptedOrchestrator) -> Ended:
    """Waits for its end."""
    async with asyncio.timeout(DEADLINE_S):
        _, stderr = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, stderr.decode(), served)
