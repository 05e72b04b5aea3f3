"""OpenAI's older completions."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox.runner.endpoint import completions
from sandbox.runner.endpoint.checks import BadRequest, Served
from sandbox.types import Completion, Message, Request, TokenLogprob


def serve(completion: Completion, **fields: Any) -> Served:
    body = {"prompt": "Hi", **fields}
    return Served(2, body, completions.request(body), completion)


def test_the_prompt_is_a_users_message() -> None:
    body = {"prompt": "Hi", "stop": "END", "echo": False, "best_of": 1, "max_tokens": 16}
    assert completions.request(body) == Request((Message("user", "Hi"),), ("END",))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"prompt": None}, "one text"),
        ({"prompt": [1, 2]}, "no token ids"),
        ({"prompt": ["a", "b"]}, "send several requests"),
        ({"prompt": "x" * (3 << 20) + "y"}, "bytes"),
        ({"echo": True}, "echo is not taken"),
        ({"suffix": "x"}, "suffix is not taken"),
        ({"best_of": 2}, "best_of must be 1"),
        ({"n": 2}, "send several requests"),
        ({"logprobs": 2}, "0 or 1"),
        ({"messages": [{}]}, "/v1/chat/completions"),
        ({"tools": [{}]}, "/v1/chat/completions"),
        ({"logit_bias": {"1": 1}}, "the run decides"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(BadRequest, match=told):
        completions.request({"prompt": "Hi", **fields})


def test_an_answer_and_a_stream() -> None:
    sampled = (TokenLogprob("He", -1.0), TokenLogprob("llo", -2.0))
    served = serve(
        Completion("Hello", 10, 2, logprobs=sampled), logprobs=0, stream_options={"include_usage": True}
    )
    told = completions.answer(served)
    assert (told["object"], told["usage"]["total_tokens"]) == ("text_completion", 12)
    assert told["choices"] == [
        {
            "index": 0,
            "text": "Hello",
            "finish_reason": "stop",
            "logprobs": {
                "tokens": ["He", "llo"],
                "token_logprobs": [-1.0, -2.0],
                "top_logprobs": None,
                "text_offset": [0, 2],
            },
        }
    ]
    text, usage, end = [event.data for event in completions.events(served)]
    assert text
    assert usage
    assert (text["choices"], usage["usage"], end) == (told["choices"], told["usage"], None)
    assert completions.answer(serve(Completion("", 1, 0)))["choices"][0]["logprobs"] is None
