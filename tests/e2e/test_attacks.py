"""Model-written code that attacks its own sandbox costs a step; the agent goes on, neighbours notice nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.endpoint import answers, says, scripted_endpoint
from tests.e2e.leftovers import run_cleanly
from tests.fakes.runs import flags, lines, outcomes, place

FORK_BOMB = """\
import os, time
try:
    while True:
        if os.fork() == 0:
            time.sleep(1000)
except BaseException as error:
    print('no more:', type(error).__name__)"""
ATTACKS = {
    "endless loop": "while True:\n    pass",
    "os._exit": "import os\nos._exit(0)",
    "allocation": "held = b'x' * (2 << 30)",
    "fork bomb": FORK_BOMB,
    "signals": "import os, signal\nprint(os.getpid())\nos.kill(0, signal.SIGKILL)",
}
# What the agent must have been told of it.
TOLD = {
    "endless loop": "3 seconds",
    "os._exit": "Error",
    "allocation": "memory",
    "fork bomb": "no more",
    "signals": "Error",
}
NEIGHBOURS = 3
AFTERWARDS = [says("Still here?", "y = 20 + 22\nprint('alive', y)"), answers("y")]
SCRIPT = {
    **{
        f"attack by {name}": [[says("I attack.", f"kept = 1\n{code}"), *AFTERWARDS]]
        for name, code in ATTACKS.items()
    },
    "neighbour": [
        [says(f"Work {n}.", f"import time\nt = {n}\ntime.sleep(0.3)\nprint('worked', t)") for n in range(4)]
        + [answers("42")]
    ],
}


@pytest.mark.docker
@pytest.mark.slow
async def test_every_attack_becomes_an_observation_and_the_agent_finishes() -> None:
    with place() as home, scripted_endpoint(SCRIPT, "--dialect", "vllm") as endpoint:
        write_tasks(home / "tasks.jsonl")
        ended = await run_cleanly(
            *flags(
                home,
                endpoint.base_url,
                launcher="docker",
                group_size=1,
                max_concurrent_sandboxes=4,
                step_timeout=3,
                max_steps=6,
            ),
            directory=home,
        )
        assert ended.code == 0, ended.stderr
        rollouts = {line["task_id"]: line for line in lines(home / "run" / "rollouts.jsonl")}
        assert outcomes(home / "run") == {"finished": len(ATTACKS) + NEIGHBOURS}
        assert {line["answer"] for line in rollouts.values()} == {"42"}
        for name in ATTACKS:
            prompts = [m["content"] for c in rollouts[name]["completions"][1:] for m in c["messages"]]
            observed = [text for text in prompts if text.startswith("Observation") or "Error" in text]
            assert TOLD[name] in observed[0], (name, observed)
            assert any("alive 42" in text for text in observed), (name, observed)
        for number in range(NEIGHBOURS):
            steps = rollouts[f"neighbour {number}"]["steps"]
            assert [step["error"] for step in steps] == [""] * len(steps) == [""] * 5
        # It was one attempt each: nothing was retried.
        assert all(line["attempt"] == 0 for line in rollouts.values())


def write_tasks(path: Path) -> None:
    """Attackers, with quiet neighbours between them."""
    names = [*ATTACKS]
    for number in range(NEIGHBOURS):
        names.insert(2 * number, f"neighbour {number}")
    rows = [
        {"task_id": name, "question": f"attack by {name}" if name in ATTACKS else name, "answer": "42"}
        for name in names
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
