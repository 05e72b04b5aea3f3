"""Finds the texts that a tokenizer takes for control tokens, which end turns, name roles or stand for images.

A tokenizer recognises them in any text, whoever wrote it. Here they are found in contents, so that contents can
be encoded without control tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import AddedToken

_WINDOW = 16_384  # characters searched at a time
_STEM = 3  # first characters of a control token: few different ones exist, and most contents hold none


class ControlTokens:
    """The special tokens, and added tokens that the chat template names. Tokens of spaces alone are text."""

    def __init__(
        self, added: Mapping[int, AddedToken], special: Iterable[int], template: str, normalizer: Any = None
    ) -> None:
        """`added`: all added tokens by id. `normalizer`: the tokenizer's; some tokens are found behind it only."""
        from tokenizers import AddedToken, Tokenizer, models  # slow to import, and --help does not need it

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
        folded = {token.content.lower() for token in tokens.values()}
        self._all = "\n".join(sorted(folded))
        lengths = range(1, self._longest)
        self._heads, self._tails = [slice(n) for n in lengths], [slice(-n, None) for n in lengths]
        self._beginnings = {token[:end] for token in folded for end in range(1, len(token))}
        self._endings = {token[start:] for token in folded for start in range(1, len(token))}
        rewritten = normalizer is not None and any(token.normalized for token in tokens.values())
        self._rewritten = rewritten
        # Many texts may normalize to a control token, with unknown first characters: then every text is searched.
        stems = {""} if rewritten else {token.content[:_STEM] for token in tokens.values()}
        self._stem = re.compile("|".join(map(re.escape, sorted(stems)))) if stems else None
        # All text between control tokens becomes the unknown token, 0.
        self._finder = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        if rewritten:
            self._finder.normalizer = normalizer
        self._finder.add_tokens(
            [AddedToken(token.content, normalized=token.normalized and rewritten) for token in tokens.values()]
        )

    def may_hold(self, text: str) -> bool:
        """Whether this may be a piece of a control token whose other pieces are printed around it. Small and large
        letters, and space around, do not count: a template may change them."""
        text = text.strip().lower()
        if not text or self._rewritten:
            return bool(text)
        return (
            text in self._all
            or not self._beginnings.isdisjoint(map(text.__getitem__, self._tails))
            or not self._endings.isdisjoint(map(text.__getitem__, self._heads))
        )

    def found_in(self, text: str) -> list[int]:
        """The control tokens that `text` holds, in order; by numbers of this object's own."""
        (encoding,) = self._finder.encode_batch_fast([text], add_special_tokens=False)
        return [number for number in encoding.ids if number]

    def spelled_in(self, text: str) -> bool:
        """Whether `text` holds a control token."""
        if self._stem is None or self._stem.search(text) is None:
            return False
        for start in range(0, len(text), _WINDOW):
            window = text[start : start + _WINDOW + self._longest]
            (encoding,) = self._finder.encode_batch_fast([window], add_special_tokens=False)
            if any(encoding.ids):
                return True
        return False

    def cut(self, text: str) -> list[str]:
        """`text` in pieces, cut in the middle of each control token that was found."""
        (encoding,) = self._finder.encode_batch([text], add_special_tokens=False)
        cuts = [
            (start + end) // 2
            for number, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if number
        ]
        return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
