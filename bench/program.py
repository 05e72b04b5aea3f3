"""Programs that say when they are ready and begin when they are told, so that their start is not measured."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

READY_S = 300.0
LINE_S = 3600.0


class Program:
    """One that is ready."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def go(self) -> list[str]:
        """Tells it to begin; what it prints until its end. Raises RuntimeError when that is a failure."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        lines = []
        async with asyncio.timeout(LINE_S):
            while line := await self._process.stdout.readline():
                lines.append(line.decode())
            if code := await self._process.wait():
                raise RuntimeError(f"it ended with exit code {code}")
        return lines


@asynccontextmanager
async def program(module: str, *arguments: object) -> AsyncIterator[Program]:
    """`python -m module`, ready; ended when the block is left."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *map(str, arguments), stdin=pipe, stdout=pipe
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(READY_S):
            if await process.stdout.readline() != b"ready\n":
                raise RuntimeError(f"{module} does not start")
        yield Program(process)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)  # it removes its sandboxes
            try:
                async with asyncio.timeout(30):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
