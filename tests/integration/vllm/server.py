"""A real vLLM server in a process of its own, on this machine's CPU."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.integration.vllm.weights import model_folder

NAME = "policy"
CONTEXT = 1024
AGENTS_CONTEXT = 8192
KEY = "sk-right"
START_S = 600.0  # on two cores that others use too
STOP_S = 30.0
# One thread: several wait for each other in a loop, and stand still together when something else needs a core.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}  # fmt: skip
Answer = tuple[int, Any]


class VllmServer:
    """Serves NAME from when it is entered. It may be killed and started again at the same address."""

    def __init__(self, log: Path, *flags: str, context: int = CONTEXT) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._log, self._flags, self.context = log, flags, context
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> VllmServer:
        self.start()
        self.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        command = [
            *("nice", "-n", "10", sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model_folder()), "--served-model-name", NAME),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *(
                "--dtype",
                "bfloat16",
                "--max-model-len",
                str(self.context),
                "--max-num-seqs",
                "8",
                "--enforce-eager",
            ),
            # On the CPU its engine dies of a request with a seed whose prompt is evaluated in pieces.
            *("--no-enable-chunked-prefill", "--max-num-batched-tokens", str(AGENTS_CONTEXT)),
            *self._flags,
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=os.environ | ENVIRONMENT, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        """Until it serves."""
        assert self._process is not None
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if self.ask("/health")[0] == 200:
                    return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(f"vLLM does not serve: {self._log.read_text()[-3000:]}")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Ends the server with all of its processes. Idempotent."""
        if self._process is None:
            return
        self._end(how)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self._end(signal.SIGKILL)  # its engine may outlive it
        self._process.wait()
        self._process = None

    def _end(self, how: signal.Signals) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, how)

    def ask(self, path: str, body: Mapping[str, Any] | None = None, key: str = "") -> Answer:
        """(status, JSON or text). A GET without a body. Blocking."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=START_S) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def post(self, path: str, **body: Any) -> Any:
        """The answer to a request that succeeds."""
        status, answer = self.ask(path, body)
        assert status == 200, (path, status, answer)
        return answer
