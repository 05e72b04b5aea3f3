"""Atropos' real run-api as a process of its own, and the example trainer in front of it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from examples.trainer import MASKED, Group, RunApi, check_group, sequences
from tests.fakes.inference.log import Served
from tests.fakes.runs import DEADLINE_S, Ended, Running


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


class RunApiProcess:
    """`run-api` on one port, that can be killed and started again."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(self.port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        async with asyncio.timeout(DEADLINE_S):
            while not await asyncio.to_thread(self._answers):
                assert self._process.poll() is None, "the run-api does not start"
                await asyncio.sleep(0.1)

    async def fresh(self) -> None:
        """As it is after its start."""
        if self._process is None:
            await self.start()
        else:
            await self.reset()

    async def reset(self) -> None:
        """Another trainer wipes it, as Atropos' own tools do when they begin."""
        await asyncio.to_thread(lambda: urllib.request.urlopen(f"{self.url}/reset_data", timeout=60).close())

    async def kill(self) -> None:
        self.end()

    def end(self) -> None:
        """Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.url, timeout=10).close()
        except (urllib.error.URLError, OSError):
            return False
        return True


@asynccontextmanager
async def run_api() -> AsyncIterator[RunApiProcess]:
    api = RunApiProcess()
    try:
        await api.start()
        yield api
    finally:
        await api.kill()


@dataclass(slots=True)
class Trainer:
    """The example trainer's calls, one batch at a time, each group checked."""

    api: RunApi
    batches: list[list[Group]] = field(default_factory=list)

    @classmethod
    async def registered(cls, url: str, **terms: Any) -> Trainer:
        trainer = cls(RunApi(url))
        await trainer.register(**terms)
        return trainer

    async def register(self, **terms: Any) -> None:
        """Says what it wants, and opens the run-api to environments by asking for a batch."""
        await asyncio.to_thread(lambda: self.api.register(**terms))
        await self._batch()

    async def take(self, count: int, serve: Running | None = None) -> list[list[Group]]:
        """The next batches. Fails as soon as `serve` has ended in another way than well."""
        taken: list[list[Group]] = []
        async with asyncio.timeout(DEADLINE_S):
            while len(taken) < count:
                batch = await self._batch()
                if batch is None:
                    assert serve is None or serve.process.returncode in (None, 0), await serve.ended()
                    await asyncio.sleep(0.05)
                    continue
                taken.append(batch)
        return taken

    async def until_ended(self, serve: Running) -> Ended:
        """All batches that come until `serve` has ended."""
        ended = asyncio.create_task(serve.ended())
        while not ended.done():
            if await self._batch() is None:
                await asyncio.wait({ended}, timeout=0.05)
        await self.rest()
        return ended.result()

    async def rest(self) -> None:
        """All whole batches that still wait."""
        while await self._batch() is not None:
            pass

    async def _batch(self) -> list[Group] | None:
        batch = await asyncio.to_thread(self.api.batch)
        for group in batch or ():
            check_group(group)
        if batch is not None:
            self.batches.append(batch)
        return batch

    @property
    def groups(self) -> list[Group]:
        return [group for batch in self.batches for group in batch]

    @property
    def rollouts(self) -> list[str]:
        """Ids of all rollouts it was given."""
        return [facts["rollout_id"] for group in self.groups for facts in group["overrides"]]

    @property
    def tasks(self) -> list[str]:
        """The task of each group."""
        return [group["overrides"][0]["task_id"] for group in self.groups]


Stretch = tuple[tuple[int, ...], tuple[float, ...]]  # ids and log-probs of one completion


def sampled(served: Served) -> Stretch:
    """What the endpoint gave."""
    return tuple(served.sampled_ids), tuple(round(p, 6) for p in served.logprobs)


def trained(group: Group) -> Iterator[Stretch]:
    """Each stretch of trained positions: one completion."""
    for line in sequences(group):
        ids: list[int] = []
        logprobs: list[float] = []
        assert line.logprobs_T is not None
        for label, logprob in [*zip(line.labels_T, line.logprobs_T, strict=True), (MASKED, 1.0)]:
            if label != MASKED:
                ids.append(label)
                logprobs.append(round(logprob, 6))
            elif ids:
                yield tuple(ids), tuple(logprobs)
                ids, logprobs = [], []
