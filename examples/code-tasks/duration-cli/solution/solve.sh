#!/bin/sh
set -eu
cat > /app/duration.py <<'END'
import re
import sys

FORM = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)
SIZES = (86400, 3600, 60, 1)


def seconds(text):
    if re.fullmatch("[0-9]+", text):
        return str(int(text))
    match = FORM.fullmatch(text)
    if not text or not match:
        raise ValueError(text)
    return str(sum(int(number or 0) * size for number, size in zip(match.groups(), SIZES)))


def duration(text):
    if not re.fullmatch("[0-9]+", text):
        raise ValueError(text)
    rest, parts = int(text), []
    for letter, size in zip("dhms", SIZES):
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count}{letter}")
    return "".join(parts) or "0s"


arguments = sys.argv[1:]
convert = seconds
if arguments[:1] == ["--back"]:
    convert = duration
    del arguments[0]
given = arguments or [line.strip() for line in sys.stdin if line.strip()]
try:
    results = [convert(text) for text in given]
except ValueError as error:
    print(f"invalid: {error}", file=sys.stderr)
    sys.exit(2)
for result in results:
    print(result)
END
