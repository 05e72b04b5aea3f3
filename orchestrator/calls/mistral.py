"""Mistral: `[TOOL_CALLS]` and a JSON array of calls; since 2025 `[TOOL_CALLS]NAME[ARGS]{...}` for each call.

Between name and arguments an id may stand. Ids that the model wrote are not used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from orchestrator.calls.source import Called, Source
from orchestrator.types import Tools

_OPENS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def read(text: str, tools: Tools) -> Iterator[str | Called]:
    """The texts and the calls, in their order; see `Reader`."""
    source = Source(text)
    yield source.before(_OPENS)
    while source.has(_OPENS):
        if source.has("["):
            yield source.call("arguments")
            while source.has(","):
                yield source.call("arguments")
            source.take("]")
        else:  # some servers do not print the control token [ARGS]
            name = source.before(_ID, _ARGUMENTS, "{").strip()
            if source.has(_ID):
                source.before(_ARGUMENTS, "{")
            source.has(_ARGUMENTS)
            yield name, source.arguments()
        yield source.before(_OPENS)


def forced(name: str | None, template: str) -> str:
    """How a call begins; see `formats.forced`."""
    if name is None:
        return _OPENS
    if _ARGUMENTS in template:
        return f"{_OPENS}{name}{_ARGUMENTS}"
    return f'{_OPENS} [{{"name": {json.dumps(name)}, "arguments": '
