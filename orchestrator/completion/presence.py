"""Whether an inference endpoint answers at all. Asked after failures, without sampling."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.completion.base import PROBE_HEADER, Endpoint, Refusal
from orchestrator.completion.http import HttpClient, Unreadable
from orchestrator.completion.retry import Retryable
from orchestrator.errors import CompletionError, ContextLengthError

ANSWER_TIMEOUT_S = 10.0


async def one_answers(endpoints: Sequence[Endpoint]) -> None:
    """Returns when one of them answers a request for its models. Otherwise raises the last one's CompletionError,
    which may be an AuthenticationError."""
    for number, endpoint in enumerate(endpoints, 1):
        try:
            await _answers(endpoint)
        except CompletionError:
            if number == len(endpoints):
                raise
        else:
            return


async def _answers(endpoint: Endpoint) -> None:
    client = HttpClient(endpoint)
    try:
        await client.get("/v1/models", timeout_s=ANSWER_TIMEOUT_S, headers=PROBE_HEADER)
    except (Refusal, Unreadable, ContextLengthError):
        pass  # no list, but a server that says so
    except Retryable as error:
        if error.status is None or error.status >= 500:
            raise
    finally:
        await client.aclose()
