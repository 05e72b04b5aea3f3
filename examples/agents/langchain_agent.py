"""An agent of LangChain, which LangGraph runs: `create_agent` and a tool that runs Python.

orchestrator process --env.agent program:examples/agents/langchain_agent.py --env.sandbox_image IMAGE ...
"""

import os
import subprocess
import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def run_python(code: str) -> str:
    """Runs Python code in a process of its own and returns what it prints, errors included."""
    argv = ["timeout", "60", sys.executable, "-c", code]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout[-10_000:] or f"exit code {done.returncode}"


agent = create_agent(
    ChatOpenAI(model=os.environ["OPENAI_MODEL"]),
    tools=[run_python],
    system_prompt="Use run_python to solve the task. Then say the answer and nothing else.",
)
ended = agent.invoke({"messages": [{"role": "user", "content": sys.stdin.read()}]})
print(ended["messages"][-1].text)
