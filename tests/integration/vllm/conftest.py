"""Servers and what their log-probs are compared with. All on this machine's CPU: no GPU was seen."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.completion.tokenizer import HubTokenizer, load_tokenizer
from tests.integration.vllm.reference import Reference
from tests.integration.vllm.server import AGENTS_CONTEXT, KEY, VllmServer
from tests.integration.vllm.weights import model_folder


@pytest.fixture(scope="session")
def folder() -> Path:
    """The model as safetensors."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make test-vllm")
    return model_folder()


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> HubTokenizer:
    return load_tokenizer(str(folder))


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def plain(folder: Path, logs: Path) -> Iterator[VllmServer]:
    """As `vllm serve` starts it, in its development mode."""
    with VllmServer(logs / "plain.log") as server:
        yield server


@pytest.fixture(scope="session")
def equipped(folder: Path, logs: Path) -> Iterator[VllmServer]:
    """With a parser of calls, adapters, a key, and room for agents' prompts."""
    flags = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--api-key", KEY]
    with VllmServer(
        logs / "equipped.log", *flags, "--enable-lora", "--max-loras", "2", context=AGENTS_CONTEXT
    ) as server:
        yield server


@pytest.fixture
def figures(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints a figure, also of a test that passes."""

    def tell(text: str) -> None:
        with capsys.disabled():
            print(f"\nvLLM on CPU, no GPU seen: {text}", flush=True)

    return tell


@pytest.fixture(scope="session")
def reference(folder: Path) -> Reference:
    """The same weights in a forward pass of our own."""
    return Reference(folder)
