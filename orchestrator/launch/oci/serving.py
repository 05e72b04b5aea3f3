"""One container of the OCI runtime in which a program serves others: its begin, what is asked of it, its log."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import socket
from typing import Any

from orchestrator.errors import RolloutError, SandboxLostError
from orchestrator.launch.base import CommandEnd, Program
from orchestrator.launch.contents import APP, PYTHON
from orchestrator.launch.hardening import Hardening
from orchestrator.launch.names import CHANNEL_GID, CHANNEL_MOUNT
from orchestrator.launch.oci.namespaces import Namespaces
from orchestrator.launch.oci.sandbox import OciSandbox
from orchestrator.launch.uids import UidPair
from orchestrator.rules.waits import first_of
from orchestrator.types import Healthcheck

_NAMESPACE_FD = 3  # the first that an OCI runtime hands on
_MAIN = f"{APP}/sandbox/pid1/service.py"
_LOG, _LOG_S, _LAST_WORDS_S, _MARGIN_S = 0, 10.0, 1.0, 30.0
_MAX_SAID_BYTES = 64 << 10
_HEALTHY = b"+"
_SEPARATE_S = "0"  # programs have no limit of time


class OciServingSandbox(OciSandbox):
    """A `ServingSandbox`. `account`: gives (uid, gid) of a user of its image; None: the program's. The launcher
    says where its `request` is."""

    def __init__(self, uids: UidPair, kill: Any, pause: Any, namespaces: Namespaces) -> None:
        super().__init__(uids, kill, pause)
        self._namespaces = namespaces
        self._checks = 0
        self._answers: dict[int, list[asyncio.Future[bytes]]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._last_log, self._log_came = b"", asyncio.Event()
        self._folder = Path()
        self._go = -1
        self._account: Callable[[str | None], Awaitable[tuple[int, int]]]

    def is_told_in(
        self, folder: Path, go: int, said: int, account: Callable[[str | None], Awaitable[tuple[int, int]]]
    ) -> None:
        """`go`, `said`: the ends of the pipes of `folder`. The caller closes the first, and calls `hung_up`."""
        self._folder, self._go, self._account = folder, go, account
        self._reading = asyncio.create_task(self._read(said), name=f"said by {self.name}")

    async def hung_up(self) -> None:
        """Nothing is heard of it any more. Idempotent."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    async def begin(self) -> None:
        """Raises SandboxLostError."""
        self._tell(b"x")

    async def check(self, check: Healthcheck, user: str | None = None) -> str:
        """Raises SandboxLostError, ImageUnusable."""
        uid, gid = await self._account(user)
        self._checks += 1
        times = (check.interval_s, check.timeout_s, check.start_period_s, check.start_interval_s)
        texts = [check.command, *map(str, (*times, check.retries, uid, gid))]
        await asyncio.to_thread(_write, self._folder / "checks" / str(self._checks), texts)
        report = await self._asked(self._checks, b"%d\n" % self._checks, check.longest_s + _MARGIN_S)
        if report == _HEALTHY:
            return ""
        if report.isdigit():
            return f"it cannot be run: {os.strerror(int(report))}"
        return report[1:].decode("utf-8", "replace") or "nobody knows why"

    async def program_end(self) -> CommandEnd:
        """Raises SandboxLostError."""
        return await self.command_end()

    async def log(self) -> str:
        """Idempotent."""
        with suppress(RolloutError, TimeoutError):
            if not self._ended.is_set():
                await self._asked(_LOG, b"log\n", _LOG_S)
            elif not self._last_log:  # it is said with its end, and may not have been read yet
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self._log_came.wait()
        return self._last_log.decode("utf-8", "replace")

    async def connected(self, port: int, source: str) -> socket:
        """Raises OSError."""
        if self._ended.is_set():  # its number may be another process' by now
            raise ConnectionRefusedError(0, "the service has ended")
        return await self._namespaces.connected(self.pid, port, source)

    async def listening(self, address: str, port: int) -> socket:
        """Raises LaunchError."""
        return await self._namespaces.listening(self.pid, address, port)

    def _tell(self, line: bytes) -> None:
        try:
            os.write(self._go, line)
        except OSError as error:
            raise SandboxLostError(
                f"the sandbox of a service cannot be told anything: {error.strerror}"
            ) from error

    async def _asked(self, number: int, line: bytes, limit_s: float) -> bytes:
        """Raises SandboxLostError."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers.setdefault(number, []).append(answer)
        try:
            self._tell(line)
            async with asyncio.timeout(limit_s):
                came = await first_of(_of(answer), self._ended.wait())
        except TimeoutError:
            raise SandboxLostError(f"the sandbox of a service did not answer within {limit_s:g} s") from None
        finally:
            if number in self._answers:
                with suppress(ValueError):
                    self._answers[number].remove(answer)
        if not isinstance(came, bytes):
            raise SandboxLostError("the service has ended")
        return came

    async def _read(self, said: int) -> None:
        reader = asyncio.StreamReader(limit=_MAX_SAID_BYTES)
        file = os.fdopen(said, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), file
        )
        try:
            while line := await reader.readline():
                number, size = map(int, line.split())
                content = await reader.readexactly(min(size, _MAX_SAID_BYTES))
                if number == _LOG:
                    self._last_log = content
                    self._log_came.set()
                waiting = self._answers.pop(number, ())
                for answer in waiting:
                    if not answer.done():
                        answer.set_result(content)
        except (ValueError, asyncio.IncompleteReadError):
            return  # pid 1 sends nothing like it: whoever waits is told by a limit of time
        finally:
            transport.close()


async def _of(answer: "asyncio.Future[bytes]") -> bytes:
    return await asyncio.shield(answer)


def serving_arguments(hardening: Hardening, uids: UidPair, user: tuple[int, int]) -> tuple[str, ...]:
    """What is started as pid 1. `user`: (uid, gid) in the agent's namespace."""
    numbers = (uids.worker, CHANNEL_GID, hardening.worker_processes, _NAMESPACE_FD, *user)
    return (PYTHON, "-P", "-S", _MAIN, CHANNEL_MOUNT, *map(str, numbers), _SEPARATE_S)


@contextmanager
def serving_request(folder: Path, program: Program, environment: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    """Makes the folder that pid 1 reads. Yields descriptors: one byte into the first starts the program, and when
    it is closed, in any way, the sandbox ends; the second is read, and closed by who reads it. Raises OSError."""
    folder.mkdir()
    _write(folder / "command", program.argv)
    _write(folder / "environment", [f"{name}={value}" for name, value in environment.items()])
    _write(folder / "cwd", [program.cwd])
    _write(folder / "folders", program.folders)
    _write(folder / "volumes", program.volumes)
    (folder / "checks").mkdir()
    for name in ("go", "said"):
        os.mkfifo(folder / name)
    for place in (folder, *folder.rglob("*")):  # whatever the umask is: pid 1 is another user for an ordinary one
        place.chmod(0o755)
    (folder / "said").chmod(0o777)
    go, said = (os.open(folder / name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC) for name in ("go", "said"))
    try:
        yield go, said
    finally:
        os.close(go)


def _write(file: Path, texts: Iterable[str]) -> None:
    file.write_bytes(b"".join(os.fsencode(text) + b"\0" for text in texts))
    file.chmod(0o755)
