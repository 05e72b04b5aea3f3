"""A forward proxy as a process of its own: plain requests with the whole address, and tunnels by CONNECT.

Prints its address, then one line for each request that it takes. Names that end in `.test` lead to 127.0.0.1.
`--user NAME:PASSWORD`: who else asks gets a 407.

    python -m tests.fakes.http_proxy
"""

from __future__ import annotations

import asyncio
import sys
from base64 import b64encode
from urllib.parse import urlsplit


async def serve(user: str) -> None:
    wanted = f"proxy-authorization: basic {b64encode(user.encode()).decode()}".lower()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, address, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
        print(method, address, flush=True)
        if user and wanted not in head.decode().lower():
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
            writer.close()
            return
        if method == "CONNECT":
            host, _, port = address.rpartition(":")
        else:
            parts = urlsplit(address)
            host, port = parts.hostname or "", str(parts.port or 80)
            path = parts._replace(scheme="", netloc="").geturl() or "/"
            head = head.replace(address.encode(), path.encode(), 1)
            head = head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
        there = await asyncio.open_connection("127.0.0.1" if host.endswith(".test") else host, int(port))
        if method == "CONNECT":
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            there[1].write(head)
        await asyncio.gather(pipe(reader, there[1]), pipe(there[0], writer))

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[2] if sys.argv[1:2] == ["--user"] else ""))
