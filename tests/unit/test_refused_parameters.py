"""Endpoints that refuse a parameter, each in its own words: found by neutral requests, and done without."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from aiohttp import web

from orchestrator.completion.base import CompletionRequest, Endpoint
from orchestrator.completion.chat import ChatCompleter, trial
from orchestrator.completion.connect import connect
from orchestrator.completion.http import HttpClient
from orchestrator.completion.retry import RetryPolicy
from orchestrator.errors import CompletionError, ContextLengthError, EnvironmentUnusable, ParameterError
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.requests import AgentRequest
from orchestrator.types import CompletionKind, Message, Sampling, Wishes
from tests.fakes.plans import a_plan, an_agent

ONCE = RetryPolicy(attempts=1, pauses=0)
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=64, seed=1)
STOPS = ("Observation:", "Calling tools:", "</code>")
TALK = (Message("system", "You are helpful."), Message("user", "What is 1 + 1?"))
TOOL = ({"type": "function", "function": {"name": "f", "description": "it", "parameters": {"type": "object"}}},)


def error(message: str, **more: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", **more}}


@dataclass(frozen=True)
class Strict:
    """A chat service that refuses what some service refuses, in that service's words."""

    says: Callable[[dict[str, Any]], tuple[int, Any] | None] = lambda body: None
    tools: bool = True
    models: Any = field(default_factory=lambda: {"data": [{"id": "m", "object": "model", "owned_by": "us"}]})

    def refusal(self, body: dict[str, Any]) -> tuple[int, Any] | None:
        if body.get("tools") and not self.tools:
            return 400, error(
                '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
            )
        return self.says(body)


@asynccontextmanager
async def serving(service: Strict, text: str = "two") -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """(its address, the bodies of all requests for completions)."""
    bodies: list[dict[str, Any]] = []

    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        bodies.append(body | {"probe": "x-orchestrator-probe" in request.headers})
        refused = service.refusal(body)
        if refused is not None:
            return web.json_response(refused[1], status=refused[0])
        message = {"role": "assistant", "content": text}
        return web.json_response({"choices": [{"index": 0, "finish_reason": "stop", "message": message}]})

    async def models(request: web.Request) -> web.Response:
        return web.json_response(service.models)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", bodies
    finally:
        await runner.cleanup()


def request(**more: Any) -> CompletionRequest:
    made = CompletionRequest(TALK, None, STOPS, SAMPLING, "r", "t", 0, 1, call_format="hermes")
    return replace(made, **more)


def unsupported(*names: str, words: str = "Unsupported parameter: '{}' is not supported with this model.") -> Any:
    def says(body: dict[str, Any]) -> tuple[int, Any] | None:
        return next(((400, error(words.format(name), param=name)) for name in names if name in body), None)

    return says


def o_series(body: dict[str, Any]) -> tuple[int, Any] | None:
    """gpt-5 and the o-series: every refusal names one parameter alone."""
    if unknown := [
        n for n in ("top_k", "min_p", "repetition_penalty", "repeat_penalty", "return_token_ids") if n in body
    ]:
        return 400, error(f"Unrecognized request arguments supplied: {', '.join(unknown)}")
    if "max_tokens" in body:
        text = "'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
        return 400, error(f"Unsupported parameter: {text}", param="max_tokens", code="unsupported_parameter")
    return unsupported("logprobs", "stop", "temperature", "top_p", "presence_penalty", "frequency_penalty")(body)


def anthropic(body: dict[str, Any]) -> tuple[int, Any] | None:
    if "temperature" in body and "top_p" in body:
        return 400, error(
            "`temperature` and `top_p` cannot both be specified for this model. Please use only one."
        )
    return None


def one_stop(body: dict[str, Any]) -> tuple[int, Any] | None:
    if len(body.get("stop") or ()) > 1:
        return 422, {
            "detail": [{"loc": ["body", "stop"], "msg": "List should have at most 1 item after validation"}]
        }
    return None


def camel(body: dict[str, Any]) -> tuple[int, Any] | None:
    for name, told in (("top_k", "topK"), ("repetition_penalty", "repetitionPenalty"), ("stop", "stopSequences")):
        if name in body:
            return 400, {"message": f"The field {told} is not allowed for this model"}
    return None


def pydantic(body: dict[str, Any]) -> tuple[int, Any] | None:
    extra = [n for n in ("top_k", "min_p", "repeat_penalty", "return_token_ids", "seed", "n") if n in body]
    detail = [
        {"type": "extra_forbidden", "loc": ["body", n], "msg": "Extra inputs are not permitted"} for n in extra
    ]
    return (422, {"detail": detail}) if extra else None


def gemini(body: dict[str, Any]) -> tuple[int, Any] | None:
    for name in ("top_k", "min_p", "repetition_penalty", "repeat_penalty", "return_token_ids"):
        if name in body:
            return 400, [{"error": {"code": 400, "message": f'Unknown name "{name}": Cannot find field.'}}]
    if "presence_penalty" in body or "frequency_penalty" in body:
        return 400, [{"error": {"code": 400, "message": "Penalty is not enabled for models/gemini"}}]
    return None


def no_system(body: dict[str, Any]) -> tuple[int, Any] | None:
    if body["messages"][0]["role"] == "system":
        return 500, error("System role not supported")
    return None


SERVICES = {
    "o-series": o_series,
    "grok": unsupported("stop", "presence_penalty", words="Argument not supported on this model: {}"),
    "anthropic": anthropic,
    "one stop string": one_stop,
    "camel-case": camel,
    "pydantic": pydantic,
    "gemini": gemini,
    "no system message": no_system,
    "only four": lambda body: (
        (400, error("Invalid 'stop': array too long. Expected an array with maximum length 2.", param="stop"))
        if len(body.get("stop") or ()) > 2
        else None
    ),
    "no word of what": lambda body: (400, error("bad request")) if "top_k" in body else None,
}


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.parametrize("probed", [True, False])
async def test_what_a_service_refuses_costs_no_rollout_a_completion(name: str, probed: bool) -> None:
    async with serving(Strict(SERVICES[name]), text="two</code> and more") as (address, bodies):
        completer = ChatCompleter(HttpClient(Endpoint(address, "m")), ONCE)
        if probed:
            await completer.aclose()
            completer = await connect(Endpoint(address, "m"), None, like=trial(SAMPLING, stop=STOPS))
            assert len(bodies) <= 2
            assert all(body["probe"] for body in bodies)
            assert {body.get("max_tokens", body.get("max_completion_tokens")) for body in bodies} == {1}
        completion = await completer.sample(request())
        assert completion.text == "two</code> and more"
        assert completion.visible == "two", "what the endpoint cannot do, the product does"
        before = len(bodies)
        await completer.sample(request())
        assert len(bodies) == before + 1, "it is learned once"
        await completer.aclose()
    last = bodies[-1]
    assert last["messages"][-1]["content"].endswith("What is 1 + 1?")
    assert "You are helpful." in json.dumps(last["messages"])
    if name in ("one stop string", "only four"):
        assert last["stop"][-1] == "</code>"


async def test_the_probe_sends_what_the_run_sends() -> None:
    async with serving(Strict()) as (address, bodies):
        like = trial(Sampling(0.7, 0.9, 512, 3), stop=STOPS, tools=True)
        completer = await connect(Endpoint(address, "m"), None, like=like)
        await completer.aclose()
    (probe,) = bodies
    assert [message["role"] for message in probe["messages"]] == ["system", "user"]
    assert (probe["temperature"], probe["top_p"], probe["max_tokens"]) == (0.7, 0.9, 1)
    assert len(probe["stop"]) == 3
    assert probe["tools"]


async def test_a_temperature_that_is_not_taken_is_said_and_never_replaced() -> None:
    async with serving(Strict(unsupported("temperature"))) as (address, _):
        like = trial(replace(SAMPLING, temperature=0.7))
        with pytest.raises(EnvironmentUnusable, match=r"--env\.temperature 1"):
            await connect(Endpoint(address, "m"), None, like=like)
        completer = ChatCompleter(HttpClient(Endpoint(address, "m")), ONCE)
        with pytest.raises(ParameterError, match=r"--env\.temperature 1"):
            await completer.sample(request(sampling=replace(SAMPLING, temperature=0.7)))
        await completer.aclose()
        judge = ChatCompleter(HttpClient(Endpoint(address, "m")), ONCE, strict=False)
        assert (await judge.sample(request(sampling=replace(SAMPLING, temperature=0.0)))).text == "two"
        await judge.aclose()


async def test_a_refused_form_takes_nothing_from_requests_without_one() -> None:
    """A program's `response_format` that is not taken beside log-probs and a seed switched both off for all."""

    def says(body: dict[str, Any]) -> tuple[int, Any] | None:
        if body.get("response_format") and ("logprobs" in body or "seed" in body):
            return 400, error("response_format cannot be used together with logprobs or seed")
        return None

    form = Wishes(response_format={"type": "json_object"})
    async with serving(Strict(says)) as (address, bodies):
        completer = ChatCompleter(HttpClient(Endpoint(address, "m")), ONCE)
        await completer.sample(request(wishes=form))
        assert "logprobs" not in bodies[-1]
        await completer.sample(request())
        await completer.aclose()
    assert bodies[-1]["logprobs"] is True
    assert bodies[-1]["seed"] == 1
    assert completer.left_out == ()


@pytest.mark.parametrize("wishes", [Wishes(), Wishes(tools=TOOL), Wishes(response_format={"type": "json_object"})])
async def test_a_refusal_of_one_rollouts_words_teaches_nothing(wishes: Wishes) -> None:
    """The control of the same kind is served with the same parameters."""

    def says(body: dict[str, Any]) -> tuple[int, Any] | None:
        return (400, error("seed and logprobs: no")) if "1 + 1" in json.dumps(body["messages"]) else None

    async with serving(Strict(says)) as (address, bodies):
        completer = ChatCompleter(HttpClient(Endpoint(address, "m")), ONCE)
        for _ in range(3):
            with pytest.raises(CompletionError, match="seed and logprobs"):
                await completer.sample(request(wishes=wishes))
        assert completer.left_out == ()
        await completer.aclose()
    assert len(bodies) == 4, "the control is asked once"


async def test_tools_that_are_refused_are_said_at_the_start_and_programs_go_on_without() -> None:
    async with serving(Strict(tools=False)) as (address, bodies):
        like, notes = trial(SAMPLING, tools=True), list[str]()
        with pytest.raises(EnvironmentUnusable, match=r"refuses tools.*--env\.tool_call_format json"):
            await connect(Endpoint(address, "m"), None, like=like, calls="hermes")
        completer = await connect(Endpoint(address, "m"), None, like=like, notes=notes)
        assert (await completer.sample(request())).text == "two"
        await completer.aclose()
    assert any("refuses tools" in note for note in notes)
    assert sum(body["probe"] for body in bodies) == 3


@pytest.mark.parametrize("words", ["Invalid 'stop': array too long.", "invalid value for stop"])
async def test_one_programs_many_stop_strings_cost_the_others_none(words: str) -> None:
    service = Strict(lambda body: (400, error(words)) if len(body.get("stop") or ()) > 4 else None)
    async with serving(service) as (address, bodies):
        completer = ChatCompleter(HttpClient(Endpoint(address, "m")), ONCE)
        try:
            many = tuple(f"stop {number}" for number in range(9))
            assert (await completer.sample(request(stop=many))).text == "two"
            assert (await completer.sample(request(stop=STOPS))).text == "two"
        finally:
            await completer.aclose()
    assert bodies[-1]["stop"] == list(STOPS)


def holds(tokens: int, prompt: int, words: str) -> Callable[[dict[str, Any]], tuple[int, Any] | None]:
    def says(body: dict[str, Any]) -> tuple[int, Any] | None:
        over = prompt + body["max_tokens"] > tokens
        return (400, error(words.format(tokens=tokens, prompt=prompt, most=body["max_tokens"]))) if over else None

    return says


@pytest.mark.parametrize(
    "words",
    [
        "This model's maximum context length is {tokens} tokens. However, you requested 9 tokens ({prompt} in the "
        "messages, {most} in the completion).",
        "'max_tokens' is too large: {most}. This model's maximum context length is {tokens} tokens and your "
        "request has {prompt} input tokens ({most} > {tokens} - {prompt}).",
        "Requested token count exceeds the model's maximum context length of {tokens} tokens. You requested a "
        "total of 9 tokens: {prompt} tokens from the input messages and {most} tokens for the completion.",
    ],
)
async def test_a_text_is_asked_for_what_fits_behind_its_prompt(words: str) -> None:
    async with serving(Strict(holds(100, 40, words))) as (address, bodies):
        completer = ChatCompleter(HttpClient(Endpoint(address, "m")), ONCE)
        completer.context_length = 100
        counted = request(sampling=replace(SAMPLING, max_tokens=500), prompt_tokens=45)
        assert (await completer.sample(counted)).text == "two"
        assert [body["max_tokens"] for body in bodies] == [55], "what the run's tokenizer counts"
        assert (await completer.sample(replace(counted, prompt_tokens=0))).text == "two"
        assert [body["max_tokens"] for body in bodies[1:]] == [100, 60], "what the endpoint says"
        await completer.aclose()
    async with serving(Strict(holds(100, 400, words))) as (address, bodies):
        completer = ChatCompleter(HttpClient(Endpoint(address, "m")), ONCE)
        with pytest.raises(ContextLengthError):
            await completer.sample(request())
        assert len(bodies) == 1
        await completer.aclose()


async def test_a_request_that_does_not_fit_is_made_smaller_once() -> None:
    """An endpoint whose room shrinks with what it is asked for would be asked without end."""
    words = (
        "This model's maximum context length is 100 tokens. However, you requested 9 tokens ({} in the messages)."
    )

    def says(body: dict[str, Any]) -> tuple[int, Any] | None:
        return 400, error(words.format(101 - body["max_tokens"]))

    async with serving(Strict(says)) as (address, bodies):
        completer = ChatCompleter(HttpClient(Endpoint(address, "m")), ONCE)
        with pytest.raises(ContextLengthError):
            await completer.sample(request())
        await completer.aclose()
    assert [body["max_tokens"] for body in bodies] == [64, 63]


async def test_a_parameter_that_one_kind_alone_does_not_take_is_no_end_of_the_policys() -> None:
    """The service refuses a temperature beside tools, and answers plain requests."""

    def says(body: dict[str, Any]) -> tuple[int, Any] | None:
        return unsupported("temperature")(body) if "tools" in body else None

    async with serving(Strict(says)) as (address, _):
        for kind in ("program", "tool_calling"):
            completer = ChatCompleter(HttpClient(Endpoint(address, "m")), ONCE)
            agent = an_agent(kind=kind, call_format="hermes")
            plan = a_plan(agent=agent, sampling=replace(SAMPLING, temperature=0.7))
            lease = Lease(plan, completer, None, {})
            first = await lease.complete(AgentRequest(1, CompletionKind.PLAN, TALK), b"1")
            assert first.completion is not None
            more = (*TALK, Message("assistant", "two"), Message("user", "And?"))
            second = await lease.complete(
                AgentRequest(2, CompletionKind.ACTION, more, wishes=Wishes(tools=TOOL)), b"2"
            )
            if kind == "program":
                assert second.refused is not None
                assert "env.temperature" in second.refused.text
                assert lease.live
            else:
                assert second.ended == "llm_error"
            await lease.aclose()
            await completer.aclose()


async def test_what_a_demanded_call_does_not_take_is_taken_from_no_other() -> None:
    def says(body: dict[str, Any]) -> tuple[int, Any] | None:
        demanded = body.get("tool_choice") not in (None, "auto")
        return (400, error("logprobs: not with this tool_choice")) if demanded and "logprobs" in body else None

    async with serving(Strict(says)) as (address, bodies):
        completer = ChatCompleter(HttpClient(Endpoint(address, "m")), ONCE)
        for choice in (Wishes(TOOL, "required"), Wishes(TOOL, "required", "f"), Wishes(TOOL)):
            await completer.sample(request(wishes=choice))
            assert ("logprobs" in bodies[-1]) is (choice.tool_choice == "auto")
        await completer.aclose()


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (400, "Only user and assistant roles are supported!"),
        (400, "Unexpected role: system"),
        (500, "Jinja Exception: raise_exception() called at row 3, column 14"),
    ],
)
async def test_a_system_message_that_the_servers_template_refuses_is_folded(status: int, words: str) -> None:
    def says(body: dict[str, Any]) -> tuple[int, Any] | None:
        return (status, error(words)) if body["messages"][0]["role"] == "system" else None

    async with serving(Strict(says)) as (address, bodies):
        completer = ChatCompleter(HttpClient(Endpoint(address, "m")), ONCE)
        assert (await completer.sample(request())).text == "two"
        await completer.aclose()
    (message,) = bodies[-1]["messages"]
    assert message == {"role": "user", "content": "You are helpful.\n\nWhat is 1 + 1?"}


async def test_reasoning_is_asked_for_as_the_service_takes_it() -> None:
    """Learned from its answer, whatever its name: OpenAI refuses `reasoning`, OpenRouter takes it."""
    openai = Strict(unsupported("reasoning", words="Unrecognized request argument supplied: {}"))
    for effort, asked in (("low", "low"), (None, "medium")):
        reasoning = {"enabled": True, **({"effort": effort} if effort else {})}
        async with serving(openai) as (address, bodies):
            endpoint = Endpoint(address, "m", chat_extras={"reasoning": reasoning})
            completer = ChatCompleter(HttpClient(endpoint), ONCE)
            assert (await completer.sample(request())).text == "two"
            await completer.aclose()
        assert "reasoning" not in bodies[-1]
        assert bodies[-1]["reasoning_effort"] == asked
    async with serving(openai) as (address, _):
        endpoint = Endpoint(address, "m", chat_extras={"reasoning": {"enabled": True, "max_tokens": 2048}})
        completer = ChatCompleter(HttpClient(endpoint), ONCE)
        with pytest.raises(ParameterError, match=r"env\.max_reasoning_tokens.*env\.reasoning_effort"):
            await completer.sample(request())
        await completer.aclose()


@pytest.mark.parametrize(
    "models", [None, [], {}, {"data": None}, {"data": []}, {"data": ["m"]}, {"data": {"id": "m"}}]
)
async def test_a_list_of_models_that_nobody_can_read_names_no_server(models: Any) -> None:
    async with serving(Strict(models=models)) as (address, _):
        completer = await connect(Endpoint(address, "m"), None, like=trial(SAMPLING), max_token_length=100)
        try:
            assert (await completer.sample(request())).text == "two"
        finally:
            await completer.aclose()


async def test_an_error_that_passes_teaches_no_folding() -> None:
    failures = iter(range(2))

    def says(body: dict[str, Any]) -> tuple[int, Any] | None:
        return (500, error("the chat template failed")) if next(failures, None) is not None else None

    async with serving(Strict(says)) as (address, bodies):
        completer = ChatCompleter(HttpClient(Endpoint(address, "m")), RetryPolicy(attempts=2))
        assert (await completer.sample(request())).text == "two"
        await completer.aclose()
    assert [message["role"] for message in bodies[-1]["messages"]] == ["system", "user"]
