"""The model itself: torch and transformers, in f32, without a cache.

The layers see a whole line at once. Logits are made only where a token is trained, a few places at a time: all of
a line of 16,384 tokens would be 10 GB. What an architecture does behind its layers (a scale, a cap) is left to it:
its `forward` is called for every few places, and only what the layers gave is kept between these calls.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError, EnvironmentUnusable
from orchestrator.forward.compare import Recomputed
from orchestrator.forward.lines import TrainedLine
from orchestrator.forward.weights import ADAPTER_FILE, Weights

_LIBRARIES = ("torch", "accelerate", "gguf", "peft")
_PLACES = 64  # whose logits are held at a time: 40 MB where there are 150,000 tokens
_TRIAL_TOKENS = 128
_BLOCK = 32  # numbers with one step between them, as in llama.cpp's Q8_0 and Q8_1
_REASON_CHARS = 300


def demand_libraries() -> None:
    """Raises EnvironmentUnusable without the extra `torch`. Imports nothing."""
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentUnusable(
            f"verify --model needs the extra torch ({', '.join(missing)} not installed): "
            "pip install 'rollout-orchestrator[torch]'; PyTorch's pages name the small build for CPUs"
        )


def demand_adapter(folder: Path) -> None:
    """Raises ConfigError for a folder that is no adapter."""
    if not (folder / ADAPTER_FILE).is_file():
        raise ConfigError(f"--adapter: {folder} holds no {ADAPTER_FILE}; name a folder as PEFT saves it")


class Model:
    """A causal language model in f32 on the CPU."""

    def __init__(self, model: Any) -> None:
        """Raises ConfigError for an architecture whose layers cannot be evaluated apart from its head."""
        takes = inspect.signature(model.forward).parameters
        if model.base_model is model or "logits_to_keep" not in takes:
            raise ConfigError(f"--model: logits of a {type(model).__name__} cannot be made in pieces")
        self._model = model
        self.architecture = type(model).__name__
        self.vocabulary_size = int(model.get_input_embeddings().num_embeddings)
        self.context = getattr(model.config.get_text_config(), "max_position_embeddings", None)

    @classmethod
    def load(cls, weights: Weights, adapter: Path | None = None) -> Model:
        """Blocking, for a minute or more. `adapter`: a folder as PEFT saves it. Raises ConfigError."""
        path = weights.path.resolve()
        # Weights as safetensors alone: other formats may run code when they are read.
        source = {"gguf_file": path.name} if weights.is_gguf else {"use_safetensors": True}
        with _quiet():
            import torch
            import transformers

            try:
                model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                    str(path.parent if weights.is_gguf else path),
                    dtype=torch.float32,
                    local_files_only=True,
                    trust_remote_code=False,
                    **source,
                )
            except Exception as error:  # transformers raises anything from OSError to NotImplementedError here
                raise ConfigError(f"--model: {weights.path} cannot be loaded: {_reason(error)}") from error
            if adapter is not None:
                model = _adapted(model, adapter)
        if odd := {str(p.dtype) for p in model.parameters()} - {"torch.float32"}:
            raise ConfigError(f"--model: {weights.path} was loaded as {', '.join(sorted(odd))}, not as float32")
        return cls(model.eval())

    def speed(self) -> float:
        """Tokens a second, by a trial of a short line."""
        line, last = [0] * _TRIAL_TOKENS, [_TRIAL_TOKENS - 1]
        for _ in range(2):  # the first pass touches the weights for the first time
            began = time.perf_counter()
            list(self._logits(line, last))
        return _TRIAL_TOKENS / (time.perf_counter() - began)

    def recompute(self, line: TrainedLine) -> Recomputed:
        """The log-probs of one line. Blocking; memory grows with the line's length, not with its square."""
        import torch

        tokens, behind = line.tokens, [*line.tokens[1:], 0]
        pieces: list[Any] = []
        for places, logits in self._logits(tokens, line.places_P):
            labels = torch.tensor([[tokens[p], tokens[p - 1], behind[p]] for p in places])
            rows = logits.gather(-1, labels) - logits.logsumexp(-1, keepdim=True)
            cooled = logits / line.temperature
            tempered = cooled.gather(-1, labels[:, :1]) - cooled.logsumexp(-1, keepdim=True)
            pieces.append(torch.cat([rows, tempered], -1))
        own, before, later, at_temperature = torch.cat(pieces).T.tolist()
        if line.places_P[-1] == len(tokens) - 1:
            later[-1] = float("nan")
        return Recomputed(own, before, later, at_temperature)

    def rounded(self, line: TrainedLine) -> list[float]:
        """The line's log-probs (`own_P`) if what goes into each matrix is rounded to 8 bits, in blocks, as
        llama.cpp does beside quantised weights. How far they are from `recompute` is what that rounding makes."""
        with _rounding(self._model):
            return list(self.recompute(line).own_P)

    def _logits(self, tokens: Sequence[int], places: Sequence[int]) -> Iterator[tuple[Sequence[int], Any]]:
        """Some places, and the logits (places, vocabulary) that predict them; again until all had their turn."""
        import torch

        ids = torch.tensor([list(tokens)])
        with torch.inference_mode(), _layers_kept(self._model):
            for start in range(0, len(places), _PLACES):
                some = places[start : start + _PLACES]
                rows = torch.tensor(some) - 1
                yield some, self._model(input_ids=ids, logits_to_keep=rows, use_cache=False).logits[0]


@contextlib.contextmanager
def _rounding(model: Any) -> Iterator[None]:
    """Within it, the inputs of linear layers are rounded."""
    import torch

    def rounded(layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        blocks = inputs[0].reshape(-1, _BLOCK)
        steps = blocks.abs().amax(-1, keepdim=True) / 127
        whole = torch.where(steps > 0, (blocks / steps).round(), 0.0)
        return ((whole * steps.half().float()).reshape(inputs[0].shape), *inputs[1:])

    linear = (m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.in_features % _BLOCK == 0)
    hooks = [module.register_forward_pre_hook(rounded) for module in linear]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _layers_kept(model: Any) -> Iterator[None]:
    """Within it, the layers are evaluated once: later calls of the model get what they gave."""
    layers = model.base_model
    evaluate, output = layers.forward, None

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal output
        if output is None:
            output = evaluate(*args, **kwargs)
        return output

    layers.forward = forward
    try:
        yield
    finally:
        del layers.forward  # the class's own comes back


def _adapted(model: Any, adapter: Path) -> Any:
    """The model with the adapter merged into it. Raises ConfigError."""
    import peft

    with warnings.catch_warnings(record=True) as notices:
        warnings.simplefilter("always")
        try:
            adapted = peft.PeftModel.from_pretrained(model, str(adapter.resolve())).merge_and_unload()
        except Exception as error:  # as when a model is loaded
            raise ConfigError(f"--adapter: {adapter} does not fit the model: {_reason(error)}") from error
    for warning in notices:
        if "missing adapter keys" in str(warning.message):  # PEFT goes on without them
            raise ConfigError(f"--adapter: {adapter} does not fit the model: {_reason(warning.message)}")
    return adapted


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the libraries' notices and progress bars off the terminal."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def _reason(error: object) -> str:
    return " ".join(str(error).split())[:_REASON_CHARS] or type(error).__name__
