"""What a fresh sandbox says otherwise than the lost one: harmless things are put right, state is refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import oci_images
from tests.fakes.inference import Call, ScriptedServer
from tests.fakes.runs import flags, lines, running, until, write_tasks
from tests.integration.test_oci_run import containers, environ

_WHY_NOT = oci_images.why_not()
pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(300),
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
]


def saying(expression: str) -> Callable[[Call], str]:
    """The first turn prints this; a second and a third one follow."""

    def script(call: Call) -> str:
        code = (
            f"import time\nbegan = time.time()\nprint({expression})",
            "time.sleep(1)\nprint(began > 0)",
            "final_answer(0)",
        )[min(call.turn, 2)]
        return f"Thought {call.turn}.\n<code>\n{code}\n</code>"

    return script


async def lost_once(home: Path, script: Callable[[Call], str], **more: str) -> tuple[list[dict[str, Any]], int]:
    """(the lines of a rollout whose sandbox is killed behind its second completion, completions sampled)."""
    write_tasks(home / "tasks.jsonl", 1)
    settings = {"group_size": 1, "warm_sandboxes": 0, "max_concurrent_sandboxes": 1, "launcher": "oci", **more}
    async with ScriptedServer("vllm", script) as server:
        server.at_most = 2
        async with running(
            *flags(home, server.base_url, **settings), directory=home, environ=environ()
        ) as started:
            await until(lambda: len(server.log.completed) == 2, "it works")
            for pid in containers(home).values():
                os.kill(pid, signal.SIGTERM)
            server.at_most = None
            ended = await started.ended()
        assert ended.code == 0, ended.stderr
        return list(lines(home / "run/rollouts.jsonl")), len(server.log.completed)


async def test_a_time_is_the_one_that_the_lost_sandbox_told(home: Path) -> None:
    (line,), sampled = await lost_once(home, saying("__import__('datetime').datetime.now().isoformat()"))
    assert line["continued"][0]["turn"] == 2
    assert "brought to turn 3 from its record; harmless differences: time (1)" in line["notes"]
    assert sampled == 3, "nothing was sampled twice"


async def test_a_rollout_whose_clock_is_printed_as_a_number_parts_from_its_record(
    home: Path,
) -> None:
    (line,), sampled = await lost_once(home, saying("began"))
    assert line["outcome"] == "finished"
    (continued,) = line["continued"]
    assert continued["turn"] == 1, "the completion before the difference is kept"
    assert "prompt 2 is not the recorded one: message " in continued["refused"]
    assert "\n" not in continued["refused"]
    assert sampled == 4, "only what followed from the clock was sampled again"


async def test_a_shell_stands_where_it_stood(home: Path) -> None:
    def script(call: Call) -> str:
        commands = ("export SEEN=1; cd /tmp; date --iso-8601=ns", "echo $SEEN > seen; sleep 1", "pwd; cat seen")
        fenced = [f"I look.\n```bash\n{command}\n```\n" for command in commands]
        return (*fenced, "It is done.")[min(call.turn, 3)]

    (line,), sampled = await lost_once(home, script, agent="shell", tool_call_format="fenced")
    assert (line["outcome"], line["continued"][0]["turn"]) == ("finished", 2)
    assert "brought to turn 3 from its record; harmless differences: time (1)" in line["notes"]
    last = line["completions"][-1]["messages"][-1]["content"]
    assert last.startswith("/tmp\n1\n"), last
    assert sampled == 4, "nothing was sampled twice"
