"""The values of a sheet's cells."""

import re

from sheet.formula import parse


def values(rows):
    """Rows of cells' texts → rows of the texts of their values."""
    return [[value(cell) for cell in row] for row in rows]


def value(cell):
    if cell.startswith("="):
        return parse(cell[1:])
    if re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", cell):
        return shown(float(cell))
    return cell


def shown(number):
    return f"{number:.4f}"
