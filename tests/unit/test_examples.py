"""The example tasks: made again they are the same bytes, and every answer follows from its attachments.

The solvers share nothing with the generator: they read the question's numbers and the attached files.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import subprocess
import sys
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
KEYS = {"task_id", "question", "answer", "level", "files", "metadata"}
Row = dict[str, Any]


def _rows(name: str) -> list[Row]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


TASKS, REASONING = _rows("tasks.jsonl"), _rows("reasoning_gym.jsonl")


def _text(name: str) -> str:
    return (FOLDER / "files" / name).read_text(encoding="utf-8")


def _table(text: str) -> Iterator[dict[str, str]]:
    return csv.DictReader(io.StringIO(text))


def _members(name: str) -> dict[str, str]:
    with zipfile.ZipFile(FOLDER / "files" / name) as archive:
        return {member: archive.read(member).decode("utf-8") for member in archive.namelist()}


def _names(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def _asked(question: str, pattern: str) -> str:
    found = re.search(pattern, question)
    assert found, f"{pattern} is not in {question}"
    return found[1]


def csv_sum(q: str) -> object:
    town = _asked(q, r"warehouse is (\w+)")
    return sum(int(r["quantity"]) for r in _table(_text("stock.csv")) if r["warehouse"] == town)


def csv_count(q: str) -> object:
    least = int(_asked(q, r"greater than (\d+)"))
    return len([r for r in _table(_text("readings.csv")) if int(r["temperature"]) > least])


def csv_distinct(q: str) -> object:
    return len(Counter(r["card"] for r in _table(_text("visits.csv"))))


def json_tallest(q: str) -> object:
    return sorted(json.loads(_text("towers.json")), key=lambda tower: tower["height_m"])[-1]["town"]


def json_sum(q: str) -> object:
    return sum(json.loads(_text("votes.json")).values())


def txt_errors(q: str) -> object:
    return sum("ERROR" in line for line in _text("machine.txt").splitlines())


def txt_divisible(q: str) -> object:
    return sum(n for n in map(int, _text("numbers.txt").split()) if not n % int(_asked(q, r"by (\d+)")))


def py_function(q: str) -> object:
    return _names(_text("transform.py"))["transform"](int(_asked(q, r"transform\((\d+)\)")))


def csv_join(q: str) -> object:
    prices = {r["item"]: int(r["price"]) for r in _table(_text("prices.csv"))}
    return sum(int(r["quantity"]) * prices[r["item"]] for r in _table(_text("orders.csv")))


def csv_best_month(q: str) -> object:
    months: dict[str, int] = defaultdict(int)
    for row in _table(_text("takings.csv")):
        months[row["date"].rpartition("-")[0]] += int(row["amount"])
    return max(months, key=months.__getitem__)


def csv_longest_loan(q: str) -> object:
    day = date.fromisoformat
    return max((day(r["returned"]) - day(r["borrowed"])).days for r in _table(_text("loans.csv")))


def json_nested(q: str) -> object:
    branches = json.loads(_text("library.json"))["branches"]
    return max(branches, key=lambda b: sum(shelf["books"] for shelf in b["shelves"]))["name"]


def txt_decode(q: str) -> object:
    key = json.loads(_text("key.json"))
    return "".join(key.get(letter, letter) for letter in _text("message.txt")).split()[-1]


def py_constants(q: str) -> object:
    limits = _names(_text("limits.py"))["LIMITS"]
    return sum(int(r["weight"]) > limits[r["item"]] for r in _table(_text("parcels.csv")))


def txt_sections(q: str) -> object:
    town = _asked(q, r"section of (\w+)")
    section = _text("report.txt").split(f"[{town}]")[1].split("[")[0]
    return sum(map(int, re.findall(r": (\d+)", section)))


def zip_months(q: str) -> object:
    item = _asked(q, r"the item (\w+)")
    rows = (row for text in _members("months.zip").values() for row in _table(text))
    return sum(int(row["sold"]) for row in rows if row["item"] == item)


def zip_most_mentions(q: str) -> object:
    texts = _members("letters.zip")
    return max(texts, key=lambda name: len(re.findall(r"\blantern\b", texts[name])))


def zip_currencies(q: str) -> object:
    members = _members("travel.zip")
    rates = json.loads(members["rates.json"])
    totals: dict[str, int] = defaultdict(int)
    for row in _table(members["trips.csv"]):
        totals[row["town"]] += int(row["amount"]) * rates[row["currency"]]
    return max(totals.values())


def zip_chain(q: str) -> object:
    members, name, total = _members("trail.zip"), _asked(q, r"Start at (\w+\.json)"), 0
    while name:
        stop = json.loads(members.pop(name))  # pop: a circle would be a KeyError
        name, total = stop["next"], total + stop["points"]
    return total


def zip_script(q: str) -> object:
    members = _members("labels.zip")
    return max(members["names.txt"].split(), key=_names(members["codes.py"])["code_of"])


SOLVERS: dict[str, Callable[[str], object]] = {
    f"example-{solve.__name__.replace('_', '-')}": solve
    for solve in (
        *(csv_sum, csv_count, csv_distinct, json_tallest, json_sum, txt_errors, txt_divisible, py_function),
        *(csv_join, csv_best_month, csv_longest_loan, json_nested, txt_decode, py_constants, txt_sections),
        *(zip_months, zip_most_mentions, zip_currencies, zip_chain, zip_script),
    )
}


def test_made_again_the_tasks_are_the_same_bytes(tmp_path: Path) -> None:
    # -I -S: nothing but the standard library can be imported, whatever is installed.
    script = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); sys.argv[0] = 'generate'; import runpy; "
    script += "runpy.run_module('generate', run_name='__main__')"
    subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", script, "--directory", str(tmp_path)], check=True, timeout=60
    )
    made = {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    kept = [FOLDER / "tasks.jsonl", *(p for p in (FOLDER / "files").iterdir() if p.is_file())]
    assert made == {p.relative_to(FOLDER): p.read_bytes() for p in kept}


@pytest.mark.parametrize("row", TASKS, ids=lambda row: row["task_id"])
def test_the_answer_follows_from_the_attachments(row: Row) -> None:
    assert str(SOLVERS[row["task_id"]](row["question"])) == row["answer"]


@pytest.mark.parametrize("row", TASKS, ids=lambda row: row["task_id"])
def test_the_question_names_what_is_attached(row: Row) -> None:
    names = [Path(file).name for file in row["files"]]
    assert names
    assert all((FOLDER / file).is_file() for file in row["files"])
    assert all(name in row["question"] for name in names)


def test_rows_have_one_shape_and_ids_of_their_own() -> None:
    rows = TASKS + REASONING
    assert all(set(row) == KEYS and row["level"] in (1, 2, 3) for row in rows)
    assert all(isinstance(row["answer"], str) and row["answer"] for row in rows)
    assert len({row["task_id"] for row in rows}) == len(rows)


def test_tasks_cover_levels_and_kinds_of_file_and_are_small() -> None:
    kinds = {Path(file).suffix for row in TASKS for file in row["files"]}
    assert kinds == {".csv", ".json", ".txt", ".py", ".zip"}
    assert len(TASKS) >= 16
    assert Counter(row["level"] for row in TASKS).keys() == {1, 2, 3}
    assert sum(p.stat().st_size for p in (FOLDER / "files").iterdir()) < 300_000


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"-?\d+", text)]


def _in_base(number: int, base: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, base)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[digit] + digits
    return digits


def _count_primes(question: str) -> int:
    low, high = _numbers(question)
    return sum(all(n % d for d in range(2, math.isqrt(n) + 1)) for n in range(max(low, 2), high + 1))


def _expression(question: str) -> float:
    value = eval(_asked(question, r"(-?[\d(][\d\s+*/()-]*\d\)?)"))
    return int(value) if value == int(value) else value


def _convert(question: str) -> str:
    found = re.search(r"base-(\d+) number (\w+) to base-(\d+)", question)
    assert found
    return _in_base(int(found[2], int(found[1])), int(found[3]))


def _sorted_numbers(question: str) -> str:
    numbers = re.findall(r"-?\d+\.?\d*", question.split("\n")[0])
    return str(sorted(numbers, key=float, reverse="descending" in question.split("\n")[0]))


def _sorted_words(question: str) -> str:
    order, words = _asked(question, r"in (\w+) order \(using.*\) and"), question.strip().rsplit(": ", 1)[1]
    return ", ".join(sorted(words.split(", "), reverse=order == "descending"))


def _legs(question: str) -> int:
    legs = {"sheep": 4, "human": 2, "ant": 6, "dog": 4, "bee": 6, "firefly": 6, "elephant": 4}
    legs |= {"lobster": 10, "scorpion": 8}
    animals = re.findall(r"(\d+) (\w+)s\b", question.split("if you have")[1])
    return sum(int(count) * legs[animal] for count, animal in animals)


REASONING_SOLVERS: dict[str, Callable[[str], object]] = {
    "chain_sum": _expression,
    "basic_arithmetic": _expression,
    "products": _expression,
    "gcd": lambda q: math.gcd(*_numbers(q)),
    "lcm": lambda q: math.lcm(*_numbers(q)),
    "letter_counting": lambda q: _asked(q, r'text: "(.*)"').lower().count(_asked(q, r'letter "(\w)"')),
    "spell_backward": lambda q: _asked(q, r": (\w+)$")[::-1],
    "count_primes": _count_primes,
    "count_bits": lambda q: _numbers(q)[-1].bit_count(),
    "base_conversion": _convert,
    "leg_counting": _legs,
    "number_sorting": _sorted_numbers,
    "word_sorting": _sorted_words,
}


@pytest.mark.parametrize("row", REASONING, ids=lambda row: row["task_id"])
def test_the_reasoning_gym_answer_is_right(row: Row) -> None:
    assert row["metadata"]["source"] == "reasoning_gym"
    assert str(REASONING_SOLVERS[row["metadata"]["kind"]](row["question"])) == row["answer"]
