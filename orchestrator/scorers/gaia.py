"""Correctness by GAIA's published rules, exactly as in the leaderboard's `scorer.py`.

Numbers: `$`, `%` and `,` are removed, then values are compared; an answer that is no number counts as infinity.
Lists (a reference with `,` or `;`): equally long, compared by element. Text: compared without white space, ASCII
punctuation and case, by code points, without Unicode normalization.
"""

import math
import re
import string

_NUMBER_SIGNS = str.maketrans("", "", "$%,")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SEPARATORS = re.compile("[,;]")
_WHITE_SPACE = re.compile(r"\s")


def question_scorer(answer: str, truth: str) -> bool:
    """Whether `answer` counts as `truth`. Never raises; linear in the answer's length."""
    if _is_number(truth):
        return _same_number(answer, truth)
    if _SEPARATORS.search(truth):
        answers, truths = _SEPARATORS.split(answer), _SEPARATORS.split(truth)
        return len(answers) == len(truths) and all(map(_same_element, answers, truths))
    return _plain(answer).translate(_PUNCTUATION) == _plain(truth).translate(_PUNCTUATION)


def _same_element(answer: str, truth: str) -> bool:
    """Inside a list punctuation is compared: elements may consist of it."""
    return _same_number(answer, truth) if _is_number(truth) else _plain(answer) == _plain(truth)


def _same_number(answer: str, truth: str) -> bool:
    try:
        value = float(answer.translate(_NUMBER_SIGNS))
    except ValueError:
        value = math.inf  # as published: a reference of `inf` is met by every answer that is no number
    return value == float(truth)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _plain(text: str) -> str:
    return _WHITE_SPACE.sub("", text).lower()
