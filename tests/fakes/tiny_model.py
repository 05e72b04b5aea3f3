"""Tiny language models with random weights, written as real ones are: folders, GGUF files, LoRA adapters.

Their weights are large enough that tokens differ in likelihood by several nats: a shift by one is seen.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import peft
import torch
import transformers

from tests.fakes.tiny_gguf import HIDDEN, SPREAD, a_config, write_model
from tests.fakes.tokenizer import ENTRIES, tokenizer_folder


def a_model(seed: int = 0, entries: int = ENTRIES, hidden: int = HIDDEN) -> transformers.PreTrainedModel:
    """A model of Qwen2's architecture for the tests' tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder(entries))
    torch.manual_seed(seed)
    config = a_config(len(tokenizer), hidden, tokenizer.eos_token_id)
    return transformers.Qwen2ForCausalLM(config).eval()


def write(model: transformers.PreTrainedModel, folder: Path, entries: int | None = ENTRIES) -> Path:
    """The model's folder, with the tokenizer of so many entries, or without one."""
    model.save_pretrained(folder)
    if entries is not None:
        shutil.copytree(tokenizer_folder(entries), folder, dirs_exist_ok=True)
    return folder


def trained_on(model: transformers.PreTrainedModel, by: float, seed: int = 9) -> transformers.PreTrainedModel:
    """Other weights, `by` of their spread away: the next version of a policy."""
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            weight += by * SPREAD * torch.randn(weight.shape, generator=draw)
    return other


def write_adapter(model: transformers.PreTrainedModel, folder: Path, seed: int) -> Path:
    """A LoRA adapter that changes what the model says; the model itself stays as it is."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(_copy(model), config)
    adapted.save_pretrained(folder)
    return folder


def merged(model: transformers.PreTrainedModel, adapter: Path) -> transformers.PreTrainedModel:
    """A model with the adapter in its weights."""
    return peft.PeftModel.from_pretrained(_copy(model), str(adapter)).merge_and_unload().eval()


def _copy(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    return trained_on(model, 0.0)


def write_gguf(model: transformers.PreTrainedModel, path: Path, kind: str = "F32", entries: int = ENTRIES) -> Path:
    """The model as one file; its matrices are stored as `kind`, for example Q8_0."""
    weights = {name: weight.numpy() for name, weight in model.state_dict().items()}
    return write_model(model.config, weights, path, kind, entries)
