"""A fifth for each expression that tells all texts right. Python's own `re` decides, in a process with limits."""

import json
import random
import sys

import judge

chance = random.Random(6)
MATCHER = """
import json, re, sys
pattern, texts = json.load(sys.stdin)
pattern = re.compile(pattern)
print(json.dumps([pattern.fullmatch(text) is not None for text in texts]))
"""


def time():
    return f"{chance.randint(0, 23):02}:{chance.randint(0, 59):02}"


def color():
    return "#" + "".join(chance.choices("0123456789abcdefABCDEF", k=chance.choice([3, 6])))


def version():
    numbers = ".".join(str(chance.choice([0, 1, 7, 10, 23, 100])) for _ in range(3))
    return numbers + chance.choice(["", "-" + "".join(chance.choices("abz019", k=chance.randint(1, 4)))])


def amount():
    number = chance.randint(0, 10 ** chance.randint(1, 10))
    return f"{number:,}" + chance.choice(["", f".{chance.randint(0, 99):02}"])


def quoted():
    return '"' + "".join(chance.choices(["a", " ", "'", "n", r"\"", r"\\"], k=chance.randint(0, 8))) + '"'


# Whether a text is what the name says, written without the expressions of the solution.
def is_time(text):
    hour, _, minute = text.partition(":")
    two = all(len(part) == 2 and part.isdigit() for part in (hour, minute))
    return two and int(hour) < 24 and int(minute) < 60


def is_color(text):
    return text[:1] == "#" and len(text) in (4, 7) and all(c in "0123456789abcdefABCDEF" for c in text[1:])


def is_version(text):
    numbers, dash, name = text.partition("-")
    whole = [part.isdigit() and part == str(int(part)) for part in numbers.split(".")]
    allowed = all(c in "abcdefghijklmnopqrstuvwxyz0123456789" for c in name)
    return len(whole) == 3 and all(whole) and bool(dash) == bool(name) and allowed


def is_amount(text):
    whole, dot, cents = text.partition(".")
    digits = whole.replace(",", "")
    right = digits.isdigit() and whole == f"{int(digits):,}"
    return right and (len(cents) == 2 and cents.isdigit() if dot else True)


def is_quoted(text):
    if len(text) < 2 or text[0] != '"' or text[-1] != '"':
        return False
    inside = text[1:-1].replace(r"\\", "").replace(r"\"", "")
    return '"' not in inside and "\\" not in inside


KINDS = {
    "time": (time, is_time, ["24:00", "23:60", "7:05", "07:5", "19:59", "20:00", "12:300", "12.30", ""]),
    "color": (color, is_color, ["#ffff", "#ab", "fff", "#ggg", "##fff", "#12345", "#1234567", "#"]),
    "version": (version, is_version, ["1.2", "1.2.3.4", "01.2.3", "1.2.3-", "1.2.3-RC", "1.2.3rc", "1.2.03"]),
    "amount": (amount, is_amount, ["1234", "1,23", "0,123", "1,234.5", "1,2345", ",123", "12.345", "00", "", "."]),
    "quoted": (quoted, is_quoted, ['"', '"\\"', '"\\n"', '"a"b"', '"\\\\"', '"\\\\\\"', "a", 'a"b"', '"a\\']),
}  # fmt: skip


def changed(text):
    """The text with one character more, less or another, mostly wrong then."""
    at = chance.randint(0, len(text))
    put = chance.choice(["", *'0159:.,-#afFG"\\ x'])
    return text[:at] + put + text[at + chance.randint(0, 1) :]


def right(kind, pattern):
    make, holds, edges = KINDS[kind]
    good = [make() for _ in range(60)]
    texts = edges + good + [changed(text) for text in good] + [text * (60 // max(1, len(text))) for text in edges]
    # An expression that tries all ways takes years for these.
    texts += [text[0] + text[len(text) // 2] * 58 for text in good]
    if pattern is None:
        return False
    ran = judge.run([sys.executable, "-I", "-c", MATCHER], json.dumps([pattern.strip("\r\n"), texts]), cpu_s=4)
    return ran.stdout.strip() == json.dumps([holds(text) for text in texts])


judge.finish({kind: right(kind, judge.text(f"/app/patterns/{kind}.txt", 1000)) for kind in KINDS})
