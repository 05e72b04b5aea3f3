"""For processes that others are forked from: importing this module imports what `load_tokenizer` needs."""

from __future__ import annotations

from orchestrator.completion.tokenizer import auto_tokenizer

auto_tokenizer()
