"""The beginning and the end of what a step printed, however much it was."""

from sandbox.texts import shorten, truncation_note

_UTF8_MAX = 4  # bytes of one character


class BoundedOutput:
    """Collects bytes, keeps the first and last that `max_chars` characters can take, counts the rest."""

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._half = max(1, max_chars // 2) * _UTF8_MAX
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    def append(self, chunk: bytes) -> None:
        room = self._half - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        if len(self._tail) > 2 * self._half:  # cut now and then, not with every chunk
            self._cut_tail()

    def text(self) -> str:
        """All of it, shortened to `max_chars` plus a note. Bytes that are no UTF-8 are replaced."""
        self._cut_tail()
        if not self._dropped:
            return shorten((self._head + self._tail).decode("utf-8", "replace"), self._max_chars)
        half = max(1, self._max_chars // 2)
        head = self._head.decode("utf-8", "replace")[:half]
        tail = self._tail.decode("utf-8", "replace")[-half:]
        return f"{head}{truncation_note(self._dropped, 'bytes')}{tail}"

    def _cut_tail(self) -> None:
        surplus = len(self._tail) - self._half
        if surplus > 0:
            del self._tail[:surplus]
            self._dropped += surplus
