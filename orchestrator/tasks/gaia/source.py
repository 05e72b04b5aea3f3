"""`gaia`: the benchmark's folder in both of its layouts, read directly.

2023/validation/metadata.jsonl            Level a number, file_name beside it        (until 2025)
2023/validation/metadata.parquet          Level a text, file_path from the repository's root
2023/validation/metadata.level1.parquet   the same by level
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.tasks.base import NONE, Columns, Source
from orchestrator.tasks.decoded import Decoded, DecodeError
from orchestrator.tasks.jsonl import read_jsonl
from orchestrator.tasks.lines import check_readable
from orchestrator.tasks.rows import one_line
from orchestrator.types import BadTask, Task

SPLITS = ("validation", "test")
LEVELS = ("1", "2", "3")
YEAR = "2023"
_FLAG = "env.dataset_path"


def gaia_tasks(folder: Path, split: str, columns: Columns = NONE) -> Source:
    """`folder` is the dataset's, its `2023` or the split's own. `columns` renames theirs. Raises ConfigError."""
    if split not in SPLITS:
        raise ConfigError(f"env.split: {split!r} is no split of GAIA; valid are {', '.join(SPLITS)}")
    split_folder, files = _metadata(folder, split)
    parquet_files = {file: _open(file) for file in files}
    return Source(f"gaia {split} in {split_folder}", lambda: _tasks(parquet_files, split_folder, columns))


def metadata_files(folder: Path) -> list[Path]:
    """The files that hold a split folder's rows: one of the layouts, none when it has none of them."""
    for name in ("metadata.jsonl", "metadata.parquet"):
        if (folder / name).exists():
            return [folder / name]
    return sorted(folder.glob("metadata.level*.parquet"))


def _metadata(folder: Path, split: str) -> tuple[Path, list[Path]]:
    places = [folder / YEAR / split, folder / split]
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


def _tasks(
    parquet_files: Mapping[Path, Decoded | None], split_folder: Path, columns: Columns
) -> Iterator[Task | BadTask]:
    for file, parquet in parquet_files.items():
        if parquet is None:
            yield from read_jsonl(file, source="gaia", flag=_FLAG, columns=columns)
        else:
            failure = f"{_FLAG}: cannot read {file}"
            located = partial(_located, split_folder=split_folder)
            yield from parquet.tasks("gaia", columns, failure, prefix=f"{file.name} ", located=located)


def _located(row: dict[str, Any], split_folder: Path) -> tuple[dict[str, Any], Path]:
    """The row with its file named from the root. In a folder that was moved, files lie beside their metadata."""
    path = row.get("file_path")
    if isinstance(path, str) and path.startswith(f"{YEAR}/") and split_folder.parent.name == YEAR:
        return {**row, "files": [path]}, split_folder.parent.parent
    return row, split_folder


def _open(file: Path) -> Decoded | None:
    """The rows of a parquet file. None for the lines of the other layout."""
    check_readable(file, _FLAG)
    try:
        return Decoded("parquet", str(file)) if file.suffix == ".parquet" else None
    except DecodeError as error:
        raise ConfigError(f"{_FLAG}: cannot read {file}: {error}") from error
