"""Atropos' own tools for fine-tuning data, one after the other, fed by one `serve` that they reset under way."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.inference import ScriptedServer
from tests.fakes.runs import DEADLINE_S, Running, answers, flags, place, running, write_tasks
from tests.fakes.tokenizer import tokenizer_folder
from tests.fakes.trainers import run_api

TASKS = 12


async def generated(module: str, out: Path, url: str, serve: Running, *more: str) -> list[Any]:
    """What `atropos-sft-gen` or `atropos-dpo-gen` writes, by the command line of docs/training.md."""
    tool = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"atroposlib.cli.{module}", str(out), "--api-url", url),
        *("--group-size", "2", "--tokenizer", str(tokenizer_folder()), "--save-messages"),
        *("--max-token-len", "16384", "--num-seqs-to-save", "2", *more),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            said, _ = await tool.communicate()
    finally:
        if tool.returncode is None:
            tool.kill()
            await tool.wait()
    assert tool.returncode == 0, said.decode()
    assert serve.process.returncode is None, "serve outlives the tool"
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.long
async def test_sft_and_dpo_data_are_made_of_messages() -> None:
    with place() as home:
        write_tasks(home / "tasks.jsonl", TASKS)
        async with run_api() as api, ScriptedServer("vllm", answers(TASKS)) as server:
            given = flags(
                home,
                server.base_url,
                rollout_server_url=api.url,
                scoring_strategy="correctness",
                max_batches_offpolicy=1,
            )
            async with running(*given, directory=home, command="serve") as serve:
                chosen = await generated("sft", home / "sft.jsonl", api.url, serve, "--tasks-per-step", "2")
                assert len(chosen) >= 2
                for line in chosen:
                    assert line["score"] == 1.0, "wrong answers are left out"
                    assert line["messages"][0]["role"] == "system"
                    assert "final_answer" in line["messages"][-1]["content"]
                pairs = await generated("dpo", home / "dpo.jsonl", api.url, serve)
                assert len(pairs) >= 2
                for pair in pairs:
                    assert "final_answer(-1)" in pair["neg"][-1]["content"]
                    assert "final_answer(-1)" not in pair["pos"][-1]["content"]
                serve.signal(signal.SIGTERM)
                ended = await serve.ended()
        assert ended.code == 128 + signal.SIGTERM, ended.stderr
        assert not ended.traceback, ended.stderr
        assert "restarted or reset" in ended.stderr, "the second tool wiped the run-api"
