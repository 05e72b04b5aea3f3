"""Qwen2.5's tokenizer, small enough to travel in the package: 0.6 MB for 11.

The vocabulary of a byte-level BPE is the bytes, then the result of each merge, in order. So the merges are
kept, with whatever else the two files of a tokenizer folder hold, and the vocabulary is derived from them.
The tokenizer is Qwen's, under Apache-2.0.
"""

import hashlib
import json
import lzma
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from orchestrator.errors import EnvironmentUnusable

PACKED = Path(__file__).resolve().parent / "tokenizer.xz"


def unpack(cache: Path | None = None) -> Path:
    """The tokenizer's folder below the user's cache, made at the first call. Raises EnvironmentUnusable."""
    data = PACKED.read_bytes()
    folder = (cache or _cache()) / f"qwen2.5-tokenizer-{hashlib.sha256(data).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    packed = json.loads(lzma.decompress(data))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            (draft / "tokenizer.json").write_text(json.dumps(original(packed), ensure_ascii=False), "utf-8")
            (draft / "tokenizer_config.json").write_text(json.dumps(packed["config"], ensure_ascii=False), "utf-8")
            draft.chmod(0o755)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        if not folder.is_dir():  # another process may have been faster
            raise EnvironmentUnusable(
                f"cannot write {folder.parent}: {error.strerror}; set XDG_CACHE_HOME to a folder of yours"
            ) from error
    return folder


def original(packed: dict[str, Any]) -> dict[str, Any]:
    """The original tokenizer.json."""
    merges = [merge.split(" ") for merge in packed["merges"].split("\n")]
    tokens = [*packed["bytes"], *("".join(merge) for merge in merges), *packed["rest"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer: dict[str, Any] = packed["tokenizer"]
    return {**tokenizer, "model": {**tokenizer["model"], "vocab": vocabulary, "merges": merges}}


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rollout-orchestrator" / "demo"
