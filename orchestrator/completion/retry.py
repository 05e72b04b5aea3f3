"""Retries of inference calls: what is worth another try, and how long to wait for it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from typing import TypeVar

from orchestrator.errors import CompletionError

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_RETRY_AFTER_S = 60.0  # a server asking for more is treated as asking for this
_CONTEXT_WORDS = (
    "context length", "context_length", "context size", "context window", "maximum context",
    "max_model_len", "longer than the model", "exceeds the available context", "too many tokens",
    "input is too long", "exceed_context_size",
)  # fmt: skip


class Retryable(CompletionError):
    """A passing fault of the endpoint. `after_s`: what the server asked us to wait, if it did.

    `status`: the HTTP status, None where no answer came or it could not be read.
    """

    def __init__(self, text: str, after_s: float | None = None, status: int | None = None) -> None:
        super().__init__(text)
        self.after_s = after_s
        self.status = status


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Up to `attempts` calls, backing off from `base_s`, jittered, doubling up to `cap_s`."""

    attempts: int = 4
    base_s: float = 0.25
    cap_s: float = 8.0

    def wait_s(self, attempt: int, after_s: float | None) -> float:
        """Seconds to wait after failed call number `attempt` (1, 2 …)."""
        backoff = min(self.cap_s, self.base_s * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.5)  # noqa: S311
        return max(backoff, min(after_s, MAX_RETRY_AFTER_S)) if after_s is not None else backoff


async def with_retries(call: Callable[[], Awaitable[T]], policy: RetryPolicy, deadline_s: float) -> tuple[T, int]:
    """(result, retries used). Raises CompletionError when the attempts or `deadline_s` are used up."""
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    for attempt in range(1, policy.attempts + 1):
        try:
            async with asyncio.timeout_at(end):
                return await call(), attempt - 1
        except TimeoutError as error:
            raise CompletionError(f"no completion within {deadline_s:g} s") from error
        except Retryable as error:
            wait_s = policy.wait_s(attempt, error.after_s)
            if attempt == policy.attempts or loop.time() + wait_s >= end:
                raise CompletionError(f"{error} ({attempt} attempts)") from error
            log.debug("completion attempt %d failed: %s; next in %.2f s", attempt, error, wait_s)
            await asyncio.sleep(wait_s)
    raise AssertionError("unreachable: the last attempt returns or raises")


def retry_after_s(value: str | None) -> float | None:
    """Seconds of a Retry-After header: a number or an HTTP date. None: absent or nonsense."""
    if not value:
        return None
    try:
        return max(0.0, min(float(value), MAX_RETRY_AFTER_S))
    except ValueError:
        pass
    try:
        return max(0.0, min(parsedate_to_datetime(value).timestamp() - time(), MAX_RETRY_AFTER_S))
    except (TypeError, ValueError, OverflowError):
        return None


def is_context_length(status: int, text: str) -> bool:
    """Whether an error says that the prompt is too long: servers word this in many ways."""
    lowered = text.lower()
    return status in (400, 413, 422, 500) and any(word in lowered for word in _CONTEXT_WORDS)
