"""Runs a program of the host (pip, mmdebstrap, buildah) to its end, with live output; it can be cancelled."""

import asyncio
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from orchestrator.errors import EnvironmentUnusable
from orchestrator.rules.waits import uninterrupted

TERMINATE_GRACE_S = 10.0  # mmdebstrap unmounts and clears its folder on SIGTERM
_TAIL_LINES = 20


async def run_program(
    argv: Sequence[str],
    *,
    timeout_s: float,
    progress: Callable[[str], None],
    env: Mapping[str, str] | None = None,
    stdin: IO[bytes] | None = None,
    cwd: Path | None = None,
) -> tuple[int, tuple[str, ...]]:
    """Exit code and the last lines of what it printed; every line goes to `progress` as it comes.

    Its umask is the usual one, so that what others are to read does not depend on this process'.
    If cancelled or out of time, the whole process group is ended before this returns.
    Raises EnvironmentUnusable if the time is up.
    """
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=stdin or asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        limit=1 << 20,
        env={**os.environ, **(env or {})},
        cwd=cwd,
        umask=0o022,
    )
    assert process.stdout is not None
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    try:
        async with asyncio.timeout(timeout_s):
            async for raw in process.stdout:
                if line := raw.decode(errors="replace").strip():
                    tail.append(line)
                    progress(line)
            return await process.wait(), tuple(tail)
    except TimeoutError:
        raise EnvironmentUnusable(f"{argv[0]} was not done after {timeout_s:.0f} s: try again") from None
    finally:
        if process.returncode is None:
            await uninterrupted(_end(process))


async def _end(process: asyncio.subprocess.Process) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(TERMINATE_GRACE_S):
                await process.wait()
                return
