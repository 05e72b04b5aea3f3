"""What `download-gaia` makes of the published files, and the account it gives of them.

    README.md                 the configurations `datasets.load_dataset` finds: 2023_all, 2023_level1 …
    2023/SPLIT/metadata.*     the rows as published; with levels chosen, only theirs
    2023/SPLIT/metadata.levelN.jsonl    made here where jsonl is published: every column a text

`datasets` runs no loader script like GAIA's own, and loads no JSON whose columns change their type.
"""

import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import orjson

from orchestrator.errors import EnvironmentUnusable
from orchestrator.tasks.base import Source
from orchestrator.tasks.gaia.source import LEVELS, SPLITS, YEAR, gaia_tasks, metadata_files
from orchestrator.tasks.lines import read_lines
from orchestrator.types import BadTask

README = "README.md"
_NOTES = ("Steps", "Number of steps", "How long did this take?", "Tools", "Number of tools")
_TEXTS = ("task_id", "Question", "Level", "Final answer", "file_name", "file_path")
_COLUMNS = {**dict.fromkeys(_TEXTS), "Annotator Metadata": dict.fromkeys(_NOTES)}  # None: a text


def splits_in(root: Path) -> list[str]:
    """The splits that have rows in this folder."""
    return [split for split in SPLITS if metadata_files(root / YEAR / split)]


def take_account(root: Path) -> tuple[dict[str, Counter[str]], list[str]]:
    """Rows and attachments of each split, counted as `orchestrator process` will see them, and what is wrong."""
    counts = {split: Counter[str]() for split in splits_in(root)}
    problems = []
    for split, count in counts.items():
        for task in _tasks(root, split):
            count["rows"] += 1
            if isinstance(task, BadTask):
                problems.append(f"{split} {task.task_id}: {task.reason}")
                continue
            if task.level not in LEVELS:
                problems.append(f"{split} {task.task_id}: no level from {LEVELS[0]} to {LEVELS[-1]}")
            count[f"level {task.level}"] += 1
            count["files"] += len(task.attachments)
            count["bytes"] += sum(file.size_bytes for file in task.attachments)
    return counts, problems


def _tasks(root: Path, split: str) -> Source:
    """The split's tasks. The test split hides its answers, so its questions stand in for them here."""
    return gaia_tasks(root, split, {"answer": "Question"} if split == "test" else {})


def arrange(root: Path, origin: str, levels: Collection[str]) -> None:
    """Makes the files by level and the README. With levels chosen, removes all other rows and files."""
    for split in SPLITS:
        if (root / YEAR / split / "metadata.jsonl").exists():
            _write_levels(root / YEAR / split, levels)
        if levels:
            _remove_others(root, split, levels)
    if not splits_in(root):
        raise EnvironmentUnusable(f"{origin} has no such rows; leave out --level, or name another --revision")
    _write_readme(root, origin)


def _write_levels(place: Path, levels: Collection[str]) -> None:
    """Writes the files by level beside metadata.jsonl. With levels chosen, leaves only their rows in that one."""
    all_rows, by_level = b"", dict.fromkeys(levels or LEVELS, b"")
    for _, line in read_lines(place / "metadata.jsonl", "output-dir"):
        try:
            row = orjson.loads(line or b"")
            level = str(row["Level"]).strip()
        except (ValueError, TypeError, LookupError):
            continue  # no row, or of no level: the account names it
        if level in by_level:
            path = f"{YEAR}/{place.name}/{row['file_name']}" if row.get("file_name") else ""
            by_level[level] += orjson.dumps(_shaped({**row, "file_path": path}, _COLUMNS)) + b"\n"
            all_rows += orjson.dumps(row) + b"\n"
    if levels:
        (place / "metadata.jsonl").write_bytes(all_rows)
    for level, rows in by_level.items():
        if rows:
            (place / f"metadata.level{level}.jsonl").write_bytes(rows)


def _shaped(value: Any, columns: Any) -> Any:
    """An object with these columns and no others; a text where they are None."""
    if columns is not None:
        fields = value if isinstance(value, dict) else {}
        return {name: _shaped(fields.get(name), inner) for name, inner in columns.items()}
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)


def _remove_others(root: Path, split: str, levels: Collection[str]) -> None:
    """Removes what is of other levels. A task's files are those it names, and those that are named after it."""
    place = root / YEAR / split
    names = {"metadata.jsonl", *(f"metadata.level{n}.{ending}" for n in levels for ending in ("jsonl", "parquet"))}
    for task in _tasks(root, split) if metadata_files(place) else ():
        if isinstance(task, BadTask) or task.level in levels:
            names |= {task.task_id, *(file.path.name for file in getattr(task, "attachments", ()))}
    for file in sorted(place.rglob("*")):
        if file.is_file() and names.isdisjoint((file.name, file.name.split(".")[0])):
            file.unlink()


def _write_readme(root: Path, origin: str) -> None:
    """Writes the file whose head tells `datasets` what can be loaded."""
    data_files: dict[str, list[dict[str, str]]] = {}
    for split in splits_in(root):
        file = metadata_files(root / YEAR / split)[0]
        # metadata.jsonl itself does not load; the files by level that were made of it do.
        suffix = "" if file.name == "metadata.parquet" else ".level*"
        for name, part in {"all": suffix, **{f"level{n}": f".level{n}" for n in LEVELS}}.items():
            path = f"{YEAR}/{split}/metadata{part}{file.suffix}"
            if any(root.glob(path)):
                data_files.setdefault(f"{YEAR}_{name}", []).append({"split": split, "path": path})
    configs = [{"config_name": n, "default": n == f"{YEAR}_all", "data_files": f} for n, f in data_files.items()]
    (root / README).write_text(
        f"---\nconfigs: {json.dumps(configs)}\n---\n# GAIA, as `orchestrator download-gaia` left it\n\n"
        f"{origin}. Its conditions hold for this copy too: do not share it.\n\n"
        "`orchestrator process --env.dataset gaia --env.dataset_path THIS_FOLDER`, or\n"
        f'`datasets.load_dataset("THIS_FOLDER", "{YEAR}_all", split="validation")`. `file_path` begins here.\n',
        "utf-8",
    )
