"""A Hugging Face tokenizer folder, made from the vocabulary inside a GGUF file.

Reads the metadata at the head of the file (format: GGUF version 2 or 3, little endian) and writes the two files
that every version of `transformers` loads, with neither torch nor a model library. The tokenizer does what the
server does with the same file, so text is left as it is: no Unicode normalization, unlike upstream Qwen's.
"""

import json
import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

# Patterns that cut text before merging, by the name in `tokenizer.ggml.pre`; from each model's tokenizer.json.
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLITS = {
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "smollm": (r"\p{N}", _GPT2_WORDS),
}
_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def read_metadata(path: Path) -> dict[str, Any]:
    """The key-value pairs at the head of the file. Raises ValueError for anything else than GGUF 2 or 3."""
    return read_head(path)[0]


def read_head(path: Path) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """The key-value pairs, and (elements, type in ggml's numbers) of each tensor. Raises ValueError as above."""
    with path.open("rb") as file:
        magic, version, tensors, pairs = struct.unpack("<4sIQQ", _take(file, 24))
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"{path.name} is no GGUF file of version 2 or 3")
        metadata = {_string(file): _value(file, _scalar(file, "I")) for _ in range(pairs)}
        return metadata, [_tensor(file) for _ in range(tensors)]


def write_tokenizer(gguf: Path, folder: Path) -> None:
    """Writes the files of a tokenizer and generation_config.json. Raises ValueError for a vocabulary not known
    here."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    metadata = read_metadata(gguf)
    kind, cut = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or cut not in SPLITS:
        raise ValueError(f"{gguf.name} has a {kind}/{cut} tokenizer; known are gpt2 with {', '.join(SPLITS)}")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[cut]]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(t, special=k == _CONTROL, normalized=False) for t, k in added])

    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata[f"{metadata['general.architecture']}.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
    }
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")):
        if (token_id := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[name] = tokens[token_id]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    token_ids = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    ends = sorted({token_id for token_id in token_ids if token_id is not None})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}) + "\n", "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _tensor(file: BinaryIO) -> tuple[int, int]:
    _name, dimensions = _string(file), _scalar(file, "I")
    elements = math.prod(_scalar(file, "Q") for _ in range(dimensions))
    kind, _offset = _scalar(file, "I"), _scalar(file, "Q")
    return elements, kind


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        item = _scalar(file, "I")
        return [_value(file, item) for _ in range(_scalar(file, "Q"))]
    if kind not in _SCALARS:
        raise ValueError(f"metadata of unknown type {kind}")
    return _scalar(file, _SCALARS[kind])


def _scalar(file: BinaryIO, code: str) -> Any:
    return struct.unpack("<" + code, _take(file, struct.calcsize("<" + code)))[0]


def _string(file: BinaryIO) -> str:
    return _take(file, _scalar(file, "Q")).decode("utf-8")


def _take(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise ValueError("the file ends within its metadata")
    return data
