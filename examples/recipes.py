"""The example tasks: each function makes one, with the answer computed from the same random data.

Every question says what the attachments hold and which form the answer has, so that a short script answers
it and only one text is right.
"""

from __future__ import annotations

import csv
import io
import json
import random
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

NUMBER = "Answer with the number only."
TOWNS = ["Alderby", "Brackwell", "Corrin", "Dunmere", "Eastholt", "Farrow", "Glenhaven", "Harrowick"]
GOODS = ["anvil", "barrel", "candle", "drum", "easel", "funnel", "goblet", "hammock", "inkwell", "jug"]
WORDS = (  # noqa: SIM905 - a list literal would take 25 lines
    "amber basin copper delta ember fable garnet harbour island jasper kettle lantern meadow nectar "
    "orchard pebble quarry ribbon saddle timber umbrella valley willow yonder zephyr"
).split()


@dataclass(frozen=True)
class Example:
    """One task. `files`: name → content; `answer`: short and exact."""

    level: int
    question: str
    answer: str | int
    files: dict[str, str | bytes]


# --- level 1: one file, one step ---------------------------------------------------------------------------


def csv_sum(rng: random.Random) -> Example:
    rows = [(f"S{n:03}", rng.choice(TOWNS[:4]), rng.choice(GOODS), rng.randint(1, 90)) for n in range(60)]
    town = TOWNS[2]
    return Example(
        1,
        "The attached stock.csv has the columns shelf, warehouse, item and quantity. What is the sum of "
        f"quantity over all rows whose warehouse is {town}? {NUMBER}",
        sum(quantity for _, warehouse, _, quantity in rows if warehouse == town),
        {"stock.csv": _csv("shelf,warehouse,item,quantity", rows)},
    )


def csv_count(rng: random.Random) -> Example:
    rows = [(n, rng.choice(["roof", "cellar", "yard"]), rng.randint(-5, 38)) for n in range(1, 121)]
    return Example(
        1,
        "The attached readings.csv has the columns id, sensor and temperature. How many rows have a "
        f"temperature greater than 25? {NUMBER}",
        sum(temperature > 25 for *_, temperature in rows),
        {"readings.csv": _csv("id,sensor,temperature", rows)},
    )


def csv_distinct(rng: random.Random) -> Example:
    rows = [(f"V{n:03}", rng.choice(TOWNS), f"K-{rng.randint(1, 60):02}") for n in range(90)]
    return Example(
        1,
        "The attached visits.csv has the columns visit, town and card. How many different values does the "
        f"column card have? {NUMBER}",
        len({card for *_, card in rows}),
        {"visits.csv": _csv("visit,town,card", rows)},
    )


def json_tallest(rng: random.Random) -> Example:
    heights = rng.sample(range(20, 140), len(TOWNS))
    towers = [{"town": town, "height_m": height} for town, height in zip(TOWNS, heights, strict=True)]
    return Example(
        1,
        "The attached towers.json is a list of objects with the keys town and height_m. Which town has the "
        "greatest height_m? Answer with the name of the town.",
        _only_best(dict(zip(TOWNS, heights, strict=True))),
        {"towers.json": _json(towers)},
    )


def json_sum(rng: random.Random) -> Example:
    votes = {word: rng.randint(10, 999) for word in WORDS[:15]}
    return Example(
        1,
        "The attached votes.json is an object that maps each name to a number of votes. What is the sum of "
        f"all the votes? {NUMBER}",
        sum(votes.values()),
        {"votes.json": _json(votes)},
    )


def txt_errors(rng: random.Random) -> Example:
    levels = rng.choices(["INFO", "WARNING", "ERROR"], weights=[6, 2, 3], k=150)
    lines = [f"{n:04} {level} {rng.choice(GOODS)} {rng.choice(WORDS)}" for n, level in enumerate(levels)]
    return Example(
        1,
        f"How many lines of the attached machine.txt contain the word ERROR? {NUMBER}",
        levels.count("ERROR"),
        {"machine.txt": _lines(lines)},
    )


def txt_divisible(rng: random.Random) -> Example:
    numbers = [rng.randint(100, 9999) for _ in range(80)]
    return Example(
        1,
        "The attached numbers.txt has one whole number on each line. What is the sum of the numbers that are "
        f"divisible by 7? {NUMBER}",
        sum(number for number in numbers if number % 7 == 0),
        {"numbers.txt": _lines(numbers)},
    )


def py_function(rng: random.Random) -> Example:
    factor, shift, modulus = rng.randint(3, 9), rng.randint(11, 40), rng.choice([97, 101, 103])
    argument = rng.randint(50, 90)
    value = 1
    for step in range(argument):
        value = (value * factor + shift + step) % modulus
    code = (
        "def transform(n):\n"
        "    value = 1\n"
        "    for step in range(n):\n"
        f"        value = (value * {factor} + {shift} + step) % {modulus}\n"
        "    return value\n"
    )
    return Example(
        1,
        f"The attached transform.py defines the function transform. What does transform({argument}) return? "
        f"{NUMBER}",
        value,
        {"transform.py": code},
    )


# --- level 2: two files, nested data, or two steps ---------------------------------------------------------


def csv_join(rng: random.Random) -> Example:
    prices = {item: rng.randint(2, 60) for item in GOODS}
    orders = [(n, rng.choice(GOODS), rng.randint(1, 12)) for n in range(1, 51)]
    return Example(
        2,
        "The attached orders.csv has the columns order, item and quantity; the attached prices.csv has the "
        "columns item and price. What is the total of quantity times price over all orders? " + NUMBER,
        sum(quantity * prices[item] for _, item, quantity in orders),
        {
            "orders.csv": _csv("order,item,quantity", orders),
            "prices.csv": _csv("item,price", prices.items()),
        },
    )


def csv_best_month(rng: random.Random) -> Example:
    days = [date(2031, 1, 1) + timedelta(days=n) for n in range(0, 360, 3)]
    rows = [(day.isoformat(), rng.randint(20, 400)) for day in days]
    total: Counter[str] = Counter()
    for day, amount in rows:
        total[day[:7]] += amount
    return Example(
        2,
        "The attached takings.csv has the columns date (YYYY-MM-DD) and amount. In which month is the sum of "
        "amount greatest? Answer with the month as YYYY-MM.",
        _only_best(total),
        {"takings.csv": _csv("date,amount", rows)},
    )


def csv_longest_loan(rng: random.Random) -> Example:
    lengths = rng.sample(range(3, 200), len(WORDS))
    rows = []
    for title, length in zip(WORDS, lengths, strict=True):
        start = date(2030, 1, 1) + timedelta(days=rng.randint(0, 300))
        rows.append((title, start.isoformat(), (start + timedelta(days=length)).isoformat()))
    return Example(
        2,
        "The attached loans.csv has the columns title, borrowed and returned, both dates as YYYY-MM-DD. How "
        f"many days lie between borrowed and returned for the title that was away longest? {NUMBER}",
        max(lengths),
        {"loans.csv": _csv("title,borrowed,returned", rows)},
    )


def json_nested(rng: random.Random) -> Example:
    books = {town: {label: rng.randint(5, 80) for label in "ABCDE"} for town in TOWNS[:6]}
    branches = [
        {"name": town, "shelves": [{"label": label, "books": count} for label, count in shelves.items()]}
        for town, shelves in books.items()
    ]
    return Example(
        2,
        'The attached library.json has a list "branches"; each branch has a "name" and a list "shelves", and '
        'each shelf has a "label" and a number of "books". Which branch has the most books on all its '
        "shelves together? Answer with the name of the branch.",
        _only_best({town: sum(shelves.values()) for town, shelves in books.items()}),
        {"library.json": _json({"branches": branches})},
    )


def txt_decode(rng: random.Random) -> Example:
    plain = "abcdefghijklmnopqrstuvwxyz"
    shuffled = "".join(rng.sample(plain, len(plain)))
    words = rng.sample(WORDS, 6)
    return Example(
        2,
        "The attached message.txt is written in a secret alphabet. The attached key.json is an object that "
        "maps each secret letter to the real one. Decode the message. Answer with its last word, in lower "
        "case.",
        words[-1],
        {
            "message.txt": " ".join(words).translate(str.maketrans(plain, shuffled)) + "\n",
            "key.json": _json(dict(sorted(zip(shuffled, plain, strict=True)))),
        },
    )


def py_constants(rng: random.Random) -> Example:
    limits = {item: rng.randint(20, 70) for item in GOODS}
    parcels = [(f"P{n:03}", rng.choice(GOODS), rng.randint(1, 90)) for n in range(70)]
    entries = "".join(f'    "{item}": {limit},\n' for item, limit in limits.items())
    code = f"# The greatest weight in kg at which a parcel may travel.\nLIMITS = {{\n{entries}}}\n"
    return Example(
        2,
        "The attached limits.py defines the dictionary LIMITS, from item to the greatest weight allowed. The "
        "attached parcels.csv has the columns parcel, item and weight. How many parcels weigh more than is "
        f"allowed for their item? {NUMBER}",
        sum(weight > limits[item] for _, item, weight in parcels),
        {"limits.py": code, "parcels.csv": _csv("parcel,item,weight", parcels)},
    )


def txt_sections(rng: random.Random) -> Example:
    sizes = {town: rng.randint(4, 14) for town in TOWNS}
    counts = {town: [rng.randint(1, 50) for _ in range(size)] for town, size in sizes.items()}
    lines: list[str] = []
    for town, numbers in counts.items():
        lines += [f"[{town}]", *(f"{rng.choice(GOODS)}: {number}" for number in numbers), ""]
    town = TOWNS[5]
    return Example(
        2,
        "The attached report.txt has sections. Each begins with a line with the name of a town in square "
        "brackets, followed by lines such as 'drum: 12'. What is the sum of the numbers in the section of "
        f"{town}? {NUMBER}",
        sum(counts[town]),
        {"report.txt": _lines(lines)},
    )


# --- level 3: archives and several steps -------------------------------------------------------------------


def zip_months(rng: random.Random) -> Example:
    item = GOODS[1]
    members, total = {}, 0
    for month in range(1, 7):
        rows = [(rng.choice(GOODS[:5]), rng.randint(1, 30)) for _ in range(25)]
        members[f"2031-{month:02}.csv"] = _csv("item,sold", rows)
        total += sum(sold for name, sold in rows if name == item)
    return Example(
        3,
        "The attached months.zip holds several csv files, each with the columns item and sold. What is the "
        f"sum of sold over all files for the item {item}? {NUMBER}",
        total,
        {"months.zip": _zip(members)},
    )


def zip_most_mentions(rng: random.Random) -> Example:
    texts = {f"{town.lower()}.txt": rng.choices(WORDS[:12], k=160) for town in TOWNS[:6]}
    return Example(
        3,
        "The attached letters.zip holds several txt files. In which of them does the word lantern occur most "
        "often? Answer with the name of the file, written like alderby.txt.",
        _only_best({name: words.count("lantern") for name, words in texts.items()}),
        {"letters.zip": _zip({name: _paragraph(words) for name, words in texts.items()})},
    )


def zip_currencies(rng: random.Random) -> Example:
    rates = {"crown": 1, "florin": rng.randint(2, 6), "ducat": rng.randint(7, 15)}
    trips = [(n, rng.choice(TOWNS), rng.randint(3, 40), rng.choice(list(rates))) for n in range(1, 41)]
    cost: Counter[str] = Counter()
    for _, town, amount, currency in trips:
        cost[town] += amount * rates[currency]
    return Example(
        3,
        "The attached travel.zip holds trips.csv with the columns trip, town, amount and currency, and "
        "rates.json, which maps each currency to its worth in crowns. Convert every amount to crowns. What "
        f"is the total in crowns of the town with the greatest total? {NUMBER}",
        cost[_only_best(cost)],
        {"travel.zip": _zip({"trips.csv": _csv("trip,town,amount,currency", trips), "rates.json": _json(rates)})},
    )


def zip_chain(rng: random.Random) -> Example:
    names = [f"{word}.json" for word in rng.sample(WORDS, 12)]
    chain = names[:9]  # the other files are not on the way
    points = {name: rng.randint(1, 50) for name in names}
    following = dict(zip(chain, [*chain[1:], None], strict=True))
    following |= {name: rng.choice(chain) for name in names[9:]}
    members = {name: _json({"points": points[name], "next": following[name]}) for name in sorted(names)}
    return Example(
        3,
        'The attached trail.zip holds json files, each an object with the keys "points" and "next", the name '
        f"of the next file. Start at {chain[0]} and follow next until it is null. What is the sum of points "
        f"over all files on the way, the first and the last included? {NUMBER}",
        sum(points[name] for name in chain),
        {"trail.zip": _zip(members)},
    )


def zip_script(rng: random.Random) -> Example:
    multiplier, modulus = rng.choice([31, 37, 41]), 1000
    names = [f"{word}-{rng.randint(10, 99)}" for word in rng.sample(WORDS, 20)]

    def code_of(name: str) -> int:
        value = 7
        for character in name:
            value = (value * multiplier + ord(character)) % modulus
        return value

    script = (
        "def code_of(name):\n"
        "    value = 7\n"
        "    for character in name:\n"
        f"        value = (value * {multiplier} + ord(character)) % {modulus}\n"
        "    return value\n"
    )
    return Example(
        3,
        "The attached labels.zip holds codes.py, which defines the function code_of, and names.txt with one "
        "name on each line. Which name has the greatest code_of(name)? Answer with the name.",
        _only_best({name: code_of(name) for name in names}),
        {"labels.zip": _zip({"codes.py": script, "names.txt": _lines(names)})},
    )


EXAMPLES: tuple[Callable[[random.Random], Example], ...] = (
    *(csv_sum, csv_count, csv_distinct, json_tallest, json_sum, txt_errors, txt_divisible, py_function),
    *(csv_join, csv_best_month, csv_longest_loan, json_nested, txt_decode, py_constants, txt_sections),
    *(zip_months, zip_most_mentions, zip_currencies, zip_chain, zip_script),
)


def _only_best(values: Mapping[str, int]) -> str:
    best = max(values.values())
    winners = [name for name, value in values.items() if value == best]
    if len(winners) != 1:
        raise ValueError(f"the question would have {len(winners)} answers: choose another seed")
    return winners[0]


def _csv(header: str, rows: Iterable[Sequence[object]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([header.split(","), *rows])
    return out.getvalue()


def _json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


def _lines(values: Iterable[object]) -> str:
    return "".join(f"{value}\n" for value in values)


def _paragraph(words: list[str]) -> str:
    return _lines(" ".join(words[i : i + 12]) for i in range(0, len(words), 12))


def _zip(members: dict[str, str]) -> bytes:
    """Stored, not compressed: compressors differ between machines."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            entry = zipfile.ZipInfo(name, date_time=(2031, 1, 1, 0, 0, 0))
            entry.create_system = 3
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content)
    return out.getvalue()
