"""The index of a run: its rows and figures in tables beside the record, made once and read from then on.

What was added to the record since is read when somebody looks. The record is known again by size, time and samples
of its content; of another one, and of one that was changed, the index is made anew.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from orchestrator import __version__
from orchestrator.report.found import attempts_in_order, found_row, group_text, slim, transcript
from orchestrator.report.measured import TaskCounts
from orchestrator.report.reader import RunReader
from orchestrator.report.summary import Run, describe
from orchestrator.report.tables import Tables, as_json
from orchestrator.report.totals import Row, Totals
from orchestrator.run.files import (
    CURRICULUM_FILE,
    DROPPED_FILE,
    groups_file_of,
    groups_in,
    is_going_on,
    read_description,
    record_of,
)
from orchestrator.run.frames import INDEX_BITS, is_compressed, squeezed
from orchestrator.run.lenient import Skipped
from orchestrator.run.prices import NO_PRICES, PriceList

_FORMAT = 3
_LINES = 250  # that are read at a time: others wait for as long
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_CURRICULUM = "curriculum"  # what is counted of it is not kept: it is short, and read again whole


class RunIndex:
    """One run's index, for one thread at a time. `version` changes with its content. `run`: figures and rows."""

    def __init__(self, directory: Path, price_list: PriceList = NO_PRICES) -> None:
        """Raises OSError, sqlite3.Error; ConfigError if `price_list` lacks a model of the run."""
        self.directory, self._price_list = directory, price_list
        self.tables = Tables(directory)
        self.version = 0
        self._is_broken = False  # what was read last is not all in the tables
        self._sources: dict[str, list[Any]] = {}  # role: name, size, time, bytes that were read, digest of samples
        self._reader = self._new_reader()
        if not self.tables.is_new:
            try:
                self._restore()
            except (sqlite3.Error, orjson.JSONDecodeError, KeyError, TypeError, ValueError):
                self._begin_anew()

    def close(self) -> None:
        self.tables.close()

    @property
    def run(self) -> Run:
        return self._reader.run

    def read(self, limit_s: float, told: Callable[[float], None] = lambda _: None) -> bool:
        """Reads what is new for about so long. Whether that was all. `told`: is given the share of the record that
        was read. Raises OSError, sqlite3.Error, ConfigError."""
        until, files = time.monotonic() + limit_s, self._files()
        if self._is_broken or not self._is_same(files):
            self._begin_anew()
        before = {role: path.stat() for role, path in files.items()}
        if all(self._is_read(role, before[role]) for role in files):
            return True
        self._is_broken = is_behind = True
        with self.tables.writing():
            while is_behind and time.monotonic() < until:
                for number in self._reader.read(files.get("groups"), _LINES):
                    self._find(number)
                    self.version += 1
                self.tables.flush()
                is_behind = self._reader.is_behind
                told(self._share(files))
            self._note(files, before)
            self._save(files)
        self._is_broken = False
        if not is_behind:
            self.tables.prove()
        return not is_behind

    def overview(self) -> dict[str, Any]:
        """As that of a report that has all."""
        describe(self.run, self.directory)
        shown = self.run.overview()
        if not is_going_on(self.directory):  # nobody will end the line
            roles = {path: role for role, path in self._files().items()}
            for path in self._reader.torn:
                role = {"record": "rollout_lines", "groups": "group_lines"}.get(roles.get(path, ""))
                if role is not None:
                    shown["skipped"][role] += 1
        return {**shown, "bad_tasks": self.run.bad_tasks}

    def attempts(self, group: int) -> list[Row]:
        """The rows of a group, in their order."""
        return attempts_in_order(self._reader.attempts(group))

    # ------------------------------------------------------------ reading

    def _find(self, number: int) -> None:
        """Makes a group found, as it is now."""
        database, group, rows = self.tables.database, self.run.groups[number], self.attempts(number)
        self.tables.put("found", *found_row(group, rows))
        self.tables.put("texts", number, squeezed(group_text(group, rows).encode()))
        for row in rows:
            shown = as_json(slim(row))
            there = database.execute("SELECT row FROM ended WHERE id = ?", (row["id"],)).fetchone()
            if there is None or there[0] != shown:
                database.execute("INSERT OR REPLACE INTO ended (id, row) VALUES (?, ?)", (row["id"], shown))

    def _hear(self, row: Row, line: dict[str, Any]) -> None:
        self.tables.put("said", row["id"], row["group"], squeezed(transcript(line).encode()))

    # ------------------------------------------------------------ state

    def _new_reader(self) -> RunReader:
        tables = self.tables
        return RunReader(
            self.directory, growing=True, price_list=self._price_list, table=tables.mapping, told=self._hear
        )

    def _begin_anew(self) -> None:
        self.tables.anew()
        self._sources = {}
        self._reader = self._new_reader()
        self.version += 1

    def _head(self) -> list[Any]:
        prices = self._price_list.of(read_description(self.directory))
        return [_FORMAT, __version__, None if prices is None else prices.public()]

    def _save(self, files: dict[str, Path]) -> None:
        run = self.run
        state = {
            "head": self._head(),
            "version": self.version,
            "sources": self._sources,
            "next": {role: self._reader.next[path] for role, path in files.items() if path in self._reader.next},
            "torn": [role for role, path in files.items() if path in self._reader.torn],
            "totals": run.totals.kept(),
            "measured": None if run.measured is None else run.measured.kept(),
            "skipped": asdict(run.skipped),
            "bad_tasks": run.bad_tasks,
            "forgotten": run.forgotten,
        }
        self.tables.put("state", "state", as_json(state))

    def _restore(self) -> None:
        """Raises sqlite3.Error, KeyError, TypeError, ValueError for a state that is none of this version."""
        kept = orjson.loads(self.tables.database.execute("SELECT value FROM state").fetchone()[0])
        if kept["head"] != orjson.loads(as_json(self._head())):
            raise ValueError("made by another version, or with other prices")
        run, files = self.run, self._files()
        run.skipped, run.bad_tasks, run.forgotten = (
            Skipped(**kept["skipped"]),
            kept["bad_tasks"],
            kept["forgotten"],
        )
        measured = kept["measured"]
        self._reader.go_on(
            Totals.restored(kept["totals"]),
            None if measured is None else TaskCounts.restored(measured),
            {files[role]: at for role, at in kept["next"].items() if role in files and role != _CURRICULUM},
        )
        self._reader.torn.update(files[role] for role in kept["torn"] if role in files)
        self.version, self._sources = kept["version"], kept["sources"]

    # ------------------------------------------------------------ the record

    def _files(self) -> dict[str, Path]:
        groups = groups_in(self.directory, groups_file_of(read_description(self.directory)))
        files = {"record": record_of(self.directory), "groups": groups}
        for role, name in (("dropped", DROPPED_FILE), (_CURRICULUM, CURRICULUM_FILE)):
            path = self.directory / name
            files[role] = path if path.is_file() else None
        return {role: path for role, path in files.items() if path is not None}

    def _note(self, files: dict[str, Path], before: dict[str, os.stat_result]) -> None:
        """Keeps what the files are known by. `before`: how they were before they were read."""
        for role, path in files.items():
            read = _bytes(path, self._reader.next.get(path, 0))
            self._sources[role] = [
                path.name,
                before[role].st_size,
                before[role].st_mtime_ns,
                read,
                _digest(path, read),
            ]

    def _is_same(self, files: dict[str, Path]) -> bool:
        """Whether the files are those that were read, with nothing but more at their ends."""
        return all(role in files and self._is_grown(files[role], *kept) for role, kept in self._sources.items())

    def _is_grown(self, path: Path, name: str, size: int, changed_ns: int, read: int, digest: str) -> bool:
        now = path.stat()
        if path.name != name or now.st_size < size or (now.st_size == size and now.st_mtime_ns != changed_ns):
            return False
        return _digest(path, read) == digest

    def _is_read(self, role: str, now: os.stat_result) -> bool:
        """Whether nothing was added to the file since it was read to its end."""
        kept = self._sources.get(role)
        return kept is not None and kept[1:3] == [now.st_size, now.st_mtime_ns] and not self._reader.is_behind

    def _share(self, files: dict[str, Path]) -> float:
        size = sum(path.stat().st_size for path in files.values())
        return sum(_bytes(path, self._reader.next.get(path, 0)) for path in files.values()) / size if size else 1.0


def _bytes(path: Path, place: int) -> int:
    """How many bytes of the file lie before a place in it."""
    return place >> INDEX_BITS if is_compressed(path) else place


def _digest(path: Path, size: int) -> str:
    """Of the first, the last and some other parts of the first `size` bytes."""
    found = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        for number in range(_SAMPLES):
            at = max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1)
            found.update(os.pread(file.fileno(), min(_SAMPLE_BYTES, size - at), at))
    return found.hexdigest()
