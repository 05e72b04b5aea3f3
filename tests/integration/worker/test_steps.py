"""Code steps as the agent sees them: real CPython, state kept, values, output and errors in text."""

from __future__ import annotations

import os

import pytest

from sandbox.errors import CodeError
from sandbox.pid1.identity import WORKER_NICE
from tests.integration.worker.conftest import Steps


def test_state_lives_across_steps(steps: Steps) -> None:
    steps.value(
        "import math\nclass Point:\n    x = 3\ndef twice(n):\n    return 2 * n\nnumbers = (n for n in range(9))"
    )
    assert steps.value("next(numbers)") == "0"
    assert steps.value("twice(Point.x) + next(numbers) + math.floor(1.5)") == "8"


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("6 * 7", "42"),
        ("x = 6 * 7", "42"),
        ("x: int = 5", "5"),
        ("x = 1\nx += 2", "3"),
        ("x: int", None),
        ("print('hi')", None),
        ("a, b = 1, 2", None),
        ("def f(): pass", None),
        ("'text'", "text"),
        ("", None),
        ("# nothing", None),
        ("None", None),
        ("match 3:\n    case 3:\n        y = 1", None),
        ("float('nan')", "nan"),
        ("{3}", "{3}"),
        ("__name__", "__main__"),
        ("(y := 4)", "4"),
    ],
)
def test_a_step_shows_its_last_value(steps: Steps, code: str, value: str | None) -> None:
    assert steps.value(code) == value


def test_await_works_at_the_top_level_and_tasks_live_on(steps: Steps) -> None:
    steps.value("import asyncio\nasync def later():\n    await asyncio.sleep(0)\n    return 'done'")
    steps.value("task = asyncio.create_task(later()) if await later() else None")
    assert steps.value("await task") == "done"
    assert steps.value("asyncio.run(later())") == "done"


def test_output_of_python_and_of_child_processes_keeps_its_order(steps: Steps) -> None:
    printed = steps.printed(
        "import subprocess, sys, os\n"
        "print('one')\nsubprocess.run(['echo', 'two'])\nprint('three', file=sys.stderr)\n"
        "os.write(1, b'four\\n')\nprint('five', end='')"
    )
    assert printed == "one\ntwo\nthree\nfour\nfive"


def test_prints_before_an_error_are_kept(steps: Steps) -> None:
    error = steps.error("print('so far')\n1 / 0")
    assert steps.executor.state["_print_outputs"] == "so far\n"
    assert error.endswith("ZeroDivisionError: division by zero")


def test_a_traceback_shows_the_models_lines_alone(steps: Steps) -> None:
    steps.value("import json\ndef load(text):\n    return json.loads(text)")
    lines = steps.error("x = 1\nload('{')").splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1:3] == ['  File "<step 2>", line 2, in <module>', "    load('{')"]
    assert '  File "<step 1>", line 3, in load' in lines
    assert "    return json.loads(text)" in lines
    assert sum("File " in line for line in lines) == 2
    assert any("^^^" in line for line in lines)


def test_causes_and_groups_are_shown(steps: Steps) -> None:
    error = steps.error(
        "try:\n    {}['k']\nexcept KeyError as e:\n    raise ExceptionGroup('both', [ValueError('v')]) from e"
    )
    assert "KeyError: 'k'" in error
    assert "direct cause" in error
    assert "ValueError: v" in error
    assert "sandbox" not in error


def test_a_syntax_error_points_at_its_place(steps: Steps) -> None:
    error = steps.error("x = 1\ny = = 2")
    assert error.splitlines()[:2] == ['  File "<step 1>", line 2', "    y = = 2"]
    assert error.endswith("SyntaxError: invalid syntax")


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("exit()", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("def f(): f()\nf()", "RecursionError"),
        ("x = []\nfor _ in range(10**5): x = [x]\nrepr(x)", "RecursionError"),
        ("class Bad(Exception):\n    def __str__(self): raise SystemExit\nraise Bad", "Bad"),
        ("class Loud:\n    def __str__(self): 1 / 0\nLoud()", "ZeroDivisionError"),
        ("b'\\xff'.decode()", "UnicodeDecodeError"),
        ("'\\x00' + chr(0)\nimport nothing_like_it", "ModuleNotFoundError"),
        ("input()", "EOFError"),
        ("async def f(): raise ValueError('inside')\nawait f()", "ValueError: inside"),
        ("raise GeneratorExit", "GeneratorExit"),
    ],
)
def test_whatever_is_raised_is_an_observation_and_the_state_stays(steps: Steps, code: str, shown: str) -> None:
    steps.value("kept = 1")
    assert shown in steps.error(code)
    assert steps.value("kept") == "1"


def test_long_output_keeps_its_beginning_and_end(steps: Steps) -> None:
    steps.begin(max_output_chars=1_000)
    printed = steps.printed("print('begin' + 'x' * 3_000_000 + 'end')")
    assert printed.startswith("begin")
    assert printed.endswith("end\n")
    assert "... output truncated: " in printed
    assert len(printed) < 1_100
    value = steps.value("'y' * 10**6")
    assert value is not None
    assert len(value) <= 1_000
    assert len(steps.error("raise ValueError('z' * 10**6)")) <= 1_000
    assert steps.printed("print('short')") == "short\n"


def test_output_that_is_no_text_does_not_disturb(steps: Steps) -> None:
    assert steps.printed("import os\nos.write(1, b'\\xff\\x00ok')") == "\ufffd\x00ok"
    assert steps.printed("print('\\ud800')") == "\\ud800\n"
    assert steps.value("'\\ud800'") == "?"


def test_classes_can_be_pickled_for_multiprocessing(steps: Steps) -> None:
    code = (
        "import multiprocessing\ndef square(n):\n    return n * n\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool:\n"
        "    squares = pool.map(square, range(4))\nsquares"
    )
    assert steps.value(code) == "[0, 1, 4, 9]"
    assert steps.value("import pickle\nclass A: n = 5\npickle.loads(pickle.dumps(A())).n") == "5"


def test_modules_written_by_the_model_can_be_imported(steps: Steps) -> None:
    steps.value("write_file('my_module_of_mine.py', 'ANSWER = 42')")
    assert steps.value("import my_module_of_mine\nmy_module_of_mine.ANSWER") == "42"


def test_the_worker_knows_nothing_of_our_packages_and_environment(steps: Steps) -> None:
    names = steps.value("import os\nsorted(os.environ)")
    ours = ["PATH", "HOME", "PWD", "LANG", "TZ", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE"]
    assert names == str(sorted([*ours, "USER", "LOGNAME", "OMP_NUM_THREADS", "PYTHON_CPU_COUNT"]))
    assert "ModuleNotFoundError" in steps.error("import sandbox")
    assert steps.value("import os\nos.getcwd()") == str(steps.workspace)
    assert steps.value("[fd for fd in range(64) if os.path.exists(f'/proc/self/fd/{fd}')]") == "[0, 1, 2, 3, 4, 5]"
    inherited = "import subprocess\nsubprocess.check_output(['ls', '/proc/self/fd'], close_fds=False, text=True)"
    assert steps.value(inherited) == "0\n1\n2\n3\n"  # 3: the listing itself


def test_the_worker_is_the_first_to_go_and_the_last_to_run(steps: Steps) -> None:
    assert steps.value("open('/proc/self/oom_score_adj').read().strip()") == "1000"
    behind = min(19, os.getpriority(os.PRIO_PROCESS, 0) + WORKER_NICE)
    assert steps.value("import os\nos.getpriority(os.PRIO_PROCESS, 0)") == str(behind)
    assert steps.value("import resource\nresource.getrlimit(resource.RLIMIT_CORE)") == "(0, 0)"
    assert steps.value("os.getsid(0) == os.getpid()") == "True"
    status = (
        "dict(line.split(':\\t', 1) for line in open('/proc/self/status').read().splitlines() if ':\\t' in line)"
    )
    assert steps.value(f"status = {status}\nstatus['CapEff'], status['CapInh'], status['NoNewPrivs']") == str(
        ("0" * 16, "0" * 16, "1")
    )


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        (
            "t = 0\nfor i in range(3):\n    t += i\nprint(t, i, 'i' in globals(), locals() is globals())",
            "3 2 True True",
        ),
        ("'''doc'''\nfrom __future__ import annotations\nfor i in [1]: pass\nprint(i)", "1\n"),
        ("x: int = 1\nfor x in [2, 3]: pass\nprint(x, __annotations__)", "3 {'x': <class 'int'>}"),
        ("i = 9\nfor j in range(2):\n    k = [i for i in range(3)]\nprint(i, j, k)", "9 1 [0, 1, 2]"),
        ("while True:\n    if (n := 5) > 3: break\nprint(n)", "5\n"),
        ("for i in range(1):\n    def f(i=i): return i\n    class C: i = 7\nprint(f(4), C.i, i)", "4 7 0"),
        (
            "for n in [1]:\n    try: 1 / 0\n    except ZeroDivisionError as n: pass\nprint('n' in globals())",
            "False",
        ),
        ("for n in [1, 2]:\n    del n\nprint('n' in globals())", "False"),
        ("for i in range(2):\n    total = missing + i", "NameError: name 'missing' is not defined"),
        ("for _ in [1]:\n    import json, os.path as p\nprint(json.dumps(p.basename('/a/b')))", '"b"'),
        ("for v in [1, [2]]:\n    match v:\n        case [w]: pass\n        case w: pass\nprint(v, w)", "[2] 2"),
        ("async def g():\n    yield 3\nasync for a in g(): b = a\nprint(b)", "3\n"),
        ("for __x in [1]: print(__x, __name__)", "1 __main__"),
        ("for i in range(2): exec('i = 5'); print(i, eval('i'))", "5 5\n5 5"),
        ("print = lambda *a: None\nfor i in [1]: len = 3\ndel print, len\nprint(len('ab'), i)", "2 1"),
    ],
)
def test_loops_of_a_step_mean_what_they_say(steps: Steps, code: str, shown: str) -> None:
    try:
        seen = steps.printed(code)
    except CodeError as error:
        seen = str(error)
    assert shown in seen
