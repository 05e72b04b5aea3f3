"""Which texts a tokenizer takes for control tokens: those that end turns, name roles, stand for images.

A tokenizer finds them in any text, whoever wrote it. Here they are found in contents, so that these can be encoded
without them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import AddedToken

_WINDOW = 16_384  # characters looked through at a time
_STEM = 3  # characters a control token begins with; few different ones, and none of them in most contents


class ControlTokens:
    """The special tokens, and the added ones that the chat template names. Runs of spaces are text."""

    def __init__(
        self, added: Mapping[int, AddedToken], special: Iterable[int], template: str, normalizer: Any = None
    ) -> None:
        """`added`: all added tokens by id. `normalizer`: the tokenizer's own, behind which it looks for some."""
        from tokenizers import AddedToken, Tokenizer, models  # which takes its time, and no --help needs it

        special = frozenset(special)
        tokens = {
            number: token
            for number, token in added.items()
            if not token.content.isspace()
            and token.content
            and (token.special or number in special or token.content in template)
        }
        self.ids = frozenset(tokens)
        self._longest = max((len(token.content) for token in tokens.values()), default=0)
        rewritten = normalizer is not None and any(token.normalized for token in tokens.values())
        # Of the texts that become one of them when they are normalized, nobody knows the beginnings.
        stems = {""} if rewritten else {token.content[:_STEM] for token in tokens.values()}
        self._stem = re.compile("|".join(map(re.escape, sorted(stems)))) if stems else None
        self._finder = Tokenizer(
            models.WordLevel({"": 0}, unk_token="")
        )  # everything between them is unknown to it
        if rewritten:
            self._finder.normalizer = normalizer
        self._finder.add_tokens(
            [AddedToken(token.content, normalized=token.normalized and rewritten) for token in tokens.values()]
        )

    def spelled_in(self, text: str) -> bool:
        """Whether `text` holds one."""
        if self._stem is None or self._stem.search(text) is None:
            return False
        for start in range(0, len(text), _WINDOW):
            window = text[start : start + _WINDOW + self._longest]
            (found,) = self._finder.encode_batch_fast([window], add_special_tokens=False)
            if any(found.ids):
                return True
        return False

    def cut(self, text: str) -> list[str]:
        """`text` in pieces, each control token that was found in two of them."""
        (found,) = self._finder.encode_batch([text], add_special_tokens=False)
        cuts = [
            (start + end) // 2 for number, (start, end) in zip(found.ids, found.offsets, strict=True) if number
        ]
        return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
