"""Programs that ask a server, directly or by a proxy. They import little: several are started at once to ask much.

    python -m bench.requests pairs N PORT [PROXY ...]   seconds of requests: directly, then by each proxy, in turns
    python -m bench.requests load N C PORT PROXY        seconds that N requests take, C at a time, each alone
    python -m bench.requests kept N C PORT PROXY        the same on C connections that stay
    python -m bench.requests download N PORT PROXY CA   seconds that N MiB take

PROXY 0: directly. CA: a file with whom to trust, which makes it TLS; -: plain.
"""

from __future__ import annotations

import json
import select
import socket
import ssl
import sys
import time
from typing import Any

HOST = "127.0.0.1"
_BODY = b"x" * 100


def request(path: str, port: int, proxy: int, *, tls: bool = False) -> bytes:
    """As a program writes it."""
    before = f"http://{HOST}:{port}" if proxy and not tls else ""
    return f"GET {before}{path} HTTP/1.1\r\nHost: {HOST}:{port}\r\n\r\n".encode()


def ask(port: int, proxy: int) -> float:
    """Seconds from connecting to the answer."""
    started, got = time.perf_counter(), b""
    with socket.create_connection((HOST, proxy or port)) as connection:
        connection.sendall(request("/ask", port, proxy))
        while not got.endswith(_BODY):
            got += connection.recv(4096)
    return time.perf_counter() - started


def pairs(count: int, port: int, *proxies: int) -> list[list[float]]:
    """The times of direct requests, and of those by each proxy."""
    ways = (0, *proxies)
    for proxy in ways:
        ask(port, proxy)
    return [list(times) for times in zip(*([ask(port, way) for way in ways] for _ in range(count)), strict=True)]


def load(count: int, at_once: int, port: int, proxy: int, *, kept: bool) -> float:
    """Seconds."""
    question = request("/ask", port, proxy)
    answers: dict[int, tuple[socket.socket, bytearray]] = {}
    started = time.perf_counter()
    with select.epoll() as waiting:

        def begin() -> None:
            connection = socket.create_connection((HOST, proxy or port))
            answers[connection.fileno()] = connection, bytearray()
            waiting.register(connection, select.EPOLLIN)
            connection.sendall(question)

        for _ in range(at_once):
            begin()
        asked, answered = at_once, 0
        while answered < count:
            for number, _ in waiting.poll():
                connection, answer = answers[number]
                answer += (data := connection.recv(4096))
                if not data:
                    raise RuntimeError("a connection broke off")
                if not answer.endswith(_BODY):
                    continue
                answered += 1
                answer.clear()
                if not kept:
                    connection.close()
                if asked < count:
                    asked += 1
                    connection.sendall(question) if kept else begin()
        took = time.perf_counter() - started
    for connection, _ in answers.values():
        connection.close()
    return took


def download(mebibytes: int, port: int, proxy: int, authority: str) -> float:
    """Seconds from the request to the last byte."""
    tls = authority != "-"
    connection = socket.create_connection((HOST, proxy or port))
    if tls and proxy:
        connection.sendall(f"CONNECT {HOST}:{port} HTTP/1.1\r\nHost: {HOST}:{port}\r\n\r\n".encode())
        while b"\r\n\r\n" not in connection.recv(4096):
            pass
    if tls:
        connection = ssl.create_default_context(cafile=authority).wrap_socket(connection, server_hostname=HOST)
    started, buffer, got = time.perf_counter(), bytearray(1 << 20), 0
    with connection:
        connection.sendall(request(f"/send/{mebibytes}", port, proxy, tls=tls))
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(4096)
        got = len(head.partition(b"\r\n\r\n")[2])
        while got < mebibytes << 20:
            if not (size := connection.recv_into(buffer)):
                raise RuntimeError(f"{got} bytes of {mebibytes} MiB")
            got += size
    return time.perf_counter() - started


def main(what: str, *words: str) -> None:
    """As the module says."""
    numbers: Any = [word if "/" in word or word == "-" else int(word) for word in words]
    if what == "pairs":
        took: object = pairs(*numbers)
    elif what == "download":
        took = download(*numbers)
    else:
        took = load(*numbers, kept=what == "kept")
    print(json.dumps(took))


if __name__ == "__main__":
    main(*sys.argv[1:])
