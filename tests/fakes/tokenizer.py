"""A small real tokenizer with a chat template, made on the spot.

Byte-level BPE trained on smolagents' own prompt files, so that code tags and prompt text come out in
tokens of plausible length while anything beyond ASCII is split into bytes. Saved the way models save
theirs: a folder that `AutoTokenizer` loads without torch and without network.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

ENTRIES = 1500
END, START, END_OF_TEXT = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
DEFAULT_SYSTEM = "You are a small test model, created by nobody. You are a helpful assistant."

# Qwen's: punctuation takes the line breaks behind it along, so a token may carry text beyond a stop string.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# As Qwen's: tools in the system message, calls in tags, results as the user's.
CHAT_TEMPLATE = (
    "{%- set first = messages[0].content if messages[0].role == 'system' else '" + DEFAULT_SYSTEM + "' -%}"
    "{{- '<|im_start|>system\\n' + first -}}"
    "{%- if tools -%}"
    "{{- '\\n\\n# Tools\\n<tools>' -}}{%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}"
    "{{- '\\n</tools>\\nA call: <tool_call>\\n{...}\\n</tool_call>' -}}"
    "{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'tool' -%}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}"
    "{%- elif not loop.first or message.role != 'system' -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content -}}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{- '\\n' if message.content or not loop.first else '' -}}"
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' -}}'
    "{{- call.function.arguments | tojson -}}{{- '}\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def tokenizer_folder(entries: int = ENTRIES) -> Path:
    """A folder with the tokenizer, made by whoever asks first. Another `entries`: other ids of the same text."""
    corpus = _corpus()
    # What transformers 5 saves, transformers 4 does not read.
    recipe = "\0".join((version("transformers"), str(entries), _SPLIT, CHAT_TEMPLATE, START, END, *corpus))
    key = hashlib.blake2b(recipe.encode(), digest_size=8).hexdigest()
    home = Path(tempfile.gettempdir()) / f"rollout-orchestrator-tests-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    folder = home / f"tokenizer-{key}"
    if not folder.is_dir():
        fresh = Path(tempfile.mkdtemp(dir=home))
        _make(fresh, corpus, entries)
        try:
            fresh.rename(folder)
        except OSError:  # another process was quicker, and made the same
            shutil.rmtree(fresh)
    return folder


def _corpus() -> list[str]:
    prompts = importlib.resources.files("smolagents") / "prompts"
    files = sorted((f for f in prompts.iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name)
    return [
        file.read_text("utf-8")
        .replace("{{code_block_opening_tag}}", "<code>")
        .replace("{{code_block_closing_tag}}", "</code>")
        for file in files
    ]


def _make(folder: Path, corpus: list[str], entries: int) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
