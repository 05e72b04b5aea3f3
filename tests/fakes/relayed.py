"""The runner's side of streams alone, as a process of its own: parks at a socket and listens as it is told.

    python -m tests.fakes.relayed FOLDER

Prints the addresses as a line of JSON, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rollout_api.v1 import sandbox_pb2 as pb

from orchestrator.proxy.lease import Lease
from orchestrator.proxy.server import SandboxServer
from orchestrator.types import Way, World
from sandbox.runner.client import Client, assigned
from sandbox.runner.relay import Relay
from sandbox.types import Box
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.plans import a_plan, some_limits

READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Relayed:
    """Where such a process listens."""

    addresses: list[tuple[str, int]]
    pid: int


def main(folder: Path) -> None:
    """Serves until standard input ends."""
    with Client(Box(folder, folder, folder, None, 100)) as client:
        responses = client.park(pb.Confinement(no_new_privileges=True, seccomp_mode=2, process_id=1))
        told = assigned(next(responses))
        relay = Relay([(one.address, one.port) for one in told.listeners], client.relay)
        relay.start()
        print(json.dumps(relay.addresses), flush=True)
        sys.stdin.read()


@asynccontextmanager
async def relayed(folder: Path, ways: Sequence[Way], **limits: int) -> AsyncIterator[tuple[Relayed, Lease]]:
    """Such a process, and its lease."""
    lease = Lease(
        a_plan(limits=some_limits(**limits)), ScriptedCompleter(["1"]), None, {}, world=World(tuple(ways))
    )
    pipe = asyncio.subprocess.PIPE
    async with SandboxServer(folder) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.fakes.relayed", str(folder), stdin=pipe, stdout=pipe
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(READY_S):
                await server.parked()
                server.assign(lease)
                addresses = json.loads(await process.stdout.readline())
            yield Relayed([(host, port) for host, port in addresses], process.pid), lease
        finally:
            process.kill()
            await process.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
