"""An agent of AutoGen with a tool that runs Python.

orchestrator process --env.agent program:examples/agents/autogen_agent.py --env.sandbox_image IMAGE ...
"""

import asyncio
import os
import subprocess
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient


def run_python(code: str) -> str:
    """Runs Python code in a process of its own and returns what it prints, errors included."""
    argv = ["timeout", "60", sys.executable, "-c", code]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout[-10_000:] or f"exit code {done.returncode}"


abilities = ModelInfo(
    vision=False, function_calling=True, json_output=False, structured_output=False, family="unknown"
)
agent = AssistantAgent(
    "solver",
    OpenAIChatCompletionClient(model=os.environ["OPENAI_MODEL"], model_info=abilities),
    tools=[run_python],
    max_tool_iterations=12,  # by default it ends with what the tool printed
    system_message="Use run_python to solve the task. Then say the answer and nothing else.",
)
result = asyncio.run(agent.run(task=sys.stdin.read()))
print(result.messages[-1].content)
