"""Keeps keys out of everything that is printed, logged or written."""

import re

_URL_USER = re.compile(r"(?<=://)[^/?#\s]*@")
# Two patterns instead of one, so that each character is looked at once.
_QUERY_NAME = re.compile(r"[?&][^=&#\s]*")
_QUERY_VALUE = re.compile(r"=[^&#\s]+")
_NAME_OF_KEY = re.compile(r"(?i)key|token|secret|passw|sig")
_KEY = re.compile(r"\b(?:sk|pk|tvly|hf|xai|gsk|ghp)[-_][\w*.-]{4,}")
_SHOWN_CHARACTERS = 60


class Secret:
    """A key. Only `reveal` returns it; repr, str and format do not show it."""

    __slots__ = ("_value",)

    def __init__(self, value: str = "") -> None:
        self._value = value

    def reveal(self) -> str:
        """The key itself; empty: there is none."""
        return self._value

    def __bool__(self) -> bool:
        return bool(self._value)

    def __repr__(self) -> str:
        return "Secret('***')" if self._value else "Secret('')"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)


def names_a_key(name: str) -> bool:
    """Whether a variable or a header of this name mostly holds a key."""
    return _NAME_OF_KEY.search(name) is not None


def redact(text: str, *secrets: Secret) -> str:
    """`text` without these secrets, without credentials in URLs and without what looks like a key."""
    for secret in secrets:
        if secret:
            text = text.replace(secret.reveal(), "[key]")
    text = _URL_USER.sub("", text)
    return _KEY.sub("[key]", _without_query_keys(text))


def _without_query_keys(text: str) -> str:
    kept, end = [], 0
    for name in _QUERY_NAME.finditer(text):
        if name.start() < end or _NAME_OF_KEY.search(name[0]) is None:  # in a replaced value, or no key's name
            continue
        if value := _QUERY_VALUE.match(text, name.end()):
            kept += [text[end : name.end()], "=[key]"]
            end = value.end()
    return "".join((*kept, text[end:]))


def shown(value: object) -> str:
    """A refused value as error texts quote it: one line, shortened, without keys."""
    try:
        text = redact(value if isinstance(value, str) else str(value))
    except ValueError:  # Python writes out no more than 4300 digits
        return "a number of thousands of digits"
    if len(text) > _SHOWN_CHARACTERS:
        text = text[:_SHOWN_CHARACTERS] + "..."
    return repr(text) if isinstance(value, str) else " ".join(text.split())
