"""Waits, at the start of a run, for an endpoint that is still loading, and says so.

While a model loads, its server refuses connections (vLLM, SGLang, TGI), answers 503 (llama.cpp), or is hidden by a
gateway that answers 502, 503, 504 or 429, by a forwarded port that drops connections, by a name that is not known
yet. Such an answer says nothing about what the endpoint can do, so the probe is sent again. What says something (a
refusal, a refused key, an answer of another shape) is passed on at once.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from orchestrator.completion.base import Endpoint, Refusal
from orchestrator.completion.retry import Aborted, ConnectionFailed, Retryable
from orchestrator.errors import (
    AuthenticationError,
    CompletionError,
    CompletionTimeout,
    EnvironmentUnusable,
    NotServing,
)
from orchestrator.rules.backoff import Backoff

T = TypeVar("T")

SAMPLES = 3  # probes of one endpoint that may sample
SAID_EVERY_S = 10.0
BETWEEN_PROBES = Backoff(first_s=0.5, most_s=5.0, spread=0.2)


@dataclass(frozen=True, slots=True)
class Wait:
    """How the wait for one endpoint stands. `who`: the endpoint, for people. `answer`: what became of the last
    probe; empty: the endpoint serves."""

    who: str
    waited_s: float
    timeout_s: float
    answer: str


class WaitLines:
    """Lines about waits for people: one when a wait begins, one every SAID_EVERY_S, one when it is over."""

    def __init__(self) -> None:
        self._said_s: dict[str, float] = {}  # how old a wait was when its last line was said, by `who`

    def line(self, wait: Wait) -> str | None:
        """The line to say now, if there is one."""
        before = self._said_s.get(wait.who)
        if not wait.answer:
            self._said_s.pop(wait.who, None)
            return None if before is None else f"{wait.who} answers after {wait.waited_s:.0f} s"
        if before is not None and wait.waited_s < before + SAID_EVERY_S:
            return None
        self._said_s[wait.who] = wait.waited_s
        if before is None:
            return (
                f"waiting for {wait.who} for up to {wait.timeout_s:g} s (--openai.startup_timeout; Ctrl-C ends "
                f"it): {wait.answer}"
            )
        return f"still waiting for {wait.who}, {wait.waited_s:.0f} of {wait.timeout_s:g} s: {wait.answer}"


def wait_sayer(say: Callable[[str], None]) -> Callable[[Wait], None]:
    """Tells people of waits, line by line."""
    lines = WaitLines()

    def tell(wait: Wait) -> None:
        if (line := lines.line(wait)) is not None:
            say(line)

    return tell


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a loading endpoint is waited for (`timeout_s` 0: not at all), and who is told."""

    timeout_s: float
    tell: Callable[[Wait], None]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


NO_PATIENCE = Patience(0.0, lambda wait: None)


class Startup:
    """The start of one endpoint. All its probes share one patience, and SAMPLES of them may sample.

    `what`: the endpoint's part in the run. `flag`: the setting with its address.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        patience: Patience = NO_PATIENCE,
        what: str = "the endpoint",
        flag: str = "--openai.base_url",
    ) -> None:
        self.samples_left = SAMPLES
        self._who = f"{what} {endpoint.shown}"
        self._flag = flag
        self._patience = patience
        self._began_s = patience.clock()
        self._failures = 0

    async def answered(self, probe: Callable[[], Awaitable[T]], else_do: str = "") -> T:
        """What comes of the probe, which is sent again while the endpoint is loading.

        Raises NotServing when the patience has come to its end; `else_do` is added to what the error says to do.
        Raises EnvironmentUnusable for a key that is refused and for an endpoint that is elsewhere. Other errors of
        the probe are raised as they are.
        """
        while True:
            try:
                return await probe()
            except CompletionError as error:
                if isinstance(error, AuthenticationError) or (isinstance(error, Refusal) and error.moved):
                    raise EnvironmentUnusable(str(error)) from error
                if not is_loading(error):
                    raise
                self._failures += 1
                await self._pause(error, else_do)

    async def sample(self, probe: Callable[[], Awaitable[T]]) -> T:
        """One probe that samples. Raises EnvironmentUnusable for one too many."""
        if not self.samples_left:
            raise EnvironmentUnusable(
                f"{self._who} gave no whole answer to {SAMPLES} probes, and may have sampled for each of them; "
                "look at its log"
            )
        try:
            result = await probe()
        except CompletionError as error:
            self.samples_left -= may_have_sampled(error)
            raise
        self.samples_left -= 1
        return result

    def over(self) -> None:
        """Tells that the endpoint serves, if a wait for it was told."""
        if self._failures:
            self._patience.tell(self._wait(""))

    async def _pause(self, error: CompletionError, else_do: str) -> None:
        """Waits until the probe is to be sent again, once more when the time is over."""
        timeout_s = self._patience.timeout_s
        wait = self._wait(str(error))
        if wait.waited_s >= timeout_s:
            after, longer = "", ""
            if timeout_s:
                after, longer = f" after {timeout_s:g} s", ", or wait longer with --openai.startup_timeout"
            raise NotServing(
                f"{self._who} does not serve{after}: {error}; start it or set {self._flag}{longer}{else_do}"
            ) from error
        self._patience.tell(wait)
        asked_s = (error.after_s if isinstance(error, Retryable) else None) or 0.0
        pause_s = max(asked_s, BETWEEN_PROBES.pause_s(self._failures, random.random()))  # noqa: S311
        await self._patience.sleep(min(pause_s, timeout_s - wait.waited_s))

    def _wait(self, answer: str) -> Wait:
        waited_s = self._patience.clock() - self._began_s
        return Wait(self._who, waited_s, self._patience.timeout_s, answer)


def is_loading(error: CompletionError) -> bool:
    """Whether an endpoint that is loading, or gets new weights, may fail like this: by a 429 or 5xx, without a
    connection, without an answer in time, by an abort."""
    status = error.status if isinstance(error, Retryable) else None
    return status is not None or isinstance(error, ConnectionFailed | CompletionTimeout | Aborted)


def may_have_sampled(error: CompletionError) -> bool:
    """Whether a request that failed like this may have been sampled for."""
    if isinstance(error, Refusal | AuthenticationError):
        return False
    if isinstance(error, ConnectionFailed):
        return error.sent
    if isinstance(error, Aborted):
        return error.sampled
    return not (isinstance(error, Retryable) and error.status is not None)
