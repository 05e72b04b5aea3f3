"""The names of cells: A1 is in row 0 and column 0."""

import re


def place(name):
    """The row and the column of a cell's name."""
    letters, digits = re.fullmatch(r"([A-Z]+)([1-9][0-9]*)", name).groups()
    column = 0
    for letter in letters:
        column = column * 26 + ord(letter) - ord("A")
    return int(digits) - 1, column
