"""Tiny models with random weights, and LoRA adapters for them, as GGUF files: made without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers

from tests.fakes.tokenizer import ENTRIES, tokenizer_folder

Weights = Mapping[str, "np.ndarray[Any, Any]"]

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
HIDDEN, LAYERS, HEADS, KEY_HEADS, INNER = 64, 2, 4, 2, 128
SPREAD = 0.25  # standard deviation of the weights
CONTEXT = 32_768
RANK = 4  # of an adapter


def a_config(entries: int, hidden: int = HIDDEN, end_of_turn: int | None = None) -> transformers.Qwen2Config:
    """Qwen2's architecture, small."""
    return transformers.Qwen2Config(
        vocab_size=entries,
        hidden_size=hidden,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=SPREAD,
        eos_token_id=end_of_turn,
    )


def drawn(config: transformers.Qwen2Config, seed: int = 0) -> Weights:
    """Random weights under transformers' names."""
    hidden, inner, entries = config.hidden_size, config.intermediate_size, config.vocab_size
    keys = hidden // config.num_attention_heads * config.num_key_value_heads
    layer = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "self_attn.q_proj.bias": (hidden,),
        "self_attn.k_proj.bias": (keys,),
        "self_attn.v_proj.bias": (keys,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    shapes = {
        "model.embed_tokens.weight": (entries, hidden),
        "lm_head.weight": (entries, hidden),
        "model.norm.weight": (hidden,),
        **{f"model.layers.{n}.{name}": layer[name] for n in range(config.num_hidden_layers) for name in layer},
    }
    chance = np.random.default_rng(seed)
    return {
        name: SPREAD * chance.standard_normal(shape, np.float32) + name.endswith("norm.weight")
        for name, shape in shapes.items()
    }


def write_model(
    config: transformers.Qwen2Config, weights: Weights, path: Path, kind: str = "F32", entries: int = ENTRIES
) -> Path:
    """A model as one file, `weights` under transformers' names; matrices are stored as `kind`."""
    stored = gguf.GGMLQuantizationType[kind]
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
    for name, values in weights.items():
        if values.ndim == 2 and kind != "F32":
            writer.add_tensor(_gguf_name(name), gguf.quantize(values, stored), raw_dtype=stored)
        else:
            writer.add_tensor(_gguf_name(name), values.astype(np.float32))
    return _written(writer, path)


def write_lora(config: transformers.Qwen2Config, path: Path, seed: int) -> Path:
    """An adapter that changes what each layer attends to."""
    draw = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 2.0 * RANK)
    hidden = config.hidden_size
    for layer in range(config.num_hidden_layers):
        for side, shape in (("a", (RANK, hidden)), ("b", (hidden, RANK))):
            values = draw.standard_normal(shape, np.float32)
            writer.add_tensor(f"blk.{layer}.attn_q.weight.lora_{side}", values)
    return _written(writer, path)


def _written(writer: gguf.GGUFWriter, path: Path) -> Path:
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
