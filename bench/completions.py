"""What a completion costs on its way through the orchestrator.

Three processes: an endpoint that speaks vLLM, the orchestrator's part (gRPC server per sandbox, lease, id line,
completer) and clients in the place of sandboxes. Latency is measured in an open loop, from when a completion was
due, beside the same client that asks the endpoint directly with the same prompt, in turns. Prompts have the
length of smolagents' own. Then the most completions a second, how late expensive requests make the event loop, and
what the id line alone takes.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from rollout_api.v1 import sandbox_pb2 as pb

from bench.clients import ECHO, OBSERVATION, SYSTEM, TAG, TASK, TURNS
from bench.endpoint import STEP, endpoint
from bench.numbers import p50, p99
from bench.report import Findings, Scale
from orchestrator.completion.base import Completer, CompletionRequest, Endpoint, ids_of, stop_strings
from orchestrator.completion.connect import connect
from orchestrator.completion.line import TokenLine, visible_text
from orchestrator.completion.tokenizer import HubTokenizer, load_tokenizer
from orchestrator.completion.trajectory import trajectory
from orchestrator.completion.vllm import VllmDialect
from orchestrator.proxy import wire
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.server import SandboxServer
from orchestrator.rules.waits import aside
from orchestrator.types import Completion, CompletionKind, Message, Record, Sampling, Turn
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.plans import a_plan, an_agent, some_limits
from tests.fakes.tokenizer import tokenizer_folder

TITLE = "added latency per completion, completions a second"
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=1024, seed=1)
STOP = stop_strings(CompletionKind.ACTION, ("<code>", TAG))
IN_FLIGHT, SPARE = 64, 32
RATE = IN_FLIGHT / 0.5  # a second: 64 in flight at an endpoint that takes 0.5 s
LENGTH = 8192
ANSWER_S = 300.0


async def measure(scale: Scale) -> Findings:
    found = Findings()
    tokenizer = load_tokenizer(str(tokenizer_folder()))
    gc.freeze()  # as the orchestrator does
    for delay_s in (0.0, 0.5):
        with endpoint(delay_s, turns=0) as server:
            completer = await connect(Endpoint(server.base_url, "bench"), tokenizer, tokens="exact")
            try:
                await _latencies(found, completer, tokenizer, server.base_url, delay_s, scale)
                if delay_s == 0.0:
                    await _throughput(found, completer, tokenizer, scale)
            finally:
                await completer.aclose()
    await _lag(found, tokenizer, scale.pick(2, 16, 16))
    _line(found, tokenizer, scale.pick(2, 50, 200))
    return found


async def _latencies(
    found: Findings, completer: Completer, tokenizer: HubTokenizer, url: str, delay_s: float, scale: Scale
) -> None:
    """One at a time, and so many that `IN_FLIGHT` are at a slow endpoint."""
    direct = _direct(tokenizer)
    one = scale.pick(3, 100, 400) if delay_s == 0.0 else scale.pick(2, 12, 60)
    for in_flight, sandboxes, number, pace in (
        (1, 2, one, {"gap": delay_s + 0.04}),
        (IN_FLIGHT, IN_FLIGHT + SPARE, scale.pick(16, 640, 5120), {"rate": scale.pick(8.0, RATE, RATE)}),
    ):
        latencies: dict[str, list[float]] = {"sandboxes": [], f"{url}/completions": []}
        async with (
            _echo() as echo,
            _orchestrator(completer, tokenizer, scale.pick(4, sandboxes, sandboxes)) as player,
        ):
            if in_flight == 1:
                latencies[f"echo {echo}"] = []
            for seed in range(turns := scale.pick(1, 2, 4)):
                for through in list(latencies)[:: -1 if seed % 2 else 1]:
                    command = {"through": through, "count": number // turns, "seed": seed, **pace}
                    latencies[through] += await player.ask({**command, "direct": direct})
        ours, theirs, *hop = latencies.values()
        name = f"{in_flight} in flight, endpoint {delay_s * 1e3:g} ms"
        found.samples |= {f"{name}: through, s": ours, f"{name}: direct, s": theirs}
        promised = {} if in_flight == 1 or scale is Scale.TINY else {"at_most": 10.0}
        for percent, value, bound in ((50, p50, {}), (99, p99, promised)):
            found.add(
                f"{name}: added p{percent}",
                (value(ours) - value(theirs)) * 1e3,
                "ms",
                note=f"{value(ours) * 1e3:.2f} through, {value(theirs) * 1e3:.2f} direct",
                **bound,
            )
        if hop:
            # The hop itself takes what it takes on this machine: what is promised is what we put on top of it.
            found.add(
                f"{name}: added p50, over a bare gRPC call",
                (p50(ours) - p50(theirs) - p50(hop[0])) * 1e3,
                "ms",
                note=f"a gRPC call that is answered at once: {p50(hop[0]) * 1e3:.2f}",
                **({} if scale is Scale.TINY else {"at_most": 2.0}),
            )


@asynccontextmanager
async def _echo() -> AsyncIterator[str]:
    """A folder with the socket of a server that answers every call with as much as a completion has."""
    server = grpc.aio.server()
    answer = pb.CompleteResponse(completion=pb.Completion(text=STEP)).SerializeToString()

    async def say(request: bytes, context: Any) -> bytes:
        return answer

    service, method = ECHO.strip("/").split("/")
    handlers: dict[str, Any] = {method: grpc.unary_unary_rpc_method_handler(say)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    with tempfile.TemporaryDirectory(prefix="b") as home:
        server.add_insecure_port(f"unix:{home}/s")
        await server.start()
        try:
            yield home
        finally:
            await server.stop(None)


async def _throughput(found: Findings, completer: Completer, tokenizer: HubTokenizer, scale: Scale) -> None:
    """All clients ask again at once."""
    async with _orchestrator(completer, tokenizer, scale.pick(4, 32, 32)) as player:
        cpu, started = time.process_time(), time.perf_counter()
        done = await player.ask({"closed": scale.pick(0.5, 10.0, 60.0)})
        cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - started
    found.add(
        "completions a second",
        done / wall_s,
        "/s",
        note="endpoint and clients on the same cores",
        **({} if scale is Scale.TINY else {"at_least": 300.0}),
    )
    found.add("CPU of the orchestrator per completion", cpu_s / max(done, 1) * 1e3, "CPU-ms")


class _Player:
    """The clients' process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def tell(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")

    async def ask(self, command: dict[str, Any]) -> Any:
        assert self._process.stdout is not None
        self.tell(command)
        async with asyncio.timeout(ANSWER_S):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the clients' process has ended")
        return json.loads(line)


@asynccontextmanager
async def _orchestrator(completer: Completer, tokenizer: HubTokenizer, sandboxes: int) -> AsyncIterator[_Player]:
    """Keeps so many sandboxes ready for the clients, each for one episode, until the block is left."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.clients", stdin=pipe, stdout=pipe, limit=64 << 20
    )
    player, numbers, over = _Player(process), count(), False
    assigned: asyncio.Queue[None] = asyncio.Queue()
    plan = a_plan(
        limits=some_limits(max_token_length=1 << 20), sampling=SAMPLING
    )  # made once: it is no part of the way

    async def slot(home: Path) -> None:
        while not over:
            directory = home / str(next(numbers))
            directory.mkdir()
            async with SandboxServer(directory) as sandbox:
                player.tell({"open": str(directory)})
                await sandbox.parked()
                lease = Lease(plan, completer, tokenizer, {})
                sandbox.assign(lease)
                assigned.put_nowait(None)
                await lease.ended()
                if lease.turns:  # a run would make its training data of it
                    trajectory(Record(0.0, turns=tuple(lease.turns)), tokenizer, TAG)

    try:
        with tempfile.TemporaryDirectory(prefix="b") as home:
            async with asyncio.TaskGroup() as tg:
                slots = [tg.create_task(slot(Path(home))) for _ in range(sandboxes)]
                for _ in range(sandboxes):
                    await assigned.get()
                await asyncio.sleep(0.2)  # the assignments are on their way
                yield player
                over = True
                while not all(task.done() for task in slots):
                    await player.ask({"finish": True})
                    await asyncio.sleep(0.02)
    finally:
        process.kill()
        await process.wait()


async def _lag(found: Findings, tokenizer: HubTokenizer, sandboxes: int) -> None:
    """How late the event loop is, at rest and while programs ask as expensively as they can, all at once."""
    loop, request = asyncio.get_running_loop(), _expensive()
    tokenizer.shape  # noqa: B018 - found before the first rollout

    async def late(work: asyncio.Future[Any]) -> list[float]:
        times = []
        while not work.done():
            due = loop.time() + 0.001
            await asyncio.sleep(0.001)
            times.append(loop.time() - due)
        return times

    async def ask() -> None:
        plan = a_plan(agent=an_agent(kind="program"))
        asked = await aside(wire.completion_request, request)
        await Lease(plan, ScriptedCompleter([STEP]), tokenizer, {}).complete(asked, request)

    rest = await late(asyncio.ensure_future(asyncio.sleep(1.0)))
    busy: list[float] = []
    for _ in range(4):
        busy += await late(asyncio.gather(*(ask() for _ in range(sandboxes))))
    found.samples |= {"loop lag at rest, s": rest, "loop lag under expensive requests, s": busy}
    found.add(
        f"loop lag p99 while {sandboxes} sandboxes ask as expensively as they can",
        p99(busy) * 1e3,
        "ms",
        note=f"{p99(rest) * 1e3:.2f} at rest",
        at_most=50.0,
    )


def _expensive() -> bytes:
    """Many parameters of one large schema, in a message that nobody sampled."""
    schemas: dict[str, Any] = {"p": {"anyOf": [{} for _ in range(wire.MAX_OBJECTS - 1_000)]}}
    function = {"name": "f", "parameters": {"type": "object", "properties": schemas}}
    arguments: dict[str, Any] = {f"p{number}": [] for number in range(250)}
    call = f"<tool_call>{json.dumps({'name': 'f', 'arguments': arguments})}</tool_call>"
    return pb.CompleteRequest(
        sequence=1,
        kind=pb.COMPLETION_KIND_ACTION,
        tools_json=json.dumps([{"type": "function", "function": function}]),
        messages=[
            pb.Message(role=pb.ROLE_USER, content=TASK),
            pb.Message(role=pb.ROLE_ASSISTANT, content=call),
            pb.Message(role=pb.ROLE_USER, content=OBSERVATION),
        ],
    ).SerializeToString()


def _direct(tokenizer: HubTokenizer) -> dict[str, Any]:
    """The body the orchestrator would send, the ids of a whole episode, and how many of them each turn sends."""
    talk = [Message("system", SYSTEM), Message("user", TASK)]
    lengths = []
    ids: list[int] = []
    for _ in range(TURNS):
        ids = tokenizer.encode(tokenizer.render(tuple(talk), generation_prompt=True))
        lengths.append(len(ids))
        talk += [Message("assistant", STEP), Message("user", OBSERVATION)]
    request = CompletionRequest((), ids_of(), STOP, SAMPLING, "direct", "direct", 0, 1)
    return {"body": VllmDialect().body(request, "bench"), "ids": ids, "lengths": lengths}


def _line(found: Findings, tokenizer: HubTokenizer, wanted: int) -> None:
    """Turns at and behind `LENGTH` tokens: what the prompt's suffix, the line and the trajectory take."""
    ids = tuple(tokenizer.encode(STEP))
    token_line = TokenLine(tokenizer, TAG)
    talk: tuple[Message, ...] = (Message("system", SYSTEM), Message("user", TASK))
    turns: list[Turn] = []
    times: list[float] = []
    length = 0
    while len(times) < wanted:
        started = time.perf_counter()
        prompt = token_line.prompt(talk)
        asked = time.perf_counter()
        text, visible, _ = visible_text(tokenizer, ids, STOP)
        completion = Completion(text, visible, "stop", ids, (-0.5,) * len(ids), 1, len(ids))
        sampled = time.perf_counter()
        token_line.append(prompt, talk, completion)
        ended = time.perf_counter()
        if length >= LENGTH:
            times.append(ended - sampled + asked - started)
        length = len(prompt.ids) + len(ids)
        kept = turns[-1].kept + len(turns[-1].messages) if turns else 0
        turns.append(
            Turn(len(turns) + 1, CompletionKind.ACTION, kept, talk[kept:], 0, prompt.added, "", completion, 0, 0)
        )
        talk = (*talk, Message("assistant", STEP), Message("user", OBSERVATION))
    started = time.perf_counter()
    trajectory(Record(0.0, turns=tuple(turns)), tokenizer, TAG)
    found.add(
        f"id line at {LENGTH} tokens and more, a turn, p50",
        statistics.median(times) * 1e3,
        "ms",
        note=f"up to {length} tokens",
    )
    found.add("trajectory from the record, a turn", (time.perf_counter() - started) / len(turns) * 1e3, "ms")
    found.samples["id line, s"] = times
