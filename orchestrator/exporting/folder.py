"""The folder of an export: the data, a data set card that says how to read them, and where they come from.

train.jsonl or data/train-….parquet   the rows
README.md                             the card, with the columns' types: the hub and `datasets` read it
provenance.json                       run, digests, versions, choice, counts
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.exporting.formats import TALK, Format
from orchestrator.run.lines import dumps

PROVENANCE_FILE = "provenance.json"
CARD_FILE = "README.md"
_ROW_GROUP = 256  # rows that are held at a time, if they are short
_ROW_GROUP_VALUES = 1 << 20  # ids, log-probs and characters that are held at a time: about 40 MB


class JsonRows:
    """One strict JSON object per line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends rows. Raises OSError."""
        self._file.writelines(dumps(row) + b"\n" for row in rows)

    def close(self) -> None:
        """Raises OSError."""
        self._file.close()


class ParquetRows:
    """A parquet file, compressed."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        talk = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
        kinds = {
            "bool": pa.bool_(),
            "string": pa.string(),
            "int64": pa.int64(),
            "float64": pa.float64(),
            TALK: talk,
        }
        kinds |= {f"list of {name}": pa.list_(kinds[name]) for name in ("int64", "float64")}
        self._schema = pa.schema([(name, kinds[kind]) for name, kind in columns.items()])
        self._table = pa.Table
        path.parent.mkdir(exist_ok=True)
        self._file = pq.ParquetWriter(path, self._schema, compression="zstd")
        self._waiting: list[Mapping[str, Any]] = []
        self._values = 0

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends rows. Raises OSError."""
        for row in rows:
            self._waiting.append(row)
            self._values += _size(row)
            if len(self._waiting) >= _ROW_GROUP or self._values >= _ROW_GROUP_VALUES:
                self._flush()

    def close(self) -> None:
        """Raises OSError."""
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        self._file.write_table(self._table.from_pylist(self._waiting, schema=self._schema))
        self._waiting, self._values = [], 0


def _size(row: Mapping[str, Any]) -> int:
    """How many numbers, and characters of messages, a row holds."""
    numbers = sum(len(value) for value in row.values() if isinstance(value, list | tuple))
    return numbers + sum(len(message["content"]) for message in row.get("messages", ()))


def open_rows(folder: Path, form: Format) -> JsonRows | ParquetRows:
    """The new data file of a folder. Raises OSError."""
    path = folder / form.path
    return ParquetRows(path, form.columns) if form.parquet else JsonRows(path)


def card(name: str, form: Format, provenance: Mapping[str, Any]) -> bytes:
    """The data set card. What comes from the run stands in a block of JSON, where it is no markup."""
    head = [
        *("---", "configs:", "- config_name: default", "  data_files:"),
        *("  - split: train", f"    path: {form.path}", "dataset_info:", "  features:"),
        *(part for column, kind in form.columns.items() for part in _feature(column, kind)),
        *("tags:", "- rollouts", f"- {name}", "---"),
    ]
    counts = f"{provenance['rows']} rows, {provenance['not_solved']} of them not solved, exported with "
    counts += f"`rollout-orchestrator {provenance['version']}`"
    body = [
        *("", f"# Rollouts of agents ({name})", "", f"{counts} from the record of a run.", "", form.about, ""),
        *("    from datasets import load_dataset", '    rows = load_dataset("PATH_OR_NAME", split="train")', ""),
        *("No license is given here: the tasks' data set and the model may have terms of their own.", ""),
        *("## Where it comes from", "", "```json", dumps(provenance, indent=True).decode(), "```", ""),
    ]
    return "\n".join([*head, *body]).encode()


def _feature(name: str, kind: str) -> list[str]:
    """A column, as data set cards name its type."""
    if kind == TALK:
        fields = ("    - name: role", "      dtype: string", "    - name: content", "      dtype: string")
        return [f"  - name: {name}", "    list:", *fields]
    each = kind.removeprefix("list of ")
    return [f"  - name: {name}", f"    {'dtype' if each == kind else 'list'}: {each}"]
