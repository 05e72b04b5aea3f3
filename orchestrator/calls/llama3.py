"""Llama 3: the whole text is a JSON object with name and parameters, or several with `;` between them.

Some of the models write `<|python_tag|>` before it, and some "arguments" for "parameters". Behind that tag stands
Python for the tools that are built into Llama 3.1; that is no call here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from orchestrator.calls.source import Called, Source
from orchestrator.types import Tools

_TAG = "<|python_tag|>"


def read(text: str, tools: Tools) -> Iterator[str | Called]:
    """The texts and the calls, in their order; see `Reader`."""
    source = Source(text)
    yield "" if source.comes("{") else source.before(_TAG)
    while not source.ended():
        source.has(_TAG)
        yield source.call("parameters", "arguments")
        if not source.ended():
            source.take(";")


def forced(name: str | None, template: str) -> str:
    """How a call begins; see `formats.forced`."""
    return '{"name": ' + ('"' if name is None else f'{json.dumps(name)}, "parameters": ')
