"""The directory of a run that was scored again. It appears under its name only when it is complete."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from orchestrator.rescoring.grouping import MadeGroup
from orchestrator.run.files import DROPPED_FILE, GROUPS_FILE, ROLLOUTS_FILE, RUN_FILE
from orchestrator.run.line import dropped_line
from orchestrator.run.lines import dumps, write_whole
from orchestrator.run.new_folder import new_folder

SETTING = "env.run_dir"  # names the directory


class NewRun:
    """The files of a run, in a `folder` without a lasting name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.groups = folder / GROUPS_FILE
        self.record = folder / ROLLOUTS_FILE
        self._rollouts = self.record.open("wb")

    def add(self, line: bytes) -> int:
        """Appends a line to the record, and returns where it begins. Raises OSError."""
        offset = self._rollouts.tell()
        self._rollouts.write(line)
        return offset

    def write_groups(self, groups: Iterable[MadeGroup]) -> dict[int, str | None]:
        """Writes the groups file. Gives each group's number, and why it is not in the file. Raises OSError."""
        self._rollouts.flush()  # groups are made from it
        dropped, drops = dict[int, str | None](), list[bytes]()
        with self.groups.open("wb") as file:
            for group in groups:
                file.writelines(group.lines)
                dropped[group.number] = group.dropped
                if group.dropped is not None:
                    drops.append(dumps(dropped_line(group.number, group.task_id, group.dropped)) + b"\n")
        if drops:
            (self.folder / DROPPED_FILE).write_bytes(b"".join(drops))
        return dropped

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Writes run.json. It has no proof: its content comes from another one. Raises OSError."""
        write_whole(self.folder / RUN_FILE, facts, indent=True)

    def close(self) -> None:
        """Idempotent."""
        self._rollouts.close()


@contextmanager
def new_run(path: Path) -> Iterator[NewRun]:
    """The files of a run directory, which gets the name `path` when the block ends well; else nothing is left.

    Raises ConfigError, OutputError.
    """
    with new_folder(path, SETTING) as folder, closing(NewRun(folder)) as run:
        yield run
