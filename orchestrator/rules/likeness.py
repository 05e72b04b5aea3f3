"""Whether two texts differ only in what differs between any two runs of the same program, and how. Pure.

docs/branching.md lists the classes and argues why a policy gains nothing by them. Each form is bound to what
stands around it in real output, so that a number of an answer is none. Each takes time linear in the text: texts
are a policy's.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from orchestrator.types import Message

AROUND_CHARS = 40  # shown on each side of a difference
MAX_CHARS = (
    1 << 16
)  # of the lines that differ in one message; agents show less. Looking at them takes milliseconds

_DAY, _MONTH = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)", r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_ISO_DAY, _HOUR = r"(?:19|20)\d\d-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])", r"(?:[01]\d|2[0-3])"
_CLOCK = rf"{_HOUR}:[0-5]\d:[0-5]\d"
_NUMBER, _UNIT = r"\d{1,9}(?:\.\d{1,18})?", r"(?:[mnuµ]s|[mnu]?sec(?:ond)?s?|(?:milli|micro|nano)?seconds?|s)"
_WHEN = r"(?i:time|timestamp|ts|now|epoch|[acm]time|st_[acm]time|created|modified|updated|started|ended|finished)"


@dataclass(frozen=True, slots=True)
class _Form:
    """How a class looks. The pattern's one group is what may differ. `renames`: the same one throughout a text
    stands for the same other one throughout the other text."""

    name: str
    pattern: re.Pattern[str]
    renames: bool = False


def _forms(name: str, *patterns: str, renames: bool = False) -> Iterable[_Form]:
    return (_Form(name, re.compile(pattern, re.MULTILINE), renames) for pattern in patterns)


_HARMLESS = (
    *_forms(
        "address",
        r"(?<= at )(0x[0-9a-f]{6,16})\b",  # <function f at 0x7f2a9fd604a0>
        r"\b(0x(?:0000)?(?:7[ef]|5[56])[0-9a-f]{10})\b",  # hex(id(x)), %p: where Linux puts libraries, stack, heap
        renames=True,
    ),
    *_forms(
        "time",
        # A day alone is as often an answer.
        rf"(?<![\w-])({_ISO_DAY}[T ]{_CLOCK}(?:[.,]\d{{1,9}})?(?: ?[+-]\d\d:?\d\d\b|Z\b| UTC\b)?)",
        rf"({_ISO_DAY} {_HOUR}:[0-5]\d)(?= \S)",  # ls --time-style=long-iso, tar tv
        r"\bdatetime\.datetime\(((?:19|20)\d\d(?:, \d{1,6}){3,6})(?=[,)])",
        rf"\b({_DAY} {_MONTH} [ \d]\d {_CLOCK}(?: [AP]M)?(?: [A-Z]{{3,4}})? (?:19|20)\d\d)\b",  # date, ctime, git
        rf"\b({_DAY}, \d{{1,2}} {_MONTH} (?:19|20)\d\d {_CLOCK})\b",  # e-mail, HTTP
        rf"^[-dlcbps][-rwxsStT]{{9}}[.+@]? {{1,8}}\d{{1,9}}(?: {{1,16}}[\w.-]{{1,32}}){{2}} {{1,16}}\d{{1,15}} "
        rf"({_MONTH} [ \d]\d {_HOUR}:[0-5]\d)(?= )",  # ls -l
        rf"(?<![\w:.])({_CLOCK}[.,]\d{{3,6}})(?![\w:.])",
        rf"\[({_CLOCK})\]",
        rf"^ ({_CLOCK})(?= up )",  # uptime
        rf"\b{_WHEN}(?:_at|_ns|_ms|_s)?[\"']?[:=] ?[\"']?(1\d{{9}}(?:\d{{3}}|\d{{6}}|\d{{9}})?(?:\.\d{{1,9}})?)\b",
    ),
    *_forms(
        "duration",
        r"\bin (\d{1,6}\.\d{1,3}s(?: \(\d{1,2}:\d\d:\d\d\))?)(?!\w)",  # pytest, unittest, cargo
        r"^(\d{1,6}\.\d\ds)(?= (?:call|setup|teardown) )",  # pytest --durations
        rf"\b(?i:took|elapsed(?: time)?|duration|runtime|wall time|total time)[:=]? ?({_NUMBER} ?{_UNIT})\b(?!/)",
        r"\b(?i:elapsed(?: time)?|duration|runtime|wall time)[:=] ?(\d{1,9}\.\d{1,18}(?:e-\d\d)?)(?![\w.])",
        r"(?<![\w:.])(\d{1,2}:[0-5]\d:[0-5]\d\.\d{1,6})(?![\w:.])",  # timedelta
        r"^(?:real|user|sys)[\t ](\d{1,5}m\d{1,2}[.,]\d{1,3}s|\d{1,7}\.\d\d)$",  # time of bash, and of POSIX
        rf"\bbest of \d{{1,4}}: ({_NUMBER} {_UNIT}) per loop",  # timeit
        r"\bcopied, (\d{1,9}(?:\.\d{1,12})?(?:e-\d\d)? s, \d{1,4}(?:\.\d)? [kMGT]?B/s)$",  # dd
        r"\b(?:packages?|up to date) in (\d{1,6}m?s)$",  # npm, uv
        r"^Fetched [\d.,]{1,9} [kMG]?B in (\d{1,5}s \([\d.,]{1,9} [kMG]?B/s\))$",  # apt
        r"^ {1,16}━{1,80} [\d.]{1,8}/[\d.]{1,8} [kMG]?B ([\d.]{1,8} [kMG]?B/s +(?:eta )?\d:\d\d:\d\d)$",  # pip
    ),
    *_forms(
        "temporary name",
        r"(?<=/tmp/)(tmp[a-z0-9_]{8})(?![A-Za-z0-9_])",  # Python's tempfile
        r"(?<=/tmp/)(tmp\.[A-Za-z0-9]{10})(?![A-Za-z0-9_])",  # mktemp
        renames=True,
    ),
)
_SET = re.compile(r"\{([^{}\n]*)\}")
_ELEMENT = re.compile(r"b?'[^'\\\n]*'|b?\"[^\"\\\n]*\"|-?[\w.+-]+|\([^(){}\n]*\)")


def likeness(recorded: str, live: str) -> tuple[str, ...] | None:
    """() for equal texts; the names of what differs, where all of it is harmless; None for any other."""
    if recorded == live:
        return ()
    names, then, now = _masked(recorded, live)
    return tuple(dict.fromkeys(names)) if then == now else None


def talk_likeness(recorded: Sequence[Message], live: Sequence[Message]) -> tuple[str, ...] | None:
    """The same of two conversations; a name for each message with such a difference."""
    if len(recorded) != len(live):
        return None
    names: list[str] = []
    for then, now in zip(recorded, live, strict=True):
        if then == now:
            continue
        alike = _message_likeness(then, now)
        if alike is None:
            return None
        names += alike
    return tuple(names)


def _message_likeness(then: Message, now: Message) -> tuple[str, ...] | None:
    if (then.role, then.name) != (now.role, now.name) or then.role == "assistant":
        return None  # what the model said is what it was
    return likeness(then.content, now.content)


def _masked(recorded: str, live: str) -> tuple[list[str], str, str]:
    """(names of harmless differences, both texts without them). Only lines that differ are looked at, if there are
    as many of them in both."""
    lines = recorded.split("\n"), live.split("\n")
    if len(lines[0]) != len(lines[1]):
        return [], recorded, live
    unlike = [(old, new) for old, new in zip(*lines, strict=True) if old != new]
    then, now = ("\n".join(side) for side in zip(*unlike, strict=True))
    if max(len(then), len(now)) > MAX_CHARS:
        return [], then, now
    names: list[str] = []
    for form in _HARMLESS:
        old, new = form.pattern.findall(then), form.pattern.findall(now)
        if old == new or len(old) != len(new) or (form.renames and not _renamed(old, new)):
            continue
        names.append(form.name)
        without = partial(_without, form.name)
        then, now = form.pattern.sub(without, then), form.pattern.sub(without, now)
    if then != now and (ordered := (_SET.sub(_sorted, then), _SET.sub(_sorted, now)))[0] == ordered[1]:
        names.append("order of a set")
        then, now = ordered
    return names, then, now


def _renamed(old: list[str], new: list[str]) -> bool:
    pairs = set(zip(old, new, strict=True))
    return len(pairs) == len(set(old)) == len(set(new))


def _without(name: str, match: re.Match[str]) -> str:
    start, end = match.start(1) - match.start(), match.end(1) - match.start()
    return f"{match[0][:start]}<{name}>{match[0][end:]}"


def _sorted(match: re.Match[str]) -> str:
    """The set with its elements in one order, if it is one of plain values."""
    text, elements, at = match[1], [], 0
    while (element := _ELEMENT.match(text, at)) is not None:
        elements.append(element[0])
        at = element.end()
        if at == len(text):
            return f"{{{', '.join(sorted(elements))}}}"
        if not text.startswith(", ", at):
            break
        at += 2
    return match[0]


def first_difference(old: Sequence[Message], new: Sequence[Message]) -> str:
    """What differs between two conversations, in one line: the first state, else the first harmless difference."""
    pairs = [(number, *pair) for number, pair in enumerate(zip(old, new, strict=False), 1) if pair[0] != pair[1]]
    if not pairs:
        return f"{len(old)} messages then, {len(new)} now"
    number, before, after = next((pair for pair in pairs if _message_likeness(*pair[1:]) is None), pairs[0])
    if before.role != after.role:
        return f"message {number} is of role {before.role} then, {after.role} now"
    if before.name != after.name:
        return f"message {number} ({after.role}) is by {shortened(before.name)} then, {shortened(after.name)} now"
    _, one, other = _masked(before.content, after.content)
    if one == other:
        one, other = before.content, after.content
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    at = min(len(one), len(other)) if same is None else same
    window = slice(max(0, at - AROUND_CHARS), at + AROUND_CHARS)
    then, now = shortened(one[window]), shortened(other[window])
    return f"message {number} ({after.role}) has {then} then, {now} now"


def shortened(value: object) -> str:
    """For one line of text."""
    text = ascii(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 3 * AROUND_CHARS else text[: 3 * AROUND_CHARS] + "..."
