"""smolagents' ToolCallingAgent as a program: its model is OpenAI's client, its tool runs Python.

orchestrator process --env.agent program:examples/agents/smolagents_tools.py --env.sandbox_image IMAGE ...
"""

import os
import subprocess
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def run_python(code: str) -> str:
    """Runs Python code in a process of its own and returns what it prints, errors included.

    Args:
        code: The code.
    """
    argv = ["timeout", "60", sys.executable, "-c", code]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout[-10_000:] or f"exit code {done.returncode}"


agent = ToolCallingAgent(tools=[run_python], model=OpenAIModel(os.environ["OPENAI_MODEL"]))
print(agent.run(sys.stdin.read()))
