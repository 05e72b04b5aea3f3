"""A small model for vLLM: the GGUF file that `local_model` fetches, as a folder of safetensors, made once."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from orchestrator.local_model.gguf import read_metadata, write_tokenizer
from orchestrator.local_model.weights import MODELS, default_directory, fetch_weights, only_one

MODEL = MODELS["qwen2.5-coder-0.5b"]
# As upstream: what a server applies to requests that leave these out.
GENERATION = {
    "bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643], "pad_token_id": 151643,
    "repetition_penalty": 1.1, "temperature": 0.7, "top_k": 20, "top_p": 0.8,
}  # fmt: skip


def model_folder() -> Path:
    """The folder, kept beside the GGUF file. Blocking. Raises WeightsUnavailable."""
    home = default_directory() / MODEL.name
    folder = home / "safetensors"
    with only_one(home):
        if not folder.is_dir():
            gguf = fetch_weights(MODEL, home, lambda text: print(text, file=sys.stderr))
            folder = _dequantised(gguf, home / "safetensors.partial").rename(folder)
    return folder


def _dequantised(gguf: Path, folder: Path) -> Path:
    import torch
    import transformers

    shutil.rmtree(folder, ignore_errors=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16, local_files_only=True
    )
    # Its numbers are bfloat16's now. Without these, transformers takes it for quantised, which it would not save.
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    model.save_pretrained(folder)
    write_tokenizer(gguf, folder)
    (folder / "chat_template.jinja").write_text(read_metadata(gguf)["tokenizer.chat_template"])
    (folder / "generation_config.json").write_text(json.dumps(GENERATION, indent=2))
    return folder
