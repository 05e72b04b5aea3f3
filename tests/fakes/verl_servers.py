"""verl's servers without a GPU: its own client, in front of scripted servers with the methods of its vLLM actor.

A server samples from a script, as `tests.fakes.inference` does. It aborts for new weights as verl's servers do:
an aborted request ends with what was sampled, the version then is the next one, and whoever asks again goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from tests.fakes.inference.model import ChatMessage, Model, logprob
from tests.fakes.inference.sampling import Sample, sample
from tests.fakes.inference.script import CallReader, Reply, Script
from tests.fakes.tokenizer import tokenizer_folder

# The parameters that vLLM's SamplingParams takes, of those that anybody here may send.
KNOWN = {
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "min_tokens", "logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "skip_special_tokens"),
    *("spaces_between_special_tokens", "include_stop_str_in_output"),
}
OPEN_TURN = "<|im_start|>assistant\n"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as a server got it, and what it sampled. `version`: of its weights."""

    server: int
    request_id: str
    prompt_ids: list[int]
    parameters: dict[str, Any]
    messages: tuple[ChatMessage, ...]
    output: TokenOutput
    version: int
    priority: int

    @property
    def logprobs(self) -> list[float]:
        """The true ones."""
        return [logprob(token, len(self.prompt_ids) + n) for n, token in enumerate(self.output.token_ids)]


class Remote:
    """A method of an actor: `.remote(...)` gives what can be awaited, and begins at once."""

    def __init__(self, method: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._method = method

    def remote(self, *given: Any, **named: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._method(*given, **named))


class Servers:
    """All servers of a run, and verl's client for them: `client()`.

    `abort_after`: after how many tokens the request of this number is aborted for new weights; None: it is not.
    `error`: what a server raises at the request of this number. `context`: `max_model_len`. `hold`: answers wait
    for it.
    """

    def __init__(
        self,
        script: Script,
        *,
        servers: int = 2,
        abort_after: Callable[[int], int | None] = lambda number: None,
        error: Callable[[int], Exception | None] = lambda number: None,
        context: int = 16_384,
        hold: asyncio.Event | None = None,
    ) -> None:
        self.model = Model(tokenizer_folder())
        self.asked: list[Asked] = []
        self.version = 0
        self.loops: set[asyncio.AbstractEventLoop] = set()
        self.sessions: dict[str, int] = {}  # verl's request ids, and the server that each stays with
        self._script, self._abort_after, self._error, self._context = script, abort_after, error, context
        self._hold = hold
        self._servers = [_Server(self, number) for number in range(servers)]
        self._numbers = 0
        self._calls = CallReader()

    def client(self, config: Any, *, joins: bool = False) -> LLMServerClient:
        """`joins`: the client of asynchronous training, which continues what was aborted itself."""
        kind = FullyAsyncLLMServerClient if joins else LLMServerClient
        return kind(config, load_balancer_handle=_Balancer(self._servers, self.sessions))

    async def generate(
        self,
        server: int,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        priority: int = 0,
    ) -> TokenOutput:
        """As verl's vLLM server: unknown parameters are refused, `max_tokens` is cut to what fits."""
        self.loops.add(asyncio.get_running_loop())
        number, self._numbers = self._numbers, self._numbers + 1
        if (error := self._error(number)) is not None:
            raise error
        left = self._context - len(prompt_ids)
        if left < 1:
            raise ValueError(
                f"Prompt length ({len(prompt_ids)}) leaves no room within the maximum context length."
            )
        if unknown := sampling_params.keys() - KNOWN:
            raise TypeError(f"Unexpected keyword argument {sorted(unknown)}")
        asked = dict(sampling_params)
        messages, sampled = self._sample(prompt_ids, asked, min(int(asked["max_tokens"]), left))
        if self._hold is not None:
            await self._hold.wait()
        ids, reason = sampled.ids, "completed"
        at = self._abort_after(number)
        version = self.version
        if at is not None and at < len(ids):
            ids, reason = ids[:at], "aborted"
            self.version += 1
        logprobs = [logprob(token, len(prompt_ids) + n) for n, token in enumerate(ids)]
        output = TokenOutput(
            token_ids=ids,
            log_probs=logprobs if asked["logprobs"] else None,
            stop_reason=reason,
            num_preempted=0,
            extra_fields={"global_steps": version},
        )
        self.asked.append(Asked(server, request_id, prompt_ids, asked, messages, output, version, priority))
        return output.model_copy(deep=True)

    def _sample(
        self, prompt_ids: list[int], asked: dict[str, Any], most: int
    ) -> tuple[tuple[ChatMessage, ...], Sample]:
        text = self.model.decode(prompt_ids)
        head, opened, begun = text.rpartition(OPEN_TURN)
        messages = self.model.read_messages(head + opened)
        stop = tuple(asked["stop"])
        call = self._calls.read(messages, probe=False, seed=asked["seed"], max_tokens=most, stop=stop)
        reply = self._script(call)
        reply = Reply(reply) if isinstance(reply, str) else reply
        assert reply.text.startswith(begun), (reply.text, begun)
        # An engine looks for stop strings in what it samples, not in the prompt.
        sampled = sample(
            self.model,
            reply.text[len(begun) :],
            stop=stop,
            max_tokens=most,
            open_end=reply.length,
            rng=Random(0),
        )
        return messages, sampled


class _Server:
    """The handle of one server's actor."""

    def __init__(self, servers: Servers, number: int) -> None:
        async def generate(
            *,
            request_id: str,
            prompt_ids: list[int],
            sampling_params: dict[str, Any],
            image_data: Any = None,
            video_data: Any = None,
            priority: int = 0,
        ) -> TokenOutput:
            return await servers.generate(number, prompt_ids, dict(sampling_params), request_id, priority)

        self.generate = Remote(generate)


class _Balancer:
    """The handle of verl's load balancer: requests of one id go to one server, new ones to the next."""

    def __init__(self, servers: list[_Server], sessions: dict[str, int]) -> None:
        async def no_fields() -> list[str]:
            return []

        async def acquire(*, request_id: str) -> tuple[str, _Server]:
            number = sessions.setdefault(request_id, len(sessions) % len(servers))
            return str(number), servers[number]

        async def release(*, server_id: str) -> None:
            return None

        self.require_acquire_fields = Remote(no_fields)
        self.require_release_fields = Remote(no_fields)
        self.acquire_server = Remote(acquire)
        self.release_server = Remote(release)
