"""Writes the HTML file: template, style and script of this folder, and the data.

The Content-Security-Policy allows exactly this script and this style. Data are JSON blocks that are not run and
hold nothing that looks like a tag. The script inserts them as text only, which `trusted-types 'none'` enforces.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from base64 import b64encode
from collections.abc import Iterable
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from orchestrator.run import lines as jsonl

_SCRIPTS = (
    "text.js",
    "run.js",
    "timeline.js",
    "live.js",
    "overview.js",
    "evaluation.js",
    "outside.js",
    "rollout.js",
    "page.js",
)
_ESCAPED = {b"<": b"\\u003c", b">": b"\\u003e", b"&": b"\\u0026"}  # `dumps` escapes line ends


class Page:
    """An HTML file being written. It appears under its name when the block is left without an error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._head, self._tail = frame(live=False)
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.", suffix=".part")
        self._draft = Path(draft)
        self._file = open(handle, "wb")  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> Page:
        try:
            self._file.write(self._head)
        except OSError:  # the disk is full: remove the draft
            self._draft.unlink(missing_ok=True)
            with suppress(OSError):
                self._file.close()
            raise
        return self

    def data(self, name: str, block: bytes) -> None:
        """Adds a block made by `as_block`. `name` becomes an element's id, so it must be plain."""
        self._file.write(_element(name, block))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with self._file:
                self._file.write(self._tail)
            if kind is None:
                os.chmod(self._draft, 0o644)  # mkstemp gives 0600, but reports are shown to others
                self._draft.replace(self._path)
        finally:
            self._draft.unlink(missing_ok=True)


def document(blocks: Iterable[tuple[str, bytes]], *, live: bool) -> bytes:
    """The whole page, with blocks made by `as_block` under plain names. `live`: it may ask its own server for more
    data."""
    head, tail = frame(live=live)
    return b"".join((head, *(_element(name, block) for name, block in blocks), tail))


def frame(*, live: bool) -> tuple[bytes, bytes]:
    """What stands before the data, and behind them."""
    style, script = _source("page.css"), "\n".join(_source(name) for name in _SCRIPTS)
    head, tail = _source("page.html").split("{data}")
    head = head.replace("{policy}", policy(style, script, live=live)).replace("{style}", style)
    return head.encode(), tail.replace("{script}", script).encode()


def _element(name: str, block: bytes) -> bytes:
    return b'<script type="application/json" id="%s">%s</script>\n' % (name.encode(), block)


def as_block(value: Any) -> bytes:
    """`value` as JSON without any character that HTML gives a meaning."""
    try:
        block = jsonl.dumps(value)
    except TypeError:  # a number of more than 64 bits
        block = json.dumps(value).encode()
    for plain, escaped in _ESCAPED.items():
        block = block.replace(plain, escaped)
    return block


def policy(style: str, script: str, *, live: bool = False) -> str:
    """The Content-Security-Policy: allows this style and this script, and to a `live` page its own server, nothing
    else."""
    return (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        + ("connect-src 'self'; " if live else "")
        + "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _source(name: str) -> str:
    return (files(__package__) / name).read_text("utf-8")
