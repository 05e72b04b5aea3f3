"""An agent of Pydantic AI with a tool that runs Python and a typed answer.

orchestrator process --env.agent program:examples/agents/pydantic_ai_agent.py --env.sandbox_image IMAGE ...
"""

import os
import subprocess
import sys

from pydantic import BaseModel
from pydantic_ai import Agent


class Answer(BaseModel):
    answer: str


agent = Agent(
    "openai:" + os.environ["OPENAI_MODEL"],
    output_type=Answer,
    instructions="Use run_python to solve the task.",
)


@agent.tool_plain
def run_python(code: str) -> str:
    """Runs Python code in a process of its own and returns what it prints, errors included."""
    argv = ["timeout", "60", sys.executable, "-c", code]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout[-10_000:] or f"exit code {done.returncode}"


print(agent.run_sync(sys.stdin.read()).output.answer)
