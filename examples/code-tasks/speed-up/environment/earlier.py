"""Reads whole numbers, one per line. Prints for each how many of the earlier ones were smaller."""

import sys

seen = []
for line in sys.stdin:
    number = int(line)
    smaller = 0
    for other in seen:
        if other < number:
            smaller += 1
    print(smaller)
    seen.append(number)
