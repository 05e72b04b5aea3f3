"""A line that grows to the end of what the server holds: what fits is sampled, and then the rollout ends as
`context_length`, at whatever turn and however near."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from orchestrator.completion.base import Endpoint
from orchestrator.completion.chat import ChatCompleter
from orchestrator.completion.connect import connect
from orchestrator.completion.ids import IdCompleter
from orchestrator.completion.statuses import is_context_length
from orchestrator.completion.tokenizer import HubTokenizer, load_tokenizer
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.requests import AgentRequest
from orchestrator.rules.outcome import Refused
from orchestrator.types import CompletionKind, Message
from tests.fakes.inference import ScriptedServer, always
from tests.fakes.inference.dialects.vllm import VllmDialect
from tests.fakes.inference.model import Model
from tests.fakes.plans import a_plan
from tests.fakes.tokenizer import tokenizer_folder

ID_DIALECTS = ("vllm", "sglang", "llamacpp")
TALK = (Message("system", "You are helpful. " * 40), Message("user", "What is 6 times 7?"))
SAID = "Thought: I multiply.\n<code>\nprint(6 * 7)\n</code>"
OBSERVED = (*TALK, Message("assistant", SAID), Message("user", "Observation:\nExecution logs:\n42"))
ROOMS = [-1, 0, 1, 2, 7]


@pytest.fixture(scope="module")
def tokenizer() -> HubTokenizer:
    return load_tokenizer(str(tokenizer_folder()))


@asynccontextmanager
async def a_rollout(
    name: str, holds: int, tokenizer: HubTokenizer, notes: list[str] | None = None
) -> AsyncIterator[tuple[Lease, ScriptedServer]]:
    """A rollout at a server that holds so many tokens."""
    async with ScriptedServer(name, always(SAID), model=Model(tokenizer_folder(), context_length=holds)) as server:
        endpoint = Endpoint(server.base_url, server.model.name, "", 60.0)
        completer = await connect(endpoint, tokenizer, max_token_length=16_384, notes=notes)
        try:
            yield Lease(a_plan(), completer, tokenizer, {}), server
        finally:
            await completer.aclose()


async def turns(lease: Lease, count: int) -> None:
    talks = (TALK, OBSERVED)
    for sequence in range(1, count + 1):
        await lease.complete(
            AgentRequest(sequence, CompletionKind.ACTION, talks[sequence - 1]), str(sequence).encode()
        )


@pytest.fixture(params=[1, 2], ids=["first prompt", "after an observation"])
async def turn(request: pytest.FixtureRequest, tokenizer: HubTokenizer) -> tuple[int, int]:
    """(number of the turn, length of its prompt)."""
    async with a_rollout("vllm", 4096, tokenizer) as (lease, _):
        await turns(lease, request.param)
        return request.param, lease.turns[-1].completion.prompt_tokens


def spare(name: str) -> int:
    return int(name == "llamacpp")  # its last place is left alone


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("name", ID_DIALECTS)
async def test_what_the_server_holds_bounds_every_turn(
    name: str, room: int, turn: tuple[int, int], tokenizer: HubTokenizer
) -> None:
    number, prompt = turn
    async with a_rollout(name, prompt + room + spare(name), tokenizer) as (lease, server):
        await turns(lease, number)
        served = [one for one in server.log.completions if one.status == 200]
        if room < 1:
            ended = await lease.ended()
            assert isinstance(ended, Refused)
            assert ended.name == "context_length", ended.detail
            assert (len(lease.turns), len(server.log.completions)) == (number - 1, number - 1), "nobody was asked"
        else:
            last = lease.turns[-1].completion
            assert (len(lease.turns), len(served)) == (number, number)
            assert (last.prompt_tokens, len(last.tokens_T or ()), last.finish_reason) == (prompt, room, "length")
            assert lease.live


@pytest.mark.parametrize("name", ID_DIALECTS)
async def test_a_server_that_holds_less_after_a_restart_is_no_lack_of_an_answer(
    name: str, tokenizer: HubTokenizer, turn: tuple[int, int]
) -> None:
    number, prompt = turn
    async with a_rollout(name, 4096, tokenizer) as (lease, server):
        await turns(lease, number - 1)
        server.model.context_length = prompt
        await lease.complete(AgentRequest(number, CompletionKind.ACTION, (TALK, OBSERVED)[number - 1]), b"last")
        ended = await lease.ended()
        assert isinstance(ended, Refused)
        assert ended.name == "context_length", ended.detail


async def test_a_completion_that_llamacpp_cut_for_its_context_ends_the_rollout_by_that_name(
    tokenizer: HubTokenizer, turn: tuple[int, int]
) -> None:
    number, prompt = turn
    async with a_rollout("llamacpp", 4096, tokenizer) as (lease, server):
        await turns(lease, number - 1)
        server.model.context_length = prompt + 3
        await lease.complete(AgentRequest(number, CompletionKind.ACTION, (TALK, OBSERVED)[number - 1]), b"last")
        ended = await lease.ended()
        assert isinstance(ended, Refused)
        assert ended.name == "context_length", ended.detail


async def test_a_chat_is_not_asked_for_more_than_the_server_holds(tokenizer: HubTokenizer) -> None:
    async with ScriptedServer("vllm", always(SAID), model=Model(tokenizer_folder(), context_length=900)) as server:
        endpoint = Endpoint(server.base_url, server.model.name, "", 60.0)
        completer = await connect(endpoint, tokenizer, tokens="retokenize")
        plan = a_plan()
        lease = Lease(replace(plan, sampling=replace(plan.sampling, max_tokens=4096)), completer, tokenizer, {})
        await turns(lease, 2)
        await completer.aclose()
    assert [turn.completion.text for turn in lease.turns] == [SAID.removesuffix("</code>")] * 2


@pytest.mark.parametrize(("holds", "told"), [(4096, True), (16_384, False), (32_768, False)])
async def test_a_server_that_holds_less_than_a_rollout_may_have_is_told_at_the_start(
    holds: int, told: bool, tokenizer: HubTokenizer
) -> None:
    async with a_rollout("vllm", holds, tokenizer, notes := []):
        assert [note for note in notes if "env.max_token_length (16384)" in note] == notes
        assert len(notes) == told


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (400, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"),  # vLLM, at the bound
        (400, "max_tokens must be at least 1, got -12."),  # older ones, beyond it
        (400, "The decoder prompt (length 3000) is longer than the maximum model length of 2048."),
        (400, "Input length (9000 tokens) exceeds the maximum allowed length (8186 tokens)."),  # SGLang
        (422, "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 4000"),  # TGI
        (400, "prompt is too long: 200251 tokens > 200000 maximum"),  # Anthropic
        (400, "This model's maximum prompt length is 131072 but the request contains 537812 tokens."),  # xAI
        (400, "The input token count (1048577) exceeds the maximum number of tokens allowed (1048576)."),  # Google
        (400, "Range of input length should be [1, 30720]"),  # Alibaba
        (400, "Prompt length 5000 is greater than max_seq_len 4096"),  # TabbyAPI
        (400, "Prompt length (5000) exceeds maximum input length (4096)"),  # TensorRT-LLM
    ],
)
def test_services_say_in_many_words_that_a_prompt_is_too_long(status: int, text: str) -> None:
    assert is_context_length(status, text)
    assert not is_context_length(503, text)


class Listing(VllmDialect):
    """Has a model list of a test's."""

    cards: ClassVar[list[dict[str, Any]]] = []

    def query(self, method: str, path: str, body: Mapping[str, Any], model: Model) -> Any:
        if path == "/v1/models":
            return {"object": "list", "data": self.cards}
        return super().query(method, path, body, model)


VLLM, OTHER = {"owned_by": "vllm"}, {"owned_by": "someone"}


@pytest.mark.parametrize(
    ("cards", "holds"),
    [
        ([VLLM | {"id": "scripted", "max_model_len": 900}], 900),
        ([VLLM | {"id": "base", "max_model_len": 900}, VLLM | {"id": "scripted", "parent": "base"}], 900),
        ([VLLM | {"id": "base", "max_model_len": 900}], 900),  # a server of one model, whatever its name
        ([OTHER | {"id": "small", "max_model_len": 900}], None),  # a gateway that lists other models only
        ([OTHER | {"id": "small", "max_model_len": 900}, OTHER | {"id": "scripted", "max_model_len": 800}], 800),
        ([VLLM | {"id": "scripted", "max_model_len": "900"}], None),
        ([VLLM | {"id": "scripted", "max_model_len": -1}], None),
        ([VLLM | {"id": "scripted", "meta": 7}], None),
        ([], None),
    ],
)
async def test_the_length_is_that_of_the_model_that_is_asked_for(
    cards: list[dict[str, Any]], holds: int | None, tokenizer: HubTokenizer
) -> None:
    dialect = Listing()
    dialect.cards = cards  # type: ignore[misc]
    async with ScriptedServer(dialect, always(SAID)) as server:
        completer = await connect(Endpoint(server.base_url, "scripted", "", 60.0), tokenizer)
        await completer.aclose()
    assert isinstance(completer, IdCompleter | ChatCompleter)
    assert completer.context_length == holds
