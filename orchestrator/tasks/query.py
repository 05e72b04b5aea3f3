"""Parses `NAME?key=value&key=value`, for `hf:` and `reasoning_gym:`."""

from urllib.parse import parse_qsl

from orchestrator.errors import ConfigError


def split_query(text: str, kind: str) -> tuple[str, dict[str, str]]:
    """(name, settings). Raises ConfigError for invalid text or a key given twice."""
    name, _, query = text.partition("?")
    try:
        pairs = parse_qsl(query, strict_parsing=True, keep_blank_values=True) if query else []
    except ValueError as error:
        raise ConfigError(f"env.dataset: {kind}:{text}: write ?key=value&key=value") from error
    settings = dict(pairs)
    if not name or len(settings) != len(pairs):
        raise ConfigError(f"env.dataset: {kind}:{text}: a name is missing, or a key is given twice")
    return name, settings


def whole_number(settings: dict[str, str], key: str, default: int, *, low: int, high: int) -> int:
    """Removes the setting `key` and returns it. Raises ConfigError, which names the valid range."""
    text = settings.pop(key, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and low <= int(text) <= high):
        raise ConfigError(f"env.dataset: {key}={text!r} must be a whole number from {low} to {high}")
    return int(text)
