"""Whether a value of our vocabulary that was read back holds what its types say: a recording may have been edited,
and what is wrong in it would come out where nobody can name it.
"""

from __future__ import annotations

import math
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

MOST = 1 << 53  # whole numbers up to here are the same in every reader of JSON
_SHOWN_CHARACTERS = 60
T = TypeVar("T")
_hints = cache(get_type_hints)


def typed(value: T, *, most: int = MOST) -> T:
    """The dataclass as it is. Raises TypeError with the name of a field that is of another type, of a number above
    `most`, and of a whole one below 0."""
    kind: Any = type(value)
    for name, hint in _hints(kind).items():
        held = getattr(value, name)
        if not _fits(held, hint, most):
            raise TypeError(f"{name} cannot be {repr(held)[:_SHOWN_CHARACTERS]}")
    return value


def _fits(value: Any, hint: Any, most: int) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, arg, most) for arg in args)
    if origin is Literal:
        return value in args
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if args[-1] is not Ellipsis:
            return len(value) == len(args) and all(map(_fits, value, args, [most] * len(args)))
        return _all_fit(value, args[0], most)
    if hint in (int, float):
        return _all_fit((value,), hint, most)
    return isinstance(value, origin or hint)


def _all_fit(values: tuple[Any, ...], hint: Any, most: int) -> bool:
    """Token ids and log-probs are many: no call for each of them."""
    if hint not in (int, float):
        return all(_fits(value, hint, most) for value in values)
    kinds = set(map(type, values))
    if hint is int:
        return kinds <= {int} and (not values or (min(values) >= 0 and max(values) <= most))
    return kinds <= {int, float} and all(-math.inf < value <= most for value in values)  # NaN is neither
