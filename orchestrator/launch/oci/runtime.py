"""The OCI runtime as coroutines: containers are started and removed, and one learns how each ended.

The keeper, a process of its own, runs the runtime: see there why. It is started with the first container, and
again if it was killed.
"""

import asyncio
import json
import logging
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from orchestrator.errors import LaunchError, RolloutError, SandboxLostError
from orchestrator.launch.oci.keeper import CALL_S
from orchestrator.launch.oci.program import environment
from orchestrator.launch.oci.user_namespace import UserNamespace
from orchestrator.rules.text import printable
from orchestrator.rules.waits import running_timeout

log = logging.getLogger(__name__)

_KEEPER = Path(__file__).with_name("keeper.py")
_ANSWER_S = CALL_S + 10.0
_CLOSING_S = 30.0
_LINE_BYTES = 1 << 20
_ERROR_CHARS = 400

LOST = "the process that watches sandboxes has ended"
CLOSED = "the launcher has been closed"


class Unfit(LaunchError):
    """Nothing can be forked from this container, or another one of its kind, by what it imports."""


class Watched(Protocol):
    """One container, which learns of its end in the event loop."""

    def ended(self, status: int, output: str) -> None:
        """Pid 1 ended with this wait status. `output`: the end of what it printed."""

    def lose(self, error: RolloutError) -> None:
        """Nobody will learn how it ended."""


class Runtime:
    """`command`: the runtime's program and its global options. `users`: where an ordinary user runs it. `live`:
    by name."""

    def __init__(
        self, command: Sequence[str], live: Mapping[str, Watched], users: UserNamespace | None = None
    ) -> None:
        keeper = [sys.executable, "-I", "-S", str(_KEEPER), *command]
        self._environment = environment(command[0])
        self._command = keeper if users is None else users.entered_by(keeper)
        self._live = live
        self._opening = asyncio.Lock()
        self._is_closed = False
        self._keeper: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._heard_s = 0.0  # when the keeper last said anything (loop time), or was started
        self._calls = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def start(self, name: str, bundle: Path, more: Mapping[str, object] = MappingProxyType({})) -> int:
        """Starts a container from the folder `bundle`. Returns the process id of its pid 1. `more`: of a root that
        it may write to. LaunchError: the runtime refused, or did not answer; `remove` it in any case."""
        try:
            answer = await self._call(start=name, bundle=str(bundle), **more)
        except SandboxLostError as error:
            raise LaunchError(str(error)) from None
        if "error" in answer:
            raise (Unfit if "unfit" in answer else LaunchError)(told_by_runtime(answer["error"]))
        return int(answer["pid"])

    def seen_by_keeper(self, path: Path) -> Path:
        """The way to `path` among the mounts of the keeper, as long as it lives."""
        assert self._keeper is not None
        return Path(f"/proc/{self._keeper.pid}/root{path}")

    async def kill(self, name: str) -> None:
        """Kills a container and all its processes, unless it has ended; its sandbox learns when none is left.
        Raises SandboxLostError."""
        await self._call(kill=name)

    async def pause(self, name: str, still: bool) -> None:
        """Has all processes of a container stand still, or go on. Raises SandboxLostError; none where one that has
        ended is to go on."""
        answer = await self._call(pause=name, still=still)
        if "error" in answer:
            raise SandboxLostError(f"the sandbox cannot be held still: {told_by_runtime(answer['error'])}")

    async def remove(self, name: str) -> bool:
        """Kills a container and all its processes, and removes it. False: there was none. Raises SandboxLostError
        if that did not work."""
        answer = await self._call(remove=name)
        if "error" in answer:
            raise SandboxLostError(told_by_runtime(answer["error"]))
        return bool(answer["existed"])

    async def aclose(self) -> None:
        """Hangs up: the keeper removes what is left and ends. Whoever waits for an answer, or asks later, gets
        SandboxLostError. Idempotent."""
        async with self._opening:
            self._is_closed = True
            self._lose(CLOSED)
        if self._keeper is not None:
            try:
                async with asyncio.timeout(_CLOSING_S):
                    await self._keeper.wait()
            except TimeoutError:
                log.warning("containers were not removed in %g s", _CLOSING_S)
                with suppress(ProcessLookupError):
                    self._keeper.kill()
                await self._keeper.wait()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    async def _call(self, **told: object) -> dict[str, Any]:
        writer = await self._opened()
        self._calls += 1
        number = self._calls
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            writer.write(json.dumps({"call": number, **told}).encode() + b"\n")
            async with running_timeout(_ANSWER_S):
                return await answer
        except TimeoutError:
            self._end_stopped()
            raise SandboxLostError(f"the OCI runtime did not answer within {_ANSWER_S:g} s") from None
        finally:
            self._answers.pop(number, None)

    def _end_stopped(self) -> None:
        """A keeper that somebody has stopped, and that has said nothing for so long, may never go on. The next
        call starts another one."""
        keeper, silent_s = self._keeper, asyncio.get_running_loop().time() - self._heard_s
        if (
            keeper is not None
            and keeper.returncode is None
            and silent_s >= _ANSWER_S / 2
            and is_stopped(keeper.pid)
        ):
            log.error("the process that watches sandboxes stands still (SIGSTOP): it is ended")
            keeper.kill()

    async def _opened(self) -> asyncio.StreamWriter:
        async with self._opening:
            if self._is_closed:
                raise SandboxLostError(CLOSED)
            if self._writer is None:
                ours, theirs = socket.socketpair()
                with theirs:
                    try:
                        self._keeper = await asyncio.create_subprocess_exec(
                            *self._command,
                            stdin=theirs.fileno(),
                            stdout=asyncio.subprocess.DEVNULL,
                            stderr=asyncio.subprocess.PIPE,
                            env=self._environment,
                            start_new_session=True,  # Ctrl-C is for the orchestrator alone
                        )
                    except OSError as error:
                        ours.close()
                        raise SandboxLostError(f"cannot start a process: {error.strerror}") from error
                self._heard_s = asyncio.get_running_loop().time()
                reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=_LINE_BYTES)
                self._reading = asyncio.create_task(self._read(reader, self._keeper), name="oci keeper")
            return self._writer

    async def _read(self, reader: asyncio.StreamReader, keeper: asyncio.subprocess.Process) -> None:
        try:
            with suppress(OSError):
                while line := await reader.readline():
                    self._heard_s = asyncio.get_running_loop().time()
                    self._hear(json.loads(line))
        except (ValueError, LookupError, TypeError) as error:
            log.error("the process that watches sandboxes sent an invalid message: %r", error)
        finally:
            if self._writer is not None:  # else we have hung up
                self._lose(LOST)
                log.warning("%s: %s", LOST, await _last_words(keeper))

    def _hear(self, message: dict[str, Any]) -> None:
        if "ended" in message:
            if (sandbox := self._live.get(message["ended"])) is not None:
                sandbox.ended(int(message["status"]), str(message["said"]))
        elif "lost" in message:
            if (sandbox := self._live.get(message["lost"])) is not None:
                sandbox.lose(SandboxLostError(str(message["said"])))
        elif (answer := self._answers.get(message["call"])) is not None and not answer.done():
            answer.set_result(message)

    def _lose(self, why: str) -> None:
        """The keeper is gone, or will be. Where it ended by itself, the next call starts another one."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(SandboxLostError(why))
        for sandbox in self._live.values():
            sandbox.lose(SandboxLostError(why))


async def _last_words(keeper: asyncio.subprocess.Process) -> str:
    """The last line of what a keeper that has ended printed, or else its exit code."""
    if keeper.returncode is None:
        with suppress(ProcessLookupError):
            keeper.kill()
    assert keeper.stderr is not None
    said = (await keeper.stderr.read()).decode("utf-8", "replace").strip().rpartition("\n")[2]
    return said or f"exit code {await keeper.wait()}"


def is_stopped(pid: int) -> bool:
    """Whether this process of ours stands still."""
    with suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    return False


def told_by_runtime(text: str) -> str:
    """The runtime's error as one line. Runtimes write logfmt or JSON, the message under `msg`."""
    line = text.strip().rpartition("\n")[2]
    with suppress(ValueError, TypeError, KeyError):
        line = str(json.loads(line)["msg"])
    if 'msg="' in line:
        line = line.partition('msg="')[2].removesuffix('"').replace('\\"', '"')
    return "the OCI runtime refused: " + printable(" ".join(line.split()), "?")[:_ERROR_CHARS]
