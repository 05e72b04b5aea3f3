"""Speaks the Model Context Protocol with one server: the only module that knows the SDK, imported when there is a
server.

The SDK gets answers to its requests, and pings. Other things that a server may say are dropped: its log, its
progress, changes of its list, wishes for completions.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import mcp.types as spoken
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp import ClientSession, McpError
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from orchestrator.tools.mcp.wire import Dial, Wire

MAX_PAGES = 64  # of a list of tools
logging.getLogger("mcp").setLevel(logging.CRITICAL)  # what goes wrong is told by us, without what was sent


class ServerRefusal(Exception):
    """The server answered a request with an error."""


class ServerGone(Exception):
    """The server has ended, or cannot be reached."""


class Conversation:
    """One initialized conversation. `ended`: the server has."""

    def __init__(self, session: ClientSession, wire: Wire, ended: asyncio.Event) -> None:
        self._session, self._wire, self.ended = session, wire, ended

    async def tools(self) -> list[dict[str, Any]]:
        """All tools, as the server lists them. Raises as `call`."""
        tools: list[dict[str, Any]] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            request = spoken.ListToolsRequest(params=spoken.PaginatedRequestParams(cursor=cursor))
            page = await self._ask(request, spoken.ListToolsResult)
            tools += page.get("tools", [])
            cursor = page.get("nextCursor")
            if not cursor:
                return tools
        raise ServerRefusal(f"its list of tools has more than {MAX_PAGES} pages")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a tool. Raises ServerRefusal, ServerGone."""
        params = spoken.CallToolRequestParams(name=name, arguments=dict(arguments))
        return await self._ask(spoken.CallToolRequest(params=params), spoken.CallToolResult)

    async def ping(self) -> None:
        """Raises ServerGone; not where the server only does not know the question."""
        try:
            await self._ask(spoken.PingRequest(), spoken.EmptyResult)
        except ServerRefusal:
            return

    async def _ask(self, request: Any, kind: Any) -> dict[str, Any]:
        """Asked past the SDK's own methods, as those check a result by the server's schema, for as long as that
        takes."""
        asked = asyncio.ensure_future(self._session.send_request(spoken.ClientRequest(request), kind))
        ended = asyncio.ensure_future(self.ended.wait())
        try:
            await asyncio.wait([asked, ended], return_when=asyncio.FIRST_COMPLETED)
            if not asked.done() or (self.ended.is_set() and asked.exception() is not None):
                raise ServerGone("it ended")
            result = asked.result()
        except McpError as error:
            raise ServerRefusal(error.error.message) from None
        except ValidationError:
            raise ServerRefusal("it sent an answer that cannot be read") from None
        finally:
            for task in (asked, ended):
                task.cancel()
            await asyncio.wait([asked, ended])
        told: dict[str, Any] = result.model_dump(by_alias=True, mode="json", exclude_none=True)
        return told


@asynccontextmanager
async def conversation(dial: Dial) -> AsyncIterator[Conversation]:
    """A conversation with a server, until the block is left. To be left by the task that entered it. Raises
    EnvironmentUnusable, ServerRefusal, ServerGone."""
    to_session, from_wire = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_wire, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    ended = asyncio.Event()
    problem: Exception
    async with AsyncExitStack() as stack:
        wire = await stack.enter_async_context(dial)
        tasks = [
            asyncio.create_task(_read(wire, to_session, ended)),
            asyncio.create_task(_write(wire, from_session, ended)),
        ]
        stack.push_async_callback(_ended, tasks)
        session = await stack.enter_async_context(ClientSession(from_wire, to_wire))
        talk = Conversation(session, wire, ended)
        beginning = asyncio.ensure_future(session.initialize())
        gone = asyncio.ensure_future(ended.wait())
        try:
            await asyncio.wait([beginning, gone], return_when=asyncio.FIRST_COMPLETED)
            if beginning.done() and beginning.exception() is None:
                yield talk
                return
            words = f": {wire.last_words}" if wire.last_words else ""
            # Raised outside of the session, which would raise a group of errors.
            problem = ServerGone(f"it ended before it began{words}")
            if beginning.done() and not ended.is_set():
                problem = ServerRefusal(f"it does not begin: {beginning.exception()}")
        finally:
            for task in (beginning, gone):
                task.cancel()
            await asyncio.wait([beginning, gone])
    raise problem


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _read(
    wire: Wire, to_session: MemoryObjectSendStream[SessionMessage | Exception], ended: asyncio.Event
) -> None:
    """Passes on what the SDK is to hear; answers what else is asked."""
    try:
        async with to_session:
            async for line in wire.lines():
                message = _message(line)
                if message is None:
                    continue
                kind = message.root
                if isinstance(kind, spoken.JSONRPCRequest) and kind.method != "ping":
                    await wire.send(_refusal(kind.id), None)
                elif not isinstance(kind, spoken.JSONRPCNotification):
                    await to_session.send(SessionMessage(message))
    except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        return
    finally:
        ended.set()


async def _write(
    wire: Wire, from_session: MemoryObjectReceiveStream[SessionMessage], ended: asyncio.Event
) -> None:
    try:
        async with from_session:
            async for one in from_session:
                message = one.message
                text = message.model_dump_json(by_alias=True, exclude_none=True)
                number = message.root.id if isinstance(message.root, spoken.JSONRPCRequest) else None
                await wire.send(text.encode("utf-8", "replace"), number if isinstance(number, int) else None)
    except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        return
    finally:
        ended.set()


def _message(line: bytes) -> spoken.JSONRPCMessage | None:
    """None: the line is no message. Servers print other things too."""
    if not line.lstrip().startswith(b"{"):
        return None
    try:
        return spoken.JSONRPCMessage.model_validate_json(line)
    except ValidationError:  # also for one that is too deep
        return None


def _refusal(number: str | int) -> bytes:
    error = {"code": -32601, "message": "this client only lists and calls tools"}
    return json.dumps({"jsonrpc": "2.0", "id": number, "error": error}).encode()
