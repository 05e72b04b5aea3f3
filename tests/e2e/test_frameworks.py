"""The usual agent frameworks as programs, each in its default mode: `examples/agents` in an image that has them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.completion.tokenizer import load_tokenizer
from tests.fakes.inference import ScriptedServer
from tests.fakes.runs import flags, lines, place, run
from tests.fakes.tokenizer import tokenizer_folder
from tests.frameworks.image import frameworks_image
from tests.frameworks.programs import PROGRAMS, Program

pytestmark = [pytest.mark.long, pytest.mark.docker, pytest.mark.timeout(900)]

QUESTION = "What is six times seven?"


def calls(*called: tuple[str, dict[str, str]]) -> str:
    """As the model writes them."""
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        for name, arguments in called
    )


def demanded(*called: tuple[str, dict[str, str]]) -> str:
    """The same where the request demands a call: the prompt ends with its beginning."""
    return calls(*called).removeprefix('<tool_call>\n{"name": "')


TWICE = (("run_python", {"code": "print(6 * 7)"}), ("run_python", {"code": "print(7 * 6)"}))
# What the model says, turn by turn.
USUAL = ["I count in two ways.\n" + calls(*TWICE), "42"]
TURNS = {
    "mini_swe_agent": [
        "I count in two ways.\n"
        + calls(("bash", {"command": "echo $((6 * 7))"}), ("bash", {"command": "echo $((7 * 6))"})),
        "I submit.\n" + calls(("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 42"})),
    ],
    "pydantic_ai_agent": [demanded(*TWICE), demanded(("final_result", {"answer": "42"}))],
    "smolagents_code": [
        "Thought: I count.\n<code>\nx = 6 * 7\nprint(x)\n</code>",
        "Thought: That is it.\n<code>\nfinal_answer(x)\n</code>",
    ],
    "smolagents_tools": [demanded(*TWICE), demanded(("final_answer", {"answer": "42"}))],
}


@pytest.fixture(scope="module")
def image() -> str:
    return asyncio.run(frameworks_image())


@pytest.fixture
def home() -> Iterator[Path]:
    with place() as directory:
        task = {"task_id": "t", "question": QUESTION, "answer": "42"}
        (directory / "tasks.jsonl").write_text(json.dumps(task) + "\n")
        yield directory


@pytest.mark.parametrize("preload", [False, True], ids=["alone", "preload"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
async def test_a_framework_in_its_default_mode(home: Path, image: str, program: Program, preload: bool) -> None:
    turns = TURNS.get(program.name, USUAL)
    async with ScriptedServer("vllm", lambda call: turns[call.number or 0]) as server:
        given = flags(
            home,
            server.base_url,
            launcher="docker",
            sandbox_image=image,
            sandbox_memory="2GiB",
            agent=f"program:{program.path}",
            program_preload=json.dumps(program.modules) if preload else None,
            group_size=1,
            trained_segments="all_segments",
        )
        ended = await run(*given, directory=home)
        sampled = [served.sampled_ids for served in server.log.completed]
    (line,) = lines(home / "run" / "rollouts.jsonl")
    told = f"{program.name}: {line['outcome']}, {line.get('detail')}\n{ended.stdout}\n{ended.stderr}"
    assert ended.code == 0, told
    assert (line["outcome"], line["answer"], line["score_parts"]["correctness"]) == ("finished", "42", 1.0), told
    groups = lines(home / "run" / "groups.jsonl")
    print(program.name, preload, len(groups), [{k: v for k, v in g["overrides"][0].items() if k not in ("output",)} for g in groups])
    print(sampled, [[t for t in m if t != -100] for g in groups for m in g["masks"]])
    checked = await run(str(home / "run"), directory=home, command="verify")
    print(checked.stdout)
    assert checked.code == 0, checked.stdout
