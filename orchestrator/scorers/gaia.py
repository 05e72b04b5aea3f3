"""Correctness by GAIA's published rules.

Numbers: `$`, `%` and `,` go, then the values are compared. Lists (a reference with `,` or `;`):
equally long, element by element. Text: without white space, ASCII punctuation and case. Where the
published rules would call any nonsense correct (a reference of `inf`, or of punctuation alone) the
texts themselves decide. Canonically equal Unicode is equal.
"""

from __future__ import annotations

import math
import re
import string

from orchestrator.text import normal_form

_NUMBER_SIGNS = str.maketrans("", "", "$%,")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SEPARATORS = re.compile("[,;]")
_WHITE_SPACE = re.compile(r"\s")


def question_scorer(answer: str, truth: str) -> bool:
    """Whether `answer` counts as `truth`. Never raises; linear in the answer's length."""
    if _number(truth) is not None:
        return _same_number(answer, truth)
    if _SEPARATORS.search(truth):
        answers, truths = _SEPARATORS.split(answer), _SEPARATORS.split(truth)
        return len(answers) == len(truths) and all(map(_same_element, answers, truths))
    wanted = _plain(truth)
    if without := wanted.translate(_PUNCTUATION):
        return _plain(answer).translate(_PUNCTUATION) == without
    return _plain(answer) == wanted


def _same_element(answer: str, truth: str) -> bool:
    """Punctuation counts inside a list: its elements may consist of it."""
    if _number(truth) is not None:
        return _same_number(answer, truth)
    return _plain(answer) == _plain(truth)


def _same_number(answer: str, truth: str) -> bool:
    value = _number(answer.translate(_NUMBER_SIGNS))
    return value is not None and value == _number(truth)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _plain(text: str) -> str:
    return _WHITE_SPACE.sub("", normal_form("NFC", text)).lower()
