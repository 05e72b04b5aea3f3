"""Agent frameworks as programs, each in its default mode: `examples/agents` in an image that has them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.launch.oci.machine import why_no_forks
from tests.fakes import oci_images
from tests.fakes.inference import ScriptedServer
from tests.fakes.runs import flags, lines, place, run
from tests.frameworks import clock
from tests.frameworks.image import frameworks_image
from tests.frameworks.programs import ANSWER, PROGRAMS, QUESTION, Program

# The first test builds the image: three minutes.
pytestmark = [pytest.mark.full, pytest.mark.frameworks, pytest.mark.docker, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def image() -> str:
    return asyncio.run(frameworks_image())


@pytest.fixture
def home() -> Iterator[Path]:
    with place() as directory:
        task = {"task_id": "t", "question": QUESTION, "answer": ANSWER}
        (directory / "tasks.jsonl").write_text(json.dumps(task) + "\n")
        yield directory


@pytest.mark.parametrize("how", ["alone", "preload", "forked"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
async def test_a_framework_in_its_default_mode(home: Path, image: str, program: Program, how: str) -> None:
    launcher: dict[str, object] = {"launcher": "docker"}
    if how == "forked":
        if (reason := oci_images.why_not() or why_no_forks("runc")) is not None:
            pytest.skip(reason)
        await asyncio.to_thread(oci_images.stored_image, image)
        launcher = {"launcher": "oci", "start": "fork"}
    async with ScriptedServer("vllm", lambda call: program.turns[call.number or 0]) as server:
        given = flags(
            home,
            server.base_url,
            **launcher,
            sandbox_image=image,
            agent=f"program:{program.path}",
            program_preload=None if how == "alone" else json.dumps(program.modules),
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
    assert "imports env.program_preload for itself" not in printed, printed
    groups = lines(home / "run" / "groups.jsonl")
    trained = [[token for token in mask if token != -100] for group in groups for mask in group["masks"]]
    if program.segments == 1:
        sampled = [[token for completion in sampled for token in completion]]
    assert trained == sampled, printed
    assert {facts["token_source"] for group in groups for facts in group["overrides"]} == {"sampled"}
    checked = await run(str(home / "run"), directory=home, command="verify")
    assert checked.code == 0, f"{program.name}:\n{checked.stdout}"


@pytest.mark.parametrize("program", clock.PROGRAMS, ids=lambda program: program.name)
async def test_a_framework_uses_an_mcp_server_that_nobody_here_wrote(
    home: Path, image: str, program: Program
) -> None:
    line = await with_the_clock(home, f"program:{program.path}", program.turns, sandbox_image=image)
    offered = {tool["function"]["name"]: tool["function"] for tool in line["tools"][0]}
    assert {"convert_time", "get_current_time"} <= set(offered)
    parameters = offered["convert_time"]["parameters"]
    assert set(parameters["required"]) == {"source_timezone", "time", "target_timezone"}
    assert "IANA" in parameters["properties"]["source_timezone"]["description"]


@pytest.mark.parametrize("kind", clock.AGENTS)
async def test_smolagents_uses_an_mcp_server_that_nobody_here_wrote(home: Path, kind: str) -> None:
    await with_the_clock(home, kind, clock.AGENTS[kind])


async def with_the_clock(home: Path, agent: str, turns: tuple[str, ...], **more: object) -> dict[str, Any]:
    """The rollout of an agent that asks the clock twice; it is also played again, without the clock."""
    task = {"task_id": "t", "question": clock.QUESTION, "answer": clock.ANSWER}
    (home / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    async with ScriptedServer("vllm", lambda call: turns[call.number or 0]) as server:
        settings = {"launcher": "docker", "agent": agent, "group_size": 1, "mcp_servers": clock.clock()}
        ended = await run(*flags(home, server.base_url, **settings, **more), directory=home)
    assert ended.code == 0, f"{ended.stdout}\n{ended.stderr}"
    (line,) = lines(home / "run" / "rollouts.jsonl")
    printed = "\n".join(f"{step['observations']}{step['error']}" for step in line["steps"])
    assert (line["outcome"], line["answer"]) == ("finished", clock.ANSWER), f"{line['reason']}\n{printed}"
    made = [(call["name"], call["arguments"]["time"]) for call in line["tool_calls"]]
    assert sorted(made) == [("convert_time", "12:00"), ("convert_time", "13:00")]
    assert all('"time_difference": "-3.5h"' in call["output"] for call in line["tool_calls"])
    checked = await run(str(home / "run"), directory=home, command="verify")
    assert checked.code == 0, checked.stdout
    given = [f"--env.{name}={value}" for name, value in {"agent": agent, "launcher": "docker", **more}.items()]
    again = await run(str(home / "run"), *given, directory=home, command="replay")
    assert again.code == 0, f"{again.stdout}\n{again.stderr}"
    return line
