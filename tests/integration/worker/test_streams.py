"""Prints arrive in the step that made them, whatever the code did to the streams and descriptors below them."""

from __future__ import annotations

import pytest

from tests.integration.worker.conftest import Steps

WRAP = "import io, os, sys, logging\n"


@pytest.mark.parametrize(
    "code",
    [
        "sys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding='utf-8')",
        "sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8', line_buffering=True)",
        "sys.stdout = io.TextIOWrapper(sys.stdout.buffer, 'latin-1', 'replace')",
        "sys.stdout = open(sys.stdout.fileno(), 'w', encoding='utf-8', buffering=1)",
        "sys.stdout = os.fdopen(1, 'w', 1)",
        "sys.stdout = os.fdopen(sys.stdout.fileno(), 'w', 4096)",
        "sys.stdout = io.TextIOWrapper(open(sys.stdout.fileno(), 'wb', 0), write_through=True)",
        "sys.stdout = open(os.dup(1), 'w')",
        "sys.stdout = open('/dev/stdout', 'w')",
        "sys.stdout = open('/dev/fd/1', 'w')",
        "sys.stdout = open('/proc/self/fd/1', 'a')",
        "sys.stdout.reconfigure(encoding='utf-16', line_buffering=False)",
        "import codecs; sys.stdout = codecs.getwriter('utf-8')(sys.stdout.buffer)",
        "import codecs; sys.stdout = codecs.getwriter('utf-8')(sys.stdout.detach())",
        "sys.stdout = sys.stderr",
        "sys.stderr.detach()",
        "sys.__stdout__.detach(); sys.stdout = open(1, 'w', closefd=False)",
    ],
)
def test_a_stream_that_a_step_makes_anew_carries_its_prints(steps: Steps, code: str) -> None:
    kept = "utf-16" in code
    printed = steps.printed(f"{WRAP}kept = 41\n{code}\nprint('one')")
    assert kept or printed == "one\n"
    assert steps.printed("kept += 1\nprint('two', kept, flush=True)") == "two 42\n"
    assert (
        steps.printed("import subprocess; subprocess.run(['echo', 'three']); print('four', end='')")
        == "three\nfour"
    )


@pytest.mark.parametrize(
    "code",
    [
        "with open(sys.stdout.fileno(), 'w') as out: out.write('one\\n')",
        "out = os.fdopen(1, 'w'); print('one', file=out); out.close()",
        "open(1, 'w').write('one\\n')",
        "print('one'); os.close(1)",
        "print('one'); sys.stdout.close()",
        "print('one'); sys.stdout.detach().close()",
        "print('one'); sys.stdout.buffer.close()",
        "print('one'); os.closerange(1, 3)",
        "print('one'); import asyncio\nasync def f():\n    await (asyncio.get_running_loop()).connect_write_pipe("
        "asyncio.Protocol, sys.stdout)\nasyncio.run(f())",
        "print('one'); os.dup2(os.open(os.devnull, os.O_WRONLY), 1)",
        "print('one'); os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())",
    ],
)
def test_what_a_step_closes_is_open_in_the_next_and_no_print_gets_into_a_file(steps: Steps, code: str) -> None:
    assert steps.printed(f"{WRAP}kept = 41\n{code}") == "one\n"
    step = (
        "import subprocess, sys\nkept += 1\nfile = open('a.txt', 'w'); other = open('b.txt', 'w')\n"
        "print('two', kept)\n"
        "print('three', file=sys.stderr)\nsubprocess.run(['sh', '-c', 'echo four; echo five >&2'])\n"
        "file.close(); other.close()\nprint(repr(open('a.txt').read() + open('b.txt').read()))"
    )
    assert steps.printed(step) == "two 42\nthree\nfour\nfive\n''\n"


def test_a_file_opened_in_the_step_that_closed_standard_output_gets_no_print(steps: Steps) -> None:
    code = (
        f"{WRAP}with open(sys.stdout.fileno(), 'w') as out: out.write('one\\n')\n"
        "file = open('c.txt', 'w')\nprint('two')\nprint('three', file=sys.stderr)\n"
        "file.write('mine'); file.close(); print(open('c.txt').read())"
    )
    assert steps.printed(code) == "one\ntwo\nthree\nmine\n"
    assert steps.printed("print('four')") == "four\n"


def test_a_pipe_that_took_the_number_of_standard_output_gets_no_print(steps: Steps) -> None:
    assert steps.printed(f"{WRAP}os.close(1)\nends = os.pipe()\nprint('one', ends[0])") == "one 1\n"
    assert steps.printed("print('two')") == "two\n"
    assert steps.value("os.set_blocking(ends[0], False); os.close(ends[1]); os.read(ends[0], 9)") == "b''"


def test_what_lies_in_a_stream_of_the_steps_own_arrives_in_that_step(steps: Steps) -> None:
    for way in (
        "io.TextIOWrapper(sys.stdout.detach())",
        "io.TextIOWrapper(sys.stdout.buffer)",
        "io.BufferedWriter(sys.stdout.buffer)",
        "open(os.dup(1), 'w')",
        "open('/dev/stdout', 'w')",
        "open('/dev/stderr', 'wb')",
        "open(1, 'w', closefd=False)",
    ):
        steps.begin()
        text = "b'one'" if "Buffered" in way or "wb" in way else "'one'"
        assert steps.printed(f"{WRAP}out = {way}\n_ = out.write({text})") == "one", way
        assert steps.printed("print('two')") == "two\n", way


def test_a_redirection_holds_as_in_python_and_ends_with_its_step(steps: Steps) -> None:
    redirected = (
        f"{WRAP}saved = os.dup(1); log = open('log.txt', 'w'); _ = os.dup2(log.fileno(), 1)\n"
        "print('into the file'); os.system('echo this too')"
    )
    assert steps.printed(redirected) == ""
    assert steps.printed("log.close(); print(open('log.txt').read(), end='')") == "into the file\nthis too\n"
    assert steps.printed("_ = os.dup2(saved, 1); os.system('echo back'); print('again')") == "back\nagain\n"
    steps.value("import contextlib\nbuffer = io.StringIO()")
    within = "with contextlib.redirect_stdout(buffer): print('caught')\nprint('free')"
    assert steps.printed(within) == "free\n"
    assert steps.printed("contextlib.redirect_stdout(buffer).__enter__()\nprint('caught again')") == ""
    assert steps.printed("print(repr(buffer.getvalue()))") == "'caught\\ncaught again\\n'\n"
    assert steps.printed("sys.stdout = open('own.txt', 'w'); print('mine', end='')") == ""
    assert steps.value("open('own.txt').read()") == "mine"


@pytest.mark.parametrize(
    "between",
    ["", "sys.stderr.detach()", "sys.stderr.close()", "sys.stderr = open(2, 'w')", "os.close(2)",
     "sys.stderr = io.TextIOWrapper(sys.stderr.detach())"],
)  # fmt: skip
def test_a_log_of_a_former_step_goes_on(steps: Steps, between: str) -> None:
    steps.printed(f"{WRAP}from sys import stderr\nlogging.basicConfig(format='%(message)s', force=True)")
    assert steps.printed("logging.warning('one')") == "one\n"
    steps.value(f"{between}\nNone")
    assert steps.printed("logging.warning('two'); print('three', file=stderr)") == "two\nthree\n"


def test_standard_streams_can_be_opened_by_name(steps: Steps) -> None:
    code = (
        "import subprocess\nwith open('/dev/stdout', 'w') as out: out.write('one\\n')\n"
        "with open('/dev/stderr', 'a') as out: out.write('two\\n')\n"
        "subprocess.run('echo three > /dev/stdout; echo four | tee /dev/stderr', shell=True)\n"
        "import logging; log = logging.getLogger('x'); log.addHandler(logging.FileHandler('/dev/stdout'))\n"
        "log.warning('five')"
    )
    assert steps.printed(code) == "one\ntwo\nthree\nfour\nfour\nfive\n"


@pytest.mark.parametrize(
    "end",
    [
        "os._exit(3)",
        "os.kill(os.getpid(), 9)",
        "os.abort()",
        "import ctypes; ctypes.string_at(0)",
        "import time; time.sleep(60)",
        "while True: pass",
    ],
)
def test_a_print_without_a_newline_is_kept_when_the_process_is_killed(steps: Steps, end: str) -> None:
    steps.begin(timeout_s=1.0)
    steps.error(f"import os, sys\nprint('so', 'far', end='...')\nsys.stderr.write('and this')\n{end}")
    assert steps.executor.state["_print_outputs"].startswith("so far...and this")


def test_prints_of_threads_and_children_arrive_in_their_step(steps: Steps) -> None:
    code = (
        "import threading, multiprocessing, os, sys\n"
        "def say(n): print('line', n)\n"
        "threads = [threading.Thread(target=say, args=(n,)) for n in range(3)]\n"
        "for thread in threads: thread.start(); thread.join()\n"
        "child = multiprocessing.get_context('fork').Process(target=say, args=(3,)); child.start(); child.join()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    print('line 4', end='\\n'); os._exit(0)\n"
        "_ = os.waitpid(pid, 0)"
    )
    assert steps.printed(code) == "".join(f"line {n}\n" for n in range(5))


def test_a_long_print_is_whole_though_signals_interrupt_it(steps: Steps) -> None:
    code = (
        "import signal\nsignal.signal(signal.SIGALRM, lambda *_: None)\n"
        "signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)\n"
        "for _ in range(200): print('x' * 70_000)\nsignal.setitimer(signal.ITIMER_REAL, 0)"
    )
    steps.begin(max_output_chars=20_000_000)
    assert steps.printed(code) == ("x" * 70_000 + "\n") * 200


def test_a_step_that_holds_all_files_it_may_breaks_no_stream(steps: Steps) -> None:
    error = steps.error("print('one', end='')\nheld = []\nwhile True: held.append(open('/dev/null'))")
    assert "Too many open files" in error
    assert steps.executor.state["_print_outputs"] == "one"
    assert (
        steps.printed("import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach())\nprint('two')")
        == "two\n"
    )
    assert steps.printed("print(len(held) > 100)") == "True\n"


def test_the_workers_own_descriptors_are_not_passed_to_programs(steps: Steps) -> None:
    listed = steps.value(
        "import os, subprocess; subprocess.check_output('ls /proc/self/fd', shell=True, text=True)"
    )
    assert listed is not None
    assert set(listed.split()) <= {"0", "1", "2", "3"}, "3 is the folder that ls reads"
