"""Code that breaks its own process: an observation each time, and the agent goes on with a good worker."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from sandbox.errors import CodeError, MemoryUsedUp, StepTimeout
from tests.fakes.worker_host import worker_link
from tests.integration.worker.conftest import Steps


def assert_goes_on(steps: Steps) -> None:
    """The next steps work as on the first day."""
    assert steps.value("1 + 1") == "2"
    assert steps.printed("print('still here')") == "still here\n"
    assert "ZeroDivisionError" in steps.error("1 / 0")
    assert steps.answer("final_answer('fine')") == b"fine"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import os\nos._exit(3)", "ended with exit code 3"),
        ("import os\nos._exit(0)", "ended with exit code 0"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "killed by signal SIGSEGV"),
        ("import os\nos.execv('/bin/true', ['true'])", "ended with exit code 0"),
        ("import os\nos.closerange(0, 256)", "ended with exit code"),
        ("import os\nos.write(4, b'\\xff\\xff\\xff\\xff')", "more than a frame may hold"),
        ("import os\nos.write(4, b'\\0\\0\\0\\2{]')", "invalid frame"),
        ("import os\nos.write(4, b'\\0\\0\\0\\2[]')", "invalid frame"),
        ("import os\nn = b'[' * 60000\nos.write(4, len(n).to_bytes(4, 'big') + n)", "invalid frame"),
        (
            'import os\nf = b\'{"step":9,"kind":"done"}\'\nos.write(4, len(f).to_bytes(4, \'big\') + f)',
            "another step",
        ),
        (
            'import os\nf = b\'{"step":1,"kind":"done"}\'\nos.write(4, len(f).to_bytes(4, \'big\') + f)',
            "an invalid",
        ),
        (
            'import os\nf = b\'{"step":1,"kind":"call","name":[]}\'\nos.write(4, len(f).to_bytes(4, \'big\') + f)',
            "invalid frame",
        ),
        ("import os\nos.close(4)", "ended with exit code"),
        ("import os\nos.close(4)\nwhile True: pass", "closed its pipe"),
        ("import sys\ndel sys.stdout", "ended with exit code"),
    ],
)
def test_a_broken_worker_is_an_observation(steps: Steps, code: str, told: str) -> None:
    steps.value("x = 1")
    steps.begin()
    assert told in steps.error(code)
    assert "NameError" in steps.error("x")
    assert_goes_on(steps)


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time\nwhile True:\n    try: time.sleep(60)\n    except BaseException: pass",
        "import signal\nfor n in {*range(1, 32)} - {9, 19}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        "while True: print('flood' * 1000)",
        "import os\nos.read(3, 10)",
        "import threading\nthreading.Thread(target=print).start()\nthreading.Event().wait()",
        "7 ** 10**9",  # one instruction that never lets go of the interpreter
    ],
)
def test_a_step_past_its_limit_costs_its_variables(steps: Steps, code: str) -> None:
    steps.begin(timeout_s=0.6)
    began = time.monotonic()
    error = steps.error(code)
    assert "longer than 0.6 seconds" in error
    assert "variables" in error
    assert time.monotonic() - began < 30
    assert_goes_on(steps)


@pytest.mark.parametrize(
    "code",
    [
        "import builtins\nfor n in ('print', 'len', 'str', 'open', 'type', 'id'): setattr(builtins, n, None)",
        "import builtins\nbuiltins.__import__ = None",
        "import builtins\nbuiltins.__dict__.clear()",
        "import json\njson.dumps = json.loads = json.JSONEncoder.encode = json.JSONDecoder.decode = None",
        "import os\nos.write = os.read = os.getpid = os._exit = None",
        "import sys\nsys.modules.clear()",
        "import sys\nfor name in list(sys.modules): sys.modules[name] = None",
        "import traceback, linecache\ntraceback.TracebackException.format = None\nlinecache.cache.clear()",
        "import sys\nsys.stdout = sys.stderr = None",
        "import sys\nsys.stdout.close()\nsys.stderr.close()",
        "import os\nos.close(0)\nos.close(2)",
        "import os\nos.close(3)",
        "import sys\nsys.settrace(lambda *a: 1 / 0)",
        "import sys\nsys.excepthook = sys.unraisablehook = None\nimport atexit\natexit.register(print, 'bye')",
        "import signal\nsignal.signal(14, lambda *a: 1 / 0)\nsignal.setitimer(signal.ITIMER_REAL, 0.05)",
        "import sys\nsys.setrecursionlimit(60)",
        "import os\nos.chdir('/')\nos.environ.clear()",
        "import threading\nthreading.RLock = threading.Thread = None\nimport gc\ngc.disable()",
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (5, 5))",
    ],
)
def test_a_poisoned_process_cannot_disturb_the_loop(steps: Steps, code: str) -> None:
    """It may cost the worker; it is never more than an observation."""
    for step in (code, "1 + 1", "1 + 1"):  # the poisoned worker may answer, fail, or be replaced
        try:
            steps.executor(step)
        except CodeError:
            assert "worker.py" not in steps.executor.state["_print_outputs"]
    steps.begin()
    assert_goes_on(steps)


def test_replaced_builtins_do_not_even_cost_the_worker(steps: Steps) -> None:
    steps.value("import builtins, json, os\nkept = 7")
    steps.value("builtins.len = builtins.str = builtins.isinstance = json.dumps = os.write = os.read = None")
    assert steps.value("kept") == "7"
    assert "NameError" in steps.error("missing")
    assert steps.answer("final_answer(kept)") == b"7"


def test_a_fork_that_falls_through_ends_there(steps: Steps) -> None:
    printed = steps.printed("import os\npid = os.fork()\nprint('child' if pid == 0 else os.waitpid(pid, 0)[1])")
    assert sorted(printed.split()) == ["0", "child"]
    assert steps.value("pid != 0") == "True"
    forked = "import os\nif os.fork() == 0:\n    final_answer('from the child')\nos.wait()[1]"
    assert steps.value(forked) == "0"
    failed = steps.printed("if os.fork() == 0:\n    1 / 0\nprint(os.waitstatus_to_exitcode(os.wait()[1]))")
    assert "ZeroDivisionError" in failed
    assert failed.endswith("1\n")
    left = "import sys\nif os.fork() == 0:\n    sys.exit(4)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))"
    assert steps.printed(left) == "4\n"
    assert_goes_on(steps)


def test_nothing_survives_a_wiped_worker(steps: Steps) -> None:
    steps.begin(timeout_s=5.0)
    code = (
        "import os, subprocess, sys, time\n"
        "print(subprocess.Popen(['sleep', '99'], start_new_session=True).pid)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        print(os.getpid())\n"
        "        time.sleep(99)\n"
        "    os._exit(0)\n"
        "while True: pass"
    )
    assert "longer than 5 seconds" in steps.error(code)
    daemons = steps.executor.state["_print_outputs"].split()
    assert len(daemons) == 2
    assert not any(Path("/proc", pid).exists() for pid in daemons)
    assert_goes_on(steps)


@pytest.mark.skipif(os.geteuid() != 0, reason="workers with a user of their own take root")
def test_a_late_killer_of_one_worker_does_not_reach_the_next() -> None:
    with tempfile.TemporaryDirectory() as workspace:
        Path(workspace).chmod(0o777)
        with worker_link(Path(workspace), first_killer_late_s=1.0) as link:
            link.replace()
            link.replace()  # the first worker is wiped: the second killer comes before the first
            with pytest.raises(StepTimeout):  # and not WorkerDied
                link.receive(time.monotonic() + 2.0)


def test_a_daemon_that_outlives_its_worker_does_not_hide_the_death(steps: Steps) -> None:
    code = "import os, time\nif os.fork() == 0:\n    time.sleep(60)\n    os._exit(0)\nos._exit(5)"
    assert "exit code 5" in steps.error(code)
    assert_goes_on(steps)


def test_a_worker_that_dies_between_steps_is_noticed(steps: Steps, tmp_path: Path) -> None:
    now = tmp_path / "now"
    pid = steps.value(
        "import os, threading, time\n"
        f"def die():\n    while not os.path.exists({str(now)!r}): time.sleep(0.01)\n    os._exit(9)\n"
        "threading.Thread(target=die).start()\nos.getpid()"
    )
    now.touch()
    deadline = time.monotonic() + 120
    while Path("/proc", pid).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "exit code 9" in steps.error("1 + 1")
    assert_goes_on(steps)


def test_output_of_left_over_threads_goes_to_the_next_step(steps: Steps) -> None:
    steps.value("import threading, time\nt = threading.Timer(0.1, print, ['late'])\nt.start()")
    assert steps.printed("t.join()\nprint('now')") == "late\nnow\n"


def test_three_memory_kills_running_end_the_episode(steps: Steps) -> None:
    kill = "import os\nos.kill(os.getpid(), 9)"
    assert "too much memory" in steps.error(kill)
    assert "too much memory" in steps.error(kill)
    with pytest.raises(MemoryUsedUp):
        steps.executor(kill)


def test_a_step_without_a_memory_kill_starts_the_count_again(steps: Steps) -> None:
    kill = "import os\nos.kill(os.getpid(), 9)"
    for _ in range(3):
        assert "too much memory" in steps.error(kill)
        assert "too much memory" in steps.error(kill)
        steps.value("1")


def test_a_kill_the_kernel_did_not_count_is_not_blamed_on_memory(steps: Steps) -> None:
    steps.kills = 4
    steps.begin()
    assert "killed by signal SIGKILL" in steps.error("import os\nos.kill(os.getpid(), 9)")
    steps.kills = 5
    assert "too much memory" in steps.error("import os\nos.kill(os.getpid(), 9)")
