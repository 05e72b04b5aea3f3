"""Samples that keep to a schema: their log-probs are the model's, of no other weights, and nothing is joined."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.completion.base import CompletionRequest, Endpoint, ids_of
from orchestrator.completion.connect import connect
from orchestrator.completion.ids import IdCompleter
from orchestrator.completion.retry import RetryPolicy
from orchestrator.completion.tokenizer import load_tokenizer
from orchestrator.errors import CompletionError, ContextLengthError
from orchestrator.types import Sampling, Wishes
from tests.fakes.inference import ScriptedServer, always
from tests.fakes.inference.model import logprob
from tests.fakes.tokenizer import tokenizer_folder

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FORMS = [{"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}, {"type": "json_object"}]
SAID = '{"city": "Rome"}'


def asked(**more: Any) -> CompletionRequest:
    tokenizer = load_tokenizer(str(tokenizer_folder()))
    ids = ids_of(tokenizer.encode("<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"))
    request = CompletionRequest((), ids, ("</code>",), Sampling(1.0, 1.0, 64, 7), "r", "t", 0, 1)
    return replace(request, **more)


async def completer_of(server: ScriptedServer) -> IdCompleter:
    completer = await connect(Endpoint(server.base_url, "scripted"), load_tokenizer(str(tokenizer_folder())))
    assert isinstance(completer, IdCompleter)
    completer._retry = RetryPolicy(attempts=1, pauses=0)
    return completer


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize("form", [*FORMS, {}, {"type": "text"}])
async def test_log_probs_are_the_model_s_and_not_of_what_the_schema_left(kind: str, form: dict[str, Any]) -> None:
    async with ScriptedServer(kind, always(SAID)) as server:
        completer = await completer_of(server)
        request = asked(wishes=Wishes(response_format=form))
        completion = await completer.sample(request)
        bodies = [served.body for served in server.log.completions]
        await completer.aclose()
    place = len(request.prompt_ids or ())
    raw = tuple(logprob(token, place + number) for number, token in enumerate(completion.tokens_T or ()))
    assert (completion.visible, completion.logprobs_T) == (SAID, raw)
    guided = form.get("type", "text") != "text"
    assert len(bodies) == 1 + guided, "one request more, and none where there is no schema"
    first = bodies[0]["sampling_params"] if kind == "sglang" else bodies[0]
    schema = json.loads(first["json_schema"]) if "json_schema" in first else first.get("response_format")
    if kind == "vllm":
        assert (schema or {}) == form
    else:
        assert schema == ((SCHEMA if "json_schema" in form else {"type": "object"}) if guided else None)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_there_is_room_for_the_second_request(kind: str) -> None:
    async with ScriptedServer(kind, always(SAID * 9)) as server:
        completer = await completer_of(server)
        request = asked(wishes=Wishes(response_format=FORMS[0]))
        prompt = len(request.prompt_ids or ())
        completer.context_length = server.model.context_length = prompt + 5
        completion = await completer.sample(request)
        assert (len(completion.tokens_T or ()), completion.finish_reason) == (4, "length")
        completer.context_length = server.model.context_length = prompt + 1
        with pytest.raises(ContextLengthError):
            await completer.sample(request)
        await completer.aclose()


@pytest.mark.parametrize("spans", [False, True])
async def test_log_probs_of_other_weights_are_not_taken(spans: bool) -> None:
    async with ScriptedServer("sglang", always(SAID)) as server:
        completer = await completer_of(server)
        read, scores = completer.dialect.read, completer.dialect.scores

        def changes(answer: Any) -> Any:
            sampled = read(answer)
            if not spans:
                server.model.weight_version = "2"
                return sampled
            half = [
                {"version": "1", "start": 0, "end": 2},
                {"version": "default", "start": 2, "end": len(sampled.ids)},
            ]
            return replace(sampled, weight_versions=half)

        completer.dialect.read = changes  # type: ignore[method-assign]
        with pytest.raises(CompletionError, match="the weights changed"):
            await completer.sample(asked(wishes=Wishes(response_format=FORMS[0])))
        completer.dialect.read = read  # type: ignore[method-assign]
        completer.dialect.scores = lambda answer, ids: scores(answer, [*ids[:-1], 5])  # type: ignore[method-assign]
        with pytest.raises(CompletionError, match="not an answer in the dialect sglang"):
            await completer.sample(asked(wishes=Wishes(response_format=FORMS[0])))
        await completer.aclose()


@pytest.mark.parametrize(("form", "joined"), [(FORMS[0], False), ({}, True)])
async def test_what_was_aborted_is_gone_on_with_only_without_a_schema(form: dict[str, Any], joined: bool) -> None:
    """A grammar begins at the first token that is sampled: the rest of a JSON text would be another one."""
    async with ScriptedServer("sglang", always(SAID)) as server:
        completer = await completer_of(server)
        completer._retry = RetryPolicy()
        read, answers = completer.dialect.read, iter([True])

        def aborts(answer: Any) -> Any:
            sampled = read(answer)
            if next(answers, False):
                count = 3
                return replace(
                    sampled, ids=sampled.ids[:count], logprobs=sampled.logprobs[:count],
                    sampled_tokens=count, finish_reason="abort", text=None,
                )  # fmt: skip
            return sampled

        completer.dialect.read = aborts  # type: ignore[method-assign]
        request = asked(wishes=Wishes(response_format=form))
        await completer.sample(request)
        sampling = [served for served in server.log.completions if served.body["logprob_start_len"] == -1]
        await completer.aclose()
    longer = [len(served.prompt_ids or ()) > len(request.prompt_ids or ()) for served in sampling]
    assert longer == [False, joined]
