"""Tools and `print` keep their names, whatever a step called so; files are where Python looks for them."""

from __future__ import annotations

import json

import pytest

from sandbox.errors import CodeError
from sandbox.runner.executor import Reach, WorkerExecutor
from sandbox.runner.tool_calling import PythonTool, WorkerTool
from sandbox.types import SandboxTool, ToolSpec
from sandbox.worker.tools import FILE_TOOLS
from tests.integration.worker.conftest import SEARCH, Steps

NOTE = "Note: {0} is a tool's name. The next step finds the tool there, and in {0}_ what this step called so.\n"
SHOP = "def price(item): return len(item)\nasync def later(item): return item * 2\ndef fail(): raise KeyError('x')"
ITEM = {"item": {"type": "string", "description": ""}}


@pytest.mark.parametrize(
    "code",
    [
        "search = search('a')",
        "def search(query): return 'own'",
        "class search: pass",
        "import json as search",
        "for search in [1, 2]: pass",
        "with open('/dev/null') as search: pass",
        "search: int = 5",
        "(search := 5)",
        "globals()['search'] = None",
        "try: 1 / 0\nexcept ZeroDivisionError as error: search = error",
    ],
)
def test_a_tool_whose_name_a_step_used_is_there_in_the_next(steps: Steps, code: str) -> None:
    assert steps.printed(code) == NOTE.format("search")
    assert steps.value("search('b')") == 'found by {"query":"b"}'
    assert steps.printed("search('c')") == "", "said once"


def test_what_a_step_called_like_a_tool_is_kept_beside_it(steps: Steps) -> None:
    assert steps.value("search = search('a')\nsearch") == 'found by {"query":"a"}'
    assert steps.value("search_") == 'found by {"query":"a"}'
    assert steps.printed("del search, read_file") == ""
    assert steps.value("write_file('x', 'y'); read_file('x') + search('q')") == 'yfound by {"query":"q"}'


def test_a_step_that_fails_or_is_killed_takes_no_tool_along(steps: Steps) -> None:
    steps.error("search = read_file = 1\nsearch / 0")
    assert steps.executor.state["_print_outputs"] == NOTE.format("read_file") + NOTE.format("search")
    assert steps.value("callable(search) and callable(read_file)") == "True"
    steps.error("search = 1\nimport os; os._exit(1)")
    assert steps.value("callable(search)") == "True"


@pytest.mark.parametrize(
    "code",
    [
        "print = 5",
        "def print(*values): pass",
        "import builtins; builtins.print = lambda *values: None",
        "import builtins; del builtins.print",
        "import sys; sys.stdout.write = lambda text: None",
        "import sys; sys.stdout = None",
    ],
)
def test_print_prints_in_the_next_step(steps: Steps, code: str) -> None:
    steps.value(f"{code}\nNone")
    assert steps.printed("print('a', 2, sep='-', end='!')") == "a-2!"


def test_print_is_pythons_own_to_those_who_look(steps: Steps) -> None:
    assert steps.printed("print(*range(300), sep='')") == "".join(map(str, range(300))) + "\n"
    assert steps.printed("print(); print(None, [1], end=None); print('x', 'y', sep=None)") == "\nNone [1]\nx y\n"
    assert "sep must be None or a string, not int" in steps.error("print('a', sep=1)")
    assert (
        steps.printed("import io\nf = io.StringIO()\nprint('a', 1, file=f)\nprint(repr(f.getvalue()))")
        == "'a 1\\n'\n"
    )
    assert steps.value("import pickle, builtins; pickle.loads(pickle.dumps(print)) is builtins.print") == "True"


def test_final_answer_is_there_again_and_what_took_its_name_is_kept(steps: Steps) -> None:
    assert steps.printed("final_answer = 42") == NOTE.format("final_answer")
    assert steps.answer("final_answer(final_answer_)") == b"42"


def _tools(steps: Steps) -> dict[str, WorkerTool]:
    own = [ToolSpec(name, "", ITEM, "string") for name in ("price", "later")]
    own.append(ToolSpec("fail", "", {}, "string"))
    reach = Reach((SEARCH,), tuple(SandboxTool(spec, "shop", SHOP) for spec in own), kind="tool_calling")
    steps.executor = WorkerExecutor(steps.link, steps.executor._settings, reach, steps._call, lambda: None)
    steps.executor.send_variables({})
    made: dict[str, WorkerTool] = {
        spec.name: WorkerTool(spec, steps.executor) for spec in (*FILE_TOOLS, *own, SEARCH)
    }
    return made | {"python": PythonTool(steps.executor, ("*",))}


def test_a_call_reaches_its_tool_whatever_the_name_means_in_code(steps: Steps) -> None:
    tools = _tools(steps)
    assert tools["price"](item="pen") == "3"
    tools["python"](code="price = price('pencil'); search = None")
    tools["python"](
        code="import threading, time\ndef take():\n    while True: globals()['search'] = 1; time.sleep(0)\n"
        "threading.Thread(target=take, daemon=True).start()"
    )
    assert tools["search"](query="b").endswith('found by {"query":"b"}')
    assert tools["later"](item="ab").endswith("abab")
    assert tools["write_file"](path="own.txt", content="x" * 5).endswith("own.txt")


def test_arguments_of_a_call_are_values_and_not_code(steps: Steps) -> None:
    tools = _tools(steps)
    assert tools["search"](query="it's \ud800 {x}") == 'found by {"query":"it\'s \\ud800 {x}"}'
    with pytest.raises(CodeError, match=r"^TypeError: the content must be text, not float$"):
        tools["write_file"](path="a.txt", content=json.loads("NaN"))
    with pytest.raises(CodeError, match=r"^KeyError: 'x'$"):
        tools["fail"]()


def test_file_tools_and_python_agree_on_where_files_are(steps: Steps) -> None:
    steps.value("import os\nos.makedirs('deep/er', exist_ok=True); os.chdir('deep')")
    assert steps.value("write_file('er/a.txt', 'one')") == f"Wrote 3 characters to {steps.workspace}/deep/er/a.txt"
    assert (
        steps.value("open('er/a.txt').read() + read_file('er/a.txt') + read_file('~/deep/er/a.txt')")
        == "oneoneone"
    )
    assert (
        steps.value("open('b.txt', 'w').write('two'); append_to_file('b.txt', '!'); read_file('b.txt')") == "two!"
    )
    assert steps.value("os.chdir('..'); read_file('deep/b.txt')") == "two!"


def test_a_managed_agents_step_may_await_within_a_step_that_awaits(steps: Steps) -> None:
    code = "import asyncio\nawait asyncio.sleep(0)\n"
    reach = Reach(space="helper")
    helper = WorkerExecutor(steps.link, steps.executor._settings, reach, steps._call, lambda: None)

    def member(task: str) -> str:
        helper.send_variables({"task": task})
        return str(helper(f"{code}print('within'); asyncio.run(asyncio.sleep(0, task))").output)

    steps.executor.team = {"helper": member}
    steps.executor.send_variables({})
    outside = (
        f"{code}async def ask(): return helper('dig') + str(asyncio.get_running_loop().is_running())\nawait ask()"
    )
    assert steps.value(outside) == "digTrue"
