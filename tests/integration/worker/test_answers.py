"""`final_answer(x)`: one rule from any object to text, under the step's limit."""

from __future__ import annotations

import pytest

from sandbox.texts import ANSWER_CHARS
from tests.integration.worker.conftest import Steps


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("'Paris'", b"Paris"),
        ("''", b""),
        ("42", b"42"),
        ("3.0", b"3.0"),
        ("1e400", b"inf"),
        ("True", b"True"),
        ("{1}", b"{1}"),
        ("[1, 'a']", b"[1, 'a']"),
        ("b'raw'", b"b'raw'"),
        ("'\\u00e9'", "é".encode()),
        ("'\\ud800'", b"\xed\xa0\x80"),
        ("10 ** 5000", b"1" + b"0" * 5000),
        ("[10 ** 5000]", b"[1" + b"0" * 5000 + b"]"),
        ("type('Text', (str,), {'__str__': lambda self: 'forged'})('real')", b"real"),
        ("None", None),
    ],
)
def test_any_object_becomes_text(steps: Steps, expression: str, answer: bytes | None) -> None:
    assert steps.answer(f"final_answer({expression})") == answer


@pytest.mark.parametrize("expression", ["'x' * 10**7", "1 << 10**7", "list(range(10**5))", "'\\ud800' * 10**6"])
def test_an_answer_that_is_too_long_arrives_just_too_long(steps: Steps, expression: str) -> None:
    answer = steps.answer(f"final_answer({expression})")
    assert answer is not None
    assert len(answer) == ANSWER_CHARS


def test_final_answer_ends_the_step(steps: Steps) -> None:
    assert (
        steps.answer("try:\n    final_answer('first')\nexcept Exception:\n    final_answer('second')\nprint(1)")
        == b"first"
    )


def test_an_answer_swallowed_by_a_bare_except_still_stands(steps: Steps) -> None:
    assert steps.answer("try:\n    final_answer('first')\nexcept:\n    pass\nfinal_answer('second')") == b"first"


def test_an_answer_from_a_thread_counts(steps: Steps) -> None:
    code = "import threading\nt = threading.Thread(target=lambda: final_answer(5))\nt.start()\nt.join()"
    assert steps.answer(code) == b"5"


def test_an_answer_can_be_awaited_for(steps: Steps) -> None:
    assert steps.answer("async def f():\n    final_answer('async')\nawait f()") == b"async"


def test_final_answer_comes_back_after_it_was_overwritten(steps: Steps) -> None:
    steps.value("final_answer = 3")
    assert steps.answer("final_answer(answer=3)") == b"3"


def test_an_object_without_text_is_an_observation(steps: Steps) -> None:
    assert "ZeroDivisionError" in steps.error(
        "class Bad:\n    def __str__(self): return 1 / 0\nfinal_answer(Bad())"
    )
    assert not steps.executor.answered
    assert "final_answer() missing 1 required positional argument" in steps.error("final_answer()")
    assert steps.answer("final_answer('better')") == b"better"


def test_an_object_whose_text_never_comes_runs_into_the_step_limit(steps: Steps) -> None:
    steps.begin(timeout_s=0.5)
    error = steps.error("class Slow:\n    def __str__(self):\n        while True: pass\nfinal_answer(Slow())")
    assert "longer than 0.5 seconds" in error
