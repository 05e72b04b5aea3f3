"""The endpoint's `/mcp` asked by the official SDK's own client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import jsonschema
import pytest
from mcp import ClientSession, McpError
from mcp.client.streamable_http import streamable_http_client

from sandbox.errors import ToolFailure
from sandbox.runner.endpoint.mcp import VERSIONS
from sandbox.runner.endpoint.server import ProgramEndpoint
from sandbox.types import Completion
from tests.unit.sandbox.endpoint.test_mcp import PRICE, serving

SLOW = 0.2


@asynccontextmanager
async def asking(endpoint: ProgramEndpoint) -> AsyncIterator[ClientSession]:
    url = endpoint.environment["ORCHESTRATOR_MCP_URL"]
    async with streamable_http_client(url) as (read, write, session_id), ClientSession(read, write) as session:
        assert (await session.initialize()).protocolVersion == VERSIONS[0]
        assert session_id() is None
        yield session


def answers(name: str, arguments: str) -> str:
    if "pin" in arguments:
        raise ToolFailure("no article pin")
    return f"{name} {arguments}"


async def test_the_sdk_lists_and_calls_tools() -> None:
    with serving(answers) as endpoint:
        async with asking(endpoint) as session:
            await session.send_ping()
            (tool,) = (await session.list_tools()).tools
            jsonschema.Draft202012Validator.check_schema(tool.inputSchema)
            assert (tool.name, tool.description) == (PRICE.name, PRICE.description)
            good = await session.call_tool("price", {"article": "größer"})
            assert (good.isError, good.content[0].text) == (False, 'price {"article": "größer"}')  # type: ignore[union-attr]
            bad = await session.call_tool("price", {"article": "pin"})
            assert (bad.isError, bad.content[0].text) == (True, "no article pin")  # type: ignore[union-attr]
            with pytest.raises(McpError, match="there is no tool 'nothing'; there are: price"):
                await session.call_tool("nothing", {})
            with pytest.raises(McpError, match="there is no method 'resources/list'"):
                await session.list_resources()
            # Calls of one client run side by side.
            several = await asyncio.gather(*(session.call_tool("price", {"n": n}) for n in range(8)))
            assert [one.content[0].text for one in several] == [f'price {{"n": {n}}}' for n in range(8)]  # type: ignore[union-attr]


async def test_a_client_that_gives_a_call_up_is_served_on() -> None:
    ends = threading.Event()

    def call(name: str, arguments: str) -> str:
        if "wait" in arguments:
            assert ends.wait(60)
        return "done"

    with serving(call) as endpoint:
        async with asking(endpoint) as session:
            with pytest.raises(McpError, match="Timed out"):
                await session.call_tool("price", {"article": "wait"}, timedelta(seconds=SLOW))
            assert (await session.call_tool("price", {"article": "pen"})).content[0].text == "done"  # type: ignore[union-attr]
            ends.set()


async def test_a_run_without_tools_lists_none() -> None:
    endpoint = ProgramEndpoint()
    with endpoint.serving(lambda request, connection: Completion("", 1, 1), lambda end: None):
        async with asking(endpoint) as session:
            assert (await session.list_tools()).tools == []
