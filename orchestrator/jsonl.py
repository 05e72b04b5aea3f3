"""Strict JSON, one value per line, on disk when `append` returns."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson


def dumps(value: Any, *, indent: bool = False) -> bytes:
    """Strict JSON without a newline at the end. Lone surrogates become U+FFFD: they are no text."""
    option = orjson.OPT_NON_STR_KEYS | (orjson.OPT_INDENT_2 if indent else 0)
    try:
        return orjson.dumps(value, option=option)
    except TypeError as error:
        if "surrogates" not in str(error):
            raise
        return orjson.dumps(_clean(value), option=option)


class JsonLines:
    """A file that grows by whole lines. Each is flushed; `fsync` also waits for the disk."""

    def __init__(self, path: Path, *, fsync: bool = False) -> None:
        self.path = path
        self._fsync = fsync
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def append(self, value: Any) -> None:
        """Raises OSError (disk full) with no half line left behind."""
        line = dumps(value) + b"\n"
        start = self._file.seek(0, os.SEEK_END)
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:]) or 0
            if self._fsync:
                os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(start)
            raise

    def close(self) -> None:
        """Idempotent."""
        self._file.close()


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_clean(k): _clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(v) for v in value]
    return value
