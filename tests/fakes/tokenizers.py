"""Small real tokenizers of the families there are, with control tokens and chat templates like those of models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.demo.tokenizer import unpack
from tests.fakes.tokenizer import tokenizer_folder

CORPUS = [
    "the quick brown fox, 42 times: def f(x):\n    return x + 1\n\n",
    "naïve café 漢字 <tag> a_b <|x|> system user assistant [x] </x> Observation: think tool call",
    " \t\n" * 5,
]
SPACES = "    "
QWEN_CALLS = ("<tool_call>", "</tool_call>")
CONTROLS = ("<|s|>", "<|e|>", "<|pad|>", "<|s|><|e|>", "<think>", "</think>", "[INST]", "[/INST]")


def byte_level() -> Tokenizer:
    """As GPT-2, Qwen, Llama 3 and DeepSeek have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s?\p{L}+|\p{N}|\s*[\r\n]+|\s+(?!\S)|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return tokenizer


def controls_in_vocabulary() -> Tokenizer:
    """The model itself knows the control tokens, and would make them of words."""
    tokenizer = byte_level()
    words = {token: i for i, token in enumerate(tokenizer.get_vocab())}
    for token in CONTROLS:
        words.setdefault(token, len(words))
    unigram = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0, byte_fallback=False))
    unigram.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    unigram.decoder = decoders.ByteLevel()
    return unigram


def sentencepiece() -> Tokenizer:
    """As Llama 2 and Mistral have it: a space before the text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"]))
    return tokenizer


def lower_case() -> Tokenizer:
    """Tokens are looked for in another text than the one that was written."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return tokenizer


MODELS = {
    "byte level": byte_level,
    "controls in the vocabulary": controls_in_vocabulary,
    "sentencepiece": sentencepiece,
    "lower case": lower_case,
}
ADDED: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "takes space behind": {"rstrip": True},
    "takes space before": {"lstrip": True},
    "stands alone": {"single_word": True},
    "in the normalized text": {"normalized": True},
}
TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|s|>' + m.role + '\n' + m.content + '<|e|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|s|>assistant\n' }}{% endif %}"
    ),
    "trims": (
        "{% for m in messages %}{{ '<|s|>' + m.role + '<|e|>\n\n' + (m.content | trim) + '<|pad|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|s|>assistant<|e|>\n\n' }}{% endif %}"
    ),
    "leaves thoughts out": (
        "{% for m in messages %}{% set c = m.content %}{{ '<|s|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' and '</think>' in c %}"
        "{% if loop.last %}"
        "{{ '<think>\n' + c.split('</think>')[0].split('<think>')[-1] + '\n</think>\n\n' }}"
        "{% endif %}"
        "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ c + '<|e|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|s|>assistant\n<think>\n' }}{% endif %}"
    ),
    "in brackets": (
        "{{ '<|pad|>' }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + '<|e|>' }}"
        "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
    ),
    "says it twice": (
        "{% for m in messages %}{{ '<|s|>' + m.content + '<|e|>' + m.content + '<|pad|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|s|>' }}{% endif %}"
    ),
    "changes it": (
        "{% for m in messages %}"
        "{{ '<|s|>' + m.role + '\n' + (m.content | upper | replace('A', 'aa'))[:200] + '<|e|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|s|>assistant\n' }}{% endif %}"
    ),
    "counts on it": (
        "{% for m in messages %}{% if m.content.startswith('<|s|>') %}{{ '[INST][INST]' }}{% endif %}"
        "{{ '<|s|>' + m.content + '<|e|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|s|>' }}{% endif %}"
    ),
    "refuses empty turns": (
        "{% for m in messages %}{% if not m.content | trim %}{{ raise_exception('an empty turn') }}{% endif %}"
        "{{ '<|s|>' + m.role + '\n' + m.content + '<|e|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|s|>assistant\n' }}{% endif %}"
    ),
}


# As Qwen3-Coder's, which print names as tags; and as those that print each key as a tag of its own.
_TAGS = (
    "{% if tools %}{{ '<|pad|>' }}{% for t in tools %}{% set f = t.function %}"
    "{{ '<function=' + f.name + '>' + (f.description or '') }}"
    "{% for key, one in ((f.parameters or {}).properties or {}).items() %}"
    "{{ '\n<' + key + '>' + (one.description or '') + '</' + key + '>' }}"
    "{% for value in one.enum or [] %}{{ '<' + value + '>' }}{% endfor %}{% endfor %}{% endfor %}"
    "{{ '<tool_call>' }}{% endif %}"
    "{% for m in messages %}{{ '<|s|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>\n<function=' + c.function.name + '>' }}"
    "{% for key, value in c.function.arguments.items() %}{{ '\n<parameter=' + key + '>' }}"
    "{{ value if value is string else value | tojson }}{{ '</parameter>' }}{% endfor %}"
    "{{ '</function></tool_call>' }}{% endfor %}{{ '<|e|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|s|>assistant\n' }}{% endif %}"
)
TOOL_TEMPLATES = {
    "qwen3_coder": _TAGS,
    "hermes": _TAGS.replace("<function=", "<name=").replace("<parameter=", "<"),
}


def made(model: str = "byte level", added: str = "plain", template: str = "chatml") -> HubTokenizer:
    """One of each family. Its thoughts' tokens are no special ones; runs of spaces are added tokens, too."""
    backend = MODELS[model]()
    flags = ADDED[added]
    backend.add_tokens(
        [AddedToken(c, special="think" not in c, **{"normalized": False, **flags}) for c in CONTROLS]
        + [AddedToken(SPACES, normalized=False)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|e|>")  # type: ignore[no-untyped-call]
    fast.chat_template = TEMPLATES.get(template) or TOOL_TEMPLATES[template]
    return HubTokenizer(fast, f"{model}, {added}, {template}")


def control_ids(tokenizer: HubTokenizer, ids: Any) -> list[int]:
    """Those of `ids` that are control tokens, in order: special ones, and others that the template prints."""
    template = tokenizer._tokenizer.chat_template
    known = {tokenizer.encode(token)[-1] for token in CONTROLS if "think" not in token or token in template}
    return [token for token in ids if token in known]


def qwen(template: str = "", marks: Sequence[str] = (), *, special: bool = True) -> HubTokenizer:
    """Qwen2.5's template, or another, and its tokens of calls on a small vocabulary, with `marks` as more control
    tokens: Qwen's own vocabulary takes a second to load."""
    inner = AutoTokenizer.from_pretrained(str(tokenizer_folder()))
    inner.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in ("<tool_call>", "</tool_call>")]
    )
    inner.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    config = json.loads((unpack() / "tokenizer_config.json").read_text("utf-8"))
    inner.chat_template = template or config["chat_template"]
    inner.bos_token = config["bos_token"]
    return HubTokenizer(inner, "qwen2.5")
