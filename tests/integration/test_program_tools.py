"""Host tools and tools of MCP servers in real sandboxes: a program calls them over `/mcp`, smolagents' agents in
their own ways. The record, the budgets and replay treat all alike."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.fakes import oci_images
from tests.fakes.inference import Reply, ScriptedServer
from tests.fakes.runs import Ended, flags, lines, place, run
from tests.fakes.tokenizer import tokenizer_folder

MCP_SERVER = Path(__file__).parents[1] / "fakes" / "mcp_server.py"
TOOLS = """
import asyncio

def price(article: str) -> float:
    \"\"\"Looks up a price.

    Args:
        article: Its name.
    \"\"\"
    return {"pen": 1.5}[article]

async def slow(number: int) -> str:
    \"\"\"Takes its time.

    Args:
        number: Comes back.
    \"\"\"
    await asyncio.sleep(1.0)
    return str(number)
"""
CLIENT = """
import json, os, sys, urllib.request
from concurrent.futures import ThreadPoolExecutor

def rpc(method, **params):
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    request = urllib.request.Request(
        os.environ["ORCHESTRATOR_MCP_URL"],
        json.dumps(message).encode(),
        {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"},
    )
    answer = json.load(urllib.request.urlopen(request))
    return answer.get("result", answer.get("error"))

def call(tool, **arguments):
    result = rpc("tools/call", name=tool, arguments=arguments)
    return result["content"][0]["text"] if "content" in result else result["message"]

def complete(text):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": text}]}).encode(),
        {"Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""
PROGRAM = f"""{CLIENT}
names = sorted(tool["name"] for tool in rpc("tools/list")["tools"])
said = [call("price", article="pen"), call("price", article="pin"), call("echo", text="größer"), call("fails")]
with ThreadPoolExecutor(8) as threads:
    said.append("".join(threads.map(lambda n: call("slow", number=n), range(8))))
said.append(call("nothing"))
print(json.dumps([names, said, complete("hello")]))
"""
SAID = [
    "1.5",
    "KeyError: 'pin'",
    "größer",
    "no such thing",
    "01234567",
    "there is no tool 'nothing'; there are: price, slow, echo, fails",
]


@contextmanager
def shop() -> Iterator[Path]:
    with place() as folder:
        task = {"task_id": "t", "question": "Ask.", "answer": "ok"}
        (folder / "tasks.jsonl").write_text(json.dumps(task) + "\n")
        (folder / "shop_tools.py").write_text(TOOLS)
        (folder / "agent.py").write_text(PROGRAM)
        yield folder


def given(folder: Path, url: str, launcher: str, agent: str, **more: object) -> list[str]:
    servers = [{"name": "bad", "command": sys.executable, "args": [str(MCP_SERVER), "--tools", "echo,fails"]}]
    settings = {"launcher": launcher, "agent": agent, "group_size": 1, "mcp_servers": json.dumps(servers)}
    tools = json.dumps(["python:shop_tools:price", "python:shop_tools:slow"])
    return flags(folder, url, **{**settings, "host_tools": tools, **more})


async def played(folder: Path, launcher: str, agent: str, *says: str, **more: object) -> Ended:
    async with ScriptedServer("vllm", lambda call: Reply(says[call.number or 0])) as server:
        return await run(*given(folder, server.base_url, launcher, agent, **more), directory=folder)


launchers = pytest.mark.parametrize(
    "launcher",
    ["process", pytest.param("docker", marks=pytest.mark.docker), pytest.param("oci", marks=pytest.mark.docker)],
)


@pytest.mark.slow
@launchers
async def test_a_program_calls_host_tools_and_mcp_servers(launcher: str) -> None:
    if launcher == "oci":
        oci_images.stored_image()
    with shop() as folder:
        ended = await played(folder, launcher, "program:agent.py", "ok", rollout_timeout=60)
        assert ended.code == 0, ended.stderr
        (line,) = lines(folder / "run" / "rollouts.jsonl")
        assert line["outcome"] == "finished", line["reason"]
        assert json.loads(line["answer"]) == [["echo", "fails", "price", "slow"], SAID, "ok"]
        calls = line["tool_calls"]
        assert sorted(call["sequence"] for call in calls) == list(range(1, 13))
        by_name = {call["name"]: call for call in calls}
        assert by_name["echo"]["arguments"] == {"text": "größer"}
        assert by_name["fails"]["error"] == "no such thing"
        assert len([call for call in calls if call["name"] == "slow"]) == 8
        described = json.loads((folder / "run" / "run.json").read_text())
        assert set(described["agent"]["mcp_tools"]) == {"echo", "fails"}
        checked = await run(str(folder / "run"), directory=folder, command="verify")
        assert checked.code == 0, checked.stdout

        # Played again without the server, and without calling the functions.
        (folder / "shop_tools.py").write_text(TOOLS.replace("1.5", "2.5"))
        again = await run(
            *(str(folder / "run"), "--env.agent", "program:agent.py", "--env.run_dir", str(folder / "again")),
            *("--env.host_tools", json.dumps(["python:shop_tools:price", "python:shop_tools:slow"])),
            *("--env.launcher", launcher),
            directory=folder,
            command="replay",
        )
        assert again.code == 0, again.stdout + again.stderr
        assert "1 of 1 rollouts as recorded" in again.stdout


CODE = """Thought: I ask.
<code>
print(price("pen"), echo(text="größer"))
try:
    fails()
except Exception as error:
    print(error)
</code>"""


@pytest.mark.slow
@launchers
async def test_smolagents_agents_have_the_same_tools(launcher: str) -> None:
    if launcher == "oci":
        oci_images.stored_image()
    with shop() as folder:
        ended = await played(folder, launcher, "code", CODE, "So.\n<code>\nfinal_answer('ok')\n</code>")
        assert ended.code == 0, ended.stderr
        (line,) = lines(folder / "run" / "rollouts.jsonl")
        assert (line["outcome"], line["answer"]) == ("finished", "ok"), line["reason"]
        assert [call["name"] for call in line["tool_calls"]] == ["price", "echo", "fails"]
        assert "1.5 größer\nno such thing" in line["steps"][0]["observations"]
        assert "def echo(text: string) -> string:" in json.dumps(line["completions"][0]["messages"])


FLOOD = f"""{CLIENT}
complete("hello")
with ThreadPoolExecutor(32) as threads:
    list(threads.map(lambda n: call("price", article="pen"), range(2000)))
"""
HANGS_UP = f"""{CLIENT}
import socket, urllib.parse
complete("hello")
address = urllib.parse.urlsplit(os.environ["ORCHESTRATOR_MCP_URL"])
params = {{"name": "slow", "arguments": {{"number": 1}}}}
body = json.dumps({{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}}).encode()
for _ in range(20):
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(b"POST /mcp HTTP/1.1\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body)
print(call("echo", text="still here"))
"""


async def test_a_program_that_floods_with_calls_ends_by_its_budget() -> None:
    with shop() as folder:
        (folder / "agent.py").write_text(FLOOD)
        ended = await played(folder, "process", "program:agent.py", "ok", max_tool_calls=20)
        assert ended.code == 0, ended.stderr
        (line,) = lines(folder / "run" / "rollouts.jsonl")
    assert (line["outcome"], line["reason"]) == ("budget", "20 tool calls")
    assert len(line["tool_calls"]) <= 20


async def test_calls_whose_clients_hung_up_are_on_record_and_hold_up_nobody() -> None:
    with shop() as folder:
        (folder / "agent.py").write_text(HANGS_UP)
        ended = await played(folder, "process", "program:agent.py", "ok")
        assert ended.code == 0, ended.stderr
        (line,) = lines(folder / "run" / "rollouts.jsonl")
    assert (line["outcome"], line["answer"]) == ("finished", "still here"), line["reason"]
    # Those before it may be answered after it.
    assert [call["output"] for call in line["tool_calls"]].count("still here") == 1


async def test_waiting_for_tools_does_not_use_up_the_rollouts_clock() -> None:
    with shop() as folder:
        (folder / "agent.py").write_text(
            f"{CLIENT}\ncomplete('hello')\nfor n in range(6):\n    call('slow', number=n)\nprint('ok')\n"
        )
        ended = await played(folder, "process", "program:agent.py", "ok", rollout_timeout=4)
        assert ended.code == 0, ended.stderr
        (line,) = lines(folder / "run" / "rollouts.jsonl")
    assert line["outcome"] == "finished", line["reason"]
    assert line["waiting_s"] >= 6


@pytest.mark.parametrize("agent", ["code", "tool_calling"])
async def test_what_a_server_says_of_its_tools_never_becomes_a_control_token(agent: str) -> None:
    says = {
        "code": ["I ask.\n<code>\nprint(control())\n</code>", "So.\n<code>\nfinal_answer('ok')\n</code>"],
        "tool_calling": [
            '<tool_call>\n{"name": "control", "arguments": {}}\n</tool_call>',
            '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "ok"}}\n</tool_call>',
        ],
    }[agent]
    servers = json.dumps(
        [{"name": "bad", "command": sys.executable, "args": [str(MCP_SERVER), "--tools", "control"]}]
    )
    with shop() as folder:
        ended = await played(folder, "process", agent, *says, mcp_servers=servers)
        assert ended.code == 0, ended.stderr
        (line,) = lines(folder / "run" / "rollouts.jsonl")
        assert (line["outcome"], line["answer"]) == ("finished", "ok"), line["reason"]
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder())
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        first = line["completions"][0]
        assert first["prompt_ids"].count(end) == len(first["messages"])
        assert "Obey" in tokenizer.decode(first["prompt_ids"])
