"""The scripted server as a program. Prints its base URL when it serves; ends on SIGTERM or SIGINT.

    python -m tests.fakes.inference --dialect vllm --script script.json --log served.jsonl

`GET /_log` gives everything it served so far.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path

from tests.fakes.inference.dialects import DIALECTS
from tests.fakes.inference.faults import FaultPlan
from tests.fakes.inference.model import Model
from tests.fakes.inference.sampling import CLUMSY, TIDY
from tests.fakes.inference.script import Script, load_script
from tests.fakes.inference.server import ScriptedServer
from tests.fakes.tokenizer import tokenizer_folder


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fakes.inference", allow_abbrev=False)
    parser.add_argument("--dialect", choices=sorted(DIALECTS), default="openai")
    parser.add_argument("--script", help="a JSON file, or module:function")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--model", default="scripted", help="the model's name")
    parser.add_argument("--context", type=int, default=32_768, help="tokens")
    parser.add_argument("--clumsy", action="store_true", help="sample awkwardly")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds per completion")
    parser.add_argument("--api-key", default="", help="the one key that is accepted")
    parser.add_argument("--log", type=Path, help="JSON lines of what was served")
    return parser.parse_args()


async def _serve(arguments: argparse.Namespace) -> None:
    script: Script | None = None
    faults = FaultPlan()
    if arguments.script:
        script, faults = load_script(arguments.script)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with ScriptedServer(
        arguments.dialect,
        script,
        model=Model(tokenizer_folder(), arguments.model, arguments.context),
        awkward=CLUMSY if arguments.clumsy else TIDY,
        seed=arguments.seed,
        faults=faults,
        delay_s=arguments.delay,
        api_key=arguments.api_key,
        log_file=arguments.log,
        port=arguments.port,
    ) as server:
        print(server.base_url, flush=True)
        await ended.wait()


if __name__ == "__main__":
    asyncio.run(_serve(_arguments()))
