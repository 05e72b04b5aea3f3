"""Commands that begin as forks of a process that has imported what they need: importing was half of a small run.

A fork is a process like any other, with its own session, environment, directory and standard streams; only what
modules read when they are imported is that of the process it was forked from.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from orchestrator.completion.tokenizer import auto_tokenizer

ROOT = Path(__file__).parents[2]
_MOST_BYTES = 128 * 1024
_MAIN = """\
import sys
from tests.fakes.forked import serve
sys.argv = ["-c", *serve(int(sys.argv[1]))]
from orchestrator.cli import main
sys.exit(main())
"""
_IMPORTED = ("process", "evaluate", "serve", "replay", "rescore", "verify", "view", "export")


class Forked:
    """One that is under way, as asyncio's Process has it."""

    def __init__(self, pid: int, stdout: asyncio.StreamReader, stderr: asyncio.StreamReader) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.returncode: int | None = None
        self._end: asyncio.Task[None] | None = None

    def follow(self, told: asyncio.StreamReader, line: asyncio.StreamWriter) -> None:
        """Begins to wait for its end."""
        self._end = asyncio.create_task(self._follow(told, line))

    async def _follow(self, told: asyncio.StreamReader, line: asyncio.StreamWriter) -> None:
        self.returncode = int(await told.readline())
        line.close()  # kept until here: one that nobody holds closes itself

    async def wait(self) -> int:
        """Its exit code, negative after a signal."""
        assert self._end is not None
        await asyncio.shield(self._end)
        assert self.returncode is not None
        return self.returncode

    async def communicate(self) -> tuple[bytes, bytes]:
        """All that it still prints."""
        out, err = await asyncio.gather(self.stdout.read(), self.stderr.read())
        await self.wait()
        return out, err

    def send_signal(self, number: int) -> None:
        """As `os.kill`. Raises ProcessLookupError."""
        if self.returncode is None:
            os.kill(self.pid, number)


async def forked(arguments: Sequence[str], environment: Mapping[str, str], directory: Path) -> Forked:
    """`orchestrator ARGUMENTS` in a session of its own, without standard input."""
    ours, theirs = socket.socketpair()
    pipes = [os.pipe(), os.pipe()]
    request = {"arguments": [*arguments], "environment": {**environment}, "directory": str(directory)}
    with theirs, open(os.devnull, "rb") as nothing:
        given = [nothing.fileno(), *(end for _, end in pipes), theirs.fileno()]
        socket.send_fds(_forker()[0], [json.dumps(request).encode()], given)
    streams = []
    for begin, end in pipes:
        os.close(end)
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda p=protocol: p, os.fdopen(begin, "rb"))  # type: ignore[misc]
        streams.append(reader)
    told, line = await asyncio.open_unix_connection(sock=ours)
    process = Forked(int(await told.readline()), *streams)
    process.follow(told, line)
    return process


@functools.cache
def _forker() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The process that forks, and the way to it; it ends when this process does."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, str(theirs.fileno())],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # no terminal, as for those who are forked
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return ours, process


def serve(control: int) -> list[str]:
    """Forks for each request, and tells each one's pid and end. Returns in the forks alone, with the arguments."""
    for name in _IMPORTED:
        importlib.import_module(f"orchestrator.commands.{name}")
    auto_tokenizer()
    gc.freeze()  # so that collections in the forks copy no memory of this process
    requests, ready = socket.socket(fileno=control), selectors.DefaultSelector()
    ready.register(requests, selectors.EVENT_READ)
    running: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of the process: its pid, who is told
    while True:
        for key, _events in ready.select():
            if key.fileobj is requests:
                content, fds, _flags, _address = socket.recv_fds(requests, _MOST_BYTES, 4)
                if not content:
                    os._exit(0)
                if (pid := os.fork()) == 0:
                    for one in (ready, requests, *(told for _, told in running.values())):
                        one.close()
                    return _become(json.loads(content), fds)
                told = socket.socket(fileno=fds.pop())
                for fd in fds:
                    os.close(fd)
                told.sendall(b"%d\n" % pid)
                ended = os.pidfd_open(pid)
                running[ended] = pid, told
                ready.register(ended, selectors.EVENT_READ)
            else:
                ready.unregister(key.fd)
                pid, told = running.pop(key.fd)
                os.close(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with told, suppress(OSError):  # nobody may be there any more
                    told.sendall(b"%d\n" % code)


def _become(request: Mapping[str, object], fds: list[int]) -> list[str]:
    """Makes this fork what the request describes; its arguments."""
    os.setsid()
    hear_hangups()
    for target, fd in enumerate(fds[:3]):
        os.dup2(fd, target)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with suppress(OSError):  # the listing's own
                os.close(int(name))
    os.chdir(str(request["directory"]))
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]
    return [*request["arguments"]]  # type: ignore[misc]


def hear_hangups() -> None:
    """Where the tests themselves run under nohup, the runs they start would inherit that."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
