"""Sockets in the network namespaces of sandboxes, as coroutines. `sockets` makes them, in a process of its own."""

import asyncio
import socket
import sys
from contextlib import suppress
from pathlib import Path

from orchestrator.errors import LaunchError
from orchestrator.launch.oci.runtime import CLOSED
from orchestrator.rules.text import printable

_PROGRAM = Path(__file__).with_name("sockets.py")
_ANSWER_S, _CONNECT_S, _CLOSING_S = 30.0, 10.0, 5.0
_PACKET = 4096
_OK = b"ok"
_IP_BIND_ADDRESS_NO_PORT = 24  # the port is chosen with the connection: sources may share one
_HERE = "127.0.0.1"


class Namespaces:
    """Of one launcher. The process is started with the first socket, and again if it has ended."""

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._line: socket.socket | None = None
        self._is_closed = False

    async def listening(self, pid: int, address: str, port: int) -> socket.socket:
        """A socket that listens on the loopback of the sandbox with this pid 1. Raises LaunchError."""
        try:
            return await self._asked(f"{pid} {address} {port}")
        except OSError as error:
            raise LaunchError(
                f"nothing can listen at {address}:{port} in the sandbox: {error.strerror}"
            ) from error

    async def connected(self, pid: int, port: int, source: str) -> socket.socket:
        """A connection to a port of its loopback that seems to come from `source` there. Raises OSError."""
        made = await self._asked(str(pid))
        try:
            made.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.bind((source, 0))
            made.setblocking(False)
            async with asyncio.timeout(_CONNECT_S):
                await asyncio.get_running_loop().sock_connect(made, (_HERE, port))
        except BaseException:
            made.close()
            raise
        return made

    async def aclose(self) -> None:
        """Whoever waits for a socket, or asks for one later, gets none. Idempotent."""
        self._is_closed = True
        if self._line is not None:
            with suppress(OSError):  # nobody is there
                self._line.shutdown(socket.SHUT_RDWR)  # who waits for an answer hears of it
        async with self._one_at_a_time:
            line, self._line = self._line, None
        if line is not None:
            line.close()
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            try:
                async with asyncio.timeout(_CLOSING_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

    async def _asked(self, question: str) -> socket.socket:
        """Raises OSError."""
        async with self._one_at_a_time:
            if self._is_closed:
                raise OSError(0, CLOSED)
            if self._line is None or (self._process is not None and self._process.returncode is not None):
                await self._start()
            assert self._line is not None
            try:
                self._line.send(question.encode())
                async with asyncio.timeout(_ANSWER_S):
                    words, made = await self._answer(self._line)
            except BaseException:  # an answer may still come, and would be taken for that of the next question
                await self._drop()
                raise
        if made is None:
            if words:
                await self._restart_for_others(words)
            ended = CLOSED if self._is_closed else "the process for sockets has ended"
            raise OSError(0, printable(words.decode("utf-8", "replace"), "?") or ended)
        return made

    async def _restart_for_others(self, words: bytes) -> None:
        """Where it could not enter: the containers may be in another user namespace now, of another keeper."""
        if b"not permitted" in words:
            async with self._one_at_a_time:
                await self._drop()

    async def _answer(self, line: socket.socket) -> tuple[bytes, socket.socket | None]:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(line, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(line)
        words, descriptors, *_ = socket.recv_fds(line, _PACKET, 1)
        made = socket.socket(fileno=descriptors[0]) if descriptors else None
        return (b"" if words == _OK else words), made

    async def _start(self) -> None:
        await self._drop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", str(_PROGRAM)),
                    stdin=theirs.fileno(),
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the orchestrator alone
                )
            except BaseException:
                ours.close()
                raise
        self._line = ours

    async def _drop(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
