"""An agent in one file that is not smolagents: a loop around chat completions and a Python process.

    orchestrator process --env.agent program:examples/agents/loop.py ...

It runs in the sandbox. The task comes on standard input, the last line printed is the answer, and
OPENAI_BASE_URL leads to the model; with the `openai` package in the image, `OpenAI()` finds it by itself.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request

SYSTEM = """Solve the task step by step. To run Python, write one block:
```python
print(...)
```
You are told what it prints; each block is a process of its own. When you know the answer, write a last
line `ANSWER: ` with the answer and nothing else."""
TURNS = 12


def chat(messages: list[dict[str, str]]) -> str:
    """One completion."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def run(code: str) -> str:
    """What the code prints, errors included."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "It took longer than 60 seconds."
    return (done.stdout + done.stderr)[-10_000:]


def main() -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": sys.stdin.read()}]
    for _ in range(TURNS):
        said = chat(messages)
        messages.append({"role": "assistant", "content": said})
        if answer := re.search(r"^ANSWER:\s*(.+)$", said, re.MULTILINE):
            print(answer[1].strip())
            return
        code = re.search(r"```python\n(.*?)```", said, re.DOTALL)
        seen = f"Output:\n{run(code[1])}" if code else "Write a Python block, or a line with ANSWER."
        messages.append({"role": "user", "content": seen})
    sys.exit("no answer")


if __name__ == "__main__":
    main()
