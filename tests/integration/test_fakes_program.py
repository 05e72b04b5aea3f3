"""The scripted endpoint as a program of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.fakes.inference import (
    Model,
)
from tests.fakes.inference.client import a_body, prompt_of
from tests.fakes.tokenizer import tokenizer_folder

ROOT = Path(__file__).parents[2]


PLAIN = "Thought: I add.\n<code>\nprint(1 + 1)\n</code>"


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(tokenizer_folder())


async def test_it_runs_as_a_program(tmp_path: Path, model: Model) -> None:
    (tmp_path / "script.json").write_text(json.dumps({"tasks": [{"task": "numbers", "rollouts": [[PLAIN]]}]}))
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.fakes.inference", "--dialect", "vllm", "--api-key", "k"),
        *("--script", str(tmp_path / "script.json"), "--log", str(tmp_path / "log.jsonl")),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(60), aiohttp.ClientSession() as session:
            assert program.stdout is not None
            url = (await program.stdout.readline()).decode().strip()
            headers = {"Authorization": "Bearer k"}
            body = a_body("vllm", prompt_of(model))
            async with session.post(f"{url}/completions", json=body, headers=headers) as response:
                assert (await response.json())["choices"][0]["text"] == PLAIN
            async with session.get(f"{url.removesuffix('/v1')}/_log") as response:
                (served,) = await response.json()
            program.send_signal(signal.SIGTERM)
            assert await program.wait() == 0
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
    assert (served["sampled_text"], served["prompt_ids"]) == (PLAIN, prompt_of(model))
    assert json.loads((tmp_path / "log.jsonl").read_text()) == served
