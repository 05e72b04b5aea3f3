#!/bin/sh
set -eu
cd /app/sheet
sed -i 's/ord(letter) - ord("A")$/ord(letter) - ord("A") + 1/; s/return int(digits) - 1, column$/return int(digits) - 1, column - 1/' names.py
cat > formula.py <<'END'
"""Formulas: from text to nested tuples that `evaluate` works with."""

import re

TOKEN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|[A-Z]+[1-9][0-9]*(?![0-9A-Za-z])|[A-Z]+|[-+*/(),:])")
NAME = re.compile(r"[A-Z]+[1-9][0-9]*")
FUNCTIONS = ("SUM", "MIN", "MAX", "COUNT")


class Wrong(Exception):
    """The text is no formula."""


def parse(text):
    """The formula after the `=`."""
    tokens, at = [], 0
    text = text.strip()
    while at < len(text):
        match = TOKEN.match(text, at)
        if not match:
            raise Wrong
        tokens.append(match[1])
        at = match.end()
    parser = Parser(tokens)
    tree = parser.sum()
    if parser.next() is not None:
        raise Wrong
    return tree


class Parser:
    def __init__(self, tokens):
        self.tokens = tokens
        self.at = 0

    def next(self):
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self, *allowed):
        token = self.next()
        if token is None or (allowed and token not in allowed):
            raise Wrong
        self.at += 1
        return token

    def sum(self):
        return self.chain(self.product, ("+", "-"))

    def product(self):
        return self.chain(self.factor, ("*", "/"))

    def chain(self, part, operators):
        tree = part()
        while self.next() in operators:
            tree = (self.take(), tree, part())
        return tree

    def factor(self):
        token = self.take()
        if token == "-":
            return ("-", ("number", 0.0), self.factor())
        if token == "(":
            tree = self.sum()
            self.take(")")
            return tree
        if token[0].isdigit():
            return ("number", float(token))
        if NAME.fullmatch(token):
            return ("cell", token)
        if token not in FUNCTIONS:
            raise Wrong
        self.take("(")
        arguments = [self.argument()]
        while self.next() == ",":
            self.take()
            arguments.append(self.argument())
        self.take(")")
        return (token, arguments)

    def argument(self):
        first = self.next()
        if first and NAME.fullmatch(first) and self.tokens[self.at + 1 : self.at + 2] == [":"]:
            self.at += 2
            last = self.take()
            if not NAME.fullmatch(last):
                raise Wrong
            return ("range", first, last)
        return self.sum()
END
cat > evaluate.py <<'END'
"""The values of a sheet's cells."""

import re

from sheet.formula import Wrong, parse
from sheet.names import place


class Error(Exception):
    """Its text is what the cell shows."""


def values(rows):
    """Rows of cells' texts → rows of the texts of their values."""
    sheet = Sheet(rows)
    return [[sheet.shown(row, column) for column in range(len(cells))] for row, cells in enumerate(rows)]


class Sheet:
    def __init__(self, rows):
        self.rows = rows
        self.known = {}
        self.open = set()

    def shown(self, row, column):
        try:
            value = self.value(row, column)
        except Error as error:
            return str(error)
        if isinstance(value, str):
            return value
        text = f"{value:.4f}".rstrip("0").rstrip(".")
        return "0" if text == "-0" else text

    def value(self, row, column):
        """A number or a text; the empty text for a cell that is empty or not there."""
        key = row, column
        if key in self.open:
            raise Error("#CYCLE")
        if key not in self.known:
            self.open.add(key)
            try:
                self.known[key] = self.computed(row, column)
            except Error as error:
                self.known[key] = error
            finally:
                self.open.remove(key)
        if isinstance(self.known[key], Error):
            raise Error(str(self.known[key]))
        return self.known[key]

    def computed(self, row, column):
        if row >= len(self.rows) or column >= len(self.rows[row]):
            return ""
        cell = self.rows[row][column]
        if cell.startswith("="):
            try:
                return self.tree(parse(cell[1:]))
            except Wrong:
                raise Error("#SYNTAX") from None
        return float(cell) if re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", cell) else cell

    def tree(self, tree):
        kind, *parts = tree
        if kind == "number":
            return parts[0]
        if kind == "cell":
            value = self.value(*place(parts[0]))
            if isinstance(value, str) and value:
                raise Error("#VALUE")
            return value or 0.0
        if kind in ("+", "-", "*", "/"):
            left, right = map(self.tree, parts)
            if kind == "/" and right == 0:
                raise Error("#DIV")
            return {"+": left.__add__, "-": left.__sub__, "*": left.__mul__, "/": left.__truediv__}[kind](right)
        numbers = [number for part in parts[0] for number in self.numbers(part)]
        if kind == "COUNT":
            return float(len(numbers))
        return {"SUM": sum, "MIN": min, "MAX": max}[kind](numbers) if numbers else 0.0

    def numbers(self, argument):
        if argument[0] != "range":
            return [self.tree(argument)]
        (top, left), (bottom, right) = map(place, argument[1:])
        cells = [self.value(row, column) for row in range(top, bottom + 1) for column in range(left, right + 1)]
        return [value for value in cells if not isinstance(value, str)]
END
