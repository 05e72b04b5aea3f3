"""The HTML file: template, style and script of this folder, and the data, so that data stays data.

The policy lets exactly this script and this style run. Data stand in inert JSON blocks in which
nothing can look like a tag; the script inserts them as text only, which `trusted-types 'none'` enforces.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from base64 import b64encode
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any

from orchestrator.run import lines as jsonl

_SCRIPTS = ("text.js", "run.js", "overview.js", "rollout.js", "page.js")
_ESCAPED = {
    b"<": b"\\u003c",
    b">": b"\\u003e",
    b"&": b"\\u0026",
    "\u2028".encode(): b"\\u2028",
    "\u2029".encode(): b"\\u2029",
}


class Page:
    """An HTML file under way. It appears under its name when the block is left without an error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._style = _source("page.css")
        self._script = "\n".join(_source(name) for name in _SCRIPTS)
        head, self._tail = _source("page.html").split("{data}")
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.", suffix=".part")
        self._draft = Path(draft)
        self._file = open(handle, "wb")  # noqa: SIM115 - closed by __exit__
        self._head = head.replace("{policy}", policy(self._style, self._script)).replace("{style}", self._style)

    def __enter__(self) -> Page:
        try:
            self._put(self._head)
        except OSError:  # a full disk: the draft must not stay on it
            self._draft.unlink(missing_ok=True)
            with suppress(OSError):
                self._file.close()
            raise
        return self

    def data(self, name: str, block: bytes) -> None:
        """Adds a block of `as_block`. `name` is ours and plain: it becomes an element's id."""
        self._file.write(b'<script type="application/json" id="%s">%s</script>\n' % (name.encode(), block))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with self._file:
                self._put(self._tail.replace("{script}", self._script))
            if kind is None:
                os.chmod(self._draft, 0o644)  # a report is to be shown; mkstemp gives 0600
                self._draft.replace(self._path)
        finally:
            self._draft.unlink(missing_ok=True)

    def _put(self, text: str) -> None:
        self._file.write(text.encode())


def as_block(value: Any) -> bytes:
    """`value` as JSON that no HTML parser can take for anything else."""
    block = jsonl.dumps(value)
    for plain, escaped in _ESCAPED.items():
        block = block.replace(plain, escaped)
    return block


def policy(style: str, script: str) -> str:
    """The Content-Security-Policy: this style, this script, nothing else from anywhere."""
    return (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _source(name: str) -> str:
    return (files(__package__) / name).read_text("utf-8")
