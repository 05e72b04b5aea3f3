"""What differs between two runs of the same program is harmless where it has one of the written forms; all else is
state. The samples of harmless differences are of programs that were run twice."""

import os
import subprocess
import sys
import time

import pytest

from orchestrator.rules.likeness import MAX_CHARS, first_difference, likeness
from orchestrator.types import Message

_HARMLESS = {
    "address": (
        ("<__main__.A object at 0x7f2a9f92d990>", "<__main__.A object at 0x7f459db5d890>"),
        ("<function f at 0x7f2a9fd604a0> 0x7f2a9fd604a0", "<function f at 0x7f459dfb84a0> 0x7f459dfb84a0"),
    ),
    "time": (
        ("2026-11-28 09:22:49.645848", "2026-11-28 09:23:05.159308"),
        ("2026-11-28T09:22:49.645900+00:00", "2026-11-28T09:23:05.159347+00:00"),
        (
            "datetime.datetime(2026, 11, 28, 9, 22, 49, 645913)",
            "datetime.datetime(2026, 11, 28, 9, 23, 5, 159357)",
        ),
        ("Sat Nov 28 09:22:49 2026", "Sat Nov 28 09:23:05 2026"),
        ("Sat Nov 28 09:22:50 UTC 2026", "Sat Nov 28 09:23:07 UTC 2026"),
        ("09:22:49.645927", "09:23:05.159368"),
        ("Sat, 28 Nov 2026 09:22:49 GMT", "Sat, 28 Nov 2026 09:23:05 GMT"),
        (
            "{'timestamp': 1795857769.693665, 'ts': 1795857769693}",
            "{'timestamp': 1795857785.2257318, 'ts': 1795857785225}",
        ),
        ("2026-11-28 09:22:50,385 x", "2026-11-28 09:23:07,553 x"),
        ("-rw-r--r-- 1 root root 0 Nov 28 09:22 a.txt", "-rw-r--r-- 1 root root 0 Nov 28 09:23 a.txt"),
        (
            "-rw-r--r-- 1 root root 0 2026-11-28 09:22:50.468035008 +0000 a.txt",
            "-rw-r--r-- 1 root root 0 2026-11-28 09:23:07.712034462 +0000 a.txt",
        ),
        ("-rw-r--r-- root/root 0 2026-11-28 09:22 a.txt", "-rw-r--r-- root/root 0 2026-11-28 09:23 a.txt"),
        ("Date:   Sat Nov 28 09:23:01 2026 +0000", "Date:   Sat Nov 28 09:23:29 2026 +0000"),
        (" 09:23:01 up 48 min,  0 user", " 09:23:30 up 48 min,  0 user"),
    ),
    "duration": (
        ("took 12 ms", "took 14 ms"),
        ("elapsed: 0.012299342000005709", "elapsed: 0.013850622000063595"),
        ("0:00:00.012299", "0:00:00.013851"),
        ("Elapsed time: 0.012 seconds", "Elapsed time: 0.014 seconds"),
        ("Ran 1 test in 0.014s", "Ran 1 test in 0.012s"),
        ("0.01s call     test_x.py::T::test_a", "0.02s call     test_x.py::T::test_a"),
        ("1 passed in 0.41s", "1 passed in 0.57s"),
        ("\nreal\t0m0.100s\nuser\t0m0.001s", "\nreal\t0m0.102s\nuser\t0m0.000s"),
        ("real 0.10", "real 0.11"),
        ("100 loops, best of 5: 11.5 nsec per loop", "100 loops, best of 5: 10.1 nsec per loop"),
        (
            "1048576 bytes (1.0 MB, 1.0 MiB) copied, 0.000631566 s, 1.7 GB/s",
            "1048576 bytes (1.0 MB, 1.0 MiB) copied, 0.000779305 s, 1.3 GB/s",
        ),
        ("added 2 packages, and audited 3 packages in 2s", "added 2 packages, and audited 3 packages in 733ms"),
        ("Fetched 16.9 MB in 5s (3491 kB/s)", "Fetched 16.9 MB in 8s (1988 kB/s)"),
        ("   ━━━━ 38.9/38.9 MB 115.5 MB/s eta 0:00:00", "   ━━━━ 38.9/38.9 MB 9.0 MB/s eta 0:00:00"),
    ),
    "temporary name": (
        ("/tmp/tmp.gVGW6gWXqV", "/tmp/tmp.61dAH0WHTz"),
        ("/tmp/tmpubislqf_/out.txt", "/tmp/tmp0ijbg3c2/out.txt"),
        ("/tmp/tmp2ni16d4n.py", "/tmp/tmpq263y47h.py"),
    ),
    "order of a set": (
        ("{'fig', 'pear', 'kiwi', 'apple'}", "{'apple', 'pear', 'kiwi', 'fig'}"),
        ("frozenset({'a b', 'c, d', 'e', ('x', 1)})", "frozenset({('x', 1), 'a b', 'c, d', 'e'})"),
    ),
}
_STATE = {
    "a number of an answer": ("The answer is 41", "The answer is 42"),
    "a count": ("3 passed in 0.41s", "2 passed in 0.41s"),
    "a count beside a duration": ("3 passed in 0.41s", "2 passed in 0.57s"),
    "an exit code": ("exit code 0", "exit code 1"),
    "a file's name": (
        "-rw-r--r-- 1 root root 0 Nov 28 09:22 a.txt",
        "-rw-r--r-- 1 root root 0 Nov 28 09:22 b.txt",
    ),
    "a file's size": ("-rw-r--r-- 1 root root 10 Nov 28 09:22 a", "-rw-r--r-- 1 root root 12 Nov 28 09:23 a"),
    "a file's owner": ("-rw-r--r-- 1 root root 10 Nov 28 09:22 a", "-rw-r--r-- 1 agent root 10 Nov 28 09:23 a"),
    "a day": ("He was born on 1969-07-20", "He was born on 1969-07-21"),
    "a year": ("in Nov 2026", "in Nov 2027"),
    "the hour of a train": ("It leaves at 14:03", "It leaves at 14:05"),
    "seconds of a record": ("He ran 100 m in 9.58 seconds", "He ran 100 m in 9.63 seconds"),
    "a half-life": ("a half-life of 12 s", "a half-life of 13 s"),
    "a speed": ("duration: 3 s/m", "duration: 4 s/m"),
    "a hexadecimal number": ("0xdeadbeef", "0xcafebabe"),
    "a decimal id": ("140234567890123", "140234567890999"),
    "a large number": ("the sum is 1795857769", "the sum is 1795857785"),
    "a commit, whose hash names its files, too": ("[master 2ae72d8] y", "[master 4b7718d] y"),
    "load": ("load average: 10.62, 5.47", "load average: 13.68, 6.76"),
    "another folder": ("/tmp/tmpubislqf_/a", "/srv/tmpubislqf_/a"),
    "a file in a temporary folder": ("/tmp/tmpubislqf_/a", "/tmp/tmp0ijbg3c2/b"),
    "a name that begins like a temporary one": ("/tmp/tmpfile", "/tmp/tmpfolder"),
    "which of two are one object": (
        "<A object at 0x7f2a9f92d990> <A object at 0x7f2a9f92d990>",
        "<A object at 0x7f459db5d890> <A object at 0x7f459db5d8d0>",
    ),
    "an element of a set": ("{'fig', 'pear'}", "{'fig', 'plum'}"),
    "how often it is there": ("{1, 1, 2}", "{1, 2, 2}"),
    "elements with commas": ("{'a, b', 'c, d'}", "{'a, d', 'c, b'}"),
    "order of a list": ("[1, 2, 3]", "[3, 2, 1]"),
    "order of a dict": ("{'a': 1, 'b': 2}", "{'b': 2, 'a': 1}"),
    "form of a time": ("Sat Nov 28 09:22:49 2026", "2026-11-28 09:22:49"),
    "no time": ("2026-11-28 09:22:49", "2026-13-28 29:22:49"),
    "one line more": ("took 12 ms", "took 12 ms\n"),
    "a harmless one and another": ("took 12 ms: 4", "took 13 ms: 5"),
    "the word for a class": ("<A object at 0x7f2a9f92d990>", "<A object at <address>>"),
}


@pytest.mark.parametrize(("name", "pair"), [(name, pair) for name, pairs in _HARMLESS.items() for pair in pairs])
def test_harmless_differences_have_names(name: str, pair: tuple[str, str]) -> None:
    assert likeness(*pair) == (name,)
    text = "Execution logs:\n{}\nLast output from code snippet:\nNone"
    assert likeness(*map(text.format, pair)) == (name,)


@pytest.mark.parametrize("pair", _STATE.values(), ids=_STATE)
def test_all_other_differences_are_state(pair: tuple[str, str]) -> None:
    assert likeness(*pair) is None
    assert likeness(*reversed(pair)) is None


def test_several_classes_in_one_text() -> None:
    then = "<A object at 0x7f2a9f92d990>\ntook 12 ms\n{1, 'a'}\nsame"
    now = "<A object at 0x7f459db5d890>\ntook 14 ms\n{'a', 1}\nsame"
    assert likeness(then, now) == ("address", "duration", "order of a set")


def test_a_program_that_is_really_run_twice() -> None:
    program = "\n".join(
        (
            "import datetime, tempfile, time, unittest",
            "print(object(), {'fig', 'pear', 'kiwi', 'apple', 'plum', 'date', 'lime'})",
            "print(datetime.datetime.now().isoformat(), time.ctime())",
            "print(tempfile.mkdtemp.__name__, tempfile.mktemp())",
            "began = time.perf_counter()",
            "print(f'took {(time.perf_counter() - began) * 1e6:.2f} us')",
        )
    )
    then, now = (
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "TMPDIR": "/tmp"},
        ).stdout
        for _ in range(2)
    )
    assert then != now
    assert {"address", "time", "temporary name"} <= set(likeness(then, now) or ())


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [
        *("0", " at 0x7f2a9fd604", "/tmp/tmp", "{", "{1, ", "{'a', 'b', ", "-rwxr-xr-x 1 ", "took 12 ", "in 1."),
        *("elapsed time: 1", " ", "1:", "{(", "real 1", "Sat Nov 28 09:", "time=1"),
        "-rw-r--r--" + " " * 8 + "1" + " " * 16,
    ],
)
def test_hostile_texts_take_linear_time(part: str) -> None:
    def seconds(chars: int) -> float:
        text = part * (chars // len(part))
        began = time.process_time()
        likeness(text + "x", text + "y")
        return time.process_time() - began

    assert seconds(MAX_CHARS - 64) < 1
    assert seconds(1 << 20) < 1, "what is too long is not looked at"


def test_the_error_shows_the_state_and_not_what_is_harmless() -> None:
    then = Message("system", "Be brief."), Message("user", "took 12 ms"), Message("user", "took 12 ms\nrows: 3")
    now = Message("system", "Be brief."), Message("user", "took 13 ms"), Message("user", "took 14 ms\nrows: 4")
    told = first_difference(then, now)
    assert told == "message 3 (user) has 'took <duration>\\nrows: 3' then, 'took <duration>\\nrows: 4' now"
    assert first_difference(then[:2], now[:2]) == "message 2 (user) has 'took 12 ms' then, 'took 13 ms' now"
    assert first_difference(then[:1], then) == "1 messages then, 3 now"
    assert (
        first_difference(then[:1], (Message("user", "Be brief."),)) == "message 1 is of role system then, user now"
    )
