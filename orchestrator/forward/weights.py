"""What a model's files say without their weights being loaded: how many there are, how they are stored, which text
each id has."""

import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from orchestrator.completion.tokenizer import tokenizer_here
from orchestrator.errors import ConfigError
from orchestrator.forward.compare import Precision
from orchestrator.forward.lines import Vocabulary
from orchestrator.local_model.gguf import read_head

_FULL, _HALF = {"F32", "F64"}, {"F16", "BF16"}
_CONTROL, _BYTE = 3, 6  # of tokenizer.ggml.token_type
ADAPTER_FILE = "adapter_config.json"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class Weights:
    """A model on this machine. `stored`: the types of its tensors, in their own words. `vocabulary` None: no
    tokenizer lies beside the weights."""

    path: Path
    parameters: int
    stored: str
    precision: Precision
    vocabulary: Vocabulary | None

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()


def look_at(path: Path) -> Weights:
    """`path`: a folder as transformers saves it, with safetensors, or a GGUF file. Raises ConfigError."""
    try:
        if path.is_dir():
            return _folder(path)
        if path.is_file():
            return _gguf(path)
    except OSError as error:
        raise ConfigError(f"--model: {path} cannot be read: {error.strerror or error}") from error
    raise ConfigError(
        f"--model: {path} is not on this machine; a model on the hub is fetched by "
        "`hf download NAME --local-dir FOLDER`"
    )


def _folder(path: Path) -> Weights:
    if (path / ADAPTER_FILE).exists():  # transformers would put it on the weights, or on others that it names
        raise ConfigError(
            f"--model: {path} holds an adapter; name it by --adapter, and by --model the weights below it"
        )
    try:
        config = orjson.loads((path / "config.json").read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"--model: {path} holds no model: no config.json that can be read") from error
    types: Counter[str] = Counter()
    for file in _safetensors(path):
        types += _types(file)
    quantised = config.get("quantization_config") if isinstance(config, dict) else None
    stored = _types_text(types)
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        stored = f"{method or 'quantised'}: {stored}"
    precision = Precision.QUANTISED if quantised else _precision(types)
    return Weights(path, types.total(), stored, precision, tokenizer_here(str(path.resolve())))


def _safetensors(folder: Path) -> list[Path]:
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    try:
        named = set(orjson.loads((folder / _INDEX).read_bytes())["weight_map"].values())
        return [folder / Path(name).name for name in sorted(named)]
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--model: {folder} holds no {_SINGLE} and no {_INDEX}; weights in other formats are not loaded"
        ) from error


def _types(file: Path) -> Counter[str]:
    """How many numbers of each type a file holds."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as tensors:
            slices = [tensors.get_slice(name) for name in tensors.keys()]  # noqa: SIM118 - it is no dict
            types: Counter[str] = Counter()
            for part in slices:
                types[part.get_dtype()] += math.prod(part.get_shape())
            return types
    except SafetensorError as error:
        raise ConfigError(f"--model: {file} is not a complete safetensors file: {error}") from error


def _gguf(path: Path) -> Weights:
    try:
        metadata, tensors = read_head(path)
    except (ValueError, struct.error) as error:
        raise ConfigError(f"--model: {path} is not a readable GGUF file: {error}") from error
    import gguf

    kinds = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    types: Counter[str] = Counter()
    for elements, kind in tensors:
        types[kinds.get(kind, f"type {kind}")] += elements
    return Weights(path, types.total(), _types_text(types), _precision(types), _gguf_vocabulary(metadata))


def _types_text(types: Counter[str]) -> str:
    """The types that hold at least a hundredth of the numbers, the commonest first."""
    return ", ".join(name for name, count in types.most_common() if 100 * count >= types.total())


def _precision(types: Mapping[str, int]) -> Precision:
    if set(types) <= _FULL:
        return Precision.FULL
    return Precision.HALF if set(types) <= _FULL | _HALF else Precision.QUANTISED


class GgufVocabulary:
    """The tokens inside a GGUF file. They are only decoded: loading them as a tokenizer would take minutes."""

    def __init__(self, tokens: list[str], types: list[int], decoder: Any, end: int) -> None:
        self._tokens = tokens
        self._decoder = decoder
        self._ends = {i for i, kind in enumerate(types) if kind == _CONTROL} | {end}

    def decode(self, ids: tuple[int, ...]) -> str:
        """Ids without a token become nothing."""
        size = len(self._tokens)
        return str(self._decoder.decode([self._tokens[i] for i in ids if i < size]))

    def is_end(self, token_id: int) -> bool:
        return token_id in self._ends


def _gguf_vocabulary(metadata: Mapping[str, Any]) -> GgufVocabulary | None:
    """None for a kind of vocabulary that is not known here."""
    from tokenizers import decoders

    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if kind == "gpt2":
        decoder: Any = decoders.ByteLevel()
    elif kind == "llama":
        decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        return None
    types = metadata.get("tokenizer.ggml.token_type", [])
    return GgufVocabulary(tokens or [], types, decoder, metadata.get("tokenizer.ggml.eos_token_id", -1))
