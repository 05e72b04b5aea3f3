"""What a scripted server pretends to have loaded: tokenizer, chat template, log-probs, prefix cache."""

from __future__ import annotations

import json
import re
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer

from tests.fakes.tokenizer import END, END_OF_TEXT

_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?=<\|im_start\|>|\Z)", re.DOTALL)
_ENDED = re.compile(r"(?:<\|im_end\|>|<\|endoftext\|>)\n?\Z")
KEPT_LINES = 256


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a prompt, whichever way it came."""

    role: str
    content: str


def logprob(token_id: int, position: int) -> float:
    """The log-prob of an id at a place of the line (the first prompt id is 0). Nothing else decides it."""
    mixed = (token_id * 2654435761 + (position + 1) * 40503 * 65537) & 0xFFFFFFFF
    mixed ^= mixed >> 15
    mixed = mixed * 2246822519 & 0xFFFFFFFF
    return -(mixed / 2**32) * 4.0 - 1e-4


@dataclass(slots=True)
class Model:
    """A model that can do everything but think. `weight_version` may be changed in the middle of a run."""

    folder: Path
    name: str = "scripted"
    context_length: int = 32_768
    weight_version: str = "default"
    tokenizer: Tokenizer = field(init=False)
    pieces: Sequence[bytes] = field(init=False)
    ids: Mapping[bytes, int] = field(init=False)
    ends: frozenset[int] = field(init=False)
    special: frozenset[int] = field(init=False)
    end_id: int = field(init=False)
    end_of_text_id: int = field(init=False)
    _template: jinja2.Template = field(init=False)

    def __post_init__(self) -> None:
        file = self.folder / "tokenizer.json"
        self.tokenizer, self.pieces, self.ids, self.special = _loaded(file, file.stat().st_mtime_ns)
        self.end_id = self._id(END)
        self.end_of_text_id = self._id(END_OF_TEXT)
        self.ends = frozenset((self.end_id, self.end_of_text_id))
        self._template = _compiled(self.template)

    @property
    def size(self) -> int:
        return len(self.pieces)

    @property
    def template(self) -> str:
        alone = self.folder / "chat_template.jinja"
        if alone.exists():
            return alone.read_text("utf-8")
        return str(json.loads((self.folder / "tokenizer_config.json").read_text("utf-8"))["chat_template"])

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, special tokens in it recognised."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join([self.pieces[i] for i in ids])

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of `ids`; a character cut in two becomes U+FFFD, as in every tokenizer."""
        kept = [i for i in ids if i not in self.special] if skip_special else ids
        return self.decode_bytes(kept).decode("utf-8", "replace")

    def render(self, messages: Sequence[ChatMessage], *, generation_prompt: bool = True) -> str:
        plain = [{"role": m.role, "content": m.content} for m in messages]
        return self._template.render(messages=plain, add_generation_prompt=generation_prompt)

    def render_tools(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        """A prompt with tools. Calls in `messages` have their arguments as text, as OpenAI's API wants it."""
        told = [{**m, "content": m.get("content") or ""} for m in messages]
        for message in told:
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return self._template.render(messages=told, tools=tools, add_generation_prompt=True)

    def read_messages(self, prompt: str) -> tuple[ChatMessage, ...]:
        """The conversation in a rendered prompt, without the open turn at its end."""
        turns = [ChatMessage(m[1], _ENDED.sub("", m[2])) for m in _TURN.finditer(prompt)]
        if turns and turns[-1].role == "assistant" and not turns[-1].content:
            turns.pop()
        return tuple(turns)

    def _id(self, token: str) -> int:
        token_id = self.tokenizer.token_to_id(token)
        if token_id is None:
            raise ValueError(f"the tokenizer in {self.folder} has no {token}")
        return int(token_id)


@lru_cache(maxsize=8)  # nothing changes them, and hundreds of servers of a test process load the same
def _loaded(file: Path, written_ns: int) -> tuple[Tokenizer, Sequence[bytes], Mapping[bytes, int], frozenset[int]]:
    """(the tokenizer, the bytes of each id, ids by their bytes, ids of the special tokens)."""
    tokenizer = Tokenizer.from_file(str(file))
    special = frozenset(tokenizer.get_added_tokens_decoder())
    byte_of = {char: byte for byte, char in _byte_alphabet().items()}
    pieces = []
    for token_id in range(tokenizer.get_vocab_size()):
        token = tokenizer.id_to_token(token_id) or ""
        pieces.append(token.encode() if token_id in special else bytes(byte_of[c] for c in token))
    ids = {piece: i for i, piece in enumerate(pieces) if i not in special}
    return tokenizer, tuple(pieces), ids, special


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    return jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)


@dataclass(slots=True)
class PrefixCache:
    """Lines seen so far; how much of a new prompt is among them."""

    _lines: deque[bytes] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))

    def cached(self, prompt_ids: Sequence[int]) -> int:
        """Ids that need no evaluation. The last one of a prompt always does."""
        prompt = array("I", prompt_ids).tobytes()
        longest = max((_common(prompt, line) for line in self._lines), default=0)
        return max(0, min(longest, len(prompt_ids) - 1))

    def keep(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> None:
        """Puts a line in. Its last id was sampled but never evaluated, so it is not cached."""
        line = array("I", [*prompt_ids, *sampled_ids][:-1]).tobytes()
        for known in self._lines:
            if line.startswith(known):
                self._lines.remove(known)
                break
        self._lines.append(line)


def _common(left: bytes, right: bytes) -> int:
    """Length of the common prefix, in ids, by halving."""
    width = array("I").itemsize
    low, high = 0, min(len(left), len(right)) // width
    while low < high:
        middle = (low + high + 1) // 2
        if left[: middle * width] == right[: middle * width]:
            low = middle
        else:
            high = middle - 1
    return low


def _byte_alphabet() -> dict[int, str]:
    """Byte-level BPE's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}


def as_messages(raw: Sequence[dict[str, Any]]) -> tuple[ChatMessage, ...]:
    """Chat messages of a request; content in parts is joined."""
    found = []
    for message in raw:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        found.append(ChatMessage(message["role"], content))
    return tuple(found)
