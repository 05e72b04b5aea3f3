"""The run directory: a run's settings and everything that happened, enough to resume, replay and view it.

Its files:

    run.json        configuration without secrets, versions, image
    rollouts.jsonl  one line per attempt, bad tasks included; rollouts.jsonl.zst if it is compressed
    output/         what rollouts left in `output/`, a folder for each that left something
    groups.jsonl    the groups file, unless another place was set
    dropped.jsonl   one line per group that was not written, and why
    curriculum.jsonl  one line per group with a result, in the order they came, if there is a curriculum
    under-way/      what rollouts were served whose lines are not there yet: see `under_way`
    lock            locked by the orchestrator that uses the directory
"""

import asyncio
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from orchestrator.errors import ConfigError, RunLocked, os_error_as
from orchestrator.rules.pools import Choice, GroupResult
from orchestrator.run import lines as jsonl
from orchestrator.run import proof
from orchestrator.run.files import CURRICULUM_FILE, DROPPED_FILE, ROLLOUTS_FILE, SCHEMA, packed_name, record_of
from orchestrator.run.line import attempt_line, bad_task_line, dropped_line, read_result, result_line, shorter_line
from orchestrator.run.repair import set_torn_end_aside
from orchestrator.run.under_way import FOLDER, UnderWay
from orchestrator.types import Attempt, BadTask, Entry, Group, Member, Record, RolloutPlan


class RunDirectory:
    """Locked by one orchestrator at a time, until it is closed.

    With `resume` it holds the run to go on with, and an unfinished last line is set aside; otherwise it must hold
    no run. `compress`: of a new record. Without `full_traces` the steps, as the sandbox reports them, are left
    out; the completions hold all that was served. Raises RunLocked, ConfigError.
    """

    def __init__(
        self,
        path: Path,
        *,
        resume: bool = False,
        fsync: bool = False,
        full_traces: bool = True,
        compress: bool = False,
    ) -> None:
        self.path = path
        plain = path / ROLLOUTS_FILE
        record = record_of(path)
        self.rollouts = record or (packed_name(plain) if compress else plain)
        self._fsync = fsync
        self._full_traces = full_traces
        self._others: dict[str, jsonl.JsonLines] = {}  # by name, when there is something to write
        self._under_way = UnderWay(path / FOLDER, fsync)
        if resume:
            _demand_inside(path)
        self._lock = _locked(path)
        try:
            if resume:
                set_torn_end_aside(self.rollouts)
                set_torn_end_aside(path / DROPPED_FILE)
                set_torn_end_aside(path / CURRICULUM_FILE)
            elif record is not None and record.stat().st_size:
                raise ConfigError(
                    f"env.run_dir: {path} holds a run; go on with it by --env.resume {path}, or name another one"
                )
            self._lines = jsonl.JsonLines(self.rollouts, fsync=fsync)
        except BaseException:
            os.close(self._lock)
            raise

    async def describe(self, facts: dict[str, Any]) -> None:
        """Writes run.json, completely or not at all, with the proof of who wrote it. Raises ConfigError."""
        path = self.path / "run.json"

        def write() -> None:
            description = orjson.loads(jsonl.dumps({"schema": SCHEMA, **facts}))  # as it will be read
            if (signature := proof.prove(description)) is not None:
                description[proof.FIELD] = signature
            if len(jsonl.dumps(description, indent=True)) >= jsonl.MAX_RUN_FILE_BYTES:
                raise ConfigError(
                    f"{path} would have more than {jsonl.MAX_RUN_FILE_BYTES} bytes: use shorter settings"
                )
            jsonl.write_whole(path, description, indent=True, fsync=self._fsync)

        with os_error_as(ConfigError, f"cannot write {path}"):
            await asyncio.to_thread(write)

    async def record(self, result: Member | Attempt) -> None:
        """Writes one attempt. It is on disk when this returns."""

        def lines() -> list[dict[str, Any]]:
            line = attempt_line(result)
            return [line if self._full_traces else {**line, "steps": []}]

        await self._lines.append(lines, shorter_line)
        attempt = result.attempt if isinstance(result, Member) else result
        await self._under_way.over(attempt.plan.rollout_id, kept=attempt.lacks_turns)

    def served(self, plan: RolloutPlan, started_at: float, one: Entry) -> None:
        """Writes what a rollout under way was served. Soon it is on disk. `started_at`: Unix time."""
        self._under_way.served(plan, started_at, one)

    async def under_way(self, plan: RolloutPlan, ids: Sequence[str]) -> Record | None:
        """What a rollout that did not end was served, which such a plan may go on with; None: nothing is known.
        `ids`: of its attempts, the last first."""
        return await self._under_way.record(plan, ids)

    async def record_bad_task(self, task: BadTask, group: int) -> None:
        """Writes a row that no task could be made of. It is on disk when this returns."""
        await self._lines.append(lambda: [bad_task_line(task, group)])

    async def record_drop(self, group: Group) -> None:
        """Writes why a group is not in the groups file. It is on disk when this returns."""
        line = dropped_line(group.number, group.task.task_id, group.dropped or "")
        await self._other(DROPPED_FILE).append(lambda: [line])

    async def record_result(self, number: int, result: GroupResult, choice: Choice | None) -> None:
        """Writes what the curriculum goes by. It is on disk when this returns."""
        await self._other(CURRICULUM_FILE).append(lambda: [result_line(number, result, choice)])

    def results(self) -> dict[int, GroupResult]:
        """What `record_result` has written; of a group the first. Blocks. Raises ConfigError."""
        results: dict[int, GroupResult] = {}
        path = self.path / CURRICULUM_FILE
        with os_error_as(ConfigError, f"cannot read {path}"):
            for line in jsonl.texts(path):
                try:
                    number, result = read_result(line.text)
                except ValueError as error:
                    raise ConfigError(f"{line.place} is no result of a group ({error}): no resume") from error
                results.setdefault(number, result)
        return results

    def _other(self, name: str) -> jsonl.JsonLines:
        if name not in self._others:
            self._others[name] = jsonl.JsonLines(self.path / name, fsync=self._fsync)
        return self._others[name]

    def close(self) -> None:
        """Idempotent."""
        self._lines.close()
        self._under_way.close()
        for lines in self._others.values():
            lines.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _locked(path: Path) -> int:
    """A file descriptor that holds the lock until it is closed, or its process ends."""
    with os_error_as(ConfigError, f"cannot write the run directory {path}"):
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise RunLocked(f"another orchestrator works in {path}; set --env.run_dir to a new one") from error
    return lock


def _demand_inside(folder: Path) -> None:
    """The directory of a resumed run may hold only files, folders and links that stay in it (wandb makes some).
    With others, a foreign run directory could have any file of the user's written. Raises ConfigError."""
    with os_error_as(ConfigError, f"env.resume: cannot read {folder}"):
        for entry in _entries(folder):
            if not (entry.is_file(follow_symlinks=False) or _leads_into(folder, entry)):
                raise ConfigError(
                    f"env.resume: {entry.path} leads out of the run directory or is not a file; only a "
                    "complete run directory can be resumed"
                )


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Everything below `folder` except folders."""
    folders = [folder]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                else:
                    yield entry


def _leads_into(folder: Path, entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_symlink() and Path(entry.path).resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a circle of links
        return False


def new_run_directory(root: Path = Path("runs")) -> Path:
    """A new path: the time, with a number added if that exists."""
    stamp = time.strftime("%Y-%m-%dT%H-%M-%S")
    path, number = root / stamp, 1
    while path.exists():
        path, number = root / f"{stamp}-{number}", number + 1
    return path
