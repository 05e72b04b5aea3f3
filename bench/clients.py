"""What stands in for the agents when only the way of a completion is measured. A process of its own.

Reads commands as JSON lines and answers each with one line:

    {"open": DIRECTORY}     no answer: a client parks at the sandbox's socket there and waits for its turns
    {"through": "sandboxes" | URL, "rate": a second, "count": N, "seed": S, "direct": {...}}
                            an open loop: N completions at times drawn beforehand; answers their latencies,
                            from when each was due
    {"through": "echo DIRECTORY", ...}
                            the same with a gRPC server there that answers at once: what a hop costs by itself
    {"closed": seconds}     as many as there can be: each client asks again at once; answers how many came
    {"finish": true}        the open clients submit and go

`direct` is the body that the orchestrator would send and the lengths of its prompts, turn by turn.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc.aio
import orjson
from rollout_api.v1 import sandbox_pb2 as pb
from rollout_api.v1 import sandbox_pb2_grpc as pb_grpc

from orchestrator.proxy.wire import CONTRACT

TAG = "</code>"
SYSTEM = "You are an agent who solves tasks with code, step by step. " * 150  # about what smolagents says
TASK = "New task:\nAdd up what is in the files."
OBSERVATION = (
    "Observation:\nExecution logs:\n" + "\n".join(str(i * 37) for i in range(20)) + "\nLast output:\nNone"
)
TURNS = 8  # of an episode
GROUP_SIZE = 8  # episodes that begin with the same prompt
ECHO = "/bench/Echo"
episodes = itertools.count()


@dataclass(slots=True)
class Client:
    """One sandbox' conversation so far."""

    channel: grpc.aio.Channel
    stub: Any
    turns: int = 0
    talk: list[pb.Message] = field(default_factory=lambda: Client.opening(next(episodes) // GROUP_SIZE))

    @staticmethod
    def opening(group: int) -> list[pb.Message]:
        """How its conversation begins."""
        return [
            pb.Message(role=pb.ROLE_SYSTEM, content=SYSTEM),
            pb.Message(role=pb.ROLE_USER, content=f"{TASK} ({group})"),
        ]

    @classmethod
    async def park(cls, directory: str) -> Client:
        channel = grpc.aio.insecure_channel(f"unix:{directory}/s", options=[("grpc.use_local_subchannel_pool", 1)])
        client = cls(channel, pb_grpc.SandboxServiceStub(channel))
        request = pb.ParkRequest(contract=CONTRACT, confinement=pb.Confinement(runner_uid=1, worker_uid=2))
        async for _ in client.stub.Park(request, wait_for_ready=True):
            pass
        return client

    async def turn(self) -> None:
        self.turns += 1
        request = pb.CompleteRequest(sequence=self.turns, kind=pb.COMPLETION_KIND_ACTION, messages=self.talk)
        answer = await self.stub.Complete(request)
        if answer.WhichOneof("result") not in (None, "completion"):
            raise RuntimeError(f"no completion: {answer}")
        self.talk.append(pb.Message(role=pb.ROLE_ASSISTANT, content=(answer.completion.text + TAG).strip()))
        self.talk.append(pb.Message(role=pb.ROLE_USER, content=OBSERVATION))

    async def finish(self) -> None:
        await self.stub.SubmitResult(pb.SubmitResultRequest(stop_reason=pb.STOP_REASON_FINAL_ANSWER, answer=b"1"))
        await self.channel.close()


class Clients:
    """All of them: those with nothing to do wait in `idle`."""

    def __init__(self) -> None:
        self.idle: asyncio.Queue[Client] = asyncio.Queue()
        self._direct = 0
        self._hop: grpc.aio.Channel | None = None

    async def open(self, directory: str) -> None:
        await self.idle.put(await Client.park(directory))

    async def through_sandbox(self, due: float) -> float:
        client = await self.idle.get()
        await client.turn()
        latency = time.perf_counter() - due
        await self._done(client)
        return latency

    async def open_loop(self, command: dict[str, Any]) -> list[float]:
        """Latencies, in the order in which they were due."""
        draw = random.Random(command["seed"])
        due = time.perf_counter() + 0.1
        jobs: list[asyncio.Task[float]] = []
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as tg:
            for _ in range(command["count"]):
                due += command["gap"] if "gap" in command else draw.expovariate(command["rate"])
                await asyncio.sleep(due - time.perf_counter())
                if command["through"] == "sandboxes":
                    one = self.through_sandbox(due)
                elif command["through"].startswith("echo "):
                    one = self._echo(command["through"].removeprefix("echo "))
                else:
                    one = self._ask(session, command["through"], command["direct"], due)
                jobs.append(tg.create_task(one))
        return [job.result() for job in jobs]

    async def _ask(self, session: aiohttp.ClientSession, url: str, direct: dict[str, Any], due: float) -> float:
        """The same completion without an orchestrator."""
        lengths = direct["lengths"]
        length = lengths[self._direct % len(lengths)]
        self._direct += 1
        body = orjson.dumps({**direct["body"], "prompt": direct["ids"][:length]})
        async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
            answer.raise_for_status()
            orjson.loads(await answer.read())
        return time.perf_counter() - due

    async def _echo(self, directory: str) -> float:
        """One call as a sandbox makes it, to a server that does nothing. Timed from the call."""
        if self._hop is None:
            self._hop = grpc.aio.insecure_channel(f"unix:{directory}/s")
        request = pb.CompleteRequest(sequence=1, kind=pb.COMPLETION_KIND_ACTION, messages=Client.opening(0))
        call: Any = self._hop.unary_unary(ECHO)
        started = time.perf_counter()
        await call(request.SerializeToString(), wait_for_ready=True)
        return time.perf_counter() - started

    async def closed_loop(self, seconds: float) -> int:
        """How many completions came."""
        until, done = time.perf_counter() + seconds, 0

        async def one(client: Client) -> None:
            nonlocal done
            while client.turns < TURNS and time.perf_counter() < until:
                await client.turn()
                done += time.perf_counter() < until
            await self._done(client)

        async with asyncio.TaskGroup() as tg:
            while (left := until - time.perf_counter()) > 0:
                try:
                    async with asyncio.timeout(left):
                        client = await self.idle.get()
                except TimeoutError:
                    break
                tg.create_task(one(client))
        return done

    async def finish(self) -> None:
        while not self.idle.empty():
            await self.idle.get_nowait().finish()

    async def _done(self, client: Client) -> None:
        if client.turns < TURNS:
            await self.idle.put(client)
        else:
            await client.finish()


async def main() -> None:
    lines = asyncio.StreamReader(limit=64 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    clients = Clients()

    async def told(command: dict[str, Any]) -> None:
        if "closed" in command:
            answer: Any = await clients.closed_loop(command["closed"])
        elif "finish" in command:
            await clients.finish()
            answer = None
        else:
            answer = await clients.open_loop(command)
        print(json.dumps(answer), flush=True)

    async with asyncio.TaskGroup() as tg:
        while line := await lines.readline():
            command = json.loads(line)
            tg.create_task(clients.open(command["open"]) if "open" in command else told(command))


if __name__ == "__main__":
    asyncio.run(main())
