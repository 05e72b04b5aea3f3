#!/bin/sh
set -eu
cat > /app/earlier.py <<'END'
"""Reads whole numbers, one per line. Prints for each how many of the earlier ones were smaller."""

import sys
from bisect import bisect_left, insort

seen = []
for line in sys.stdin:
    number = int(line)
    print(bisect_left(seen, number))
    insort(seen, number)
END
