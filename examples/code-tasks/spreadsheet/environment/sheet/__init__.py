"""A small spreadsheet: `python3 -m sheet < cells.csv > values.csv`."""
