"""The architecture of the system before this one, for comparison: a plain process per agent, no isolation.

Groups one after the other; in a group every rollout is a process forked from one that has all imports done, with
smolagents' LocalPythonExecutor inside; it puts requests into a queue that the parent looks into every 10 ms.
What made its scores and its training data is left out, to its advantage.

    python -m bench.predecessor --endpoint URL --groups 8 --group-size 8

prints a line when it is ready, waits for one on stdin, runs, and prints a line at its end.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import queue
import sys
from typing import Any

import aiohttp
from smolagents import CodeAgent, Model
from smolagents.models import ChatMessage, MessageRole

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
    agent = CodeAgent(
        tools=[],
        model=QueuedModel(requests, responses),
        max_steps=12,
        additional_authorized_imports=["*"],
        verbosity_level=0,
    )
    results.put(str(agent.run(task)))


async def _rollout(task: str, url: str, session: aiohttp.ClientSession) -> str:
    """Starts the process, serves it, and gives its answer."""
    requests, responses, results = FORK.Queue(), FORK.Queue(), FORK.Queue()
    process = FORK.Process(target=_agent, args=(task, requests, responses, results))
    process.start()
    try:
        while True:
            try:
                messages = requests.get_nowait()
            except queue.Empty:
                try:
                    return str(results.get_nowait())
                except queue.Empty:
                    if process.exitcode:
                        raise RuntimeError(f"an agent's process ended with {process.exitcode}") from None
                    await asyncio.sleep(POLL_S)
                    continue
            body = {"model": "bench", "messages": messages, "max_tokens": 1024}
            async with session.post(f"{url}/chat/completions", json=body) as answer:
                completion = await answer.json()
            responses.put(completion["choices"][0]["message"]["content"])
    finally:
        await asyncio.to_thread(process.join, 10)
        process.kill()
        for pipe in (requests, responses, results):
            pipe.close()


async def run(url: str, groups: int, group_size: int) -> None:
    """Raises when an answer is not the endpoint's."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for group in range(groups):
            task = f"What is number {group}? (of q{group}!)"
            answers = await asyncio.gather(*(_rollout(task, url, session) for _ in range(group_size)))
            if set(answers) != {"42"}:
                raise RuntimeError(f"other answers than expected: {sorted(set(answers))}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.predecessor", description=__doc__.split("\n")[0])
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    given = parser.parse_args()
    print("ready", flush=True)
    sys.stdin.readline()
    asyncio.run(run(given.endpoint, given.groups, given.group_size))
    print("done", flush=True)


if __name__ == "__main__":
    main()
