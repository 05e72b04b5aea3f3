"""What the list of models says of an endpoint, and what the first probe makes of a refusal."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.completion.base import Endpoint
from orchestrator.completion.chat import ChatCompleter, trial
from orchestrator.completion.connect import connect
from orchestrator.errors import EnvironmentUnusable
from orchestrator.types import ServerType
from tests.fakes.tokenizers import made
from tests.unit.test_refused_parameters import SAMPLING, Strict, error, serving

REASONING = {"reasoning": {"effort": "high"}}


def listed(**card: Any) -> Strict:
    return Strict(models={"data": [{"id": "m", "object": "model", **card}]})


@pytest.mark.parametrize(
    ("card", "length"),
    [
        ({"owned_by": "vllm", "max_model_len": 4096}, 4096),
        ({"owned_by": "llamacpp", "meta": {"n_ctx": 2048}}, 2048),
        ({"owned_by": "llamacpp", "meta": None}, None),
        *(({"owned_by": "vllm", "max_model_len": odd}, None) for odd in (0, -1, True, "4096", 4096.0, [], None)),
    ],
)
async def test_only_a_whole_number_of_tokens_is_a_context(card: dict[str, Any], length: int | None) -> None:
    async with serving(listed(**card)) as (address, _):
        completer = await connect(Endpoint(address, "m"), None)
        await completer.aclose()
    assert isinstance(completer, ChatCompleter)
    assert completer.context_length == length


@pytest.mark.parametrize("more", [{}, {"meta": None}, {"max_model_len": "many"}])
async def test_a_server_without_a_length_is_still_known_by_its_name(more: dict[str, Any]) -> None:
    """It takes ids, and would ignore the parameter of hosted services."""
    async with serving(listed(owned_by="vllm", **more)) as (address, _):
        with pytest.raises(EnvironmentUnusable, match="vllm does not know it"):
            await connect(Endpoint(address, "m", chat_extras=REASONING), None)


async def test_a_gateway_may_be_asked_for_reasoning() -> None:
    async with serving(listed(owned_by="us")) as (address, bodies):
        completer = await connect(Endpoint(address, "m", chat_extras=REASONING), None)
        await completer.aclose()
    assert [body["reasoning"] for body in bodies] == [REASONING["reasoning"]]


async def test_a_refusal_that_is_not_of_tools_is_not_taken_for_one() -> None:
    service = Strict(lambda body: (404, error("there is no such deployment")))
    async with serving(service) as (address, _):
        with pytest.raises(EnvironmentUnusable, match="refuses completions: HTTP 404"):
            await connect(Endpoint(address, "m"), None, like=trial(SAMPLING, tools=True), calls="hermes")


async def test_a_parameter_that_is_refused_beside_tools_is_left_out_and_the_tools_stay() -> None:
    words = "top_k cannot be used together with tools"
    service = Strict(lambda body: (400, error(words)) if {"top_k", "tools"} <= body.keys() else None)
    async with serving(service) as (address, bodies):
        completer = await connect(Endpoint(address, "m"), None, like=trial(SAMPLING, tools=True), calls="hermes")
        await completer.aclose()
    assert ["tools" in body for body in bodies] == [True, True]
    assert ["top_k" in body for body in bodies] == [True, False]


@pytest.mark.parametrize(
    ("server_type", "owner", "dialect"),
    [
        ("auto", "us", "vllm"),
        ("vllm", "us", "vllm"),
        ("sglang", "us", "sglang"),
        ("atropos", "us", "atropos"),
    ],
)
async def test_a_server_with_a_list_is_asked_in_the_dialect_that_was_named(
    server_type: ServerType, owner: str, dialect: str
) -> None:
    async with serving(listed(owned_by=owner)) as (address, _):
        endpoint = Endpoint(address, "m")
        with pytest.raises(EnvironmentUnusable, match=rf"\b{dialect}\b"):
            await connect(endpoint, made(), server_type=server_type, tokens="exact")
