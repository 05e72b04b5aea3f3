"""A quarter for each way to call the program; each is tried with several calls."""

import random
import sys

import judge

chance = random.Random(8)
UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
WRONG = ("", "1x", "m", "1h1h", "1m1h", "-5", "1.5h", "1H", "1h 5m", "5s3", "1d2", "1_0")


def duration():
    units = [unit for unit in UNITS if chance.random() < 0.5] or ["m"]
    numbers = [chance.randint(0, 150) for _ in units]
    text = "".join(f"{number}{unit}" for number, unit in zip(numbers, units, strict=True))
    return text, str(sum(number * UNITS[unit] for number, unit in zip(numbers, units, strict=True)))


def number():
    seconds = chance.choice([0, 59, 60, 3600, 86400, 86399, chance.randint(0, 10**6), chance.randint(0, 10**4)])
    rest, text = seconds, ""
    for unit, size in UNITS.items():
        if rest >= size:
            text += f"{rest // size}{unit}"
            rest %= size
    return str(seconds), text or "0s"


def pairs(make):
    return zip(*(make() for _ in range(chance.randint(2, 6))), strict=True)


def printed(arguments, results, stdin=""):
    ran = judge.run([sys.executable, "/app/duration.py", *arguments], stdin)
    return ran.status == 0 and ran.stdout.rstrip("\n").split("\n") == list(results)


def forward():
    return all(printed(*pairs(duration)) for _ in range(3)) and printed(["45", "0", "2d"], ["45", "0", "172800"])


def back():
    calls = [pairs(number) for _ in range(3)]
    return all(printed(["--back", *given], results) for given, results in calls)


def from_input():
    given, results = pairs(duration)
    back_given, back_results = pairs(number)
    lines, back_lines = "\n \n".join(given) + "\n\n", "\n".join(back_given)
    return printed([], results, lines) and printed(["--back"], back_results, back_lines)


def refused():
    """Bad ones are refused, among good ones that are not."""
    for wrong in WRONG:
        good, results = pairs(duration)
        ran = judge.run([sys.executable, "/app/duration.py", *good, wrong, "1y"])
        if ran.status != 2 or ran.stdout or ran.stderr.rstrip("\n") != f"invalid: {wrong}":
            return False
    return printed(good, results) and not printed(["--back", "1h"], ["1h"])


judge.finish({"forward": forward(), "back": back(), "from_input": from_input(), "refused": refused()})
