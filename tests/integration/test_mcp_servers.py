"""MCP servers of the operator's as real processes: their tools as host tools, and what bad ones cost."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orchestrator.doctor.services import check_mcp_servers
from orchestrator.errors import ConfigError, EnvironmentUnusable, ToolError, ToolServiceError
from orchestrator.tools.base import CALLER, HostTool
from orchestrator.tools.mcp import server as server_module
from orchestrator.tools.mcp.base import McpServer
from orchestrator.tools.mcp.recorded import tool_facts
from orchestrator.tools.mcp.tools import open_servers
from tests.fakes.runs import ROOT, until

SERVER = Path(__file__).parents[1] / "fakes" / "mcp_server.py"
SHORT_S = 4.0


def a_server(name: str = "bad", *args: str, **more: object) -> McpServer:
    return McpServer(name, sys.executable, (str(SERVER), *args), **more)  # type: ignore[arg-type]


@dataclass
class Opened:
    tools: dict[str, HostTool]
    notes: list[str] = field(default_factory=list)

    async def call(self, name: str, **arguments: object) -> str:
        return await self.tools[name].call(arguments)


@asynccontextmanager
async def opened(
    *servers: McpServer, timeout_s: float = 60.0, fail_rollouts: bool = False, max_calls: int = 8
) -> AsyncIterator[Opened]:
    notes: list[str] = []
    async with AsyncExitStack() as stack:
        tools = await open_servers(
            servers,
            {"web_search"},
            stack,
            notes,
            timeout_s=timeout_s,
            max_calls=max_calls,
            fail_rollouts=fail_rollouts,
        )
        yield Opened(tools, notes)


@asynccontextmanager
async def listening(*args: str, **environ: str) -> AsyncIterator[str]:
    """The address of a server over HTTP."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SERVER),
        "--http",
        *args,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **environ},
    )
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.kill()
        await process.wait()


@pytest.fixture(params=["pipes", "http", "events"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[McpServer]:
    if request.param == "pipes":
        yield a_server()
        return
    async with listening(*(["--events"] if request.param == "events" else [])) as url:
        yield McpServer("bad", url=url)


async def test_the_tools_of_a_server_are_host_tools(server: McpServer) -> None:
    async with opened(server) as mcp:
        assert await mcp.call("echo", text="größer \u2028 \U0001f600") == "größer \u2028 \U0001f600"
        assert await mcp.call("bad_get_item", item_id=3, kind="pen", from_=None) == (
            '{"from": null, "item-id": 3, "kind": "pen"}'
        )
        assert await mcp.call("structured") == '{"n": 1}'
        assert await mcp.call("image") == "[not shown: an image, as there is text only]\nand text"
        with pytest.raises(ToolError, match="no such thing"):
            await mcp.call("fails")
        with pytest.raises(ToolError, match="text is missing"):
            await mcp.call("echo")
        with pytest.raises(ToolError, match="there is no argument"):
            await mcp.call("echo", text="x", other=1)
        cut = await mcp.call("big", size=1_000_000)
        assert cut.endswith("[cut: 800000 more characters]")
        item = mcp.tools["bad_get_item"].inputs
    assert item["item_id"] == {"type": "integer", "description": "Which.", "minimum": 1}
    assert item["from_"] == {"type": "string", "description": "from_", "nullable": True}
    assert item["kind"]["enum"] == ["pen", "ink"]
    assert item["places"]["items"]["properties"]["x"] == {"type": "number"}


@pytest.mark.slow
async def test_an_answer_of_100_megabytes_costs_its_own_call_alone(server: McpServer) -> None:
    async with opened(server) as mcp:
        results = await asyncio.gather(
            mcp.call("big", size=100_000_000), mcp.call("echo", text="still here"), return_exceptions=True
        )
        assert results[1] == "still here"
        assert "more than 2097152 bytes" in str(results[0])
        assert isinstance(results[0], ToolError)
        assert await mcp.call("echo", text="after it") == "after it"


@pytest.mark.slow
async def test_an_answer_that_is_too_deep_and_one_that_never_comes_cost_their_own_calls(server: McpServer) -> None:
    async with opened(server, timeout_s=SHORT_S) as mcp:
        results = await asyncio.gather(
            mcp.call("deep"), mcp.call("never"), mcp.call("echo", text="here"), return_exceptions=True
        )
        assert [type(one) for one in results] == [ToolError, ToolError, str]
        assert await mcp.call("echo", text="after it") == "after it"


async def test_garbage_between_the_lines_is_passed_over() -> None:
    async with opened(a_server()) as mcp:
        assert await mcp.call("garbage") == "done"
        assert await mcp.call("echo", text="x") == "x"


@pytest.mark.parametrize("fail_rollouts", [False, True])
async def test_a_server_that_a_call_killed_is_begun_anew_and_nobody_is_drawn_again(fail_rollouts: bool) -> None:
    async with opened(a_server(), fail_rollouts=fail_rollouts) as mcp:
        before = await mcp.call("pid")
        with pytest.raises(ToolError, match="the server bad is away: it ended"):
            await mcp.call("die")
        after = await mcp.call("pid")
        assert after != before
        assert not Path(f"/proc/{before}").exists()
    assert not Path(f"/proc/{after}").exists()


async def test_a_server_that_ended_between_calls_is_begun_anew_without_an_error() -> None:
    async with opened(a_server()) as mcp:
        before = int(await mcp.call("pid"))
        os.kill(before, signal.SIGKILL)
        life = mcp.tools["pid"]._server._life  # type: ignore[attr-defined]
        await until(lambda: life.ended, "the end of the server")
        assert int(await mcp.call("pid")) != before


@pytest.mark.slow
async def test_a_server_that_hangs_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "PING_S", 1.0)
    async with opened(a_server(), timeout_s=SHORT_S, fail_rollouts=True) as mcp:
        before = await mcp.call("pid")
        with pytest.raises(ToolError, match="did not answer within 4 seconds"):
            await mcp.call("hang")
        assert await mcp.call("pid") != before


async def test_only_who_had_no_call_under_way_ends_as_tool_error(tmp_path: Path) -> None:
    """The server cannot be begun again after `die`: its script is gone."""
    script = tmp_path / "server.py"
    script.write_bytes(SERVER.read_bytes())
    spec = McpServer("bad", sys.executable, (str(script),))
    async with opened(spec, fail_rollouts=True) as mcp:
        script.unlink()

        async def called_by(rollout: str, tool: str) -> BaseException:
            CALLER.set(rollout)
            with pytest.raises((ToolError, ToolServiceError)) as raised:
                await mcp.call(tool)
            return raised.value

        killer = await asyncio.create_task(called_by("killer", "die"))
        again = await asyncio.create_task(called_by("killer", "pid"))
        other = await asyncio.create_task(called_by("other", "pid"))
    assert [type(one) for one in (killer, again, other)] == [ToolError, ToolError, ToolServiceError]
    assert "a neutral question fails too" in str(other)


async def test_a_list_that_changes_changes_nothing() -> None:
    async with opened(a_server()) as mcp:
        names = set(mcp.tools)
        assert await mcp.call("grow") == "grown"
        assert set(mcp.tools) == names


async def test_keys_come_from_variables_and_files_and_are_shown_to_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MY_KEY", "hunter2hunter2")
    (tmp_path / "key").write_text("Bearer swordfish99\n")
    async with opened(a_server(env={"API_KEY": "env:MY_KEY"})) as mcp:
        assert await mcp.call("key") == "my key is [key]"
        assert mcp.tools["connect"].description == "Connects with [key]."
        assert "hunter2" not in repr(tool_facts(mcp.tools))  # for prompts, and for run.json
        with pytest.raises(ToolError) as refused:
            await mcp.call("echo", text=5)
        assert "hunter2" not in str(refused.value)
    async with listening(WANTED_KEY="Bearer swordfish99") as url:
        async with opened(McpServer("web", url=url, headers={"X-Key": f"file:{tmp_path / 'key'}"})) as mcp:
            assert await mcp.call("echo", text="Bearer swordfish99!") == "[key]!"
            assert await mcp.call("echo", text="unknown: swordfish99!") == "unknown: [key]!"
        with pytest.raises(EnvironmentUnusable, match="it answered with HTTP 401"):
            async with opened(McpServer("web", url=url)):
                pass
    with pytest.raises(ConfigError, match="the variable NOT_SET is not set"):
        async with opened(a_server(env={"API_KEY": "env:NOT_SET"})):
            pass


async def test_a_server_does_not_get_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "the orchestrator's")
    async with opened(a_server()) as mcp:
        with pytest.raises(ToolError):
            await mcp.call("key")  # there is no such variable: it ends


async def test_two_servers_with_the_same_names_and_names_that_are_taken() -> None:
    two = (a_server("one", "--tools", "echo,pid"), a_server("two", "--tools", "echo,get-item"))
    async with opened(*two) as mcp:
        assert set(mcp.tools) == {"one_echo", "pid", "two_echo", "two_get_item"}
        assert await mcp.call("two_echo", text="x") == "x"


@pytest.mark.parametrize(
    ("server", "says"),
    [
        (
            McpServer("gone", "/no/such/command"),
            "env.mcp_servers: gone: cannot run /no/such/command: No such file",
        ),
        (
            McpServer("gone", sys.executable, ("-c", "raise SystemExit('no licence')")),
            "gone: it ended.*no licence",
        ),
        (
            McpServer("gone", sys.executable, ("-c", "print('{')")),
            "env.mcp_servers: gone: it ended before it began",
        ),
        (McpServer("gone", url="http://127.0.0.1:9/mcp"), "env.mcp_servers: gone: it ended before it began"),
    ],
)
async def test_a_server_that_does_not_begin_is_named(server: McpServer, says: str) -> None:
    with pytest.raises(EnvironmentUnusable, match=says):
        async with opened(server):
            pass


async def test_doctor_begins_each_server_and_says_what_it_has() -> None:
    good, gone = a_server("good", "--tools", "echo,get-item"), McpServer("gone", "/no/such/command")
    found = [one async for one in check_mcp_servers([good, gone])]
    assert [one.text for one in found] == [
        "good has echo, good_get_item",
        "env.mcp_servers: gone: cannot run /no/such/command: No such file or directory",
    ]


ORPHAN = """
import asyncio, sys
from contextlib import AsyncExitStack
from orchestrator.tools.mcp.base import McpServer
from orchestrator.tools.mcp.recorded import tool_facts
from orchestrator.tools.mcp.tools import open_servers

async def main():
    async with AsyncExitStack() as stack:
        server = McpServer("bad", sys.executable, (sys.argv[1],))
        tools = await open_servers(
            [server], (), stack, [], timeout_s=60, max_calls=2, fail_rollouts=False
        )
        print(await tools["pid"].call({}), flush=True)
        await tools["hang"].call({})

asyncio.run(main())
"""


async def test_a_server_that_hangs_ends_with_an_orchestrator_that_is_killed() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ORPHAN, str(SERVER)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
    )
    assert process.stdout is not None
    server = int(await process.stdout.readline())
    process.kill()
    await process.wait()
    await until(lambda: not _runs(server), "the end of the server")


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_busy_server_takes_so_many_calls_at_a_time() -> None:
    async with opened(a_server(), timeout_s=SHORT_S, max_calls=2) as mcp:
        waiting = [asyncio.create_task(mcp.call("never")) for _ in range(2)]
        results = await asyncio.gather(mcp.call("echo", text="x"), *waiting, return_exceptions=True)
    assert [type(one) for one in results] == [ToolError] * 3
