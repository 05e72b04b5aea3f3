"""How answers, values and long texts become text, and how long they may be.

`answer_text` is the one rule for what `final_answer(x)` submits: a str is itself; None is no answer; an
int with more digits than an answer may have is written in hexadecimal; anything else is `str(x)`. At most
ANSWER_CHARS characters are kept, one more than an answer may have, so that the orchestrator sees that it was
too long. Lone surrogates stay: the orchestrator sees that they are no UTF-8.

The worker uses this module too, so it looks builtins up in its own copy (see `sandbox.worker.worker`).
"""

import builtins
import sys

globals()["__builtins__"] = dict(vars(builtins))

ANSWER_CHARS = 64 * 1024 + 1
_DECIMAL_BITS = 4 * ANSWER_CHARS  # an int of more bits has more decimal digits than an answer may have
_set_int_max_str_digits = sys.set_int_max_str_digits
_get_int_max_str_digits = sys.get_int_max_str_digits


def answer_text(answer: object) -> str | None:
    """The text of a final answer. Raises whatever the object's own `__str__` raises."""
    if answer is None:
        return None
    if isinstance(answer, str):
        text = str.__str__(answer)
    elif isinstance(answer, int) and int.bit_length(answer) > _DECIMAL_BITS:
        text = hex(answer)
    else:
        text = _str_of_any_length(answer)
    return text[:ANSWER_CHARS]


def value_text(value: object, max_chars: int) -> str:
    """The text of a step's last value, shortened. Raises what its `__str__` raises."""
    return shorten(str.__str__(str(value)), max_chars)


def shorten(text: str, max_chars: int) -> str:
    """Beginning and end of a long text, with a note about what is missing between them.

    At most `max_chars` characters, the note included, unless they are too few for the note.
    """
    if len(text) <= max_chars:
        return text
    room = max(0, max_chars - len(truncation_note(len(text), "characters")))
    head, tail = room - room // 2, room // 2
    note = truncation_note(len(text) - room, "characters")
    return f"{text[:head]}{note}{text[len(text) - tail :]}"


def truncation_note(missing: int, unit: str) -> str:
    """The note that replaces the middle of a shortened text."""
    return f"\n... output truncated: {missing} {unit} left out ...\n"


def clip(text: str, max_bytes: int) -> str:
    """Valid UTF-8 of at most `max_bytes`; what cannot be encoded becomes `?`."""
    return text.encode("utf-8", "replace")[:max_bytes].decode("utf-8", "ignore")


def _str_of_any_length(value: object) -> str:
    """`str(value)` without Python's limit on the digits of an int: the step's time limit is enough."""
    limit = _get_int_max_str_digits()
    _set_int_max_str_digits(0)
    try:
        return str.__str__(str(value))
    finally:
        _set_int_max_str_digits(limit)
