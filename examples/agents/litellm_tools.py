"""An agent with litellm's `completion` and a tool that runs Python.

orchestrator process --env.agent program:examples/agents/litellm_tools.py --env.sandbox_image IMAGE ...
"""

import json
import os
import subprocess
import sys

# Else the import tries three times to fetch prices, with pauses. With `env.program_preload` it comes before this
# line: then write it into the image's Dockerfile, with ENV.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import litellm

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


model = "openai/" + os.environ["OPENAI_MODEL"]
messages = [
    {"role": "system", "content": "Use run_python to solve the task. Then say the answer and nothing else."},
    {"role": "user", "content": sys.stdin.read()},
]
while True:
    said = litellm.completion(model=model, messages=messages, tools=[TOOL]).choices[0].message
    messages.append(said)
    if not said.tool_calls:
        break
    for call in said.tool_calls:
        seen = run_python(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": seen})
print(said.content)
