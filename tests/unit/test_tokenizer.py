"""Ids are the same whether a text is encoded whole or in pieces that are kept, whatever the tokenizer does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from orchestrator.completion.base import LONG_CHARS, encoded
from orchestrator.completion.tokenizer import HubTokenizer, check_source, load_tokenizer
from orchestrator.errors import EnvironmentUnusable

CORPUS = [
    "the quick brown fox, 42 times: def f(x):\n    return x + 1\n\n",
    "naïve café 漢字 <tag> a_b",
    " \t\n" * 5,
]


def byte_level() -> Tokenizer:
    """As GPT-2, Qwen, Llama 3 and DeepSeek have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s?\p{L}+|\p{N}|\s*[\r\n]+|\s+(?!\S)|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return tokenizer


def sentencepiece(prepend: bool) -> Tokenizer:
    """As Llama 2 and Mistral have it: a space before the text, by the normalizer or before the first word only."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if prepend:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def lower_case() -> Tokenizer:
    """A normalizer that changes lengths and cases."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()])
    return tokenizer


ADDED = {
    "plain": [AddedToken("<|s|>", special=True), AddedToken("<|e|>", special=True)],
    "no special ones": [AddedToken("<|s|>", normalized=False), AddedToken("<|e|>", normalized=False)],
    "takes space behind": [
        AddedToken("<|s|>", special=True, rstrip=True),
        AddedToken("<|e|>", special=True, rstrip=True),
    ],
    "takes space before": [AddedToken("<|s|>", special=True, lstrip=True), AddedToken("<|e|>", special=True)],
    "stands alone": [AddedToken("x|", special=True, single_word=True), AddedToken("<|e|>", special=True)],
    "in the normalized text": [AddedToken("<|S|>", normalized=True), AddedToken("<|e|>", special=True)],
    "one in another": [
        AddedToken("<|s|>", special=True),
        AddedToken("<|s|><|e|>", special=True),
        AddedToken("e|>a", special=True),
    ],
}
MODELS = {
    "byte level": byte_level,
    "prepended": lambda: sentencepiece(True),
    "first": lambda: sentencepiece(False),
    "lower case": lower_case,
}
BITS = [
    "<|s|>",
    "<|e|>",
    "<|S|>",
    "x|",
    "e|>a",
    "|>",
    "<",
    " ",
    "\n",
    "a",
    "é漢",
    "the quick ",
    " " * 40,
    "fox" * 700,
]


@pytest.fixture(scope="module", params=[(m, a) for m in MODELS for a in ADDED], ids=" ".join)
def backend(request: pytest.FixtureRequest) -> Iterator[Tokenizer]:
    model, added = request.param
    tokenizer = MODELS[model]()
    tokenizer.add_tokens(ADDED[added])
    return tokenizer


@example(bits=["a" * 1_998, "<|s|><|e|>a"])  # the second one begins where there could be a cut
@given(bits=st.lists(st.sampled_from(BITS), max_size=40))
def test_pieces_are_encoded_as_the_whole_text(backend: Tokenizer, bits: list[str]) -> None:
    ours = HubTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), "test")  # type: ignore[no-untyped-call]
    text = "".join(bits)
    whole = backend.encode(text, add_special_tokens=False).ids
    assert ours.encode(text) == whole
    assert ours.encode(text) == whole  # from what was kept


def test_what_many_prompts_begin_with_is_encoded_once() -> None:
    backend = byte_level()
    backend.add_tokens(ADDED["plain"])
    ours = HubTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), "test")  # type: ignore[no-untyped-call]
    for task in range(5):
        ours.encode(f"<|s|>{'You are an agent. ' * 200}<|e|><|s|>Task {task}<|e|>")
    assert ours._kept.cache_info().misses == 1
    assert ours._kept.cache_info().hits == 4


class Watched:
    """A tokenizer of one id a word that remembers who called, and with how much."""

    def __init__(self) -> None:
        self.calls: list[tuple[bool, int]] = []

    def encode(self, text: str, plain: object = ()) -> list[int]:
        self.calls.append((threading.current_thread() is threading.main_thread(), len(text)))
        return [1] * len(text.split())


async def test_a_long_text_is_encoded_beside_the_event_loop() -> None:
    tokenizer = Watched()
    words = LONG_CHARS // 2
    assert await encoded(tokenizer, "a " * words, words) == (1,) * words  # type: ignore[arg-type]
    assert await encoded(tokenizer, "a " * (words + 1), 9 * words) == (1,) * (words + 1)  # type: ignore[arg-type]
    assert tokenizer.calls == [(True, 2 * words), (False, 2 * words + 2)]


async def test_a_text_that_is_far_too_long_is_not_encoded_to_its_end() -> None:
    tokenizer = Watched()
    assert await asyncio.wait_for(encoded(tokenizer, "a " * (2 << 20), 1_000), 60) is None  # type: ignore[arg-type]
    assert sum(size for _, size in tokenizer.calls) <= 2 * LONG_CHARS


async def test_a_long_text_of_few_tokens_is_encoded_whole() -> None:
    tokenizer = Watched()
    text = "a" * 100 * LONG_CHARS
    assert await encoded(tokenizer, text, 1_000) == (1,)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["~nosuchuser/x", "/" + "x" * 300, "x" * 300])
def test_a_name_that_can_be_no_path_is_no_folder(name: str) -> None:
    with pytest.raises(EnvironmentUnusable, match=r"does not exist|not on this machine"):
        check_source(name, here_only=True)


def test_a_tokenizer_that_is_not_here_is_looked_for_nowhere_where_the_hub_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        EnvironmentUnusable, match="'nobody/nothing' is not on this machine and HF_HUB_OFFLINE is set"
    ):
        load_tokenizer("nobody/nothing")
    with pytest.raises(EnvironmentUnusable, match=r"tokenizer folder .* does not exist"):
        load_tokenizer(str(tmp_path / "none"))
