"""`env.egress` from the command line to the record: every kind of agent finds the proxy, and programs still find
their endpoint."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.e2e.endpoint import scripted_endpoint
from tests.fakes import oci_images
from tests.fakes.runs import flags, lines, place, run, running, until

QUESTION = "What does the server say?"
PAGE = "told-by-the-server"
PROGRAM = """
import json, os, sys, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": sys.stdin.read()}]}).encode()
with urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body) as answer:
    url = json.load(answer)["choices"][0]["message"]["content"]
print(urllib.request.urlopen(url).read().decode())
"""
PYTHON = "import urllib.request\nfinal_answer(urllib.request.urlopen({url!r}).read().decode())"
SHELL = "python3 -c 'import urllib.request as u; print(u.urlopen(\"{url}\").read().decode())'"


HELD, LET_GO = threading.Event(), threading.Event()  # a request for `/held` came; its connection is closed


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/held":
            HELD.set()
            self.connection.recv(1)
            LET_GO.set()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(PAGE.encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    """Under no name that a sandbox has for itself."""
    with ThreadingHTTPServer(("127.0.0.2", 0), _Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.2:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def home() -> Iterator[Path]:
    with place() as directory:
        task = {"task_id": "t", "question": QUESTION, "answer": PAGE}
        (directory / "tasks.jsonl").write_text(json.dumps(task) + "\n")
        (directory / "agent.py").write_text(PROGRAM)
        yield directory


def _named(address: str) -> str:
    """The entry for a server of this machine."""
    host, _, port = address.partition(":")
    return json.dumps([{"host": host, "ports": [int(port)], "private": True}])


def says(agent: str, url: str) -> list[str]:
    match agent:
        case "code":
            return [f"Thought.\n<code>\n{PYTHON.format(url=url)}\n</code>"]
        case "tool_calling":
            code = PYTHON.format(url=url).replace("final_answer", "print")
            calls = [("python_interpreter", {"code": code}), ("final_answer", {"answer": PAGE})]
            return [f"Action:\n{json.dumps({'name': name, 'arguments': given})}" for name, given in calls]
        case "shell":
            return [f"Next.\n```bash\n{SHELL.format(url=url)}\n```", PAGE]
    return [url]


AGENTS = {"code": {}, "tool_calling": {"tool_call_format": "json"}, "shell": {"tool_call_format": "fenced"}}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["process", pytest.param("oci", marks=pytest.mark.docker)])
@pytest.mark.parametrize("agent", [*AGENTS, "program:agent.py"])
async def test_agents_ask_the_hosts_that_are_named(home: Path, address: str, agent: str, launcher: str) -> None:
    if launcher == "oci":
        if (why := oci_images.why_not()) is not None:
            pytest.skip(why)
        oci_images.stored_image()
    more = {
        "agent": agent,
        "launcher": launcher,
        "egress": _named(address),
        "group_size": 1,
        **AGENTS.get(agent, {}),
    }
    with scripted_endpoint({QUESTION: [says(agent, f"http://{address}/page")]}, "--dialect", "vllm") as endpoint:
        ended = await run(*flags(home, endpoint.base_url, **more), directory=home, environ=oci_images.CACHE)
    assert ended.code == 0, ended.stderr
    (line,) = lines(home / "run" / "rollouts.jsonl")
    assert (line["outcome"], line["answer"]) == ("finished", PAGE)
    seen = json.dumps([turn["messages"] for turn in line["completions"]])
    assert agent in ("code", "program:agent.py") or PAGE in seen, "the agent has read it there"


def sandboxes(home: Path) -> list[str]:
    """Processes of this machine whose command line names the place."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            command = file.read_bytes()
            if str(home).encode() in command and b"--channel" in command:
                found.append(file.parent.name)
    return found


async def test_a_run_that_is_killed_amid_streams_leaves_nothing(home: Path, address: str) -> None:
    said = [f"Thought.\n<code>\n{PYTHON.format(url=f'http://{address}/held')}\n</code>"]
    with scripted_endpoint({QUESTION: [said]}, "--dialect", "vllm") as endpoint:
        given = flags(home, endpoint.base_url, group_size=1, egress=_named(address))
        async with running(*given, directory=home) as started:
            await until(HELD.is_set, "the agent asks")
            assert sandboxes(home)
            started.signal(signal.SIGKILL)
            await started.ended()
    await until(LET_GO.is_set, "the server is let go")
    await until(lambda: not sandboxes(home), "the sandboxes end by themselves")


async def test_nothing_leaves_unless_it_is_named(home: Path) -> None:
    code = "import os\nprint([name for name in os.environ if 'proxy' in name.lower()])"
    said = [f"Thought.\n<code>\n{code}\n</code>", "Thought.\n<code>\nfinal_answer(1)\n</code>"]
    with scripted_endpoint({QUESTION: [said]}, "--dialect", "vllm") as endpoint:
        given = flags(home, endpoint.base_url, group_size=1)
        ended = await run(*given, directory=home)
        refused = await run(*given, "--env.egress", "http://x/", directory=home)
    assert ended.code == 0, ended.stderr
    (line,) = lines(home / "run" / "rollouts.jsonl")
    assert "[]\n" in line["completions"][1]["messages"][-1]["content"]
    assert refused.code == 2
    assert "env.egress" in refused.stderr
