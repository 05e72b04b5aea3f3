"""A quarter each for plain orders, orders in several rows, rows to reject, and all of it with exact rounding."""

import csv
import io
import json
import random
import re
import sys
from collections import defaultdict
from decimal import ROUND_HALF_UP, Decimal

import judge

COLUMNS = ["order_id", "customer_id", "amount", "currency", "status", "updated"]
RATES = {"EUR": "1", "USD": "0.92", "JPY": "0.0061", "HLF": "0.5"}
COUNTRIES = ["DE", "FR", "JP", "BR", "KE"]
BAD_AMOUNTS = ["", "ten", "1,200.00", "-5.00", "+5", "1e3", "nan", "5 EUR", "0x10", ".", "1_000"]
BAD_CURRENCIES = ["", "XXX", "eur", "US D"]


def table(rows, columns, chance):
    columns = chance.sample(columns, len(columns))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, quoting=chance.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def orders(chance, repeats, rejects, ties):
    rows = []
    for number in range(60):
        for _ in range(chance.randint(1, 3) if repeats else 1):
            amount = f"{chance.randint(1, 99999) / 100:.2f}"
            currency = chance.choice(["EUR", "USD", "JPY"])
            if rejects and chance.random() < 0.3:
                bad_amount, bad_currency = chance.choice(BAD_AMOUNTS), chance.choice(BAD_CURRENCIES)
                choices = [(bad_amount, currency), (amount, bad_currency), (f" {amount} ", " EUR ")]
                amount, currency = chance.choice(choices)
            status = chance.choice(["paid", "paid", "open", "cancelled"])
            if rejects:
                status = chance.choice([status, f" {status}", status.upper(), status.title() + " ", "unpaid"])
            customer = f"c{chance.randint(1, 25 if rejects else 20)}"
            rows.append([f"{7000 + number}", customer, amount, currency, status, len(rows)])
    if ties:
        rows.append(["1", "half", "0.25", "HLF", "paid", len(rows)])
        rows.append(["2", "half", "1.00", "EUR", "paid", len(rows)])
    for row in rows:
        at = row[-1]
        row[-1] = f"2024-{at % 12 + 1:02}-{at % 27 + 1:02}T{at % 24:02}:{at // 60:02}:{at % 60:02}"
    chance.shuffle(rows)
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def expected(rows, countries):
    latest = {}
    for row in rows:
        if row["order_id"] not in latest or row["updated"] > latest[row["order_id"]]["updated"]:
            latest[row["order_id"]] = row
    worth, count, rejected = defaultdict(Decimal), defaultdict(int), 0
    for row in latest.values():
        if row["status"].strip().lower() != "paid":
            continue
        amount, currency = row["amount"].strip(), row["currency"].strip()
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", amount) or currency not in RATES:
            rejected += 1
            continue
        country = countries.get(row["customer_id"], "unknown")
        worth[country] += Decimal(amount) * Decimal(RATES[currency])
        count[country] += 1
    totals = {country: value.quantize(Decimal("0.01"), ROUND_HALF_UP) for country, value in worth.items()}
    ranked = sorted(totals, key=lambda country: (-totals[country], country))
    lines = [[country, str(count[country]), str(totals[country])] for country in ranked]
    return [["country", "orders", "total"], *lines], f"rejected: {rejected}"


def right(seed, repeats=False, rejects=False, ties=False):
    chance = random.Random(seed)
    rows = orders(chance, repeats, rejects, ties)
    countries = {f"c{number}": chance.choice(COUNTRIES) for number in range(1, 21)} | {"half": "NZ"}
    names = ["Tom", "Brandt, Lena", 'Wren "W" Moss', "Ines\nSato"]
    customers = [
        {"customer_id": id, "name": chance.choice(names), "country": country} for id, country in countries.items()
    ]
    given, result = judge.folder(), judge.folder() / "totals.csv"
    cut = [0, *sorted(chance.sample(range(len(rows)), 2)), len(rows)]
    for number in range(3):
        part = rows[cut[number] : cut[number + 1]]
        (given / f"orders-{number}.csv").write_text(table(part, COLUMNS, chance), newline="")
    (given / "customers.csv").write_text(table(customers, list(customers[0]), chance), newline="")
    (given / "rates.json").write_text(json.dumps(RATES))
    ran = judge.run([sys.executable, "/app/pipeline.py", str(given), str(result)])
    lines, said = expected(rows, countries)
    return judge.table(judge.text(result)) == lines and ran.stdout.strip() == said


judge.finish(
    {
        "plain": all(right(seed) for seed in (11, 12)),
        "repeats": all(right(seed, repeats=True) for seed in (13, 14)),
        "rejects": all(right(seed, rejects=True) for seed in (15, 16)),
        "all": all(right(seed, repeats=True, rejects=True, ties=True) for seed in (17, 18, 19)),
    }
)
