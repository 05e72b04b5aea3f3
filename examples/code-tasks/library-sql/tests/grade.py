"""A third for each query that is right on three databases; the rows are computed here without SQL."""

import json
import random
import sqlite3
import sys
from collections import Counter, defaultdict
from datetime import date, timedelta

import judge

chance = random.Random(9)
TODAY = date(2024, 7, 1)
RUNNER = """
import json, sqlite3, sys
query = sys.stdin.read()
libraries = [sqlite3.connect(f"file:{path}?mode=ro", uri=True) for path in sys.argv[1:]]
print(json.dumps([library.execute(query).fetchall() for library in libraries]))
"""


def library():
    """Books, members and loans; the last book and the last member have no loan, the last two members one name."""
    authors = ["M. Okafor", "L. Brandt", "A. Sato", "Z. Novak", "E. Ruiz"]
    books = [(id, f"Title {chance.randint(0, 10**6)}", chance.choice(authors)) for id in range(1, 21)]
    members = [(id, name) for id, name in enumerate(["Tom", "Wren", "Ines", "Olga", "Ada", "Ines", "Ines"], 1)]
    loans = []
    for id in range(1, 31):
        lent = date(2024, 1, 1) + timedelta(chance.randint(0, 170))
        due = lent + timedelta(21)
        returned = chance.choice([None, due, due + timedelta(chance.randint(1, 40)), due - timedelta(3)])
        loans.append((id, chance.randint(1, 15), chance.randint(1, 6), lent, due, returned))
    return books, members, loans


def text(cell):
    return cell.isoformat() if isinstance(cell, date) else cell


def stored(tables, path):
    base = sqlite3.connect(path)
    base.execute("CREATE TABLE books (id INTEGER PRIMARY KEY, title TEXT NOT NULL, author TEXT NOT NULL)")
    base.execute("CREATE TABLE members (id INTEGER PRIMARY KEY, name TEXT NOT NULL)")
    base.execute(
        "CREATE TABLE loans (id INTEGER PRIMARY KEY, book_id INTEGER NOT NULL, member_id INTEGER NOT NULL,"
        " lent TEXT NOT NULL, due TEXT NOT NULL, returned TEXT)"
    )
    for name, rows in zip(("books", "members", "loans"), tables, strict=True):
        for row in rows:
            marks = ", ".join("?" * len(row))
            base.execute(f"INSERT INTO {name} VALUES ({marks})", [text(cell) for cell in row])
    base.commit()
    base.close()
    path.chmod(0o644)


def authors(books, members, loans):
    counts = Counter(author for _, _, author in books)
    return sorted(([author, count] for author, count in counts.items()), key=lambda row: (-row[1], row[0]))


def unread(books, members, loans):
    lent = {book for _, book, *_ in loans}
    return sorted([title] for id, title, _ in books if id not in lent)


def late(books, members, loans):
    days = defaultdict(list)
    for _, _, member, _, due, returned in loans:
        if (returned or TODAY) > due:
            days[member].append(((returned or TODAY) - due).days)
    rows = [[name, len(days[id]), max(days[id])] for id, name in members if days[id]]
    return sorted(rows, key=lambda row: (-row[2], -row[1], row[0]))


libraries = [library() for _ in range(3)]
folder = judge.folder()
paths = [folder / f"{number}.db" for number in range(len(libraries))]
for tables, path in zip(libraries, paths, strict=True):
    stored(tables, path)


def right(expected):
    query = judge.text(f"/app/queries/{expected.__name__}.sql", 10_000)
    if not query:
        return False
    ran = judge.run([sys.executable, "-I", "-c", RUNNER, *map(str, paths)], query)
    return ran.stdout.strip() == json.dumps([expected(*tables) for tables in libraries])


judge.finish({query.__name__: right(query) for query in (authors, unread, late)}, named=True)
