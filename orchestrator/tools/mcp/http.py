"""Asks an MCP server at an address: the transport "streamable HTTP", answers as JSON or as a stream of events.

The server is not listened to between requests. What goes wrong with one request is the answer to that one alone.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

import httpx

from orchestrator.network import proxy_of, trust
from orchestrator.tools.bounded import IDENTITY, AnswerTooLarge, bound
from orchestrator.tools.mcp.wire import MAX_LINE_BYTES, Wire, lost

_SESSION, _VERSION = "Mcp-Session-Id", "MCP-Protocol-Version"
_MAX_SESSION_CHARS = 1_000
_FAREWELL_S = 2.0
_HEADERS = {**IDENTITY, "Content-Type": "application/json", "Accept": "application/json, text/event-stream"}


class HttpWire:
    """Requests to one address, each in a task of its own."""

    def __init__(self, client: httpx.AsyncClient, url: str, timeout_s: float) -> None:
        self.last_words = ""
        self._client, self._url, self._timeout_s = client, url, timeout_s
        self._session: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue(1)

    async def send(self, line: bytes, number: int | None) -> None:
        if number is None:
            with suppress(httpx.HTTPError, AnswerTooLarge):  # a notification; nobody waits for anything
                await self._client.post(self._url, content=line, headers=self._session, timeout=self._timeout_s)
            return
        task = asyncio.create_task(self._ask(line, number))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def lines(self) -> AsyncIterator[bytes]:
        while (line := await self._lines.get()) is not None:
            yield line

    async def close(self) -> None:
        """Ends what is under way, and the session."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if _SESSION in self._session:
            with suppress(httpx.HTTPError, AnswerTooLarge, TimeoutError):
                async with asyncio.timeout(_FAREWELL_S):
                    await self._client.delete(self._url, headers=self._session)

    async def _ask(self, line: bytes, number: int) -> None:
        why = "it sent no answer"
        try:
            async with asyncio.timeout(self._timeout_s):
                if await self._answered(line, number):
                    return
        except httpx.HTTPStatusError as error:
            if error.response.status_code == 404 and self._session:  # it has forgotten the session
                await self._lines.put(None)
                return
            why = f"it answered with HTTP {error.response.status_code}"
        except httpx.ConnectError:
            await self._lines.put(None)
            return
        except (TimeoutError, httpx.TimeoutException):
            why = f"it did not answer within {self._timeout_s:g} seconds"
        except httpx.HTTPError as error:
            why = f"the connection to it broke: {type(error).__name__}"
        except AnswerTooLarge:
            why = f"it sent more than {MAX_LINE_BYTES} bytes, or compressed ones"
        except (ValueError, RecursionError):
            why = "it sent an answer that cannot be read"
        await self._lines.put(lost(number, why))

    async def _answered(self, line: bytes, number: int) -> bool:
        """Passes on what it answers, and says whether the answer was among that."""
        stream = self._client.stream("POST", self._url, content=line, headers=self._session)
        async with stream as response:
            response.raise_for_status()
            if response.is_redirect:
                raise ValueError("a redirect")
            if response.headers.get("content-type", "").lower().startswith("text/event-stream"):
                async for content in _events(response):
                    if await self._passed_on(content, number, response.headers):
                        return True
                return False
            return await self._passed_on(await response.aread(), number, response.headers)

    async def _passed_on(self, content: bytes, number: int, headers: Mapping[str, str]) -> bool:
        message = json.loads(content)
        is_answer = isinstance(message, dict) and message.get("id") == number and "method" not in message
        if is_answer and isinstance(result := message.get("result"), dict) and "protocolVersion" in result:
            session = headers.get(_SESSION.lower(), "")[:_MAX_SESSION_CHARS]
            self._session = {_VERSION: str(result["protocolVersion"])[:40]} | (
                {_SESSION: session} if session else {}
            )
        await self._lines.put(content)
        return is_answer


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of each event of a stream."""
    rest, data = b"", []
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line.removeprefix(b"data:").removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []


@asynccontextmanager
async def asking(url: str, headers: Mapping[str, str], timeout_s: float) -> AsyncIterator[Wire]:
    """Requests to this address, until the block is left."""
    client = httpx.AsyncClient(
        headers={**headers, **_HEADERS},
        proxy=proxy_of(url),
        verify=trust() if url.startswith("https:") else True,
        trust_env=False,  # the two above are all of the environment
        follow_redirects=False,  # they would take the keys elsewhere
        timeout=timeout_s,
        event_hooks={"response": [bound(MAX_LINE_BYTES)]},
    )
    async with client:
        wire = HttpWire(client, url, timeout_s)
        try:
            yield wire
        finally:
            await wire.close()
