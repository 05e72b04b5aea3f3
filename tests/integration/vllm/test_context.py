"""Prompts that reach the end of what a real vLLM holds, at every place of a rollout."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from orchestrator.completion.ids import IdCompleter
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.requests import AgentRequest, Reply
from orchestrator.rules.outcome import Refused
from orchestrator.types import CompletionKind, Message
from tests.fakes.plans import a_plan, an_agent, some_limits
from tests.integration.vllm.asking import connected
from tests.integration.vllm.server import CONTEXT, NAME, VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
TASK = Message("user", "Count from one to ten in words, comma separated.")
ROOMS = (-1, 0, 1, 2)


class Rollout:
    """A conversation with a real vLLM."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.talk: tuple[Message, ...] = (TASK,)

    async def ask(self) -> Reply:
        reply = await self.lease.complete(AgentRequest(self._asked, CompletionKind.ACTION, self.talk), b"")
        if reply.completion is not None:
            self.talk = (*self.talk, Message("assistant", reply.completion.visible))
        return reply

    @property
    def _asked(self) -> int:
        return len(self.lease.turns) + 1

    async def fill(self, room: int) -> None:
        """One more message, with which the next prompt leaves so much room: a word of it is a token."""
        talk, most = (*self.talk, Message("user", "go")), CONTEXT - room
        prepared = await self.lease.completions.turns.prepared(
            AgentRequest(self._asked, CompletionKind.ACTION, talk)
        )
        self.talk = (*self.talk, Message("user", "go" + " go" * (most - prepared.tokens)))


@asynccontextmanager
async def a_rollout(server: VllmServer, tokenizer: HubTokenizer, **agent: object) -> AsyncIterator[Rollout]:
    async with connected(server, tokenizer) as completer:
        plan = a_plan(agent=an_agent(**agent), limits=some_limits(max_token_length=16_384))  # type: ignore[arg-type]
        yield Rollout(Lease(plan, completer, tokenizer, {}))


async def ended(rollout: Rollout) -> tuple[str, str]:
    refused = await rollout.lease.ended()
    assert isinstance(refused, Refused)
    return refused.name, refused.detail


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("turns", [0, 1, 2], ids=["first prompt", "after an observation", "after two"])
async def test_a_rollout_ends_where_the_context_does(
    plain: VllmServer, tokenizer: HubTokenizer, turns: int, room: int
) -> None:
    async with a_rollout(plain, tokenizer) as rollout:
        for _ in range(turns):
            assert (await rollout.ask()).completion is not None
            rollout.talk = (*rollout.talk, Message("user", "Observation: go on"))
        if turns:
            rollout.talk = rollout.talk[:-1]
        await rollout.fill(room)
        reply = await rollout.ask()
        if room < 1:
            assert (await ended(rollout))[0] == reply.ended == "context_length"
            assert rollout.lease.control.questions == 0, "nothing needed to be tried"
        else:
            assert reply.completion is not None
            assert len(reply.completion.tokens_T or ()) <= room
            assert reply.completion.prompt_tokens == CONTEXT - room
            await rollout.fill(0)
            assert (await rollout.ask()).ended == "context_length", "the next turn has no room"


@pytest.mark.parametrize("room", [-2000, -1, 0])
async def test_so_it_does_where_the_server_did_not_say_what_it_holds(
    plain: VllmServer, tokenizer: HubTokenizer, room: int
) -> None:
    """As behind a gateway with a model list of its own: vLLM's refusals are known, and a control is answered."""
    async with a_rollout(plain, tokenizer) as rollout:
        completer = rollout.lease.completions._sampler._completer
        assert isinstance(completer, IdCompleter)
        completer.context_length = None
        assert (await rollout.ask()).completion is not None
        await rollout.fill(room)
        assert (await rollout.ask()).ended == "context_length"
        assert (
            "the endpoint answered a neutral prompt" in (await ended(rollout))[1]
            or rollout.lease.control.questions
        )


async def test_a_program_may_shorten_its_conversation(plain: VllmServer, tokenizer: HubTokenizer) -> None:
    async with a_rollout(plain, tokenizer, kind="program", max_steps=10) as rollout:
        assert (await rollout.ask()).completion is not None
        kept = rollout.talk
        await rollout.fill(0)
        refused = (await rollout.ask()).refused
        assert refused is not None
        assert refused.too_long
        rollout.talk = (*kept, Message("user", "And backwards?"))
        asked = AgentRequest(3, CompletionKind.ACTION, rollout.talk)
        assert (await rollout.lease.complete(asked, b"")).completion is not None


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "answer"),
    [
        (CONTEXT - 3, 40, 3),
        (CONTEXT - 1, 40, 1),
        (CONTEXT, 40, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"),
        (
            CONTEXT + 1,
            40,
            f"This model's maximum context length is {CONTEXT} tokens. However, your prompt contains",
        ),
        (9, CONTEXT + 1, f"max_tokens={CONTEXT + 1} cannot be greater than max_model_len={CONTEXT}."),
    ],
)
def test_what_vllm_itself_does_at_the_bound(
    plain: VllmServer, prompt: int, max_tokens: int, answer: int | str
) -> None:
    body = {"model": NAME, "prompt": [11] * prompt, "max_tokens": max_tokens, "ignore_eos": True}
    status, told = plain.ask("/v1/completions", body)
    if isinstance(answer, int):
        assert (status, told["usage"]["completion_tokens"]) == (200, answer)
        assert told["choices"][0]["finish_reason"] == "length"
    else:
        assert status == 400
        assert told["error"]["message"].startswith(answer)


async def test_a_chat_that_is_too_long_is_refused_by_name(plain: VllmServer, tokenizer: HubTokenizer) -> None:
    async with connected(plain, tokenizer, tokens="retokenize") as completer:
        rollout = Rollout(Lease(a_plan(), completer, tokenizer, {}))
        assert (await rollout.ask()).completion is not None
        rollout.talk = (*rollout.talk, Message("user", "go " * CONTEXT))
        assert (await rollout.ask()).ended == "context_length"
