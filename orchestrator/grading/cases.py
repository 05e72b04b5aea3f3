"""Compares what the agent's program printed for each case with what it was to print. Here, where no program of the
agent's ever is: what was expected lies in no sandbox.
"""

import re
from collections.abc import Sequence

from orchestrator.grading.left_behind import LeftBehind, TooLarge
from orchestrator.rules.text import valid
from orchestrator.types import Case, TestResult

OUTPUTS = "outputs"
MAX_CASES = 200
_BYTES = 64 << 20
_SHOWN_CHARS = 200
_HEAD = re.compile(rb"(\d{1,6}) (-?\d{1,5}) (\d{1,9})\n")
_WHY = {-1001: "it could not be started", -1002: "it did not end in its time", -1003: "it printed too much"}


def case_results(left: LeftBehind, cases: Sequence[Case]) -> tuple[TestResult, ...]:
    """One for each case, in their order. A case without a record is one that did not end."""
    try:
        content = left.read(OUTPUTS, _BYTES) or b""
    except TooLarge:
        content = b""
    seen: dict[int, tuple[int, bytes]] = {}
    at = 0
    while match := _HEAD.match(content, at):
        number, status, size = map(int, match.groups())
        seen[number] = status, content[match.end() : match.end() + size]
        at = match.end() + size
    return tuple(_result(number, case, *seen.get(number, (-1002, b""))) for number, case in enumerate(cases))


def _result(number: int, case: Case, status: int, printed: bytes) -> TestResult:
    name = f"case {number + 1}"
    if status in _WHY:
        return TestResult(name, "error", _WHY[status])
    if status != 0:
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        return TestResult(name, "failed", f"it ended with {how}")
    text = printed.decode("utf-8", "replace")
    if _lines(text) == _lines(case.expected):
        return TestResult(name, "passed")
    return TestResult(name, "failed", f"it printed {valid(text)[:_SHOWN_CHARS]!r}")


def _lines(text: str) -> list[str]:
    """Without white space at the ends of lines, and without empty lines at the end."""
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines
