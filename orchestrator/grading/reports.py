"""Reads which tests passed, from reports of CTRF and JUnit and from what pytest prints. For people: no score is
made of it. Untrusted and bounded: what cannot be read is left out.
"""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any
from xml.etree.ElementTree import ParseError, XMLPullParser

from orchestrator.grading.left_behind import LeftBehind, TooLarge
from orchestrator.rules.text import holds_more, valid
from orchestrator.types import TestOutcome, TestResult

MAX_TESTS = 500
_BYTES, _REPORTS = 4 << 20, 20
_PARTS = 50_000  # of one report: elements, or objects and arrays. While more are read, all else stands still
_NAME_CHARS, _DETAIL_CHARS = 300, 500
_CTRF: dict[str, TestOutcome] = {
    "passed": "passed",
    "failed": "failed",
    "skipped": "skipped",
    "pending": "skipped",
}
_JUNIT: dict[str, TestOutcome] = {"failure": "failed", "error": "error", "skipped": "skipped"}
_PYTEST: dict[str, TestOutcome] = {
    "PASSED": "passed",
    "XPASS": "passed",
    "FAILED": "failed",
    "XFAIL": "skipped",
    "SKIPPED": "skipped",
    "ERROR": "error",
}
_NAMES = "|".join(_PYTEST)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# `PASSED tests/a.py::b - why` of -rA, and `tests/a.py::b PASSED   [ 50%]` of -v. Never read twice: time is linear.
_ID = r"[^\s\[]++(?:\[[^\n]*?\])?"
_LINE = re.compile(rf"^(?:({_NAMES}) ({_ID})(?: - ([^\n]*))?|({_ID}) ({_NAMES})(?: +\[ *\d+%\])?)$", re.MULTILINE)


def test_results(left: LeftBehind, stdout: str) -> tuple[TestResult, ...]:
    """Of the first report that has any."""
    names = left.names()
    reports = [name for name in names if name.endswith(".json") and name != "reward.json"]
    for name in (*reports, *(name for name in names if name.endswith(".xml")))[:_REPORTS]:
        is_json = name.endswith(".json")
        try:
            content = left.read(name, _BYTES) or b""
            if holds_more(content, _PARTS) if is_json else content.count(b"<") > 2 * _PARTS:
                continue
            read = _ctrf if is_json else _junit
            results = tuple(islice(read(content.decode("utf-8")), MAX_TESTS))
        except (ValueError, RecursionError, TooLarge, ParseError):
            continue
        if results:
            return results
    return tuple(islice(_pytest(_COLOURS.sub("", stdout)), MAX_TESTS))


def _result(name: object, outcome: TestOutcome, detail: object = "") -> TestResult:
    text = detail if isinstance(detail, str) else ""
    return TestResult(valid(str(name))[:_NAME_CHARS], outcome, valid(text.strip())[:_DETAIL_CHARS])


def _ctrf(text: str) -> Iterator[TestResult]:
    tests: Any = json.loads(text)
    for name in ("results", "tests"):
        tests = tests.get(name) if isinstance(tests, dict) else None
    for test in tests if isinstance(tests, list) else ():
        if isinstance(test, dict) and "name" in test:
            outcome = _CTRF.get(str(test.get("status")), "error")
            yield _result(test["name"], outcome, test.get("message") or test.get("trace") or "")


def _junit(text: str) -> Iterator[TestResult]:
    if "<!" in text.replace("<![CDATA[", ""):  # entities could grow without end
        raise ValueError("it declares something")
    parser: Any = XMLPullParser(("end",))
    parser.feed(text)
    for _, case in parser.read_events():
        if case.tag == "testcase":
            named = ".".join(part for part in (case.get("classname"), case.get("name")) if part)
            ends = [child for child in case if child.tag in _JUNIT]
            if ends:
                yield _result(named, _JUNIT[ends[0].tag], ends[0].get("message") or ends[0].text or "")
            else:
                yield _result(named, "passed")


def _pytest(text: str) -> Iterator[TestResult]:
    """Each test once: what the summary says, which has reasons, before what was printed while it ran."""
    seen: dict[str, TestResult] = {}
    for match in _LINE.finditer(text):
        outcome, name, detail = match[1] or match[5], match[2] or match[4], match[3] or ""
        if "::" in name.partition("[")[0] and (name not in seen or detail):
            seen[name] = _result(name, _PYTEST[outcome], detail)
    yield from seen.values()


def tally(tests: Iterable[TestResult]) -> dict[TestOutcome, int]:
    """How many of each outcome."""
    counts: dict[TestOutcome, int] = {}
    for test in tests:
        counts[test.outcome] = counts.get(test.outcome, 0) + 1
    return counts
