"""The text of a cell is what its file says, or the row is a bad task that names column and type."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest

from orchestrator.tasks.base import Columns
from orchestrator.tasks.jsonl import jsonl_tasks
from orchestrator.tasks.rows import make_task
from orchestrator.types import BadTask, Task

BERLIN = dt.timezone(dt.timedelta(hours=2))


def read(answer: object, columns: Columns | None = None, **more: object) -> Task | BadTask:
    row = {"question": "q", "answer": answer, **more}
    return make_task(row, source="s", place="line 1", root=None, columns=columns or {})


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (dt.date(2024, 3, 5), "2024-03-05"),
        (dt.datetime(2024, 3, 5, 10, 30), "2024-03-05T10:30:00"),
        (dt.datetime(2024, 3, 5, 10, 30, 0, 5, BERLIN), "2024-03-05T10:30:00.000005+02:00"),
        (dt.time(10, 30), "10:30:00"),
        (Decimal("12.50"), "12.50"),
        (Decimal("1E+3"), "1000"),
        (b"Paris", "Paris"),
        (2**200, str(2**200)),
        (-(2**63) - 1, "-9223372036854775809"),
        (0.1, "0.1"),
        (3.0, "3"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (np.float32(0.1), "0.1"),
        (np.int64(7), "7"),
        (np.str_("x"), "x"),
        (np.datetime64("2024-03-05T10:30:00.000000001", "ns"), "2024-03-05T10:30:00.000000001"),
        (np.array(["42"]), "42"),
        (np.array([0.1], np.float32), "0.1"),
        ([dt.date(2024, 3, 5)], "2024-03-05"),
    ],
)
def test_a_cell_is_read_exactly(cell: object, text: str) -> None:
    task = read(cell)
    assert isinstance(task, Task), task
    assert (task.answer, type(task.answer)) == (text, str)


@pytest.mark.parametrize(
    ("cell", "kind"),
    [
        (dt.timedelta(days=1), "timedelta"),
        (b"\xff\xfe", "bytes"),
        (True, "bool"),
        (np.bool_(True), "bool"),
        ({"a": 1}, "an object"),
        ([["a"]], "list"),
        ([None], "null"),
        (float("nan"), "nan"),
        (np.float64("inf"), "inf"),
        (Decimal("NaN"), "decimal"),
        (Decimal("1E+999999"), "decimal"),
        (np.datetime64("NaT"), "datetime64"),
        (np.timedelta64(1, "s"), "timedelta64"),
        (1 + 2j, "complex"),
        (object(), "object"),
        (10**400, "300 digits"),
    ],
)
def test_what_has_no_exact_text_is_a_bad_task_that_names_type_and_column(cell: object, kind: str) -> None:
    bad = read(cell)
    assert isinstance(bad, BadTask), bad
    assert bad.reason.startswith("answer ")
    assert kind in bad.reason
    named = read("", {"answer": "label"}, label=cell)
    assert isinstance(named, BadTask)
    assert named.reason.endswith("(its column is 'label')")


def test_cells_of_pandas_are_read_likewise() -> None:
    import pandas as pd  # here, as it is slow and each test process imports all modules of tests

    test_a_cell_is_read_exactly(pd.Timestamp("2024-03-05 10:30"), "2024-03-05T10:30:00")
    for cell, kind in ((pd.NaT, "NaTType"), (pd.Timedelta("1s"), "Timedelta")):
        test_what_has_no_exact_text_is_a_bad_task_that_names_type_and_column(cell, kind)


def test_metadata_can_be_recorded_whatever_it_holds() -> None:
    odd = {"when": dt.date(2024, 3, 5), "big": 2**70, "deep": [{"x": (Decimal("1.5"), np.int8(3))}], 5: b"\xff"}
    task = read("a", metadata=odd)
    assert isinstance(task, Task)
    assert json.loads(json.dumps(task.metadata)) == {
        "when": "2024-03-05",
        "big": str(2**70),
        "deep": [{"x": ["1.5", 3]}],
        "5": {"\0type": "bytes"},
    }


def lines(tmp_path: Path, text: str) -> list[Task | BadTask]:
    (tmp_path / "t.jsonl").write_text(text)
    return list(jsonl_tasks(tmp_path / "t.jsonl", name="n"))


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("123456789012345678901234567890", "123456789012345678901234567890"),
        ("-18446744073709551617", "-18446744073709551617"),
        ("3.14159265358979323846", "3.14159265358979323846"),
        ("0.1000000000000000", "0.1"),
        ("12345678901234567890.0", "12345678901234567890.0"),
        ("9007199254740993.0", "9007199254740993.0"),
        ("1e300", "1e+300"),
        ("6.02e23", "6.02e+23"),
        ("18446744073709551615", "18446744073709551615"),
    ],
)
def test_numbers_of_any_length_are_exact_in_jsonl(tmp_path: Path, written: str, text: str) -> None:
    (task,) = lines(tmp_path, f'{{"question": "q", "answer": {written}, "metadata": {{"n": [{written}]}}}}')
    assert isinstance(task, Task), task
    assert task.answer == text
    json.dumps(task.metadata)


def test_two_long_ids_stay_two(tmp_path: Path) -> None:
    row = '{"task_id": %d, "question": "q", "answer": "a"}\n'
    found = lines(tmp_path, "".join(row % (10**25 + n) for n in range(3)))
    assert [task.task_id for task in found] == [str(10**25 + n) for n in range(3)]
    assert all(isinstance(task, Task) for task in found)


def test_a_name_that_is_twice_in_a_row_is_said(tmp_path: Path) -> None:
    (bad, good) = lines(
        tmp_path,
        '{"question": "q", "answer": "1", "answer": "2"}\n'
        '{"question": "what is \\"answer\\" in \\"answer\\"?", "answer": "1", "metadata": {"answer": 2}}\n',
    )
    assert isinstance(bad, BadTask)
    assert bad.reason == "no JSON: 'answer' is there twice"
    assert isinstance(good, Task)
