"""Tiny language models with random weights, written as real ones are: folders, GGUF files, LoRA adapters.

Their weights are large enough that tokens differ in likelihood by several nats: a shift by one is seen.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import peft
import torch
import transformers

from tests.fakes.tokenizer import ENTRIES, tokenizer_folder

HIDDEN, LAYERS, HEADS, KEY_HEADS, INNER = 64, 2, 4, 2, 128
SPREAD = 0.25  # standard deviation of the weights
CONTEXT = 32_768
# GGUF's name of each part of a layer, by transformers' name.
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def a_model(seed: int = 0, entries: int = ENTRIES, hidden: int = HIDDEN) -> transformers.PreTrainedModel:
    """A model of Qwen2's architecture for the tests' tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder(entries))
    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=SPREAD,
        eos_token_id=tokenizer.eos_token_id,
    )
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
    config, stored = model.config, gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_vocabulary(writer, entries)
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        if values.ndim == 2 and kind != "F32":
            writer.add_tensor(_gguf_name(name), gguf.quantize(values, stored), raw_dtype=stored)
        else:
            writer.add_tensor(_gguf_name(name), values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    stem, _, ending = name.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{ending}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}.{ending}"


def _add_vocabulary(writer: gguf.GGUFWriter, entries: int) -> None:
    from tokenizers import Tokenizer

    folder = tokenizer_folder(entries)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    merges = json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]["merges"]
    added = tokenizer.get_added_tokens_decoder()
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_chat_template(transformers.AutoTokenizer.from_pretrained(folder).chat_template)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if i in added else normal for i in range(len(tokens))])
    writer.add_eos_token_id(next(i for i, token in added.items() if token.content == "<|im_end|>"))
