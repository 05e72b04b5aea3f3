"""An agent in one file whose model calls tools: a loop around chat completions, without any package.

    orchestrator process --env.agent program:examples/agents/tools.py ...

The model's own chat template shows it the tools, and the endpoint gives its calls as data. An answer without a
call ends the loop: its last line is the answer.
"""

import json
import os
import subprocess
import sys
import urllib.request
from typing import Any

SYSTEM = "Solve the task. Use the tool to compute. When you know the answer, write it alone on the last line."
TURNS = 12
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Runs a Python program and gives what it prints. Each call is a process of its own.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The program, with print."}},
                "required": ["code"],
            },
        },
    }
]


def chat(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """One completion: a message, with `tool_calls` where the model wants any."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": TOOLS}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as response:
        message: dict[str, Any] = json.load(response)["choices"][0]["message"]
        return message


def run(call: dict[str, Any]) -> str:
    """What a call's code prints, errors included. The model chooses the name and the arguments."""
    try:
        code = json.loads(call["arguments"])["code"]
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "It took longer than 60 seconds."
    except (ValueError, KeyError, TypeError):
        return 'Call python with {"code": "..."}.'
    return (done.stdout + done.stderr)[-10_000:]


def main() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": sys.stdin.read()},
    ]
    for _ in range(TURNS):
        said = chat(messages)
        messages.append(said)
        calls = said.get("tool_calls") or []
        if not calls:
            lines = [line.strip() for line in (said["content"] or "").splitlines() if line.strip()]
            print(lines[-1] if lines else sys.exit("no answer"))
            return
        results = ((call["id"], run(call["function"])) for call in calls)
        messages += [{"role": "tool", "tool_call_id": name, "content": printed} for name, printed in results]
    sys.exit("no answer")


if __name__ == "__main__":
    main()
