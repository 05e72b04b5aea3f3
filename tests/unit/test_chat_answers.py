"""Answers of chat endpoints in the words of many services, and what comes of each."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from orchestrator.completion.base import Endpoint, Refusal, UnusableSample
from orchestrator.completion.chat import ChatCompleter
from orchestrator.completion.control import EndpointControl
from orchestrator.completion.finish import FinishReasons, end_of
from orchestrator.completion.http import HttpClient
from orchestrator.completion.retry import Aborted, Retryable
from orchestrator.errors import AuthenticationError, CompletionError, ContextLengthError, QuotaError
from orchestrator.types import Completion, Wishes
from tests.fakes.plans import a_plan
from tests.unit.test_refused_parameters import ONCE, TOOL, request

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = Wishes(tools=TOOL)


@asynccontextmanager
async def answering(answer: Any, status: int = 200) -> AsyncIterator[ChatCompleter]:
    async def chat(_: web.Request) -> web.Response:
        return web.json_response(answer, status=status)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    completer = ChatCompleter(HttpClient(Endpoint(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "m")), ONCE)
    try:
        yield completer
    finally:
        await completer.aclose()
        await runner.cleanup()


async def said(message: dict[str, Any], wishes: Wishes = Wishes(), **choice: Any) -> Completion:  # noqa: B008
    answer = {"choices": [{"finish_reason": "stop", "message": {"role": "assistant", **message}, **choice}]}
    async with answering(answer) as completer:
        return await completer.sample(request(wishes=wishes))


THOUGHTS = {
    "mistral": {
        "content": [
            {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
            {"type": "text", "text": "t"},
            {"type": "text", "text": "wo"},
        ]
    },
    "anthropic": {
        "content": [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "two"}]
    },
    "responses": {
        "content": [{"type": "reasoning", "summary": [{"text": "hm"}]}, {"type": "output_text", "text": "two"}]
    },
    "texts": {"content": ["t", "wo"], "reasoning": "hm"},
    "openrouter": {"content": "two", "reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
    "ollama": {"content": "two", "thinking": "hm"},
    "deepseek": {"content": "two", "reasoning_content": "hm"},
}


@pytest.mark.parametrize("name", THOUGHTS)
async def test_a_content_in_parts_is_text_and_reasoning(name: str) -> None:
    completion = await said(THOUGHTS[name])
    assert completion.visible == "two"
    assert completion.text == "<think>\nhm\n</think>\n\ntwo"


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ({"prompt_tokens": 20, "completion_tokens": 7}, (20, 7)),
        ({"prompt_tokens": 20, "completion_tokens": 1_000}, (20, 64)),
    ],
)
async def test_tokens_are_those_that_the_service_counted_within_what_was_asked_for(
    usage: dict[str, int], counts: tuple[int, int]
) -> None:
    choice = {"finish_reason": "stop", "message": {"role": "assistant", "content": "two"}}
    async with answering({"choices": [choice], "usage": usage}) as completer:
        completion = await completer.sample(request())
    assert (completion.prompt_tokens, completion.completion_tokens) == counts


async def test_a_refusal_of_the_model_is_its_text() -> None:
    assert (await said({"content": None, "refusal": "I cannot."})).visible == "I cannot."


@pytest.mark.parametrize("value", [None, float("-inf"), float("nan"), "x", 0.5])
async def test_log_probs_that_are_not_used_cost_no_sample(value: Any) -> None:
    entries = [{"token": "t", "logprob": -0.5, "id": 1}, {"token": "wo", "logprob": value, "id": 2}]
    completion = await said({"content": "two"}, logprobs={"content": entries})
    assert completion.text == "two"
    assert completion.logprobs_T is None
    assert completion.tokens_T == (1, 2)


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
@pytest.mark.parametrize(
    "content", [None, "", CALL, "I look.", f"I look.\n{CALL}", [{"type": "text", "text": CALL}]]
)
async def test_a_call_counts_once_in_whatever_form(arguments: Any, content: Any) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    completion = await said({"content": content, "tool_calls": calls}, TOOLS, finish_reason="tool_calls")
    assert completion.visible.count("<tool_call>") == 1
    assert completion.visible.startswith("I look.") == ("I look." in str(content))
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize(
    "message",
    [
        {"content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {"content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
        {"content": None, "tool_calls": [{"name": "f", "arguments": {"a": 1}}]},
    ],
)
async def test_calls_in_other_places_are_calls(message: dict[str, Any]) -> None:
    assert (await said(message, TOOLS, finish_reason="function_call")).visible == CALL


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ({"error": {"message": "no capacity", "code": 503}}, Retryable, "HTTP 200 with an error: .*no capacity"),
        ({"error": "the worker died"}, CompletionError, "the worker died"),
        ({"object": "error", "message": "bad thing", "code": 400}, Refusal, "bad thing"),
        (
            {"error": {"message": "prompt exceeds the maximum context length", "code": 400}},
            ContextLengthError,
            "exceeds",
        ),
        ({"error": {"message": "who?", "type": "authentication_error"}}, AuthenticationError, "who"),
        ({"error": {"message": "pay", "code": 402}}, QuotaError, "pay"),
        ({"detail": "not here"}, CompletionError, "not here"),
        (
            {"choices": [{"error": {"message": "upstream broke"}, "finish_reason": "error"}]},
            CompletionError,
            "upstream",
        ),
        ({"odd": "thing"}, CompletionError, "odd"),
    ],
)
async def test_an_error_that_comes_with_200_is_told_in_its_words(
    answer: Any, kind: type[Exception], words: str
) -> None:
    async with answering(answer) as completer:
        with pytest.raises(CompletionError if kind is Retryable else kind, match=words):
            await completer.sample(request())


async def test_a_model_that_only_thought_in_the_words_of_openai_is_a_sample() -> None:
    text = "Could not finish the message because max_tokens or model output limit was reached."
    async with answering({"error": {"message": text}}, 400) as completer:
        with pytest.raises(UnusableSample) as thought:
            await completer.sample(request())
    assert thought.value.completion.finish_reason == "length"


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("stop", "stop eos end_turn STOP stop_sequence COMPLETE eosFound endOfTurn FINISH_REASON_STOP tool-calls"),
        ("length", "length max_tokens MAX_TOKENS maxTokens model_length REASON_MAX_LEN max-output-tokens LENGTH"),
        ("content_filter", "content_filter SAFETY refusal guardrail_intervened sensitive ContentFilter"),
        ("aborted", "abort ABORTED"),
        ("broken_off", "error cancelled network_error insufficient_system_resource userStopped"),
        ("out_of_time", "timeout TIME_LIMIT not_finished"),
        (None, "odd xyz_stop_odd"),
    ],
)
def test_words_of_services_have_one_meaning_each(end: str | None, words: str) -> None:
    assert {end_of(word) for word in words.split()} == {end}


@pytest.mark.parametrize("reason", [None, "", "odd", 7, {"type": None}, "x" * 10_000])
def test_an_unknown_word_is_judged_by_what_came_with_it(reason: Any) -> None:
    reasons = FinishReasons("an endpoint")
    assert reasons.end(reason, there=True, full=False) == "stop"
    assert reasons.end(reason, there=True, full=True) == "length"
    with pytest.raises(Retryable, match="nothing in it"):
        reasons.end(reason, there=False, full=False)
    with pytest.raises(Aborted):
        reasons.end("abort", there=True, full=False)


@pytest.mark.parametrize(
    ("reason", "end"),
    [("error", "broken_off"), ("cancelled", "broken_off"), ("network_error", "broken_off"),
     ({"type": "timeout"}, "out_of_time")],
)  # fmt: skip
def test_what_the_service_broke_off_is_no_end_of_the_model_however_much_came(reason: Any, end: str) -> None:
    for full in (True, False):
        assert FinishReasons("an endpoint").end(reason, there=True, full=full) == end
        with pytest.raises(Retryable, match="broke off"):
            FinishReasons("an endpoint").end(reason, there=False, full=full)


@pytest.mark.parametrize(
    "function", [{"name": None, "arguments": "{}"}, {"arguments": "{}"}, {"name": "f", "arguments": [1]}]
)
async def test_a_call_that_the_model_got_wrong_is_its_sample(function: dict[str, Any]) -> None:
    """If it were a fault of the service, a first completion could earn another draw."""
    found = await said({"content": None, "tool_calls": [{"function": function}]}, TOOLS)
    assert "<tool_call>" in found.text


@pytest.mark.parametrize("reason", [None, "", "odd"])
async def test_nothing_but_an_end_is_a_sample_where_the_service_counted_it(reason: Any) -> None:
    message = {"role": "assistant", "content": None}
    answer = {"choices": [{"finish_reason": reason, "message": message}], "usage": {"completion_tokens": 1}}
    async with answering(answer) as completer:
        with pytest.raises(UnusableSample):
            await completer.sample(request())
        answer["usage"] = {"completion_tokens": 0}
        with pytest.raises(CompletionError, match="nothing in it"):
            await completer.sample(request())


async def test_a_control_that_is_all_reasoning_was_served() -> None:
    """Else whoever fills a completion with a thought would get another draw of a model that thinks long."""
    plan = a_plan()
    words = "Could not finish the message because max_tokens or model output limit was reached."
    async with answering({"error": {"message": words}}, 400) as completer:
        assert (await EndpointControl(completer, None).answer(plan)).served
    empty = {"choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": None}}]}
    async with answering(empty) as completer:
        assert not (await EndpointControl(completer, None).answer(plan)).served


@pytest.mark.parametrize(
    "choice", [{"finish_reason": "time_limit"}, {"finish_reason": "error"}, {"error": "gone"}]
)
async def test_an_answer_that_stays_broken_off_was_sampled(choice: dict[str, Any]) -> None:
    """Its length may be why. A first completion without a sample would be drawn again."""
    with pytest.raises(UnusableSample) as broken:
        await said({"content": "a long text"}, **choice)
    assert broken.value.completion.text == "a long text"
    assert broken.value.completion.finish_reason == "length"
    with pytest.raises(CompletionError) as nothing:
        await said({"content": ""}, **choice)
    assert not isinstance(nothing.value, UnusableSample)
