"""Errors that come with HTTP 200: which answers are errors, and the status that each would have."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.completion.statuses import error_in, status_of


@pytest.mark.parametrize(
    "answer",
    [
        *({"error": "the worker died"}, {"errors": ["x"]}, {"object": "error", "message": "x"}, {"type": "error"}),
        *({"success": False}, {"message": "x"}, {"detail": "x"}, {"choices": [], "error": "x"}),
    ],
)
def test_an_answer_without_a_result_may_be_an_error(answer: Any) -> None:
    assert error_in(answer) == (500, answer.get("error") or answer.get("errors") or answer)


@pytest.mark.parametrize(
    "answer",
    [
        *(None, [], "x", {}, {"choices": [1], "error": "x"}, {"data": [1], "detail": "x"}, {"object": "list"}),
        *({"success": True}, {"choices": [], "message": "x"}, {"error": None}),
    ],
)
def test_any_other_answer_is_none(answer: Any) -> None:
    assert error_in(answer) is None


@pytest.mark.parametrize(
    ("told", "status"),
    [
        *(
            ("x", 500),
            ([], 500),
            (["x"], 500),
            ({}, 500),
            ({"code": 200}, 500),
            ({"code": "x", "status": 404}, 404),
        ),
        *(({"code": 429}, 429), ({"code": "503"}, 503), ({"status_code": 422}, 422), ({"http_status": 402}, 402)),
        *(({"code": 4290}, 500), ([{"code": 400}, {"code": 500}], 400), ({"type": "rate_limit_error"}, 429)),
        *(({"type": "authentication_error"}, 401), ({"type": "permission_error"}, 403)),
        *(({"type": "invalid_request_error"}, 400), ({"code": "BadRequestError"}, 400), ({"type": "odd"}, 500)),
    ],
)
def test_the_status_is_the_one_that_an_error_names(told: Any, status: int) -> None:
    assert status_of(told) == status
