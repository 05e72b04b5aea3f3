"""The command line: fetch a model, or fetch it and serve it until a signal comes.

Progress and complaints go to standard error. When the server is ready, one line of JSON goes to standard
output, so that a program that started this one can read the address. Exit codes: 0 when fetched, or after a
signal while serving; 130 after Ctrl-C before that; 2 for wrong usage; 3 without weights or server.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from orchestrator.local_model.gguf import write_tokenizer
from orchestrator.local_model.server import ServerUnavailable, start
from orchestrator.local_model.weights import (
    MODELS,
    Model,
    WeightsUnavailable,
    default_directory,
    fetch_weights,
    only_one,
)

DEFAULT_PORT = 18_080
DEFAULT_CONTEXT = 16_384  # what one rollout may hold by default


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    model = MODELS[options.model]
    folder = options.directory.expanduser() / model.name
    try:
        weights, tokenizer = _fetch(model, folder)
        if options.command == "fetch":
            print(json.dumps({"model": model.name, "weights": str(weights), "tokenizer": str(tokenizer)}))
            return 0
        _serve(model, weights, tokenizer, options)
    except (WeightsUnavailable, ServerUnavailable) as error:
        _say(f"local model unavailable: {error}")
        return 3
    except OSError as error:
        _say(f"local model unavailable: {folder}: {error.strerror or error}")
        return 3
    except KeyboardInterrupt:
        return 130


def _fetch(model: Model, folder: Path) -> tuple[Path, Path]:
    tokenizer = folder / "tokenizer"
    with only_one(folder):
        weights = fetch_weights(model, folder, _say)
        if not (tokenizer / "tokenizer_config.json").is_file():  # written last
            write_tokenizer(weights, tokenizer)
    return weights, tokenizer.resolve()


def _serve(model: Model, weights: Path, tokenizer: Path, options: argparse.Namespace) -> NoReturn:
    _say(f"loading {model.name}")
    _server, address = start(  # serves for as long as it is kept
        weights,
        name=model.name,
        port=options.port,
        parallel=options.parallel,
        context=min(options.context, model.context),
    )
    ending = {signal.SIGINT, signal.SIGTERM}
    # Blocked before the line is printed: its reader may send a signal at once.
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    print(
        json.dumps({"base_url": f"{address}/v1", "model_name": model.name, "tokenizer": str(tokenizer)}),
        flush=True,
    )
    signal.sigwait(ending)
    # Without closing the server: that waits for requests under way, for ever where their client is gone.
    os._exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m orchestrator.local_model",
        description="A small language model on this machine's CPU.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("fetch", "get weights and tokenizer"),
        ("serve", "get what is missing, serve on loopback until a signal"),
    ):
        command = commands.add_parser(
            name, help=text, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        command.add_argument("--model", choices=list(MODELS), default=next(iter(MODELS)), help="which one")
        command.add_argument("--directory", type=Path, default=default_directory(), help="where models are kept")
    command.add_argument("--port", type=_number(0, 65_535), default=DEFAULT_PORT, help="0: a free one")
    command.add_argument("--parallel", type=_number(1, 64), default=2, help="requests served at a time")
    command.add_argument(
        "--context", type=_number(256, 1 << 20), default=DEFAULT_CONTEXT, help="tokens of each request"
    )
    return parser


def _number(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not from {least} to {most}")
        return value

    parse.__name__ = "number"  # argparse names it in its complaint
    return parse


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
