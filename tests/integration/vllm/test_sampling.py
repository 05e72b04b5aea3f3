"""What docs/endpoints.md says of vLLM, held against a real one: how it is recognised, its ids and log-probs, stop
strings, seeds, and that neither its defaults nor the model's apply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.completion.base import Endpoint
from orchestrator.completion.chat import ChatCompleter
from orchestrator.completion.connect import connect
from orchestrator.completion.ids import IdCompleter
from orchestrator.completion.tokenizer import HubTokenizer, load_tokenizer
from orchestrator.errors import EnvironmentUnusable
from orchestrator.types import Completion, Wishes
from tests.fakes.tokenizer import tokenizer_folder
from tests.integration.vllm.asking import connected, request
from tests.integration.vllm.reference import Reference
from tests.integration.vllm.server import CONTEXT, NAME, VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
COUNT = "Count from one to ten in words, comma separated."
MOST_OFF = 0.08  # of bfloat16 against float32, on average: the more where tokens are unlikely


@pytest.mark.parametrize("server_type", ["auto", "vllm", "trl"])
async def test_it_is_recognised_and_takes_ids(
    plain: VllmServer, tokenizer: HubTokenizer, server_type: Any
) -> None:
    notes: list[str] = []
    options = {"server_type": server_type, "tokens": "exact", "max_token_length": CONTEXT}
    async with connected(plain, tokenizer, notes=notes, **options) as completer:
        assert isinstance(completer, IdCompleter)
        assert (completer.dialect.name, completer.context_length, notes) == ("vllm", CONTEXT, [])


async def test_it_is_asked_for_text_where_that_is_wanted(plain: VllmServer, tokenizer: HubTokenizer) -> None:
    async with connected(plain, tokenizer, tokens="retokenize") as completer:
        assert isinstance(completer, ChatCompleter)
        assert completer.left_out == ()
        completion = await completer.sample(request(tokenizer, COUNT, temperature=0.0, stop=(" Three",)))
    assert completion.visible == "One, Two,"
    assert completion.finish_reason == "stop"


async def test_another_tokenizer_is_found_at_the_start(plain: VllmServer) -> None:
    other = load_tokenizer(str(tokenizer_folder()))
    with pytest.raises(EnvironmentUnusable, match="the tokenizer is not the endpoint's"):
        await connect(Endpoint(plain.base_url, NAME), other)


async def test_another_model_s_name_is_refused_at_the_start(plain: VllmServer, tokenizer: HubTokenizer) -> None:
    with pytest.raises(EnvironmentUnusable, match="The model `another` does not exist"):
        await connect(Endpoint(plain.base_url, "another"), tokenizer)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.4, 1.0), (1.6, 1.0), (0.7, 0.5), (0.0, 1.0)])
async def test_log_probs_are_of_the_raw_distribution_however_it_samples(
    plain: VllmServer,
    tokenizer: HubTokenizer,
    reference: Reference,
    figures: Callable[[str], None],
    temperature: float,
    top_p: float,
) -> None:
    asked = request(tokenizer, temperature=temperature, top_p=top_p, max_tokens=48)
    async with connected(plain, tokenizer) as completer:
        completion = await completer.sample(asked)
    ids, logprobs = ids_and_logprobs(completion)
    distance = reference.distance(list(asked.prompt_ids or ()), ids, logprobs, temperature)
    figures(f"temperature {temperature:g}, top_p {top_p:g}: {len(ids)} tokens, {distance}")
    assert distance.own < MOST_OFF
    assert distance.shifted > 20 * distance.own
    if temperature in (0.4, 1.6):
        assert distance.tempered > 10 * distance.own


async def test_log_probs_under_a_schema_are_of_the_raw_distribution(
    plain: VllmServer, tokenizer: HubTokenizer, reference: Reference, figures: Callable[[str], None]
) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Bonn"]}, "note": {"type": "string"}}}
    schema |= {"required": ["city", "note"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    asked = replace(request(tokenizer, max_tokens=48), wishes=Wishes(response_format=form))
    async with connected(plain, tokenizer) as completer:
        completion = await completer.sample(asked)
        assert isinstance(completer, IdCompleter)
        body = completer.dialect.body(asked, NAME)
    ids, logprobs = ids_and_logprobs(completion)
    assert completion.visible.lstrip().startswith("{")
    prompt = list(asked.prompt_ids or ())
    (choice,) = plain.post("/v1/completions", **{**body, "prompt": prompt})["choices"]
    assert choice["token_ids"] == list(ids)
    theirs = reference.distance(prompt, ids, tuple(choice["logprobs"]["token_logprobs"]), 1.0)
    distance = reference.distance(prompt, ids, logprobs, 1.0)
    figures(f"under a schema: {len(ids)} tokens, {distance}; with the sample: {theirs}")
    assert distance.own < MOST_OFF
    assert theirs.own > 5 * distance.own, "what comes with the sample is of what the schema left"


async def test_neither_the_server_s_nor_the_model_s_defaults_apply(
    plain: VllmServer, tokenizer: HubTokenizer
) -> None:
    """The model's generation_config.json says top_k 20, top_p 0.8 and a penalty for repetitions."""
    async with connected(plain, tokenizer) as completer:
        assert isinstance(completer, IdCompleter)
        body = completer.dialect.body(request(tokenizer, temperature=1.6, max_tokens=60), NAME)
    assert outside_top_20(plain, body | {"prompt": list(body["prompt"])}) > 0
    bare = {"model": NAME, "prompt": list(body["prompt"]), "temperature": 1.6, "max_tokens": 60, "seed": 1}
    assert outside_top_20(plain, bare) == 0, "the defaults are there, and would apply"


def outside_top_20(server: VllmServer, body: dict[str, Any]) -> int:
    """How many sampled tokens are none of the 20 likeliest ones."""
    (choice,) = server.post("/v1/completions", **{**body, "logprobs": 20})["choices"]
    told = choice["logprobs"]
    ranks = zip(told["token_logprobs"], told["top_logprobs"], strict=True)
    return sum(len([value for value in top.values() if value > own]) >= 20 for own, top in ranks)


@pytest.mark.parametrize(
    ("stop", "text", "visible"),
    [
        ((" Thr",), "One, Two, Three", "One, Two,"),  # within a token: its other characters are sampled too
        (("o, T",), "One, Two, Three", "One, Tw"),  # over several tokens
        (("nothing", "Seven", "Four"), "One, Two, Three, Four", "One, Two, Three, "),
        ((), "One, Two, Three, Four, Five, Six, Seven, Eight, Nine, Ten<|im_end|>", None),
    ],
)
async def test_what_ends_a_completion_is_in_its_ids(
    plain: VllmServer, tokenizer: HubTokenizer, stop: tuple[str, ...], text: str, visible: str | None
) -> None:
    async with connected(plain, tokenizer) as completer:
        completion = await completer.sample(request(tokenizer, COUNT, temperature=0.0, stop=stop))
    ids, _ = ids_and_logprobs(completion)
    assert tokenizer.decode(ids) == text
    assert completion.visible == (text.removesuffix("<|im_end|>") if visible is None else visible)
    assert completion.finish_reason == "stop"


async def test_a_seed_repeats_and_another_one_does_not(plain: VllmServer, tokenizer: HubTokenizer) -> None:
    async with connected(plain, tokenizer) as completer:
        first, again, other = [
            (await completer.sample(request(tokenizer, max_tokens=24, seed=seed))).tokens_T for seed in (5, 5, 6)
        ]
    assert first == again != other


async def test_a_completion_may_be_no_longer_than_asked_for(plain: VllmServer, tokenizer: HubTokenizer) -> None:
    async with connected(plain, tokenizer) as completer:
        completion = await completer.sample(request(tokenizer, max_tokens=3))
    assert (len(completion.tokens_T or ()), completion.finish_reason) == (3, "length")


def ids_and_logprobs(completion: Completion) -> tuple[tuple[int, ...], tuple[float, ...]]:
    assert completion.tokens_T is not None
    assert completion.logprobs_T is not None
    assert len(completion.tokens_T) == len(completion.logprobs_T)
    return completion.tokens_T, completion.logprobs_T
