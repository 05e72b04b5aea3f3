"""What `download-gaia` leaves: GAIA's rows by split and level, files that `datasets` opens, an account of it all.

    FOLDER/download.json             what was asked for, and every file with its size
    FOLDER/README.md                 the configurations `datasets.load_dataset` finds: 2023_all, 2023_level1 …
    FOLDER/2023/SPLIT/metadata.*     the rows as published; with levels chosen, only theirs
    FOLDER/2023/SPLIT/metadata.levelN.jsonl   made here where jsonl is published: every column a text

GAIA's own loader script does not run with `datasets` 4 and later, and rows whose columns change their type do
not load as JSON: hence the README and the files by level. Fetching is `gaia_download`'s part.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from orchestrator.errors import EnvironmentUnusable
from orchestrator.tasks.decoded import Decoded, DecodeError
from orchestrator.tasks.gaia.source import SPLITS, metadata_files
from orchestrator.tasks.lines import read_lines
from orchestrator.tasks.rows import make_task
from orchestrator.types import BadTask, Task

YEAR = "2023"
LEVELS = ("1", "2", "3")
MANIFEST = "download.json"
README = "README.md"
_COLUMNS = ("task_id", "Question", "Level", "Final answer", "file_name")
_ANNOTATIONS = ("Steps", "Number of steps", "How long did this take?", "Tools", "Number of tools")
_FLAG = "output-dir"


@dataclass(frozen=True, slots=True)
class Manifest:
    """download.json: what a finished download consists of."""

    repository: str
    revision: str | None  # as it was asked for
    commit: str
    levels: tuple[str, ...]
    files: Mapping[str, int]  # path → bytes

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """None where there is none, or none this version could have written."""
        try:
            told = orjson.loads((folder / MANIFEST).read_bytes())
            files = {str(name): int(size) for name, size in told["files"].items()}
            return cls(told["repository"], told["revision"], told["commit"], tuple(told["levels"]), files)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, folder: Path) -> None:
        told = {name: getattr(self, name) for name in self.__slots__}
        (folder / MANIFEST).write_text(json.dumps(told, indent=1) + "\n", "utf-8")

    def whole(self, folder: Path) -> bool:
        """Whether every file is there in its size."""
        return bool(self.files) and all(size_of(folder / name) == size for name, size in self.files.items())


@dataclass(slots=True)
class SplitAccount:
    """One split, counted as `orchestrator process` will see it."""

    rows: Counter[str] = field(default_factory=Counter)  # by level; "?" is none of the three
    attachments: int = 0
    attachment_bytes: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Row:
    """One row, hostile as it came. `columns` is None where it is no object."""

    place: str
    columns: Mapping[str, Any] | None
    line: bytes = b""  # as published, in the jsonl layout

    @property
    def level(self) -> str:
        level = str((self.columns or {}).get("Level")).strip()
        return level if level in LEVELS else "?"

    @property
    def task_id(self) -> str:
        return str((self.columns or {}).get("task_id") or "")

    def file(self, split: str) -> str | None:
        """The attachment's path from the dataset's root."""
        path, name = ((self.columns or {}).get(key) for key in ("file_path", "file_name"))
        if isinstance(path, str) and path.startswith(f"{YEAR}/"):
            return path
        return f"{YEAR}/{split}/{name}" if name else None


def size_of(path: Path) -> int | None:
    """Bytes of a regular file; None for a link and anything else."""
    try:
        status = os.lstat(path)
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def published_rows(names: Collection[str], split: str, levels: Collection[str]) -> list[str]:
    """Which of the published files hold the split's rows. Empty: the split is not published in these levels."""
    place = f"{YEAR}/{split}/metadata"
    if f"{place}.jsonl" in names:
        return [f"{place}.jsonl"]
    by_level = [f"{place}.level{level}.parquet" for level in levels or LEVELS]
    # The chosen levels' own files are enough: without metadata.parquet, they are what is read.
    wanted = by_level if levels else [f"{place}.parquet", *by_level]
    return [name for name in wanted if name in names]


def read_rows(root: Path, split: str) -> Iterator[Row]:
    """The rows that `orchestrator process` would read. Raises EnvironmentUnusable for what is no parquet."""
    for file in metadata_files(root / YEAR / split):
        if file.suffix == ".jsonl":
            yield from _jsonl_rows(file)
        else:
            yield from _parquet_rows(file)


def keep_levels(root: Path, split: str, levels: Collection[str]) -> None:
    """Rewrites metadata.jsonl to the chosen levels' rows, and writes the files by level beside it."""
    file = root / YEAR / split / "metadata.jsonl"
    if not file.exists():
        return  # parquet is published by level
    rows = list(_jsonl_rows(file))
    if levels:
        file.write_bytes(b"".join(row.line + b"\n" for row in rows if row.level in levels))
    for level in levels or LEVELS:
        lines = [orjson.dumps(_texts(row, split)) + b"\n" for row in rows if row.level == level]
        if lines:
            file.with_name(f"metadata.level{level}.jsonl").write_bytes(b"".join(lines))


def write_readme(root: Path, repository: str, commit: str) -> None:
    """The file whose head tells `datasets` what can be loaded."""
    configs = [
        {"config_name": name, "default": name == f"{YEAR}_all", "data_files": files}
        for name, files in _configurations(root).items()
    ]
    (root / README).write_text(
        f"---\nconfigs: {json.dumps(configs)}\n---\n"
        f"# GAIA, as `orchestrator download-gaia` left it\n\n"
        f"{repository} at {commit}. Its conditions hold for this copy too: do not share it.\n\n"
        f"`orchestrator process --env.dataset gaia --env.dataset_path THIS_FOLDER`, or\n"
        f'`datasets.load_dataset("THIS_FOLDER", "{YEAR}_all", split="validation")`; `file_path` is relative to\n'
        "this folder. Configurations: " + ", ".join(f"`{config['config_name']}`" for config in configs) + ".\n",
        "utf-8",
    )


def take_account(root: Path) -> dict[str, SplitAccount]:
    """Rows and attachments of each split that is there, with what is wrong about them."""
    accounts: dict[str, SplitAccount] = {}
    for split in SPLITS:
        if not metadata_files(root / YEAR / split):
            continue
        account = accounts[split] = SplitAccount()
        for row in read_rows(root, split):
            account.rows[row.level] += 1
            match _as_task(row, split, root):
                case BadTask(reason=reason):
                    account.problems.append(f"{split} {row.place}: {reason}")
                case Task(attachments=attachments):
                    account.attachments += len(attachments)
                    account.attachment_bytes += sum(file.size_bytes for file in attachments)
                    if row.level == "?":
                        account.problems.append(f"{split} {row.place}: no level from {LEVELS[0]} to {LEVELS[-1]}")
        if problem := _miscounted(root / YEAR / split, account):
            account.problems.append(f"{split}: {problem}")
    return accounts


def _as_task(row: Row, split: str, root: Path) -> Task | BadTask:
    """What becomes of the row, were its answer known: the test split hides its answers."""
    name, columns = row.file(split), row.columns
    if columns is not None:
        shown = {"Final answer": "hidden"} if split == "test" else {}
        columns = {**columns, **shown, "files": [name] if name else None}
    return make_task(columns, source="gaia", place=row.place, root=root)


def _miscounted(folder: Path, account: SplitAccount) -> str:
    if not (folder / "metadata.parquet").exists():
        return ""
    for level in LEVELS:
        file = folder / f"metadata.level{level}.parquet"
        if file.exists() and (count := sum(1 for _ in _parquet_rows(file))) != account.rows[level]:
            return f"{file.name} has {count} rows, metadata.parquet {account.rows[level]} of this level"
    return ""


def _jsonl_rows(file: Path) -> Iterator[Row]:
    for number, line in read_lines(file, _FLAG):
        if line is not None and not line.strip():
            continue
        try:
            columns = orjson.loads(line or b"")
        except orjson.JSONDecodeError:
            columns = None
        yield Row(f"line {number}", columns if isinstance(columns, dict) else None, line or b"")


def _parquet_rows(file: Path) -> Iterator[Row]:
    try:
        for number, columns in enumerate(Decoded("parquet", str(file)).rows(), 1):
            yield Row(f"{file.name} row {number}", columns)
    except DecodeError as error:
        raise EnvironmentUnusable(f"cannot read {file}: {error}") from error


def _texts(row: Row, split: str) -> dict[str, Any]:
    """The columns of the parquet layout: a column that changes its type between rows does not load."""
    columns = row.columns or {}
    annotations = columns.get("Annotator Metadata")
    notes = annotations if isinstance(annotations, dict) else {}
    return {
        **{name: _text(columns.get(name)) for name in _COLUMNS},
        "file_path": row.file(split) or "",
        "Annotator Metadata": {name: _text(notes.get(name)) for name in _ANNOTATIONS},
    }


def _text(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)


def _configurations(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Name → splits with their files, as the head of a dataset's README words it."""
    found: dict[str, list[dict[str, Any]]] = {f"{YEAR}_all": []}
    for split in SPLITS:
        place = root / YEAR / split
        by_level = {level: sorted(place.glob(f"metadata.level{level}.*")) for level in LEVELS}
        whole = [place / "metadata.parquet"]
        if not whole[0].exists():
            whole = [file for files in by_level.values() for file in files]
        for name, files in ((f"{YEAR}_all", whole), *((f"{YEAR}_level{n}", by_level[n]) for n in LEVELS)):
            if files:
                paths = [str(file.relative_to(root)) for file in files]
                found.setdefault(name, []).append({"split": split, "path": paths})
    return {name: files for name, files in found.items() if files}
