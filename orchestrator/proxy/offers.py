"""Keeps each set of tools of a rollout once, however many requests bring it."""

import hashlib
from collections.abc import Callable

from orchestrator.calls.declared import text_of
from orchestrator.proxy.requests import Refusal, RequestRefused
from orchestrator.rules.text import objects_in
from orchestrator.types import Tools

# Of all sets together: they stay in memory for the whole rollout, and in its record for good.
MAX_BYTES, MAX_OBJECTS = 2 << 20, 50_000


class Offers:
    """Requests that offer the same tools get the same object: it need not be compared again."""

    def __init__(self, flaw: Callable[[Tools], Refusal | None]) -> None:
        """`flaw`: why the model cannot be shown these tools. Each set is looked at once."""
        self._flaw = flaw
        self._sets: dict[bytes, Tools | Refusal] = {}
        self._bytes = self._objects = 0

    def same(self, tools: Tools) -> Tools:
        """The same tools, as they came first. Raises RequestRefused."""
        if not tools:
            return ()
        text = text_of(tools)
        key = hashlib.sha256(text).digest()
        entry = self._sets.get(key)
        if entry is None:
            # A request that was given up may still be looked at in a thread: what came first stays.
            entry = self._sets.setdefault(key, self._refusal(tools, text) or tools)
        if isinstance(entry, Refusal):
            raise RequestRefused(entry)
        return entry

    def _refusal(self, tools: Tools, text: bytes) -> Refusal | None:
        size, objects = self._bytes + len(text), self._objects + objects_in(text)
        if size > MAX_BYTES or objects > MAX_OBJECTS:
            return Refusal(
                f"the tools of all requests, each set counted once, have more than {MAX_BYTES} bytes or "
                f"{MAX_OBJECTS} objects and arrays: offer the same tools each time",
                "tools",
            )
        if (flaw := self._flaw(tools)) is None:
            self._bytes, self._objects = size, objects
        return flaw
