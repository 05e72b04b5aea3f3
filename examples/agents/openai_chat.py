"""An agent with OpenAI's client alone: a loop around chat completions and a tool that runs Python.

orchestrator process --env.agent program:examples/agents/openai_chat.py --env.sandbox_image IMAGE ...
"""

import json
import os
import subprocess
import sys

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "run_python",
        "description": "Runs Python code in a process of its own and returns what it prints, errors included.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}


def run_python(code: str) -> str:
    argv = ["timeout", "60", sys.executable, "-c", code]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout[-10_000:] or f"exit code {done.returncode}"


client = OpenAI()
messages = [
    {"role": "system", "content": "Use run_python to solve the task. Then say the answer and nothing else."},
    {"role": "user", "content": sys.stdin.read()},
]
while True:
    said = client.chat.completions.create(
        model=os.environ["OPENAI_MODEL"], messages=messages, tools=[TOOL]
    ).choices[0]
    messages.append(said.message)
    if not said.message.tool_calls:
        break
    for call in said.message.tool_calls:
        seen = run_python(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": seen})
print(said.message.content)
