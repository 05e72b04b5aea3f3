"""Tools of the host, called from a code step through the runner."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from sandbox.errors import LeaseEnded
from tests.integration.worker.conftest import Steps, failing


def test_positional_and_keyword_arguments_arrive_by_name(steps: Steps) -> None:
    steps.value("search('a')\nsearch(query='b', limit=2)\nsearch('c', 3)")
    assert [(name, json.loads(arguments)) for name, arguments in steps.calls] == [
        ("search", {"query": "a"}),
        ("search", {"query": "b", "limit": 2}),
        ("search", {"query": "c", "limit": 3}),
    ]


def test_the_output_is_a_plain_string(steps: Steps) -> None:
    steps.search = lambda arguments: "première ligne\n\ud83d\ude00"
    assert steps.value("search('x').splitlines()[0]") == "première ligne"


def test_a_tool_that_gives_a_list_gives_python_values(steps: Steps) -> None:
    steps.search = lambda arguments: '[{"title": "größer", "date": null, "n": 1.5}]'
    assert steps.value("lookup('x')[0]") == str({"title": "größer", "date": None, "n": 1.5})
    assert steps.value("type(search('x')).__name__") == "str"


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("search()", "TypeError: search() misses query"),
        ("search(1, 2, 3)", "TypeError: search() takes 2 arguments (query, limit), 3 were given"),
        ("search('a', query='b')", "TypeError: search() got two values for argument 'query'"),
        ("search('a', colour=1)", "TypeError: search() has no argument 'colour'; it takes query, limit"),
        ("search({1})", "ToolError: search(): the arguments must be plain"),
        ("search(float('nan'))", "ToolError: search(): the arguments must be plain"),
        ("x = []\nx.append(x)\nsearch(x)", "Error"),
    ],
)
def test_a_call_that_cannot_work_is_the_codes_own_error(steps: Steps, call: str, told: str) -> None:
    error = steps.error(call)
    assert told in error
    assert "sandbox" not in error
    assert steps.calls == []


def test_a_failing_tool_raises_in_the_code(steps: Steps) -> None:
    steps.search = failing("the page does not exist")
    assert steps.error("search('x')").endswith("\nToolError: the page does not exist")
    assert (
        steps.value("try:\n    search('x')\nexcept Exception as e:\n    told = str(e)\ntold")
        == "the page does not exist"
    )


def test_waiting_for_a_tool_does_not_use_up_the_step(steps: Steps) -> None:
    steps.begin(timeout_s=2.0)

    def slow(arguments: str) -> str:
        time.sleep(2.5)
        return "late"

    steps.search = slow
    assert steps.value("search('x')") == "late"


def test_a_call_given_up_by_an_alarm_does_not_confuse_the_next(steps: Steps) -> None:
    def slow(arguments: str) -> str:
        time.sleep(2.0 if "slow" in arguments else 0)
        return arguments

    steps.search = slow
    code = (
        "import signal\n"
        "def ring(*_): raise TimeoutError('given up')\n"
        "signal.signal(signal.SIGALRM, ring)\n"
        "signal.setitimer(signal.ITIMER_REAL, 1.0)\n"
        "try: search('slow')\nexcept TimeoutError as e: told = str(e)\n"
    )
    steps.value(code)
    assert steps.value("told, search('next')") == str(("given up", '{"query":"next"}'))
    assert steps.value(code + "search('again')") == '{"query":"again"}'


def test_threads_can_call_tools(steps: Steps) -> None:
    code = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(4) as pool:\n    found = list(pool.map(search, 'abcd'))\nlen(found)"
    )
    assert steps.value(code) == "4"
    assert len(steps.calls) == 4


def test_a_left_over_thread_cannot_call_between_steps(steps: Steps, tmp_path: Path) -> None:
    now, heard = tmp_path / "now", tmp_path / "heard"
    code = (
        "import os, threading, time\nheard = []\n"
        f"def late():\n    while not os.path.exists({str(now)!r}): time.sleep(0.01)\n"
        "    try: search('late')\n    except Exception as e: heard.append(str(e))\n"
        f"    open({str(heard)!r}, 'w').close()\n"
        "t = threading.Thread(target=late)\nt.start()"
    )
    steps.value(code)
    now.touch()
    deadline = time.monotonic() + 120
    while not heard.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert steps.value("heard") == "['search() works only while a step runs']"
    assert steps.calls == []


def test_a_forked_child_cannot_call(steps: Steps) -> None:
    printed = steps.printed(
        "import os\nif os.fork() == 0:\n"
        "    try: search('x')\n    except Exception as e: print(e, flush=True)\n"
        "    os._exit(0)\nos.wait()"
    )
    assert "works only in the main process" in printed


def test_the_end_of_the_lease_is_never_shown_to_the_code(steps: Steps) -> None:
    def ended(arguments: str) -> str:
        raise LeaseEnded("budget")

    steps.search = ended
    with pytest.raises(LeaseEnded):
        steps.executor("try:\n    search('x')\nexcept BaseException:\n    pass")


def test_an_unknown_tool_is_refused_by_the_runner(steps: Steps) -> None:
    forged = (
        "import os, json\n"
        "f = json.dumps({'kind': 'call', 'step': 1, 'call': 1, 'name': 'rm', 'arguments': '{}'}).encode()\n"
        "os.write(4, len(f).to_bytes(4, 'big') + f)\n"
        "n = int.from_bytes(os.read(3, 4), 'big')\nos.read(3, n).decode()"
    )
    value = steps.value(forged)
    assert value is not None
    assert "there is no tool 'rm'" in json.loads(value)["error"]
    assert steps.calls == []
