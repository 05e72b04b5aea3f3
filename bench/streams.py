"""Both ends of a bench of streams, as programs: a server on the loopback device, and who asks it.

    python -m bench.streams serve           prints its port
    python -m bench.streams pairs N A B     seconds of requests to the ports A and B, in turns
    python -m bench.streams load N C A      seconds that N requests take, over C connections of its own each
    python -m bench.streams kept N C A      the same on C connections that stay
    python -m bench.streams download N A    seconds that N MiB take

A request is a line; the answer to `ask` has 100 bytes, to `send N` N MiB. All but `serve` print JSON.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time

ANSWER = b"x" * 100
PIECE = bytes(1 << 20)


async def serve() -> None:
    """Until it is killed."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if line == b"ask\n":
                writer.write(ANSWER)
                continue
            for _ in range(int(line.split()[1])):
                writer.write(PIECE)
                await writer.drain()
            break
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def ask(port: int) -> float:
    """Seconds from connecting to the answer."""
    started = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"ask\n")
        left = len(ANSWER)
        while left:
            left -= len(connection.recv(left))
    return time.perf_counter() - started


def pairs(count: int, *ports: int) -> list[list[float]]:
    """Of each port the times of its requests."""
    for port in ports:
        ask(port)
    return [list(times) for times in zip(*([ask(port) for port in ports] for _ in range(count)), strict=True)]


async def load(count: int, at_once: int, port: int, *, kept: bool) -> float:
    """Seconds."""

    async def work() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in range(count // at_once):
            if not kept and number:
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"ask\n")
            await reader.readexactly(len(ANSWER))
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(at_once)))
    return time.perf_counter() - started


def download(mebibytes: int, port: int) -> float:
    """Seconds from the request to the last byte."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        started = time.perf_counter()
        connection.sendall(b"send %d\n" % mebibytes)
        buffer, got = bytearray(1 << 20), 0
        while size := connection.recv_into(buffer):
            got += size
        took = time.perf_counter() - started
    if got != mebibytes << 20:
        raise RuntimeError(f"{got} bytes of {mebibytes} MiB")
    return took


def main(what: str, *numbers: int) -> None:
    """As the module says."""
    if what == "serve":
        asyncio.run(serve())
    elif what == "pairs":
        print(json.dumps(pairs(*numbers)))
    elif what == "download":
        print(json.dumps(download(*numbers)))
    else:
        print(json.dumps(asyncio.run(load(*numbers, kept=what == "kept"))))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
