"""What people should hear of a program's requests: fields without an effect, and requests that were not served."""

import threading
from collections.abc import Collection

from sandbox.runner.endpoint.checks import MAX_UNUSED
from sandbox.types import Notes

MAX_REFUSED = 3


class NoteBook:
    """The first different notes of each kind. Threads add to it."""

    def __init__(self) -> None:
        self._writing = threading.Lock()
        self._unused: dict[str, bool] = {}  # whether it was taken
        self._refusals: dict[str, bool] = {}

    @property
    def refusals(self) -> list[str]:
        """The first MAX_REFUSED, each once: programs try again."""
        return list(self._refusals)

    def add_unused(self, fields: Collection[str]) -> None:
        with self._writing:
            for field in fields:
                if len(self._unused) < MAX_UNUSED:
                    self._unused.setdefault(field, False)

    def add_refusal(self, text: str) -> None:
        with self._writing:
            if len(self._refusals) < MAX_REFUSED:
                self._refusals.setdefault(text, False)

    def take(self) -> Notes:
        """Those that were not taken before."""
        with self._writing:
            return Notes(_take_new(self._unused), _take_new(self._refusals))


def _take_new(notes: dict[str, bool]) -> tuple[str, ...]:
    fresh = tuple(note for note, is_old in notes.items() if not is_old)
    notes.update(dict.fromkeys(fresh, True))
    return fresh
