"""The architecture of the system before this one, for comparison: a plain process per agent, no isolation.

Read from its source (NousResearch/atropos, environments/smolagents_integration): groups one after the other; a
`multiprocessing.Manager` per group; every rollout a process forked from one that has all imports done, with
smolagents' LocalPythonExecutor inside and its log at `agent_verbosity` 2; requests through queues that the parent
looks into every 10 ms; processes joined one after the other, then the results read; the dialogue as JSON encoded
twice, for tokens and for masks. Left out, to its advantage: its scorers, its tools, its Markdown, and that every
answer is put on every agent's queue.

    python -m bench.predecessor --endpoint URL --groups 8 --group-size 8

prints a line when it is ready, waits for one on stdin, runs, and prints a line at its end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import queue
import sys
from typing import Any

import aiohttp
from smolagents import CodeAgent, Model
from smolagents.models import ChatMessage, MessageRole
from tokenizers import Tokenizer

from tests.fakes.tokenizer import tokenizer_folder

POLL_S = 0.01
ANSWER_S = 300.0
FORK = multiprocessing.get_context("fork")


class QueuedModel(Model):  # type: ignore[misc]
    """Asks the parent."""

    def __init__(self, requests: Any, responses: Any) -> None:
        super().__init__()
        self._requests, self._responses = requests, responses

    def generate(self, messages: list[Any], stop_sequences: list[str] | None = None, **_: Any) -> ChatMessage:
        self._requests.put([{"role": str(m.role.value), "content": _text(m.content)} for m in messages])
        return ChatMessage(role=MessageRole.ASSISTANT, content=self._responses.get(timeout=ANSWER_S))


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _agent(task: str, requests: Any, responses: Any, results: Any) -> None:
    """A rollout: the whole life of its process."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    agent = CodeAgent(
        tools=[],
        model=QueuedModel(requests, responses),
        max_steps=12,
        additional_authorized_imports=["*"],
        verbosity_level=2,
    )
    answer = str(agent.run(task))
    messages = [{"role": str(m.role.value), "content": m.content} for m in agent.write_memory_to_messages()]
    results.put((answer, messages))


async def _serve(
    process: Any, requests: Any, responses: Any, url: str, session: aiohttp.ClientSession, seed: int
) -> None:
    """Answers what the agent asks, until its process has ended. `seed`: the rollout's number, for the endpoint."""
    while process.is_alive():
        try:
            messages = requests.get_nowait()
        except queue.Empty:
            await asyncio.sleep(POLL_S)
            continue
        body = {"model": "bench", "messages": messages, "max_tokens": 1024, "seed": seed}
        async with session.post(f"{url}/chat/completions", json=body) as answer:
            completion = await answer.json()
        responses.put(completion["choices"][0]["message"]["content"])


async def _group(task: str, size: int, url: str, session: aiohttp.ClientSession, number: int) -> list[Any]:
    """(answer, messages) of each rollout. `number`: of the first one."""
    with FORK.Manager() as manager:
        results = manager.Queue()
        served = []
        for place in range(size):
            requests, responses = FORK.Queue(), FORK.Queue()
            process = FORK.Process(target=_agent, args=(task, requests, responses, results))
            process.start()
            served.append(asyncio.create_task(_serve(process, requests, responses, url, session, number + place)))
        await asyncio.gather(*served)
        return [results.get(timeout=ANSWER_S) for _ in range(size)]


async def run(url: str, groups: int, group_size: int, tokenizer: Tokenizer) -> None:
    """Raises when an answer is not the endpoint's."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for group in range(groups):
            task = f"What is number {group}? (of q{group}!)"
            results = await _group(task, group_size, url, session, group * group_size)
            if {answer for answer, _ in results} != {"42"}:
                raise RuntimeError(f"other answers than expected: {sorted(answer for answer, _ in results)}")
            for _, messages in results:
                tokens = tokenizer.encode(json.dumps(messages)).ids
                masks = [1] * len(tokenizer.encode(json.dumps(messages)).ids)
                assert len(tokens) == len(masks)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.predecessor", description=__doc__.split("\n")[0])
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    given = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(tokenizer_folder() / "tokenizer.json"))
    print("ready", flush=True)
    sys.stdin.readline()
    asyncio.run(run(given.endpoint, given.groups, given.group_size, tokenizer))
    print("done", flush=True)


if __name__ == "__main__":
    main()
