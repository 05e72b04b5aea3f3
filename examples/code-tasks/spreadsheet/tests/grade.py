"""A fifth each for arithmetic, names, functions, errors and cycles.

Formulas are made together with their values: no parser of ours has to be right.
"""

import csv
import io
import operator
import random
import re
import sys
from fractions import Fraction

import judge

chance = random.Random(12)
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]{0,3}[1-9])?")

CALCULATE = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
WRONG = (
    "=", "=1+", "=*2", "=(1", "=1)", "=1 2", "=A1:A2", "=a1", "=FOO(1)", "=SUM()", "=SUM(1,)", "=2$", "=1..2",
    "=A0",
)  # fmt: skip


class Zero(Exception):
    """Something is divided by 0."""


def blank():
    return chance.choice(["", "", "", " ", "  "])


def number():
    text = chance.choice([str(chance.randint(0, 99)), f"{chance.randint(0, 999) / 100:.2f}"])
    return text, Fraction(text)


def factor(depth, cells):
    kind = chance.choice("nnnc-(") if depth else "n"
    if kind == "-":
        text, value = factor(depth - 1, cells)
        return "-" + blank() + text, -value
    if kind == "(":
        text, value = total(depth - 1, cells)
        return f"({blank()}{text}{blank()})", value
    return chance.choice(list(cells.items())) if kind == "c" and cells else number()


def chain(make, operators, depth, cells):
    text, value = make(depth, cells)
    for _ in range(chance.choice([0, 1, 1, 2])):
        sign = chance.choice(operators)
        more, right = make(depth, cells)
        if sign == "/" and right == 0:
            raise Zero
        text += blank() + sign + blank() + more
        value = CALCULATE[sign](value, right)
    return text, value


def product(depth, cells):
    return chain(factor, "*/", depth, cells)


def total(depth, cells):
    return chain(product, "+-", depth, cells)


def formula(cells=None):
    """A formula and its value, with names of these cells in it."""
    while True:
        try:
            text, value = total(3, cells or {})
        except Zero:
            continue
        if abs(value) < 10**7:
            return f"={blank()}{text}", value


def name(row, column):
    letters = ""
    column += 1
    while column:
        column, rest = divmod(column - 1, 26)
        letters = chr(ord("A") + rest) + letters
    return f"{letters}{row + 1}"


def shows(text, value):
    """Whether a cell's text is this value: a text, an error, or a number up to the fifth decimal."""
    if isinstance(value, str):
        return text == value
    number = len(text) < 50 and text != "-0" and NUMBER.fullmatch(text)
    return number and abs(Fraction(text) - value) <= Fraction("0.0000501")


def right(rows):
    """Whether the sheet has its values. Rows of (cell, value)."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([cell for cell, _ in row] for row in rows)
    ran = judge.run([sys.executable, "-m", "sheet"], out.getvalue())
    values = judge.table(ran.stdout)
    return [len(row) for row in values] == [len(row) for row in rows] and all(
        shows(text, value)
        for given, row in zip(values, rows, strict=True)
        for text, (_, value) in zip(given, row, strict=True)
    )


def plain():
    text, value = number()
    return chance.choice([(text, value), (f"-{text}", -value)])


def sheet(cells):
    """Rows from lines of `cell is value`, with `|` between the cells."""
    pairs = [[cell.strip().split(" is ") for cell in line.split("|")] for line in cells.strip().splitlines()]
    return [[(cell, Fraction(is_) if NUMBER.fullmatch(is_) else is_) for cell, is_ in row] for row in pairs]


def arithmetic():
    fixed = sheet("=2+3*4 is 14 | =(2+3)*4 is 20 | =10-4-3 is 3 | =24/4/3 is 2 | =2*-3 is -6 | =--1 is 1")
    return right(fixed + [[formula(), ("a text", "a text"), ("", ""), plain(), formula()] for _ in range(12)])


def names():
    """Cells refer to earlier and to later ones, of 60 columns, to empty ones and to none."""
    rows, columns = 5, 60
    places = chance.sample([(row, column) for row in range(rows) for column in range(columns)], rows * columns)
    cells, known = {}, {"ZZ99": Fraction(0)}
    for at, place in enumerate(places):
        cell = ("", Fraction(0)) if at % 9 == 0 else plain() if at % 3 else formula(known)
        cells[place] = cell
        known[name(*place)] = cell[1]
        if len(known) > 8:
            del known[chance.choice(list(known))]
    whole = [[cells[row, column] for column in range(columns)] for row in range(rows)]
    return right([[(cell, value if cell else "") for cell, value in row] for row in whole])


def functions():
    grid = [[chance.choice([plain(), plain(), ("", ""), ("text", "text")]) for _ in range(4)] for _ in range(6)]
    grid[5] = [("", ""), ("word", "word"), ("", ""), ("", "")]

    def made():
        function = chance.choice(["SUM", "MIN", "MAX", "COUNT"])
        texts, numbers = [], []
        for _ in range(chance.choice([1, 1, 2, 3])):
            top, left = chance.randint(0, 5), chance.randint(0, 3)
            bottom, end = chance.randint(top, 5), chance.randint(left, 3)
            if chance.random() < 0.3:
                text, value = formula()
                texts.append(text[1:])
                numbers.append(value)
                continue
            texts.append(f"{name(top, left)}{blank()}:{blank()}{name(bottom, end)}")
            inside = [value for row in grid[top : bottom + 1] for _, value in row[left : end + 1]]
            numbers += [value for value in inside if not isinstance(value, str)]
        value = {"SUM": sum, "MIN": min, "MAX": max, "COUNT": len}[function](numbers) if numbers else 0
        return f"{function}{blank()}({blank()}{f'{blank()},{blank()}'.join(texts)}{blank()})", Fraction(value)

    def cell():
        text, value = made()
        other, add = made()
        return chance.choice([(f"={text}", value), (f"=2*{text} - {other}", 2 * value - add)])

    nested = sheet("=MAX(SUM(B6:D6), MIN(4, 9)*2, -COUNT(1,2)) is 8")
    return right(grid + [[cell() for _ in range(4)] for _ in range(5)] + nested)


def errors():
    rows = sheet("""
        word is word | 0 is 0 | =1/B1 is #DIV | =C1+1 is #DIV | =SUM(B1:D1) is #DIV
        =A1 is #VALUE | =-A1*2 is #VALUE | =MAX(1, A1) is #VALUE | =COUNT(A1) is #VALUE | =A2 is #VALUE
        =5/(2-2) is #DIV | =5/C9 is #DIV | =COUNT(A3:A3) is #DIV | =0/5 is 0 | =-0 is 0
    """)
    rows += [[(text, "#SYNTAX"), (f"={name(row, 0)}*2", "#SYNTAX")] for row, text in enumerate(WRONG, 3)]
    return right(rows)


def cycles():
    rows = sheet("""
        =A1 is #CYCLE         | =C1 is #CYCLE | =B1+1 is #CYCLE       | =C1*2 is #CYCLE | =E2 is 3        | 4 is 4
        =SUM(A2:B2) is #CYCLE | 1 is 1        | =D2 is #CYCLE         | =E3 is #CYCLE   | 3 is 3
        =F1+E1+E1 is 10       | =A3+A3 is 20  | =MAX(B2, A2) is #CYCLE | =B3 is 20      | =C2-1 is #CYCLE
    """)
    deep = [[(f"=A{row + 2}+1", Fraction(60 - row + 1))] for row in range(60)] + [[("1", Fraction(1))]]
    # Each cell needs the next one twice: values are computed once, or this takes for ever.
    wide = [[(f"=A{row + 2}+A{row + 2}", Fraction(2 ** (40 - row)))] for row in range(40)] + [[("1", Fraction(1))]]
    return right(rows) and right(deep) and right(wide)


judge.finish({part.__name__: part() for part in (arithmetic, names, functions, errors, cycles)}, named=True)
