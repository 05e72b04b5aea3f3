"""llama.cpp's own HTTP server, inside this process, on loopback only."""

import os
import socket
from pathlib import Path
from typing import Any

from orchestrator.local_model.gguf import read_metadata

PROMPT_CACHE_MIB = 1024  # llama.cpp's default of 8 GiB is more than a demonstration may take


class ServerUnavailable(Exception):
    """The server could not be started. The text is one line for the user."""


def default_threads() -> int:
    """All cores but one. The threads of llama.cpp wait for each other in a loop that takes their whole core. If
    sandboxes need a core of theirs, all of them stand still."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


def start(
    weights: Path, adapter: Path | None, *, name: str, port: int, parallel: int, context: int, threads: int
) -> tuple[Any, str]:
    """The server and its address. Blocks until the model is loaded; serves for as long as the server is kept.

    `adapter`: a LoRA adapter as GGUF, in use at scale 1. `context`: tokens for each request; llama.cpp divides its
    whole context among the slots. Raises ServerUnavailable.
    """
    try:
        import xllamacpp
    except ImportError as error:
        raise ServerUnavailable(
            f"serving needs the extra local-model: pip install 'rollout-orchestrator[local-model]' ({error})"
        ) from error

    params = xllamacpp.CommonParams()
    params.model.path = str(weights)
    params.model_alias = {name}
    params.n_parallel = parallel
    params.n_ctx = context * parallel
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    if adapter is not None:
        _check_adapter(adapter)
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(adapter), 1.0)]
    _check_port(port)
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.cache_ram_mib = PROMPT_CACHE_MIB
    params.ui = False
    params.cors_origins = "localhost"  # the default lets any web page the user visits ask the model
    params.verbosity = 1  # errors
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        with_adapter = "" if adapter is None else f" with {adapter}, which may be of another model,"
        raise ServerUnavailable(f"{name} cannot be served{with_adapter} on port {port} ({error})") from error
    return server, str(server.listening_address)


def _check_adapter(adapter: Path) -> None:
    try:
        metadata = read_metadata(adapter)
    except (OSError, ValueError) as error:
        raise ServerUnavailable(f"--adapter: {adapter} cannot be read ({error})") from error
    if metadata.get("general.type") != "adapter" or metadata.get("adapter.type") != "lora":
        raise ServerUnavailable(f"--adapter: {adapter} is no LoRA adapter as GGUF")


def _check_port(port: int) -> None:
    """llama.cpp shares a port with another server of the kind: each would get some of the requests."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as after a server that has just ended
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ServerUnavailable(f"port {port} is in use ({error.strerror})") from error
