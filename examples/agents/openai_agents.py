"""An agent of the OpenAI Agents SDK, with its default model API (Responses) and a tool that runs Python.

orchestrator process --env.agent program:examples/agents/openai_agents.py --env.sandbox_image IMAGE ...
"""

import os
import subprocess
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)  # it would send traces to OpenAI, and try for seconds before the program ends


@function_tool
def run_python(code: str) -> str:
    """Runs Python code in a process of its own and returns what it prints, errors included."""
    argv = ["timeout", "60", sys.executable, "-c", code]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout[-10_000:] or f"exit code {done.returncode}"


agent = Agent(
    name="solver",
    instructions="Use run_python to solve the task. Then say the answer and nothing else.",
    tools=[run_python],
    model=os.environ["OPENAI_MODEL"],
)
print(Runner.run_sync(agent, sys.stdin.read()).final_output)
