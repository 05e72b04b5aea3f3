"""What a completion costs the orchestrator itself.

    python -m bench.completions line          the id line and the recorder, per turn, at a given length
    python -m bench.completions throughput    completions a second through one orchestrator process

`throughput` runs three processes: an endpoint that speaks vLLM and answers at once, the orchestrator's part
(gRPC server per sandbox, lease, id line, completer), and clients in the place of sandboxes. Prompts have
the length of smolagents' own.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path

import grpc.aio
import orjson
from aiohttp import web
from rollout_api.v1 import sandbox_pb2 as pb
from rollout_api.v1 import sandbox_pb2_grpc as pb_grpc

from orchestrator.completion.base import Endpoint
from orchestrator.completion.connect import connect
from orchestrator.completion.line import TokenLine, visible_text
from orchestrator.completion.recorder import trajectory
from orchestrator.completion.tokenizer import HubTokenizer, load_tokenizer
from orchestrator.proxy.leases import Lease
from orchestrator.proxy.server import SandboxServer
from orchestrator.types import Completion, CompletionKind, Limits, Message, Record, Turn
from tests.fakes.plans import a_plan
from tests.fakes.tokenizer import tokenizer_folder

TAG = "</code>"
STOP = ("Observation:", "Calling tools:", TAG)
SAID = (  # turns of CodeAgents have 130 to 290 sampled tokens
    "Thought: I add the numbers that I have read, one by one, and look at what comes of it.\n<code>\n"
    + "".join(f"total_{n} = sum(value for value in values[{n}] if value > {n})\n" for n in range(6))
)
OBSERVATION = (
    "Observation:\nExecution logs:\n" + "\n".join(str(i * 37) for i in range(20)) + "\nLast output:\nNone"
)
SYSTEM = "You are an agent who solves tasks with code, step by step. " * 150  # about what smolagents says
LENGTH = 8192


def a_completion(tokenizer: HubTokenizer, ids: tuple[int, ...]) -> Completion:
    text, visible = visible_text(tokenizer, ids, STOP)
    return Completion(text, visible, "stop", ids, (-0.5,) * len(ids), 1, len(ids))


def line(arguments: argparse.Namespace) -> None:
    """Turns at and behind `--length` tokens: what the prompt's suffix, the line and the trajectory take."""
    tokenizer = load_tokenizer(arguments.tokenizer or str(tokenizer_folder()))
    ids = tuple(tokenizer.encode(SAID + TAG))
    token_line = TokenLine(tokenizer, TAG)
    talk: tuple[Message, ...] = (Message("system", SYSTEM), Message("user", "Add up what is in the files."))
    turns: list[Turn] = []
    times: list[float] = []
    length = 0
    while len(times) < arguments.turns:
        started = time.perf_counter()
        prompt = token_line.prompt(talk)
        asked = time.perf_counter()
        completion = a_completion(tokenizer, ids)
        sampled = time.perf_counter()
        token_line.append(prompt, talk, completion)
        ended = time.perf_counter()
        if length >= arguments.length:
            times.append(ended - sampled + asked - started)
        length = len(prompt.ids) + len(ids)
        kept = turns[-1].kept + len(turns[-1].messages) if turns else 0
        turns.append(
            Turn(len(turns) + 1, CompletionKind.ACTION, kept, talk[kept:], 0, prompt.added, "", completion, 0, 0)
        )
        talk = (*talk, Message("assistant", SAID + TAG), Message("user", OBSERVATION))
    started = time.perf_counter()
    trajectory(Record(0.0, turns=tuple(turns)), tokenizer, TAG)
    recorded = (time.perf_counter() - started) / len(turns)
    quantiles = statistics.quantiles(times, n=20)
    print(
        f"line of {arguments.length} to {length} tokens, {len(turns)} turns: suffix and line "
        f"p50 {statistics.median(times) * 1e3:.2f} ms, p95 {quantiles[-1] * 1e3:.2f} ms a turn; "
        f"trajectory {recorded * 1e3:.2f} ms a turn"
    )


# ---------------------------------------------------------------- throughput


async def endpoint(arguments: argparse.Namespace) -> None:
    """vLLM's `/v1/completions` with always the same sample. Prints its address."""
    tokenizer = load_tokenizer(arguments.tokenizer or str(tokenizer_folder()))
    ids = tokenizer.encode(SAID + TAG)

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "bench", "owned_by": "vllm"}]})

    async def completions(request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        sample = ids[: body["max_tokens"]]
        choice = {
            "index": 0,
            "text": tokenizer.decode(sample),
            "token_ids": sample,
            "logprobs": {"token_logprobs": [-0.5] * len(sample)},
            "finish_reason": "length" if len(sample) < len(ids) else "stop",
        }
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(sample)}
        answer = orjson.dumps({"choices": [choice], "usage": usage})
        return web.Response(body=answer, content_type="application/json")

    async def tokenize(request: web.Request) -> web.Response:
        return web.json_response({"tokens": tokenizer.encode((await request.json())["prompt"])})

    app = web.Application(client_max_size=64 << 20)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/tokenize", tokenize)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
    await asyncio.Event().wait()


async def clients(arguments: argparse.Namespace) -> None:
    """Plays one episode for each socket directory that comes in."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with asyncio.TaskGroup() as tg:
        while directory := (await lines.readline()).decode().strip():
            tg.create_task(_episode(directory, arguments.steps))


async def _episode(directory: str, steps: int) -> None:
    async with grpc.aio.insecure_channel(
        f"unix:{directory}/s", options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        stub = pb_grpc.SandboxServiceStub(channel)
        park = pb.ParkRequest(contract=1, confinement=pb.Confinement(runner_uid=1, worker_uid=2))
        async for _ in stub.Park(park, wait_for_ready=True):
            pass
        talk = [
            pb.Message(role=pb.ROLE_SYSTEM, content=SYSTEM),
            pb.Message(role=pb.ROLE_USER, content="Add up what is in the files."),
        ]
        for sequence in range(1, steps + 1):
            request = pb.CompleteRequest(sequence=sequence, kind=pb.COMPLETION_KIND_ACTION, messages=talk)
            answer = await stub.Complete(request)
            talk.append(pb.Message(role=pb.ROLE_ASSISTANT, content=(answer.completion.text + TAG).strip()))
            talk.append(pb.Message(role=pb.ROLE_USER, content=OBSERVATION))
        await stub.SubmitResult(pb.SubmitResultRequest(stop_reason=pb.STOP_REASON_FINAL_ANSWER, answer=b"1"))


async def throughput(arguments: argparse.Namespace) -> None:
    """Opens the other two processes, serves `--sandboxes` at a time for `--seconds`, prints what came of it."""
    tokenizer = load_tokenizer(arguments.tokenizer or str(tokenizer_folder()))
    own = [sys.executable, "-m", "bench.completions"]
    more = ["--tokenizer", arguments.tokenizer] if arguments.tokenizer else []
    pipe = asyncio.subprocess.PIPE
    server = await asyncio.create_subprocess_exec(*own, *more, "endpoint", stdout=pipe)
    player = await asyncio.create_subprocess_exec(*own, "--steps", str(arguments.steps), "clients", stdin=pipe)
    assert server.stdout is not None
    assert player.stdin is not None
    try:
        base_url = (await server.stdout.readline()).decode().strip()
        completer = await connect(Endpoint(base_url, "bench"), tokenizer, tokens="exact")
        done, numbers = 0, count()
        started, cpu = time.perf_counter(), time.process_time()
        until = started + arguments.seconds
        with tempfile.TemporaryDirectory() as home:

            async def slot() -> None:
                nonlocal done
                while time.perf_counter() < until:
                    directory = Path(home, str(next(numbers)))
                    directory.mkdir()  # noqa: ASYNC240 - as quick as anything here
                    async with SandboxServer(directory) as sandbox:
                        player.stdin.write(f"{directory}\n".encode())  # type: ignore[union-attr]
                        await sandbox.parked()
                        lease = Lease(a_plan(limits=Limits(max_token_length=1 << 20)), completer, tokenizer, {})
                        sandbox.assign(lease)
                        await lease.ended()
                        done += len(lease.turns)
                        trajectory(Record(0.0, turns=tuple(lease.turns)), tokenizer, TAG)

            async with asyncio.timeout(arguments.seconds + 120), asyncio.TaskGroup() as tg:
                for _ in range(arguments.sandboxes):
                    tg.create_task(slot())
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        await completer.aclose()
    finally:
        for process in (server, player):
            process.kill()
            await process.wait()
    print(
        f"{arguments.sandboxes} sandboxes, {arguments.steps} steps each: {done} completions in {wall_s:.1f} s, "
        f"{done / wall_s:.0f} a second; {cpu_s / done * 1e3:.2f} CPU-ms each in the orchestrator "
        f"({done / cpu_s:.0f} a second of its CPU)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.completions", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("line", "throughput", "endpoint", "clients"))
    parser.add_argument("--tokenizer", help="a folder; default: a small one made on the spot")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of the line")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--sandboxes", type=int, default=32)
    parser.add_argument("--steps", type=int, default=8, help="completions of an episode")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--profile", action="store_true", help="where the orchestrator's time goes")
    arguments = parser.parse_args()
    if arguments.what == "line":
        line(arguments)
        return
    roles: dict[str, Callable[[argparse.Namespace], Awaitable[None]]] = {
        "throughput": throughput,
        "endpoint": endpoint,
        "clients": clients,
    }
    profile = cProfile.Profile()
    if arguments.profile:
        profile.enable()
    asyncio.run(roles[arguments.what](arguments))  # type: ignore[arg-type]
    if arguments.profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("cumulative").print_stats(60)


if __name__ == "__main__":
    main()
