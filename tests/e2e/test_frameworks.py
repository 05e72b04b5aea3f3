"""Agent frameworks as programs, each in its default mode: `examples/agents` in an image that has them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.inference import ScriptedServer
from tests.fakes.runs import flags, lines, place, run
from tests.frameworks.image import frameworks_image
from tests.frameworks.programs import ANSWER, PROGRAMS, QUESTION, Program

# The first test builds the image: three minutes.
pytestmark = [pytest.mark.long, pytest.mark.frameworks, pytest.mark.docker, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def image() -> str:
    return asyncio.run(frameworks_image())


@pytest.fixture
def home() -> Iterator[Path]:
    with place() as directory:
        task = {"task_id": "t", "question": QUESTION, "answer": ANSWER}
        (directory / "tasks.jsonl").write_text(json.dumps(task) + "\n")
        yield directory


@pytest.mark.parametrize("preload", [False, True], ids=["alone", "preload"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
async def test_a_framework_in_its_default_mode(home: Path, image: str, program: Program, preload: bool) -> None:
    async with ScriptedServer("vllm", lambda call: program.turns[call.number or 0]) as server:
        given = flags(
            home,
            server.base_url,
            launcher="docker",
            sandbox_image=image,
            agent=f"program:{program.path}",
            program_preload=json.dumps(program.modules) if preload else None,
            group_size=1,
            trained_segments="all_segments",
        )
        ended = await run(*given, directory=home)
        sampled = [served.sampled_ids for served in server.log.completed]
    printed = f"{program.name}:\n{ended.stdout}\n{ended.stderr}"
    assert ended.code == 0, printed
    (line,) = lines(home / "run" / "rollouts.jsonl")
    printed += "\n".join(f"{step['observations']}{step['error']}" for step in line["steps"])
    assert (line["outcome"], line["answer"]) == ("finished", ANSWER), printed
    assert line["score_parts"]["correctness"] == 1.0, printed
    assert "cannot be imported" not in printed, printed
    groups = lines(home / "run" / "groups.jsonl")
    trained = [[token for token in mask if token != -100] for group in groups for mask in group["masks"]]
    if program.segments == 1:
        sampled = [[token for completion in sampled for token in completion]]
    assert trained == sampled, printed
    assert {facts["token_source"] for group in groups for facts in group["overrides"]} == {"sampled"}
    checked = await run(str(home / "run"), directory=home, command="verify")
    assert checked.code == 0, f"{program.name}:\n{checked.stdout}"
