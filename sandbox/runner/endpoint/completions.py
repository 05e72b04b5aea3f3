"""OpenAI's older completions: `/v1/completions`. The prompt is one message of a user's: a run's models are chat
models, and every request goes through the run's template."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from sandbox.runner.endpoint import checks
from sandbox.runner.endpoint.chat import logprob_entries
from sandbox.runner.endpoint.checks import MODEL, REFUSED, BadRequest, Body, Event, Fields, Served
from sandbox.types import Message, Request

_CHAT = "use /v1/chat/completions"
FIELDS = Fields(
    {"prompt", "stop", "n", "best_of", "logprobs", "stream", "stream_options"},
    {
        **REFUSED,
        "suffix": "text cannot be filled in, ask for it in the prompt",
        **dict.fromkeys(("messages", "tools", "tool_choice", "response_format"), _CHAT),
    },
)

error = checks.openai_error


def request(body: Body) -> Request:
    """Raises BadRequest."""
    FIELDS.check(body)
    checks.single(body)
    checks.stream_usage(body)
    checks.flag(body, "stream")
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise BadRequest("prompt must be one text: send several requests, and no token ids", "prompt")
    if body.get("best_of") not in (None, 1):
        raise BadRequest("best_of must be 1: send several requests", "best_of")
    logprobs = body.get("logprobs")
    if logprobs not in (None, 0, 1):
        reason = "the sampled tokens' log-probs alone are on record"
        raise BadRequest(f"logprobs must be 0 or 1: {reason}", "logprobs")
    return Request(
        checks.conversation([Message("user", prompt)], "prompt"),
        stop=checks.stop_strings(body.get("stop"), "stop"),
        logprobs=logprobs is not None and logprobs is not False,
    )


def answer(served: Served) -> dict[str, Any]:
    """The answer to a request that is not to be streamed."""
    return {**_head(served), "choices": [_choice(served)], "usage": checks.usage(served.completion)}


def events(served: Served) -> Iterator[Event]:
    """All the text in one event: it was sampled before the first byte is sent."""
    yield Event({**_head(served), "choices": [_choice(served)]})
    if checks.stream_usage(served.body):
        yield Event({**_head(served), "choices": [], "usage": checks.usage(served.completion)})
    yield Event(None)


def _head(served: Served) -> dict[str, Any]:
    return {"id": f"cmpl-{served.number}", "object": "text_completion", "created": 0, "model": MODEL}


def _choice(served: Served) -> dict[str, Any]:
    completion = served.completion
    logprobs = _logprobs(logprob_entries(completion)) if served.request.logprobs else None
    return {"index": 0, "text": completion.text, "finish_reason": completion.finish_reason, "logprobs": logprobs}


def _logprobs(entries: list[dict[str, Any]]) -> dict[str, Any]:
    tokens = [one["token"] for one in entries]
    return {
        "tokens": tokens,
        "token_logprobs": [one["logprob"] for one in entries],
        "top_logprobs": None,
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0)) if tokens else [],
    }
