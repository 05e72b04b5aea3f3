#!/bin/sh
set -eu
cat > /app/pipeline.py <<'END'
import csv
import json
import re
import sys
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path


def rows(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


source, target = Path(sys.argv[1]), sys.argv[2]
rates = {currency: Decimal(rate) for currency, rate in json.loads((source / "rates.json").read_text()).items()}
countries = {row["customer_id"]: row["country"] for row in rows(source / "customers.csv")}
latest = {}
for path in source.glob("orders-*.csv"):
    for row in rows(path):
        other = latest.setdefault(row["order_id"], row)
        if row["updated"] > other["updated"]:
            latest[row["order_id"]] = row

rejected, counts, sums = 0, {}, {}
for row in latest.values():
    if row["status"].strip().lower() != "paid":
        continue
    amount, currency = row["amount"].strip(), row["currency"].strip()
    if currency not in rates or not re.fullmatch(r"[0-9]+(\.[0-9]+)?", amount):
        rejected += 1
        continue
    country = countries.get(row["customer_id"], "unknown")
    counts[country] = counts.get(country, 0) + 1
    sums[country] = sums.get(country, 0) + Decimal(amount) * rates[currency]

totals = {country: total.quantize(Decimal("0.01"), ROUND_HALF_UP) for country, total in sums.items()}
with open(target, "w", newline="", encoding="utf-8") as file:
    writer = csv.writer(file)
    writer.writerow(["country", "orders", "total"])
    for country in sorted(totals, key=lambda name: (-totals[name], name)):
        writer.writerow([country, counts[country], totals[country]])
print(f"rejected: {rejected}")
END
