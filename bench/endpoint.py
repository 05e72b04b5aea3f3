"""An endpoint that costs next to nothing: vLLM's protocol, always the same episode. A process of its own.

    python -m bench.endpoint --delay 0.5 --turns 4        prints its base URL

Completions have the length of a CodeAgent's turns (130 to 290 sampled tokens); the last turn of an episode gives
the answer. With `--durations` each episode takes its own time, in parts of equal length. Takes
prompts as token ids and, for the agents it is compared with, as chat messages.
"""

from __future__ import annotations

import argparse
import asyncio
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import orjson
from aiohttp import web

from tests.fakes.inference.model import Model
from tests.fakes.tokenizer import START, tokenizer_folder

START_S = 120.0
STEP = (
    "Thought: I add the numbers that I have read, one by one, and look at what comes of it.\n<code>\n"
    "values = list(range(1, 20))\n"
    + "".join(f"total_{n} = sum(value for value in values if value % {n} == 0)\n" for n in range(2, 7))
    + "print(total_2, total_3, total_4, total_5, total_6)\n</code>"
)
ANSWER = "Thought: That is what was asked for.\n<code>\nfinal_answer(42)\n</code>"


@dataclass(frozen=True, slots=True)
class RunningEndpoint:
    """Where it listens; its process, whose CPU time is nobody's cost."""

    base_url: str
    pid: int


@contextmanager
def endpoint(delay_s: float = 0.0, turns: int = 4, durations_s: Sequence[float] = ()) -> Iterator[RunningEndpoint]:
    """Runs one until the block is left.

    `durations_s`: instead of a delay for each completion, what all those of an episode take together, in the order
    in which episodes begin; from the first again when they are used up.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, "--delay", str(delay_s), "--turns", str(turns)]
        + ["--durations", *map(str, durations_s)] * bool(durations_s),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], START_S)[0]:
            raise RuntimeError("the endpoint does not start")
        yield RunningEndpoint(process.stdout.readline().strip(), process.pid)
    finally:
        process.kill()
        process.wait()


class Delays:
    """How long each completion takes. An episode is known by its seed."""

    def __init__(self, delay_s: float, turns: int, durations_s: Sequence[float]) -> None:
        self._delay_s, self._turns = delay_s, turns
        self._durations_s = durations_s
        self._episodes: dict[int, int] = {}  # seed → place in the order of their beginnings

    def of(self, seed: int) -> float:
        """For a completion of the episode with this seed."""
        if not self._durations_s:
            return self._delay_s
        place = self._episodes.setdefault(seed, len(self._episodes))
        return self._durations_s[place % len(self._durations_s)] / self._turns


async def serve(delays: Delays, turns: int) -> None:
    """Prints the address and serves until killed."""
    tokenizer = Model(tokenizer_folder())
    texts = (STEP, ANSWER)
    samples = [tokenizer.encode(text) for text in texts]
    (start,) = tokenizer.encode(START)

    def which(said: int) -> int:
        """0: one more step; 1: the answer."""
        return int(said == turns - 1)

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "bench", "owned_by": "vllm"}]})

    async def completions(request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        prompt = body["prompt"]
        # System, task, the open turn; then two more per turn. Probes hold anything.
        said = max(0, prompt.count(start) - 3) // 2 if isinstance(prompt, list) else 0
        number = which(said)
        whole = samples[number]
        sample = whole[: body["max_tokens"]]
        choice = {
            "index": 0,
            "text": texts[number] if len(sample) == len(whole) else tokenizer.decode(sample),
            "token_ids": sample,
            "logprobs": {"token_logprobs": [-0.5] * len(sample)},
            "finish_reason": "stop" if len(sample) == len(whole) else "length",
        }
        if len(sample) > 1 and (delay_s := delays.of(body["seed"] - said)):  # each call has the next seed
            await asyncio.sleep(delay_s)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sample)}
        answer = orjson.dumps({"choices": [choice], "usage": usage})
        return web.Response(body=answer, content_type="application/json")

    async def chat(request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        number = which(sum(message["role"] == "assistant" for message in body["messages"]))
        await asyncio.sleep(delays.of(body.get("seed", 0)))
        message = {"role": "assistant", "content": texts[number]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.Response(body=orjson.dumps({"choices": [choice]}), content_type="application/json")

    async def tokenize(request: web.Request) -> web.Response:
        return web.json_response({"tokens": tokenizer.encode((await request.json())["prompt"])})

    app = web.Application(client_max_size=64 << 20)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_post("/tokenize", tokenize)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.endpoint", description=__doc__.split("\n")[0])
    parser.add_argument("--delay", type=float, default=0.0, help="seconds per completion")
    parser.add_argument("--turns", type=int, default=4, help="of an episode, the answer included; 0: no end")
    parser.add_argument("--durations", type=float, nargs="+", default=[], help="seconds of each episode")
    arguments = parser.parse_args()
    asyncio.run(serve(Delays(arguments.delay, arguments.turns, arguments.durations), arguments.turns))


if __name__ == "__main__":
    main()
