"""The report of a run that goes on: the same page, which asks for what is new. Each line is read once.

Of a very long run it shows the attempts that were begun last, and the figures of all.
"""

from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

from orchestrator.completion.base import Tokenizer
from orchestrator.report.details import TokenTable, rollout_details
from orchestrator.report.page import document
from orchestrator.report.summary import MOST_ATTEMPTS, RunReader
from orchestrator.run.files import groups_file_of, groups_in, read_description, record_of
from orchestrator.run.lenient import read_at

MAX_BEHIND_BYTES = 512 << 20  # of a record that is older than the page, its last part is read


class LiveReport:
    """The methods block, and may be called from any threads. `tokenizer`: the run's, once there is one."""

    def __init__(self, run_directory: Path, tokenizer: Callable[[], Tokenizer | None]) -> None:
        self._directory = run_directory
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._reader = RunReader(run_directory, growing=True, behind_bytes=MAX_BEHIND_BYTES)
        self._version = 0
        self._changed: dict[int, int] = {}  # the version at which a group changed last; in the order of versions
        self._bad_tasks = 0, 0  # how many there are, and the version at which that changed

    def page(self) -> bytes:
        """The HTML."""
        return document([("live", b"{}")], live=True)

    def update(self, since: int) -> dict[str, Any]:
        """What is new since that version: groups with all their attempts, and everything else as it is."""
        with self._lock:
            changed = self._reader.read(self._groups_file())
            reader, run = self._reader, self._reader.run
            bad_tasks = run.totals.bad_tasks
            if changed or bad_tasks != self._bad_tasks[0]:
                self._version += 1
            if bad_tasks != self._bad_tasks[0]:
                self._bad_tasks = bad_tasks, self._version
            for number in changed:
                self._changed.pop(number, None)
                self._changed[number] = self._version
            if len(self._changed) > 2 * len(run.groups) + 1000:
                self._changed = {number: at for number, at in self._changed.items() if number in run.groups}
            numbers = []
            for number, version in reversed(self._changed.items()):
                if version <= since:
                    break
                if number in run.groups:
                    numbers.append(number)
            return {
                **run.overview(),
                "version": self._version,
                "groups": [dict(run.groups[number]) for number in reversed(numbers)],
                "rollouts": [dict(row) for number in reversed(numbers) for row in reader.attempts(number)],
                **({"bad_tasks": run.bad_tasks[:]} if self._bad_tasks[1] > since else {}),
                "most": MOST_ATTEMPTS,
            }

    def details(self, rollout_id: str) -> dict[str, Any] | None:
        """One rollout step by step, with its tokens; None: there is no such one, or it was forgotten."""
        with self._lock:
            run, groups_file = self._reader.run, self._groups_file()
            place, written = run.places.get(rollout_id), run.written.get(rollout_id)
        record = record_of(self._directory)
        if place is None or record is None:
            return None
        group = read_at(groups_file, written[0]) if written is not None and groups_file is not None else {}
        table = TokenTable(self._tokenizer())
        tokens = table.member(group, written[1]) if written is not None else None
        shown = None if tokens is None else {**tokens, "entries": table.entries}
        return {**rollout_details(read_at(record, place)), "tokens": shown}

    def _groups_file(self) -> Path | None:
        return groups_in(self._directory, groups_file_of(read_description(self._directory)))
