"""An MCP server that nobody here wrote: `mcp-server-time`, of the protocol's own authors, in an environment of its
own, and what a model says who uses it."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import venv
from pathlib import Path

from orchestrator.launch.image.wheels import wheels_cache
from tests.frameworks.programs import Program, calls

REQUIREMENT = "mcp-server-time==2026.10.19"
QUESTION, ANSWER = "What time is it in Kolkata when it is noon in Tokyo?", "08:30"  # neither has a summer time
_ZONES = {"source_timezone": "Asia/Tokyo", "target_timezone": "Asia/Kolkata"}
_TWICE = calls("convert_time", {**_ZONES, "time": "12:00"}, {**_ZONES, "time": "13:00"})
TURNS = (f"I ask the clock.\n{_TWICE}", ANSWER)

PROGRAMS = (
    Program("openai_agents_mcp", ("agents", "agents.mcp"), TURNS),
    Program("langchain_mcp", ("langchain.agents", "langchain_openai", "langchain_mcp_adapters.client"), TURNS),
)
_CODE = """I ask the clock.
<code>
for time in ("12:00", "13:00"):
    print(convert_time(source_timezone="Asia/Tokyo", target_timezone="Asia/Kolkata", time=time))
</code>"""
AGENTS = {  # smolagents' own, and what the model says to them
    "code": (_CODE, f"So.\n<code>\nfinal_answer('{ANSWER}')\n</code>"),
    "tool_calling": (f"I ask the clock.\n{_TWICE}", calls("final_answer", {"answer": ANSWER})),
}


def clock() -> str:
    """`env.mcp_servers` with it. Fetched once."""
    folder = wheels_cache() / f"mcp-{REQUIREMENT}-{sys.version_info.major}.{sys.version_info.minor}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = folder / "bin" / "mcp-server-time"
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not command.exists():
            venv.create(folder, clear=True, with_pip=True)
            subprocess.run([folder / "bin" / "pip", "install", "--quiet", REQUIREMENT], check=True, timeout=600)
    return json.dumps([{"name": "clock", "command": str(command), "args": ["--local-timezone", "UTC"]}])
