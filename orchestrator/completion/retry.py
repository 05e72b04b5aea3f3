"""Retries of inference calls: what is tried again, after how long, and which calls wait together."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from typing import TypeVar

from orchestrator.completion.base import Refusal, UnusableSample
from orchestrator.errors import AuthenticationError, CompletionError, CompletionTimeout
from orchestrator.rules.backoff import Backoff
from orchestrator.types import Completion

log = logging.getLogger(__name__)
T = TypeVar("T")

TOO_MANY = 429
MAX_RETRY_AFTER_S = 60.0  # a server asking for more is treated as asking for this
AFTER_ABORT_S = 0.5  # before what the server aborted is asked for again: it may be at its new weights
_SPREAD = 0.2  # share of a pause over which the calls that waited together are spread
# Raised by reading an answer of another shape than expected, or with absurd numbers or depths.
NONSENSE = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)


class Retryable(CompletionError):
    """A passing fault of the endpoint. `after_s`: what the server asked us to wait, if it did.

    `status`: the HTTP status, None where no answer came or it could not be read. `words`: as for a Refusal.
    """

    def __init__(
        self, text: str, after_s: float | None = None, status: int | None = None, words: str = ""
    ) -> None:
        super().__init__(text)
        self.after_s = after_s
        self.status = status
        self.words = words or text

    def lasting(self, attempts: int) -> CompletionError:
        """The error to raise when every attempt failed."""
        return CompletionError(f"{self} ({attempts} attempts)")


class ConnectionFailed(Retryable):
    """No answer came: the connection was refused, dropped or never came about, or the host's name is not known.

    `asked`: whether the request may have arrived.
    """

    def __init__(self, text: str, *, sent: bool) -> None:
        super().__init__(text)
        self.sent = sent


class Aborted(Retryable):
    """The server gave the request up, as for new weights; it will take others. `sampled`: whether it sampled."""

    def __init__(self, text: str, *, sampled: bool) -> None:
        super().__init__(text, AFTER_ABORT_S)
        self.sampled = sampled


class ForeignAnswer(Retryable):
    """An answer of another shape than the dialect's, as a server gives that does not know the dialect."""


class SpoiltSample(Retryable):
    """A sample that cannot be used, perhaps by the server's fault. It is tried again: a server that works gives
    the same sample for the same seed."""

    def __init__(self, text: str, completion: Completion) -> None:
        super().__init__(text)
        self.completion = completion

    def lasting(self, attempts: int) -> CompletionError:
        return UnusableSample(f"{self} ({attempts} attempts)", self.completion)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Up to `attempts` calls, with `backoff` between them.

    A pause that the server asks for is not counted as a failure, up to `pauses` times. A server that answers
    "too many requests" without a time gets `pause`.
    """

    attempts: int = 4
    backoff: Backoff = Backoff(first_s=0.25, most_s=8.0, spread=0.5)  # noqa: RUF009 - immutable
    pauses: int = 8
    pause: Backoff = Backoff(first_s=1.0, most_s=30.0)  # noqa: RUF009 - immutable

    def wait_s(self, failures: int) -> float:
        """Seconds to wait after so many failed calls (1, 2 …)."""
        return self.backoff.pause_s(failures, random.random())  # noqa: S311

    def asked_s(self, error: Retryable, pauses: int) -> float | None:
        """Seconds that `error` asks all calls to wait, after so many pauses; None: it asks for none."""
        if error.after_s is None and error.status == TOO_MANY:
            return self.pause.pause_s(pauses + 1)
        return error.after_s


class Limiter:
    """Shared by all calls of one endpoint: when the endpoint asks one call to wait, all wait."""

    def __init__(self) -> None:
        self._until = 0.0  # loop time
        self._spread_s = 0.0

    def pause(self, seconds: float) -> None:
        """Holds all calls back for so long."""
        until = asyncio.get_running_loop().time() + seconds
        if until > self._until:
            self._until, self._spread_s = until, seconds * _SPREAD
            log.debug("the endpoint asks for a pause of %.1f s", seconds)

    def open_at(self) -> float:
        """Loop time at which the pause ends, if no other pause comes."""
        return self._until

    async def passed(self) -> None:
        """Returns when there is no pause."""
        loop = asyncio.get_running_loop()
        while (left := self._until - loop.time()) > 0:  # noqa: ASYNC110 - another pause may come meanwhile
            await asyncio.sleep(left + random.uniform(0, self._spread_s))  # noqa: S311


async def with_retries(
    call: Callable[[], Awaitable[T]], policy: RetryPolicy, deadline_s: float, limiter: Limiter | None = None
) -> tuple[T, int]:
    """(result, retries used). Raises CompletionError when the attempts or `deadline_s` are used up.

    Tried again is what may pass: faults of the endpoint, and refusals that no text of the request can cause.
    """
    loop = asyncio.get_running_loop()
    limiter = limiter or Limiter()
    end = loop.time() + deadline_s
    failures = pauses = 0
    while True:
        try:
            async with asyncio.timeout_at(end):
                await limiter.passed()
                return await call(), failures + pauses
        except TimeoutError as error:
            raise CompletionTimeout(f"no completion within {deadline_s:g} s") from error
        except (Retryable, Refusal, AuthenticationError) as error:
            if isinstance(error, Refusal) and error.of_text:
                raise
            asked_s = policy.asked_s(error, pauses) if isinstance(error, Retryable) else None
            if asked_s is not None and pauses < policy.pauses:
                pauses += 1
                limiter.pause(asked_s)
            else:
                failures += 1
            next_at = max(limiter.open_at(), loop.time() + policy.wait_s(failures + pauses))
            if failures >= policy.attempts or next_at >= end:
                if isinstance(error, Retryable):
                    raise error.lasting(failures + pauses) from error
                raise
            log.debug("completion failed: %s; next in %.2f s", error, next_at - loop.time())
            await asyncio.sleep(max(0.0, next_at - loop.time()))


def retry_after_s(value: str | None) -> float | None:
    """Seconds of a Retry-After header, which is a number or an HTTP date. None: absent or malformed."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time()
        except (TypeError, ValueError, OverflowError):
            return None
    return max(0.0, min(seconds, MAX_RETRY_AFTER_S)) if seconds == seconds else None
