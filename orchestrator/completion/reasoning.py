"""Which part of a sampled text is the model's reasoning: kept on record, trained on, and never given to the agent.

Code in reasoning is not an action, so the agent must not run it.
"""

from __future__ import annotations

import re

# Tags around reasoning: of Qwen, DeepSeek and most others; of Magistral; of Seed-OSS; of gpt-oss.
_TAGS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|channel|>analysis<|message|>": "<|channel|>final<|message|>",
}
_ANALYSIS, _MESSAGE_ENDS = (
    "<|channel|>analysis<|message|>",
    "<|end|>",
)  # of gpt-oss: a call may follow, and no answer
_ANSWERS = _TAGS[_ANALYSIS]  # an answer without a thought begins so; agents get no part of it
_OPENS, _CLOSES = next(iter(_TAGS.items()))
LONGEST_TAG = max(map(len, _TAGS))
_EMPTY = re.compile(r"<think>\s*</think>\s*$")


def opened_by(prompt: str) -> str:
    """The tag that a prompt ends with, where the chat template itself opens the reasoning; else an empty text."""
    end = prompt[-2 * LONGEST_TAG :].rstrip()
    return next((tag for tag in _TAGS if end.endswith(tag)), "")


def reasoning_chars(text: str, opened: str | None = "") -> int:
    """How many characters at the beginning of a sampled text are reasoning, with its tags and the space behind it.

    `opened`: the tag that the prompt ended with. None: the server made the prompt, which may have ended with a
    tag; a closing tag without an opening one shows that it did. Reasoning without an end is the whole text.
    """
    start = len(text) - len(text.lstrip())
    if text.startswith(_ANSWERS, start):
        return _behind(text, start + len(_ANSWERS))
    tag = next((tag for tag in _TAGS if text.startswith(tag, start)), opened)
    if tag:
        closes = (_TAGS[tag], _MESSAGE_ENDS) if tag == _ANALYSIS else (_TAGS[tag],)
        ends = (at + len(close) for close in closes if (at := text.find(close)) >= 0)
        end = next(ends, None)
        return len(text) if end is None else _behind(text, end)
    if tag is None and (at := text.find(_CLOSES)) >= 0 and _OPENS not in text[:at]:
        return _behind(text, at + len(_CLOSES))
    return 0


def tagged(reasoning: str) -> str:
    """Reasoning that a server sent apart from the answer, as the beginning of a sampled text."""
    return f"{_OPENS}\n{reasoning.strip()}\n{_CLOSES}\n\n"


def without_empty(printed: str) -> str:
    """What a template prints before an answer, without the empty reasoning that some templates add."""
    return _EMPTY.sub("", printed)


def _behind(text: str, end: int) -> int:
    return len(text) - len(text[end:].lstrip())
