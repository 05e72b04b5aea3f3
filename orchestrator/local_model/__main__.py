"""The command line: fetch a model, or fetch it and serve it until a signal comes. Or serve another GGUF file.

Progress and complaints go to standard error. When the server is ready, one line of JSON goes to standard
output, so that a program that started this one can read the address. Exit codes: 0 when fetched, or after a
signal while serving; 130 after Ctrl-C before that; 2 for wrong usage; 3 without weights or server.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NoReturn

from orchestrator.local_model.gguf import read_metadata, write_tokenizer
from orchestrator.local_model.server import ServerUnavailable, default_threads, start
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


@dataclass(frozen=True, slots=True)
class Local:
    """A model on this machine's disk. `context`: tokens it was trained for."""

    name: str
    weights: Path
    tokenizer: Path
    context: int


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    folder = options.directory.expanduser()
    own: Path | None = getattr(options, "weights", None)
    try:
        local = _fetched(MODELS[options.model], folder) if own is None else _own(own.expanduser(), folder)
        if options.command == "fetch":
            print(
                json.dumps({"model": local.name, "weights": str(local.weights), "tokenizer": str(local.tokenizer)})
            )
            return 0
        _serve(local, options)
    except (WeightsUnavailable, ServerUnavailable) as error:
        _say(f"local model unavailable: {error}")
        return 3
    except OSError as error:
        _say(f"local model unavailable: {error.filename or folder}: {error.strerror or error}")
        return 3
    except KeyboardInterrupt:
        return 130


def _fetched(model: Model, directory: Path) -> Local:
    folder = directory / model.name
    with only_one(folder):
        weights = fetch_weights(model, folder, _say)
        return Local(model.name, weights, _tokenizer(weights, folder), model.context)


def _own(weights: Path, directory: Path) -> Local:
    """A GGUF file of the user's. Its tokenizer is kept in `directory`, for this state of the file."""
    try:
        metadata, state = read_metadata(weights), weights.stat()
        context = int(metadata[f"{metadata['general.architecture']}.context_length"])
        key = blake2b(f"{weights.resolve()} {state.st_size} {state.st_mtime_ns}".encode(), digest_size=8)
        folder = directory / "own" / key.hexdigest()
        with only_one(folder):
            return Local(weights.stem, weights, _tokenizer(weights, folder), context)
    except KeyError as error:
        raise WeightsUnavailable(f"--weights: {weights} does not tell its {error.args[0]}") from error
    except ValueError as error:
        raise WeightsUnavailable(f"--weights: {weights} cannot be used ({error})") from error


def _tokenizer(weights: Path, folder: Path) -> Path:
    tokenizer = folder / "tokenizer"
    if not (tokenizer / "tokenizer_config.json").is_file():  # written last
        write_tokenizer(weights, tokenizer)
    return tokenizer.resolve()


def _serve(local: Local, options: argparse.Namespace) -> NoReturn:
    adapter_option: Path | None = getattr(options, "adapter", None)
    adapter = adapter_option and adapter_option.expanduser().resolve()
    _say(f"loading {local.name}" + (f" with the adapter {adapter}" if adapter else ""))
    _server, address = start(  # serves for as long as it is kept
        local.weights,
        adapter,
        name=local.name,
        port=options.port,
        parallel=options.parallel,
        context=min(options.context, local.context),
        threads=options.threads,
    )
    # Before the line is printed: its reader may send a signal at once. By a pipe, as the kernel may give the
    # signal to one of the server's threads, where it would wake nobody here, or end the process by itself.
    bell, ring = os.pipe()
    os.set_blocking(ring, False)
    signal.set_wakeup_fd(ring)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    ready = {"base_url": f"{address}/v1", "model_name": local.name, "tokenizer": str(local.tokenizer)}
    if adapter is not None:
        ready["policy_version"] = str(adapter).removesuffix(".gguf")
    print(json.dumps(ready), flush=True)
    os.read(bell, 1)
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
        own = "a GGUF file instead of one of these models"
        command.add_argument("--weights", type=Path, default=argparse.SUPPRESS, help=own)
        command.add_argument("--directory", type=Path, default=default_directory(), help="where models are kept")
    command.add_argument(
        "--adapter",
        type=Path,
        default=argparse.SUPPRESS,
        help="a LoRA adapter as GGUF; its path is the policy's version",
    )
    command.add_argument("--threads", type=_number(1, 1024), default=default_threads(), help="cores that it takes")
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
