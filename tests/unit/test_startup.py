"""An endpoint that is still loading is waited for, and never taken for one without token ids."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from orchestrator.completion import startup as startup_module
from orchestrator.completion.base import Endpoint
from orchestrator.completion.chat import ChatCompleter
from orchestrator.completion.connect import connect
from orchestrator.completion.endpoints import open_completer
from orchestrator.completion.ids import IdCompleter
from orchestrator.completion.sglang import SglangDialect
from orchestrator.completion.startup import SAID_EVERY_S, SAMPLES, Wait, WaitLines
from orchestrator.completion.tokenizer import HubTokenizer, load_tokenizer
from orchestrator.errors import EnvironmentUnusable, NotServing
from orchestrator.host.setup import completion_needs
from orchestrator.rules.backoff import Backoff
from orchestrator.rules.policy import Policy
from orchestrator.rules.redact import Secret
from orchestrator.scorers.open import open_scorer
from orchestrator.settings.config import Config
from orchestrator.settings.endpoint import OpenAISettings
from orchestrator.settings.scoring import ScoringSettings
from orchestrator.settings.table import EnvSettings
from tests.fakes.inference import Fault, ScriptedServer, always
from tests.fakes.inference.dialects.base import Answer
from tests.fakes.tokenizer import tokenizer_folder
from tests.fakes.waiting_clock import WaitingClock

DIALECTS = {"vllm": "/v1/completions", "sglang": "/generate", "llamacpp": "/completion"}
CHAT = "/v1/chat/completions"
LIST = "/v1/models"
LOADING = ("429", "500", "502", "503", "504", "reset")
Loading = Callable[[str], Fault | None]


@pytest.fixture(scope="module")
def tokenizer() -> HubTokenizer:
    return load_tokenizer(str(tokenizer_folder()))


def first(times: int, kind: str, *paths: str, **more: Any) -> Loading:
    """The first requests for one of these paths (none given: for any) fail so."""
    left = times

    def loading(path: str) -> Fault | None:
        nonlocal left
        if left <= 0 or (paths and path not in paths):
            return None
        left -= 1
        return Fault(kind, **more)  # type: ignore[arg-type]

    return loading


def always_fails(kind: str, *paths: str) -> Loading:
    return first(1_000_000, kind, *paths)


def server(dialect: str = "vllm", loading: Loading = lambda path: None, **more: Any) -> ScriptedServer:
    return ScriptedServer(dialect, always("I do not know."), loading=loading, **more)


def endpoint(address: str, key: str = "") -> Endpoint:
    return Endpoint(address, "scripted", key, 600.0)


@asynccontextmanager
async def connected(
    there: ScriptedServer, tokenizer: HubTokenizer, clock: WaitingClock, timeout_s: float = 300.0, **more: Any
) -> AsyncIterator[IdCompleter | ChatCompleter]:
    completer = await connect(endpoint(there.base_url), tokenizer, patience=clock.patience(timeout_s), **more)
    assert isinstance(completer, IdCompleter | ChatCompleter)
    assert len(sampled(there)) <= SAMPLES
    try:
        yield completer
    finally:
        await completer.aclose()


def sampled(there: ScriptedServer) -> list[str]:
    """The paths of the requests that were sampled for."""
    return [served.path for served in there.log.all if served.sampled_ids]


def asked(there: ScriptedServer) -> list[str]:
    return [served.path for served in there.log.all]


# ---------------------------------------------------------------- what is waited for


@pytest.mark.parametrize("kind", LOADING)
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_server_that_is_loading_is_exact_once_it_has_loaded(
    dialect: str, kind: str, tokenizer: HubTokenizer
) -> None:
    clock, notes = WaitingClock(), list[str]()
    async with server(dialect, first(3, kind)) as there:
        async with connected(there, tokenizer, clock, notes=notes) as completer:
            assert completer.takes_ids
            assert notes == []
            assert asked(there)[:5] == [LIST] * 4 + [DIALECTS[dialect]]
            assert sampled(there) == [DIALECTS[dialect]]
            *waits, over = clock.told
            assert over.answer == ""
            assert all(wait.answer for wait in waits)
            assert len(waits) == 3 or kind == "reset"  # aiohttp itself sends a request again that was dropped


@pytest.mark.parametrize("kind", ["429", "500", "502", "503", "504"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_server_that_lists_its_models_while_it_loads_is_waited_for_too(
    dialect: str, kind: str, tokenizer: HubTokenizer
) -> None:
    """As llama.cpp did for a while, and every gateway that knows the names of models."""
    clock, notes = WaitingClock(), list[str]()
    path = DIALECTS[dialect]
    async with server(dialect, first(8, kind, path, CHAT, "/tokenize")) as there:
        async with connected(there, tokenizer, clock, notes=notes) as completer:
            assert completer.takes_ids
            assert isinstance(completer, IdCompleter)
            assert notes == []
            assert CHAT not in asked(there)
            assert sampled(there)[-1:] == [path]
            if isinstance(completer.dialect, SglangDialect):
                assert completer.dialect.seeded


async def test_a_refused_connection_is_tried_until_the_server_listens(tokenizer: HubTokenizer) -> None:
    with socket.socket() as held:  # bound without listening: connections are refused
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        async with AsyncExitStack() as stack:

            async def starts(pause: int) -> None:
                if pause == 4:
                    held.close()
                    await stack.enter_async_context(server(port=port))

            clock = WaitingClock(starts)
            there = endpoint(f"http://127.0.0.1:{port}/v1")
            completer = await connect(there, tokenizer, patience=clock.patience())
            await completer.aclose()
    assert completer.takes_ids
    assert len(clock.slept) == 4
    assert "connection failed" in clock.told[0].answer


async def test_a_name_that_is_not_known_yet_is_waited_for_and_said(
    tokenizer: HubTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name of Kubernetes or Compose is known once its server runs."""

    async def unknown(*_: object, **__: object) -> list[Any]:
        raise OSError(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("aiohttp.resolver.ThreadedResolver.resolve", unknown)
    clock = WaitingClock()
    with pytest.raises(NotServing, match="Name or service not known"):
        await connect(endpoint("http://vllm:8000/v1"), tokenizer, patience=clock.patience(60.0))
    assert "Name or service not known" in clock.told[0].answer


async def test_a_server_that_accepts_and_does_not_answer_is_asked_again(
    tokenizer: HubTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.completion.connect.LIST_TIMEOUT_S", 0.05)
    clock = WaitingClock()
    async with server(loading=first(2, "hang")) as there, connected(there, tokenizer, clock) as completer:
        assert completer.takes_ids
    assert "no answer within 0.05 s" in clock.told[0].answer


class Updating(ScriptedServer):
    """Aborts the first completions for new weights, before their first token."""

    aborts = 2

    def _sample(self, *given: Any) -> Answer:
        answer = super()._sample(*given)
        if not self.aborts:
            return answer
        self.aborts -= 1
        self.log.all[-1].sampled_ids = []
        return replace(answer, ids=[], logprobs=[], completion_tokens=0, visible="", finish="abort")


@pytest.mark.parametrize(("dialect", "path"), [("vllm", "/v1/completions"), ("openai", CHAT)])
async def test_a_probe_that_is_aborted_for_new_weights_is_sent_again(
    dialect: str, path: str, tokenizer: HubTokenizer
) -> None:
    clock = WaitingClock()
    async with (
        Updating(dialect, always("I do not know.")) as there,
        connected(there, tokenizer, clock) as completer,
    ):
        assert completer.takes_ids == (dialect == "vllm")
        assert sampled(there) == [path]
    assert [wait.answer for wait in clock.told] == ["the server aborted it"] * 2 + [""]


@pytest.mark.parametrize("kind", LOADING)
async def test_chat_is_waited_for_like_ids(kind: str, tokenizer: HubTokenizer) -> None:
    clock = WaitingClock()
    async with server("openai", first(2, kind, CHAT)) as there:
        async with connected(there, tokenizer, clock) as completer:
            assert isinstance(completer, ChatCompleter)
            assert sampled(there) == [CHAT]
            assert completer.why.startswith("as vllm it answered: HTTP 404")
            assert completer.left_out == ()


async def test_the_time_that_a_server_asks_for_is_kept(tokenizer: HubTokenizer) -> None:
    clock = WaitingClock()
    async with server(loading=first(2, "429", retry_after_s=7.0)) as there:
        async with connected(there, tokenizer, clock) as completer:
            assert completer.takes_ids
    assert clock.slept == [7.0, 7.0]


# ---------------------------------------------------------------- how long


@pytest.mark.parametrize("kind", LOADING)
async def test_what_never_serves_ends_by_name_when_the_time_is_over(kind: str, tokenizer: HubTokenizer) -> None:
    clock = WaitingClock()
    async with server(loading=always_fails(kind)) as there:
        with pytest.raises(NotServing) as ended:
            await connect(endpoint(there.base_url), tokenizer, patience=clock.patience(40.0))
        assert there.base_url in str(ended.value)
        assert "does not serve after 40 s" in str(ended.value)
        assert "start it or set --openai.base_url, or wait longer with --openai.startup_timeout" in str(
            ended.value
        )
        assert kind == "reset" or f"HTTP {kind}" in str(ended.value)
        assert sampled(there) == []
    assert sum(clock.slept) == pytest.approx(40.0)
    assert len(clock.slept) < 20, "not a storm of requests"


async def test_nothing_is_waited_for_where_that_was_not_asked_for(tokenizer: HubTokenizer) -> None:
    clock = WaitingClock()
    async with server(loading=always_fails("503")) as there:
        with pytest.raises(NotServing, match=r"does not serve: HTTP 503.*start it or set --openai.base_url$"):
            await connect(endpoint(there.base_url), tokenizer, patience=clock.patience(0.0))
        assert asked(there) == [LIST]
    assert clock.told == []


async def test_a_cancel_ends_the_wait_at_once(tokenizer: HubTokenizer) -> None:
    async def long(pause: int) -> None:
        await asyncio.Event().wait()

    clock = WaitingClock(long)
    async with server(loading=always_fails("503")) as there:
        waiting = asyncio.create_task(
            connect(endpoint(there.base_url), tokenizer, patience=clock.patience(1e6))  # type: ignore[arg-type]
        )
        while not clock.slept:
            await asyncio.sleep(0.005)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


# ---------------------------------------------------------------- what is not waited for


async def test_a_refused_key_is_not_waited_for(tokenizer: HubTokenizer) -> None:
    clock = WaitingClock()
    async with server(api_key="right") as there:
        with pytest.raises(EnvironmentUnusable, match="OPENAI_API_KEY"):
            await connect(endpoint(there.base_url, "wrong"), tokenizer, patience=clock.patience())
    assert clock.slept == []


async def test_a_key_that_is_refused_after_a_while_ends_the_wait(tokenizer: HubTokenizer) -> None:
    refused = first(1, "401", LIST)
    loading = first(2, "503")
    clock = WaitingClock()
    async with server(loading=lambda path: loading(path) or refused(path)) as there:
        with pytest.raises(EnvironmentUnusable, match="OPENAI_API_KEY") as ended:
            await connect(endpoint(there.base_url), tokenizer, patience=clock.patience())
    assert not isinstance(ended.value, NotServing)
    assert len(clock.slept) == 2


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_a_refusal_is_not_waited_for(status: int, tokenizer: HubTokenizer) -> None:
    clock = WaitingClock()
    async with answering(lambda path, body: (status, {"error": "no"})) as (address, paths):
        with pytest.raises(EnvironmentUnusable, match=f"HTTP {status}") as ended:
            await connect(endpoint(address), tokenizer, patience=clock.patience())
        assert paths[:3] == [LIST, "/generate", CHAT]
    assert not isinstance(ended.value, NotServing)
    assert clock.slept == []


async def test_a_peer_that_speaks_no_tls_is_not_waited_for(tokenizer: HubTokenizer) -> None:
    clock = WaitingClock()
    async with server() as there:
        address = there.base_url.replace("http:", "https:")
        with pytest.raises(EnvironmentUnusable, match=r"start it or set --openai\.base_url"):
            await connect(endpoint(address), tokenizer, patience=clock.patience())
    assert clock.slept == []


# ---------------------------------------------------------------- ids or text


@pytest.mark.parametrize("kind", ["429", "500", "502", "503", "504"])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("tokens", ["auto", "exact"])
async def test_a_failing_way_of_ids_is_no_reason_for_text(
    dialect: str, kind: str, tokens: Any, tokenizer: HubTokenizer
) -> None:
    clock, notes = WaitingClock(), list[str]()
    async with server(dialect, always_fails(kind, DIALECTS[dialect])) as there:
        with pytest.raises(NotServing, match=f"does not serve after 30 s: HTTP {kind}"):
            await connect(
                endpoint(there.base_url), tokenizer, tokens=tokens, notes=notes, patience=clock.patience(30.0)
            )
        assert CHAT not in asked(there)
    assert notes == []


async def test_an_unknown_server_whose_way_of_ids_fails_says_how_to_do_without(tokenizer: HubTokenizer) -> None:
    clock = WaitingClock()
    async with server("openai", always_fails("500", "/v1/completions")) as there:
        with pytest.raises(NotServing, match=r"without token ids set --openai\.server_type openai"):
            await connect(endpoint(there.base_url), tokenizer, patience=clock.patience(5.0))
        async with connected(there, tokenizer, clock, server_type="openai") as completer:
            assert not completer.takes_ids


async def test_ids_that_cannot_be_used_are_no_reason_for_text(tokenizer: HubTokenizer) -> None:
    clock = WaitingClock()
    for kind in ("positive_logprob", "fewer_logprobs", "foreign_ids", "garbage"):
        async with server(faults=(Fault(kind, probes=True),)) as there:  # type: ignore[arg-type]
            with pytest.raises(EnvironmentUnusable, match=r"cannot be used .*--env\.token_source retokenize"):
                await connect(endpoint(there.base_url), tokenizer, patience=clock.patience())
            assert asked(there) == [LIST] + 2 * ["/v1/completions"]
    assert clock.slept == []


async def test_one_spoilt_answer_decides_nothing(tokenizer: HubTokenizer) -> None:
    clock = WaitingClock()
    for kind in ("positive_logprob", "missing_logprobs", "empty_choices", "garbage"):
        async with server(faults=(Fault(kind, probes=True, times=1),)) as there:  # type: ignore[arg-type]
            async with connected(there, tokenizer, clock) as completer:
                assert completer.takes_ids


async def test_the_last_sample_is_left_for_the_chat(tokenizer: HubTokenizer) -> None:
    clock, way = WaitingClock(), "/v1/completions"
    spoilt = Fault("positive_logprob", probes=True, times=SAMPLES)
    async with server(loading=first(1, "reset", way), faults=(spoilt,)) as there:
        with pytest.raises(EnvironmentUnusable, match="cannot be used"):
            await connect(endpoint(there.base_url), tokenizer, patience=clock.patience())
        assert asked(there) == [LIST, way, way]


async def test_a_server_that_answers_without_ids_is_asked_for_text_and_the_reason_is_kept(
    tokenizer: HubTokenizer,
) -> None:
    text = {"choices": [{"text": "2", "finish_reason": "length", "logprobs": None}], "usage": {}}
    chat = {"choices": [{"message": {"content": "2"}, "finish_reason": "length"}]}
    bodies: list[dict[str, Any]] = []

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == LIST:
            return 200, {"data": [{"id": "m", "owned_by": "somebody"}]}
        bodies.append(body)
        return 200, chat if path == CHAT else text

    clock, notes = WaitingClock(), list[str]()
    async with answering(answer) as (address, paths):
        completer = await connect(endpoint(address), tokenizer, notes=notes, patience=clock.patience())
        await completer.aclose()
    assert isinstance(completer, ChatCompleter)
    assert completer.why == "as vllm it answered: not an answer in the dialect vllm: KeyError"
    assert notes == [f"tokens are made from text: {completer.why}"]
    assert paths == [LIST, "/v1/completions", "/v1/completions", CHAT]
    assert all(body["max_tokens"] == 1 for body in bodies)
    assert len(bodies) <= SAMPLES


@pytest.mark.parametrize("kind", ["hang", "reset"])
async def test_no_more_probes_than_may_sample_are_sent_to_a_server_that_drops_them(
    kind: str, tokenizer: HubTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.completion.probe_ids.PROBE_TIMEOUT_S", 0.05)
    clock = WaitingClock()
    async with server(loading=always_fails(kind, "/v1/completions")) as there:
        with pytest.raises(EnvironmentUnusable, match="no whole answer to 3 probes"):
            await connect(endpoint(there.base_url), tokenizer, patience=clock.patience())
        assert asked(there) == [LIST] + SAMPLES * ["/v1/completions"]


async def test_a_passing_500_does_not_take_the_seeds_from_sglang(tokenizer: HubTokenizer) -> None:
    """Old servers answer so to a seed: without it they must work, and with it they must fail again."""
    clock, notes = WaitingClock(), list[str]()
    async with server("sglang", first(1, "500", "/generate")) as there:
        async with connected(there, tokenizer, clock, notes=notes) as completer:
            assert isinstance(completer, IdCompleter)
            assert isinstance(completer.dialect, SglangDialect)
            assert completer.dialect.seeded
    assert notes == []
    assert clock.slept == []


async def test_a_tokenizer_that_could_not_be_compared_is_said(tokenizer: HubTokenizer) -> None:
    clock, notes = WaitingClock(), list[str]()
    async with server(loading=always_fails("500", "/tokenize")) as there:
        async with connected(there, tokenizer, clock, notes=notes) as completer:
            assert completer.takes_ids
    assert len(notes) == 1
    assert notes[0].startswith("the tokenizer was not compared")
    assert clock.slept == []


async def test_a_hosted_service_is_asked_for_its_models_alone_also_while_it_is_waited_for(
    tokenizer: HubTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.completion.base._HOSTED", re.compile("127"))
    clock = WaitingClock()
    async with server("openai", first(3, "503")) as there:
        async with connected(there, tokenizer, clock) as completer:
            assert not completer.takes_ids
        assert asked(there) == [LIST] * 4


# ---------------------------------------------------------------- what is said


def test_a_wait_is_said_at_once_then_every_ten_seconds_then_its_end() -> None:
    lines = WaitLines()
    said = {
        second: line
        for second in range(60)
        if (line := lines.line(Wait("the endpoint http://x", float(second), 300.0, "HTTP 503: Loading model")))
    }
    assert list(said) == [0, 10, 20, 30, 40, 50]
    assert SAID_EVERY_S == 10
    assert said[0] == (
        "waiting for the endpoint http://x for up to 300 s (--openai.startup_timeout; Ctrl-C ends it): "
        "HTTP 503: Loading model"
    )
    assert said[20] == "still waiting for the endpoint http://x, 20 of 300 s: HTTP 503: Loading model"
    over = Wait("the endpoint http://x", 61.4, 300.0, "")
    assert lines.line(over) == "the endpoint http://x answers after 61 s"
    assert lines.line(over) is None, "of an endpoint that nobody waited for"


def test_endpoints_that_are_waited_for_together_are_said_each() -> None:
    lines = WaitLines()
    assert lines.line(Wait("one", 0.0, 9.0, "HTTP 503"))
    assert lines.line(Wait("two", 0.1, 9.0, "HTTP 503"))
    assert lines.line(Wait("one", 0.5, 9.0, "HTTP 503")) is None


# ---------------------------------------------------------------- all endpoints of a run


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_module, "BETWEEN_PROBES", Backoff(0.01, 0.02))


def config(*servers: ScriptedServer, startup_timeout: float = 30.0, **env: Any) -> Config:
    return Config(
        env=EnvSettings(**env),
        openai=tuple(
            OpenAISettings(base_url=there.base_url, model_name="scripted", startup_timeout=startup_timeout)
            for there in servers
        ),
    )


@pytest.mark.usefixtures("quick")
async def test_several_endpoints_are_waited_for_at_the_same_time(tokenizer: HubTokenizer) -> None:
    """Each of them serves once the other one was asked: one after the other, none ever would."""
    others: dict[str, ScriptedServer] = {}

    def until_asked(name: str) -> Loading:
        return lambda path: None if name in others and others[name].log.all else Fault("503")

    said: list[Wait] = []
    async with server(loading=until_asked("b")) as a, server(loading=until_asked("a")) as b, AsyncExitStack() as s:
        others |= {"a": a, "b": b}
        completer, why = await open_completer(
            completion_needs(config(a, b)), tokenizer, s, [], said.append, Policy()
        )
    assert completer.takes_ids
    assert why == ""
    assert said


@pytest.mark.usefixtures("quick")
async def test_an_endpoint_that_refuses_ends_the_wait_for_the_others(tokenizer: HubTokenizer) -> None:
    async with (
        server(loading=always_fails("503")) as slow,
        server(api_key="k") as refuses,
        AsyncExitStack() as stack,
    ):
        given = config(slow, refuses, startup_timeout=1e6)
        with pytest.raises(EnvironmentUnusable, match="OPENAI_API_KEY"):
            await open_completer(completion_needs(given), tokenizer, stack, [], lambda wait: None, Policy())


@pytest.mark.usefixtures("quick")
async def test_why_text_is_asked_for_is_told_once_for_all(tokenizer: HubTokenizer) -> None:
    notes: list[str] = []
    async with server("openai") as a, server("openai") as b, AsyncExitStack() as stack:
        _, why = await open_completer(
            completion_needs(config(a, b)), tokenizer, stack, notes, lambda wait: None, Policy()
        )
    assert why.startswith("as vllm it answered: HTTP 404")
    assert notes == [f"tokens are made from text: {why}"]


@pytest.mark.usefixtures("quick")
async def test_the_judge_is_waited_for_as_long_as_the_endpoints() -> None:
    said: list[str] = []
    async with server("openai", first(2, "503", CHAT)) as judge, AsyncExitStack() as stack:
        await open_scorer(judged_by(judge), Secret(), config(judge).startup_timeout, stack, said.append)
        assert sampled(judge) == [CHAT]
    assert said[0].startswith(f"waiting for the judge's endpoint {judge.base_url} for up to 30 s")
    assert said[-1].startswith(f"the judge's endpoint {judge.base_url} answers after")


@pytest.mark.usefixtures("quick")
async def test_a_judge_that_never_serves_is_named() -> None:
    async with server("openai", always_fails("503", CHAT)) as judge, AsyncExitStack() as stack:
        with pytest.raises(NotServing, match=r"the judge's endpoint .* start it or set --env\.judge_base_url"):
            await open_scorer(judged_by(judge), Secret(), 0.05, stack, lambda line: None)


def judged_by(judge: ScriptedServer) -> ScoringSettings:
    return ScoringSettings(scoring_strategy="judge", judge_base_url=judge.base_url, judge_model_name="scripted")


# ---------------------------------------------------------------- servers of another kind


@asynccontextmanager
async def answering(
    answer: Callable[[str, dict[str, Any]], tuple[int, Any]],
) -> AsyncIterator[tuple[str, list[str]]]:
    """(address, paths that were asked for) of a server that answers as told: (status, JSON)."""
    paths: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        paths.append(request.path)
        status, body = answer(request.path, await request.json() if request.can_read_body else {})
        return web.json_response(body, status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", paths
    finally:
        await runner.cleanup()
