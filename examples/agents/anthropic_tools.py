"""An agent with Anthropic's client and its tool runner: Messages and a tool that runs Python.

orchestrator process --env.agent program:examples/agents/anthropic_tools.py --env.sandbox_image IMAGE ...
"""

import os
import subprocess
import sys

from anthropic import Anthropic, beta_tool


@beta_tool
def run_python(code: str) -> str:
    """Runs Python code in a process of its own and returns what it prints, errors included."""
    argv = ["timeout", "60", sys.executable, "-c", code]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout[-10_000:] or f"exit code {done.returncode}"


said = (
    Anthropic()
    .beta.messages.tool_runner(
        model=os.environ["ANTHROPIC_MODEL"],
        max_tokens=4096,
        system="Use run_python to solve the task. Then say the answer and nothing else.",
        messages=[{"role": "user", "content": sys.stdin.read()}],
        tools=[run_python],
    )
    .until_done()
)
print("".join(block.text for block in said.content if block.type == "text"))
