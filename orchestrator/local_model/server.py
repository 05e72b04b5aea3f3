"""llama.cpp's own HTTP server, inside this process, on loopback only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

PROMPT_CACHE_MIB = 1024  # llama.cpp's default of 8 GiB is more than a demonstration may take


class ServerUnavailable(Exception):
    """The server could not be started. The text is one line for the user."""


def start(weights: Path, *, name: str, port: int, parallel: int, context: int) -> tuple[Any, str]:
    """The server and its address. Blocks until the model is loaded; serves for as long as the server is kept.

    `context`: tokens for each request; llama.cpp divides its whole context among the slots. Raises
    ServerUnavailable.
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
    params.cpuparams.n_threads = len(os.sched_getaffinity(0))
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.cache_ram_mib = PROMPT_CACHE_MIB
    params.ui = False
    params.cors_origins = "localhost"  # the default lets any web page the user visits ask the model
    params.verbosity = 1  # errors
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        raise ServerUnavailable(f"the model cannot be served on port {port} ({error})") from error
    return server, str(server.listening_address)
