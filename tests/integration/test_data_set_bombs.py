"""A few kilobytes that become gigabytes cost no memory: one line says what they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.full

MIB = 1 << 20
MOST_BYTES = {"gaia": 450 * MIB, "hf": 1_600 * MIB}  # of the largest process
# Made in a process of its own: what that took would count as the peak of all that we start.
MAKE = """
import sys
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
BOMBS = {
    "one large value": lambda: {"Question": ["a" * 700_000_000]},
    "one value in all rows": lambda: {
        "Question": pa.DictionaryArray.from_arrays(pa.array(np.zeros(400, "i4")), ["a" * 10_000_000])
    },
    "many values in one row": lambda: {
        "Question": pa.ListArray.from_arrays([0, 300_000_000], pa.array(np.ones(300_000_000, "i1")))
    },
}
columns = BOMBS[sys.argv[2]]()
columns |= {"Final answer": ["1"] * len(columns["Question"])}
pq.write_table(pa.table(columns), sys.argv[1], compression="zstd", store_schema=False)
"""
BOMBS = ("one large value", "one value in all rows", "many values in one row")
# The peak of the largest process is told, be it ours or one of those we started. Ours is VmHWM: `ru_maxrss` of a
# process begins with the memory of whoever started it, here pytest after many tests.
READ = """
import resource, sys
from pathlib import Path
from orchestrator.errors import ConfigError
from orchestrator.tasks import open_tasks
good = bad = 0
try:
    for task in open_tasks(sys.argv[1], dataset_path=Path(sys.argv[2]), split=sys.argv[3]):
        bad += type(task).__name__ == "BadTask"
        good += type(task).__name__ == "Task"
except ConfigError as error:
    print(str(error).replace("\\n", "NEWLINE"))
own = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(good, bad, max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * 1024)
"""


def row(question: str) -> dict[str, Any]:
    return {"task_id": "a", "Question": question, "Level": "1", "Final answer": "1", "file_name": ""}


def read(spec: str, folder: Path, split: str) -> tuple[str, int, int, int]:
    """(what is refused, good tasks, bad ones, the largest process' memory in bytes)."""
    ended = subprocess.run(
        [sys.executable, "-c", READ, spec, str(folder), split], capture_output=True, text=True, check=True
    )
    *said, counts = ended.stdout.splitlines()
    good, bad, peak = map(int, counts.split())
    return "".join(said), good, bad, peak


@pytest.mark.parametrize(("kind", "bomb"), [*(("gaia", bomb) for bomb in BOMBS), ("hf", "one value in all rows")])
def test_a_parquet_bomb_is_refused_or_bad_tasks(tmp_path: Path, kind: str, bomb: str) -> None:
    folder = tmp_path / "2023" / "validation"
    folder.mkdir(parents=True)
    file = folder / "metadata.parquet"
    subprocess.run([sys.executable, "-c", MAKE, file, bomb], check=True)
    assert file.stat().st_size < 100_000
    where = ("gaia", tmp_path, "validation") if kind == "gaia" else (f"hf:{folder}", tmp_path, "train")
    refused, good, _, peak = read(*where)
    assert peak < MOST_BYTES[kind]
    assert good == 0
    assert not refused or "memory" in refused
    assert "NEWLINE" not in refused


def test_rows_of_honest_sizes_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "2023" / "validation"
    folder.mkdir(parents=True)
    rows = [row(f"{n} " * 2_000) | {"task_id": str(n)} for n in range(3_000)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "metadata.parquet")
    refused, good, bad, _ = read("gaia", tmp_path, "validation")
    assert (refused, good, bad) == ("", 3_000, 0)
