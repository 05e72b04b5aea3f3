"""Nothing that an endpoint, a model or a data set says steers the terminal it is shown on."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
import unicodedata
from pathlib import Path

import pytest

from orchestrator.rules.text import printable

ROOT = Path(__file__).parents[2]
CONTROLS = "a\x1b]0;owned\x07b\x9b2Jc\x7fd\re\x1b[1An"
FORMATS = "\u202ef\u2066g\u200bh\ufeffi\u2028j\ue000k\u034fl\u3164m\U000e0041"
HOSTILE = f"{FORMATS}{CONTROLS} THE END"
BEGINNINGS = {
    "a warning": "logging.getLogger('x').warning('the endpoint answered: %s', HOSTILE)",
    "a line": "print('note:', HOSTILE)",
    "lines": "sys.stderr.writelines([HOSTILE, HOSTILE])",
    "a traceback": "raise RuntimeError(HOSTILE)",
    "a library's warning": "warnings.warn(HOSTILE)",
    "an error of ours": "sys.exit(main(['verify', HOSTILE]))",
    "a live view's line": "with view as v: v.say(HOSTILE)",
    "a warning during a live view": "with view: logging.getLogger('x').warning('%s', HOSTILE)",
    "a print during a live view": "with view: print(HOSTILE)",
    "a table": "Console(sys.stdout).print(Text(HOSTILE))",
    "a closing table": "closing_table(Tally(), [('report', HOSTILE)])",
}
PROGRAM = """
import logging, os, sys, warnings
from rich.text import Text
from orchestrator.cli import main
from orchestrator.terminal.open import open_progress
from orchestrator.terminal.closing import closing_table
from orchestrator.run.tally import Tally
HOSTILE = os.environ["HOSTILE"]
try:
    from orchestrator.terminal.console import Console
    from orchestrator.terminal.streams import guard_streams
    guard_streams()
except ImportError:
    from rich.console import Console as Rich
    Console = lambda stream: Rich(file=stream)
view = open_progress(3, Tally(), sys.stderr)
"""


def on_a_terminal(program: str, **environ: str) -> str:
    """What a terminal gets of it."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "TERM": "xterm", **environ}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=theirs, stdout=theirs, stderr=theirs, env=environ, cwd=ROOT
    ) as process:
        os.close(theirs)
        told = b""
        while True:
            try:
                piece = os.read(ours, 65_536)
            except OSError:  # the last one has closed it
                break
            if not piece:
                break
            told += piece
        process.wait()
    os.close(ours)
    return told.decode()


@pytest.mark.slow
@pytest.mark.parametrize("way", BEGINNINGS)
def test_what_others_say_reaches_a_terminal_as_plain_text(way: str) -> None:
    told = on_a_terminal(PROGRAM + BEGINNINGS[way], HOSTILE=HOSTILE)
    assert "THE END" in told
    for part in ("\x1b]0;", "\x07", "\x9b", "\x1b[1An", "\u034f", "\u3164", "\re"):
        assert part not in told
    assert not {c for c in told if unicodedata.category(c) in ("Cf", "Co", "Cs", "Zl", "Zp")}


def test_a_warning_is_one_line() -> None:
    told = on_a_terminal(PROGRAM + BEGINNINGS["a warning"], HOSTILE="well\norchestrator: all is done")
    assert len(told.strip().splitlines()) == 1


def test_bars_of_libraries_are_drawn_in_place() -> None:
    program = (
        "from orchestrator.terminal.streams import guard_streams\nguard_streams()\n"
        "from tqdm import tqdm\n"
        "for _ in tqdm(range(3), desc='out', mininterval=0):\n    list(tqdm(range(2), desc='in', leave=False))"
    )
    told = on_a_terminal(program)
    assert told.count("\rout: ") >= 3
    assert "\x1b[A" in told
    assert " [A" not in told


def test_printable_keeps_what_people_write() -> None:
    for text in ("", "plain", "Grüße, 東京 مرحبا שלום", "e\u0301", "naïve – “quoted” 😀"):
        assert printable(text) == text
    assert printable("a" + "\u0301" * 500) == "a" + "\u0301" * 4
    assert printable("one\ntwo\tthree") == "one two three"
    assert printable("\ud800") == " "
