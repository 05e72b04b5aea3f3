"""`gaia`: the benchmark's folder in both of its layouts, read directly.

    2023/validation/metadata.jsonl            Level a number, file_name beside it        (until 2025)
    2023/validation/metadata.parquet          Level a text, file_path from the repository's root
    2023/validation/metadata.level1.parquet   the same by level

Downloading is the command `download-gaia`'s part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.tasks.base import Source
from orchestrator.tasks.decoded import Decoded, DecodeError
from orchestrator.tasks.jsonl import read_jsonl
from orchestrator.tasks.lines import MAX_LINE_BYTES, check_readable
from orchestrator.tasks.rows import make_task, one_line
from orchestrator.types import BadTask, Task

SPLITS = ("validation", "test")
_YEAR = "2023"
_FLAG = "env.dataset_path"


def gaia_tasks(folder: Path, split: str) -> Source:
    """`folder` is the dataset's, its `2023` or the split's own. Raises ConfigError."""
    if split not in SPLITS:
        raise ConfigError(f"env.split: {split!r} is no split of GAIA; valid are {', '.join(SPLITS)}")
    here, files = _metadata(folder, split)
    for file in files:
        check_readable(file, _FLAG)
    opened = {file: _open_parquet(file) for file in files if file.suffix == ".parquet"}
    return Source(f"gaia {split} in {here}", lambda: _read(files, opened, here))


def metadata_files(folder: Path) -> list[Path]:
    """The files that hold a split folder's rows: one of the layouts, none when it has none of them."""
    for name in ("metadata.jsonl", "metadata.parquet"):
        if (folder / name).exists():
            return [folder / name]
    return sorted(folder.glob("metadata.level*.parquet"))


def _metadata(folder: Path, split: str) -> tuple[Path, list[Path]]:
    places = [folder / _YEAR / split, folder / split]
    if folder.name not in SPLITS or folder.name == split:
        places.append(folder)
    try:
        for place in places:
            if files := metadata_files(place):
                return place, files
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_FLAG}: cannot read {folder}: {one_line(error)}") from error
    raise ConfigError(
        f"{_FLAG}: no GAIA {split} data in {folder}; "
        f"run `orchestrator download-gaia --output-dir {folder}` or name the folder that has it"
    )


def _read(files: list[Path], opened: Mapping[Path, Decoded], here: Path) -> Iterator[Task | BadTask]:
    for file in files:
        if file in opened:
            yield from _read_parquet(file, opened[file], here)
        else:
            yield from read_jsonl(file, source="gaia", flag=_FLAG)


def _read_parquet(file: Path, opened: Decoded, here: Path) -> Iterator[Task | BadTask]:
    number = 0
    try:
        for row in opened.rows():
            number += 1
            place = f"{file.name} row {number}"
            if row is None:
                yield BadTask(place, f"the row has more than {MAX_LINE_BYTES} bytes")
                continue
            row, root = _located(row, here)
            yield make_task(row, source="gaia", place=place, root=root)
    except DecodeError as error:
        raise ConfigError(f"{_FLAG}: cannot read {file} after row {number}: {error}") from error


def _located(row: dict[str, Any], here: Path) -> tuple[dict[str, Any], Path]:
    """The row with its file named from the folder it is to be looked for in."""
    path = row.get("file_path")
    if isinstance(path, str) and path.startswith(f"{_YEAR}/") and here.parent.name == _YEAR:
        return {**row, "files": [path]}, here.parent.parent
    # A split's folder that was moved: the file lies beside its metadata in both layouts.
    return row, here


def _open_parquet(file: Path) -> Decoded:
    try:
        return Decoded("parquet", str(file))
    except DecodeError as error:
        raise ConfigError(f"{_FLAG}: cannot read {file}: {error}") from error
