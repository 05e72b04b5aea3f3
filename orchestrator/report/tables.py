"""The file of an index: an SQLite database beside the record that it is made of. It may be deleted at any time.

A run directory may be anybody's, and SQLite is not made for databases of others: a database is opened only if a
file beside it proves that this user's own process wrote it, here, and nobody since. Any other one is made anew. So
is one that a kill or a loss of power may have torn, as its proof is taken back before it is written to. Where
nothing can be kept in the run directory, or another process keeps it, the index is a temporary one.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import stat
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from orchestrator.run import proof
from orchestrator.run.lines import dumps

INDEX_FILE = "rollouts.index"
_PROOF_BYTES = 4096
_OTHERS = ("-journal", "-wal", "-shm")  # SQLite would take them for its own
_CACHE_KIB = 32 << 10
# Rows of the report by group number or rollout id, as `reader.RunReader` keeps them.
_BY_NUMBER, _BY_ID = ("groups", "members", "dropped"), ("rollouts", "places", "written", "staleness", "ungraded")
_SCHEMA = f"""
{"".join(f"CREATE TABLE {name} (key INTEGER PRIMARY KEY, value BLOB);" for name in _BY_NUMBER)}
{"".join(f"CREATE TABLE {name} (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;" for name in _BY_ID)}
CREATE TABLE state (name TEXT PRIMARY KEY, value BLOB);
CREATE TABLE found (number INTEGER PRIMARY KEY, task TEXT, level TEXT, source TEXT, scores TEXT, mean REAL,
    spread REAL, outcomes TEXT, draws INTEGER, tokens REAL, seconds REAL, cost REAL, has TEXT, mixed INTEGER,
    divided INTEGER, wrong INTEGER, "right" INTEGER, written INTEGER, dropped INTEGER, began REAL);
CREATE TABLE texts (number INTEGER PRIMARY KEY, text BLOB);
CREATE TABLE said (id TEXT PRIMARY KEY, number INTEGER, text BLOB);
CREATE TABLE ended (seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, row BLOB);
"""


class Tables:
    """The database, for one thread at a time. `is_new`: nothing is in it."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError, sqlite3.Error."""
        self.is_new = False
        self._mappings: dict[str, Table] = {}
        with ExitStack() as stack:
            try:
                self._take(directory)
            except OSError:
                self._take(Path(stack.enter_context(TemporaryDirectory(prefix="index-"))))
            stack.callback(os.close, self._lock)
            self.database = self._opened()
            self._stack = stack.pop_all()

    def _take(self, directory: Path) -> None:
        """Makes the index in this directory the one that is used. Raises OSError."""
        self._lock = _locked(directory)
        try:
            self._path = directory / INDEX_FILE
            if not self._is_proven():
                self._remove()
                os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
                self.is_new = True
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        self.database.close()
        self._stack.close()

    def anew(self) -> None:
        """Begins with an empty database. Raises OSError, sqlite3.Error."""
        os.ftruncate(self._lock, 0)
        self.database.close()
        self._remove()
        self._mappings.clear()
        self.database = self._opened()
        self.is_new = True

    def put(self, name: str, *values: Any) -> None:
        """Writes a row of a table, in place of that with the same key."""
        places = ", ".join("?" * len(values))
        self.database.execute(f"INSERT OR REPLACE INTO {name} VALUES ({places})", values)

    def mapping(self, name: str) -> Table:
        """The table of this name as a mapping."""
        return self._mappings.setdefault(name, Table(self.database, name))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """What is written within this block is in the tables behind it. After an error they may be anything, and
        are not proven. Raises sqlite3.Error."""
        os.ftruncate(self._lock, 0)
        self.database.execute("BEGIN")
        try:
            yield
            self.flush()
        finally:
            self.database.execute("COMMIT")
        self.is_new = False

    def flush(self) -> None:
        """Writes what is held in memory."""
        for mapping in self._mappings.values():
            mapping.flush()

    def forget(self) -> None:
        """Holds nothing in memory any more, of which nothing was changed."""
        for mapping in self._mappings.values():
            mapping.forget()

    def prove(self) -> None:
        """Says that the index is whole as it is on disk now. Without a key of the user's own it is made anew the
        next time. Raises OSError."""
        with self._path.open("rb") as file:
            os.fsync(file.fileno())
        facts = self._facts()
        if (signature := proof.prove(facts)) is not None:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, orjson.dumps({**facts, proof.FIELD: signature}), 0)

    def _opened(self) -> sqlite3.Connection:
        for ending in _OTHERS:
            self._path.with_name(INDEX_FILE + ending).unlink(missing_ok=True)
        database = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        for pragma in ("trusted_schema = OFF", "journal_mode = OFF", "synchronous = OFF", "temp_store = MEMORY"):
            database.execute(f"PRAGMA {pragma}")
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        database.execute("PRAGMA page_size = 16384")
        if not database.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            database.executescript(_SCHEMA)
        return database

    def _remove(self) -> None:
        for ending in ("", *_OTHERS):
            self._path.with_name(INDEX_FILE + ending).unlink(missing_ok=True)

    def _facts(self) -> dict[str, int]:
        """What changes with whoever writes to the file, or puts another one in its place."""
        how = os.lstat(self._path)
        return {
            "device": how.st_dev,
            "inode": how.st_ino,
            "size": how.st_size,
            "changed_ns": how.st_ctime_ns,
            "is_file": int(stat.S_ISREG(how.st_mode)),
        }

    def _is_proven(self) -> bool:
        with suppress(OSError, orjson.JSONDecodeError):
            told, facts = orjson.loads(os.pread(self._lock, _PROOF_BYTES, 0)), self._facts()
            return (
                isinstance(told, dict)
                and told == {**facts, proof.FIELD: told.get(proof.FIELD)}
                and proof.is_own(told)
            )
        return False


def _locked(directory: Path) -> int:
    """The file of the proof, locked until it is closed. Raises OSError."""
    path = directory / f"{INDEX_FILE}.proof"
    how = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    lock = os.open(path, how, 0o600)
    try:
        found = os.fstat(lock)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise OSError(f"{path} is no file of its own")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    return lock


class Table(MutableMapping[Any, Any]):
    """A table as a mapping to JSON values. What was read or set is held in memory until `flush`, and written then:
    a value may be changed in place."""

    def __init__(self, database: sqlite3.Connection, name: str) -> None:
        self._database, self._name = database, name
        self._held: dict[Any, Any] = {}
        self._gone: set[Any] = set()

    def __getitem__(self, key: Any) -> Any:
        if key not in self._held:
            found = None if key in self._gone else self._one(key)
            if found is None:
                raise KeyError(key)
            self._held[key] = orjson.loads(found[0])
        return self._held[key]

    def _one(self, key: Any) -> Any:
        return self._database.execute(f"SELECT value FROM {self._name} WHERE key = ?", (key,)).fetchone()

    def __setitem__(self, key: Any, value: Any) -> None:
        self._gone.discard(key)
        self._held[key] = value

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        self._held.pop(key, None)
        self._gone.add(key)

    def __iter__(self) -> Iterator[Any]:
        self.flush()
        return (key for (key,) in self._database.execute(f"SELECT key FROM {self._name} ORDER BY key"))

    def __len__(self) -> int:
        self.flush()
        return int(self._database.execute(f"SELECT count(*) FROM {self._name}").fetchone()[0])

    def flush(self) -> None:
        self._database.executemany(f"DELETE FROM {self._name} WHERE key = ?", ((key,) for key in self._gone))
        rows = ((key, as_json(value)) for key, value in self._held.items())
        self._database.executemany(f"INSERT OR REPLACE INTO {self._name} VALUES (?, ?)", rows)
        self.forget()

    def forget(self) -> None:
        """Drops what was not written."""
        self._held.clear()
        self._gone.clear()


def as_json(value: Any) -> bytes:
    try:
        return dumps(value)
    except TypeError:  # a number of more than 64 bits
        return json.dumps(value).encode()
