"""asyncio in steps: whatever a step did to its loop, the next may await."""

from __future__ import annotations

from contextlib import suppress

import pytest

from sandbox.errors import CodeError
from tests.integration.worker.conftest import Steps

SETUP = "import asyncio\nasync def later(n=1):\n    await asyncio.sleep(0)\n    return n"


@pytest.mark.parametrize(
    "code",
    [
        "asyncio.run(later())",
        "asyncio.get_running_loop().close() if False else None\nloop.close()",
        "loop.run_until_complete(later()); loop.close()",
        "loop.run_until_complete(loop.shutdown_asyncgens()); loop.stop(); loop.close()",
        "asyncio.set_event_loop(None)",
        "asyncio.set_event_loop(asyncio.new_event_loop()); asyncio.get_event_loop().close()",
        "with asyncio.Runner() as runner: runner.run(later())",
        "await later(2)\nasyncio.run(later())",
        "asyncio.run(later())\nawait later(2)\nasyncio.run(later())",
        "import threading; t = threading.Thread(target=lambda: asyncio.run(later())); t.start(); t.join()",
        "loop.call_soon(loop.stop)\ntry: await asyncio.sleep(9)\nexcept BaseException: pass",
    ],
)
def test_awaiting_works_after_a_step_that_ran_or_closed_a_loop(steps: Steps, code: str) -> None:
    steps.value(f"{SETUP}\nawait later()\nloop = asyncio.get_event_loop()\nNone")
    with suppress(CodeError):  # a loop that is stopped while it awaits says so, as in Python
        steps.executor(code)
    assert steps.value("await later(5)") == "5"
    assert steps.value("asyncio.get_event_loop().run_until_complete(later(6))") == "6"
    assert steps.value("x = await asyncio.gather(later(7), later(8))\nasyncio.run(later(x))") == "[7, 8]"


def test_statements_that_await_keep_what_python_says_of_the_whole(steps: Steps) -> None:
    steps.value(SETUP)
    code = "from __future__ import annotations\nx: Nothing = await later(3)\ndef f(a: Nowhere): return a\nf(x)"
    assert steps.value(code) == "3"
    assert "SyntaxError" in steps.error("print('never')\nawait later(\n")
    assert steps.executor.state["_print_outputs"] == ""
    assert steps.value("y = [await later(n) for n in range(3)]") == "[0, 1, 2]"
    assert "ZeroDivisionError" in steps.error("z = await later(4)\n1 / 0")
    assert steps.value("z") == "4"
    assert steps.value("async with asyncio.timeout(5):\n    w = await later(9)\nw") == "9"


def test_a_loop_that_others_have_patched_to_nest_works(steps: Steps) -> None:
    nest = pytest.importorskip("nest_asyncio", reason="nest_asyncio is not installed here")
    steps.value(f"{SETUP}\nimport sys; sys.path.append({nest.__file__.rpartition('/')[0]!r})\nimport nest_asyncio")
    assert steps.value("nest_asyncio.apply()\nasyncio.run(later(1))") == "1"
    assert steps.value("await later(2)\nasyncio.run(later(3))") == "3"
    assert (
        steps.value(
            "async def outer(): return asyncio.get_event_loop().run_until_complete(later(4))\nawait outer()"
        )
        == "4"
    )
    assert steps.value("asyncio.run(later(5)) + await later(6)") == "11"
