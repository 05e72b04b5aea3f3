"""Whole runs against a real vLLM: exact from the endpoint to `verify --model`, in its three APIs for programs, and
through a restart of the server. The model is small: what it says is not looked at, only what becomes of it."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_tool_programs import CHAT, MESSAGES, RESPONSES, TOOL
from tests.fakes.runs import Ended, flags, lines, outcomes, place, running, until, whole_lines
from tests.integration.vllm.server import KEY, NAME, VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3000)]
DEADLINE_S = 1500.0
POLICYS = {"finished", "no_answer", "max_steps", "context_length"}


@pytest.fixture
def home() -> Iterator[Path]:
    with place() as directory:
        yield directory


def write_tasks(home: Path, count: int) -> None:
    rows = [
        {
            "task_id": f"q{n}",
            "question": f"What is {n + 2} times {n + 3}? Compute it with Python.",
            "answer": str(n),
        }
        for n in range(count)
    ]
    (home / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def given(home: Path, server: VllmServer, folder: Path, **env: object) -> list[str]:
    few = {"max_steps": 2, "max_completion_tokens": 60, "max_token_length": server.context}
    made = flags(home, server.base_url, tokenizer_name=folder, **{**few, **env})
    return [flag.replace("model_name=scripted", f"model_name={NAME}") for flag in made]


async def carried_out(*arguments: str, home: Path, command: str = "process") -> Ended:
    environ = {"OPENAI_API_KEY": KEY}
    async with running(*arguments, directory=home, command=command, environ=environ) as started:
        async with asyncio.timeout(DEADLINE_S):
            out, err = await started.process.communicate()
        assert started.process.returncode is not None
        return Ended(started.process.returncode, out.decode(), err.decode())


async def verified(home: Path) -> None:
    checked = await carried_out(str(home / "run"), home=home, command="verify")
    assert checked.code == 0, checked.stdout
    assert "0 violations" in checked.stdout


async def test_what_a_run_wrote_is_what_the_model_sampled(
    home: Path,
    equipped: VllmServer,
    folder: Path,
    figures: Callable[[str], None],
) -> None:
    temperature, top_p = 0.7, 0.8
    write_tasks(home, 1)
    ended = await carried_out(*given(home, equipped, folder, temperature=temperature, top_p=top_p), home=home)
    assert ended.code == 0, ended.stderr
    counts = outcomes(home / "run")
    assert set(counts) <= POLICYS, counts
    for line in lines(home / "run" / "rollouts.jsonl"):
        assert line["token_source"] == "sampled", line
    await verified(home)
    checked = await carried_out(str(home / "run"), "--model", str(folder), home=home, command="verify")
    assert checked.code == 0, checked.stdout + checked.stderr
    figures(
        f"a run at temperature {temperature:g}, top_p {top_p:g}: {dict(counts)}; verify --model: {told(checked)}"
    )


def told(checked: Ended) -> str:
    """The lines of `verify --model` with distances."""
    kept = [" ".join(line.split()) for line in checked.stdout.splitlines() if re.search(r"mean|Δ|tokens", line)]
    return " | ".join(kept)[:600]


@pytest.mark.parametrize("program", [CHAT, RESPONSES, MESSAGES], ids=["chat", "responses", "messages"])
async def test_a_program_with_tools_is_trained_on_the_sampled_ids(
    home: Path, equipped: VllmServer, folder: Path, program: str
) -> None:
    write_tasks(home, 1)
    forced = program.replace("tools=tools", 'tools=tools, tool_choice="required"', 1)
    if program is MESSAGES:
        forced = program.replace("tools=tools", 'tools=tools, tool_choice={"type": "any"}', 1)
    # One call is demanded; the answer behind its result is the model's.
    once = forced.replace("while True:", "for turn in range(2):", 1)
    (home / "program.py").write_text(f"TOOL = {TOOL!r}\n{once}")
    ended = await carried_out(
        *given(home, equipped, folder, agent="program:program.py", trained_segments="all_segments"), home=home
    )
    assert ended.code == 0, ended.stderr
    assert set(outcomes(home / "run")) <= POLICYS
    for line in lines(home / "run" / "rollouts.jsonl"):
        assert line["token_source"] == "sampled"
        assert line["completions"], line["outcome"]
    await verified(home)


async def test_a_server_that_is_killed_and_comes_back_makes_no_rollout_wrong(
    home: Path, equipped: VllmServer, folder: Path, figures: Callable[[str], None]
) -> None:
    write_tasks(home, 2)
    rollouts = home / "run" / "rollouts.jsonl"
    async with running(*given(home, equipped, folder), directory=home, environ={"OPENAI_API_KEY": KEY}) as started:
        await until(lambda: rollouts.exists() and whole_lines(rollouts) >= 1, "a rollout is over")
        await asyncio.to_thread(equipped.stop, signal.SIGKILL)
        await asyncio.sleep(5.0)
        await asyncio.to_thread(equipped.start)
        async with asyncio.timeout(DEADLINE_S):
            _, err = await started.process.communicate()
    assert started.process.returncode == 0, err.decode()
    counts = outcomes(home / "run")
    figures(f"a server that is killed in mid-run: {dict(counts)}")
    assert set(counts) <= POLICYS | {"llm_error"}
    assert sum(counts[name] for name in POLICYS) == 4
    assert counts["llm_error"] >= 1
    for line in lines(rollouts):
        assert (line["score"] is None) == (line["outcome"] == "llm_error"), line["outcome"]
    await verified(home)


async def test_a_tool_calling_agent_keeps_exact_ids_whatever_parser_the_server_has(
    home: Path, equipped: VllmServer, folder: Path
) -> None:
    write_tasks(home, 1)
    ended = await carried_out(*given(home, equipped, folder, agent="tool_calling"), home=home)
    assert ended.code == 0, ended.stderr
    assert json.loads((home / "run" / "run.json").read_text())["agent"]["tool_calls"] == "hermes"
    await verified(home)


async def test_an_agent_with_tools_at_a_chat_endpoint_without_a_parser_is_told_at_the_start(
    home: Path, plain: VllmServer, folder: Path
) -> None:
    write_tasks(home, 1)
    ended = await carried_out(
        *given(home, plain, folder, agent="tool_calling", token_source="retokenize"), home=home
    )
    assert ended.code == 3
    assert "--enable-auto-tool-choice and --tool-call-parser" in ended.stderr
    assert "--env.tool_call_format json" in ended.stderr


async def test_so_it_works_at_one_with_a_parser(home: Path, equipped: VllmServer, folder: Path) -> None:
    write_tasks(home, 1)
    text = {"agent": "tool_calling", "token_source": "retokenize"}
    ended = await carried_out(*given(home, equipped, folder, **text), home=home)
    assert ended.code == 0, ended.stderr
    counts: Counter[str] = outcomes(home / "run")
    assert set(counts) <= POLICYS
    rows: list[dict[str, Any]] = lines(home / "run" / "rollouts.jsonl")
    assert {row["token_source"] for row in rows} == {"retokenized"}
