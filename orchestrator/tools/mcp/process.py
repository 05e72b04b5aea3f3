"""Runs an MCP server as a process that prints one JSON text per line, and bounds what is read of it.

A server gets no more of the environment than it needs to start, and ends with its standard input, with the run, or
with this process.
"""

import asyncio
import ctypes
import os
import re
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from orchestrator.errors import EnvironmentUnusable
from orchestrator.rules.waits import uninterrupted
from orchestrator.tools.mcp.wire import MAX_LINE_BYTES, Wire, lost

_INHERITED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER")
_CHUNK_BYTES = 64 * 1024
_HEAD_BYTES = 200
_LINE_CHARS = 300
_ENDS_S = 2.0  # after its input was closed, and again after SIGTERM
_PR_SET_PDEATHSIG = 1
_ID = re.compile(rb'"id"\s*:\s*(\d{1,15})\s*[,}]')
_libc = ctypes.CDLL(None)  # loaded here: not between fork and exec


class ServerProcess:
    """A running server: lines to it, lines from it, and the last line of its standard error."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.last_words = ""

    async def send(self, line: bytes, number: int | None) -> None:
        """Raises OSError when it does not read any more."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        await self._process.stdin.drain()

    async def lines(self) -> AsyncIterator[bytes]:
        """Each line that it prints, until it ends. One that is too long is read to its end, and is an error for
        the request that it answers, as far as its beginning says so."""
        assert self._process.stdout is not None
        line, size = bytearray(), 0
        while chunk := await self._process.stdout.read(_CHUNK_BYTES):
            *ended, rest = chunk.split(b"\n")
            for piece in ended:
                line += piece[: max(0, MAX_LINE_BYTES - len(line))]
                size += len(piece)
                if size <= MAX_LINE_BYTES:
                    yield bytes(line)
                elif (number := answered_id(bytes(line[:_HEAD_BYTES]))) is not None:
                    yield lost(number, f"it sent more than {MAX_LINE_BYTES} bytes")
                line, size = bytearray(), 0
            line += rest[: max(0, MAX_LINE_BYTES - len(line))]
            size += len(rest)

    async def listen(self) -> None:
        """Keeps the last line of its standard error, until that is closed."""
        assert self._process.stderr is not None
        rest = b""
        while chunk := await self._process.stderr.read(_CHUNK_BYTES):
            *ended, rest = (rest[-_CHUNK_BYTES:] + chunk).split(b"\n")
            lines = (line[-_LINE_CHARS:].decode("utf-8", "replace").strip() for line in reversed(ended))
            self.last_words = next(filter(None, lines), self.last_words)

    async def end(self) -> None:
        """Closes its input, then asks it to end, then kills it and what it started. Bounded."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(TimeoutError):
                async with asyncio.timeout(_ENDS_S):
                    await self._process.wait()
                    break
            self._kill(number)
        self._kill(signal.SIGKILL)  # what it started may have outlived it
        with suppress(TimeoutError):
            async with asyncio.timeout(_ENDS_S):
                await self._process.wait()

    def _kill(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


@asynccontextmanager
async def running(command: str, args: tuple[str, ...], env: Mapping[str, str]) -> AsyncIterator[Wire]:
    """Runs a server until the block is left. Raises EnvironmentUnusable."""
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    try:
        process = await asyncio.create_subprocess_exec(
            command,
            *args,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**inherited, **env},
            start_new_session=True,  # only the orchestrator gets a ^C; and its children can be ended with it
            preexec_fn=_die_with_parent,
        )
    except OSError as error:
        raise EnvironmentUnusable(f"cannot run {command}: {error.strerror}") from error
    server = ServerProcess(process)
    listening = asyncio.create_task(server.listen())
    try:
        yield server
    finally:
        await uninterrupted(server.end())
        listening.cancel()
        await asyncio.wait([listening])


def answered_id(beginning: bytes) -> int | None:
    """The number of the request that a line answers, if the line begins with it as most do."""
    found = _ID.search(beginning)
    return None if found is None or b'"method"' in beginning[: found.start()] else int(found[1])


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
