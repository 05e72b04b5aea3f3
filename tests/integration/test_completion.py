"""Every dialect against a server that refuses what the real one refuses and samples as awkwardly as it can."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from typing import Any

import pytest

from orchestrator.completion.base import Completer, CompletionRequest, Endpoint, Tokenizer, ids_of
from orchestrator.completion.chat import ChatCompleter
from orchestrator.completion.connect import connect
from orchestrator.completion.http import HttpClient
from orchestrator.completion.ids import IdCompleter
from orchestrator.completion.retry import RetryPolicy
from orchestrator.completion.tokenizer import HubTokenizer, load_tokenizer
from orchestrator.completion.trajectory import trajectory
from orchestrator.completion.vllm import VllmDialect
from orchestrator.errors import CompletionError, ContextLengthError, EnvironmentUnusable
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.requests import AgentRequest
from orchestrator.rules.backoff import Backoff
from orchestrator.types import CompletionKind, Message, Record, Sampling
from tests.fakes.inference import CLUMSY, Call, Fault, Reply, ScriptedServer, Served, always, by_task
from tests.fakes.inference.dialects.sglang import SglangDialect
from tests.fakes.plans import TALK, a_plan, an_agent, some_limits
from tests.fakes.tokenizer import tokenizer_folder

ID_DIALECTS = ("vllm", "sglang", "llamacpp", "atropos")
TEXT = "Thought: I print it.\n<code>\nprint('ß🙂')\n</code>"
Connect = Callable[..., AbstractAsyncContextManager[Completer]]


@pytest.fixture(scope="module")
def tokenizer() -> HubTokenizer:
    return load_tokenizer(str(tokenizer_folder()))


def endpoint(server: ScriptedServer, key: str = "") -> Endpoint:
    return Endpoint(server.base_url, server.model.name, key, 600.0)


@asynccontextmanager
async def connected(
    server: ScriptedServer, tokenizer: HubTokenizer | None, key: str = "", **options: Any
) -> AsyncIterator[Completer]:
    completer = await connect(endpoint(server, key), tokenizer, **options)
    try:
        yield completer
    finally:
        await completer.aclose()


def request(tokenizer: Tokenizer, *, max_tokens: int = 200, seed: int = 5) -> CompletionRequest:
    ids = ids_of(tokenizer.encode(tokenizer.render(TALK, generation_prompt=True)))
    stop = ("Observation:", "Calling tools:", "</code>")
    return CompletionRequest(TALK, ids, stop, Sampling(0.7, 0.9, max_tokens, seed), "rollout", "task", 0, 1)


def dialect_server(name: str, **options: Any) -> ScriptedServer:
    return ScriptedServer(name, options.pop("script", always(TEXT)), awkward=CLUMSY, **options)


def samples(server: ScriptedServer) -> list[Served]:
    """The completions that count. llama.cpp keeps tokens back that end within a character: such an answer
    is asked for again in one piece, and then the log-probs it lacks are."""
    kept: list[Served] = []
    for served in server.log.completions:
        if served.dialect == "llamacpp" and served.body["n_predict"] == 1:
            continue
        if served.dialect == "llamacpp" and not served.body["stream"]:
            kept.pop()
        kept.append(served)
    return kept


@pytest.mark.parametrize(("name", "takes_ids"), [("vllm", True), ("openai", False)])
async def test_the_server_that_trl_starts_is_vllm_s_own(
    name: str, takes_ids: bool, tokenizer: HubTokenizer
) -> None:
    async with dialect_server(name) as server, connected(server, tokenizer, server_type="trl") as completer:
        assert completer.takes_ids is takes_ids


def server_type(name: str) -> str:
    return "atropos" if name == "atropos" else "auto"


@pytest.mark.parametrize("name", ID_DIALECTS)
async def test_ids_and_logprobs_are_those_that_were_sampled(name: str, tokenizer: HubTokenizer) -> None:
    async with dialect_server(name) as server, connected(server, tokenizer, server_type=server_type(name)) as c:
        assert c.takes_ids
        assert len(server.log.probes) <= 3
        for seed in range(20):
            completion = await c.sample(request(tokenizer, seed=seed))
            served = samples(server)[-1]
            assert completion.tokens_T == tuple(served.sampled_ids)
            assert completion.logprobs_T == pytest.approx(tuple(served.logprobs), abs=1e-12)
            assert completion.text == tokenizer.decode(served.sampled_ids)
            assert served.prompt_ids == list(request(tokenizer).prompt_ids or ())


async def test_a_completion_of_split_characters_costs_llamacpp_few_requests(tokenizer: HubTokenizer) -> None:
    text = "日本語🙂한글" * 12
    async with (
        ScriptedServer("llamacpp", always(text)) as server,
        connected(server, tokenizer) as completer,
    ):
        completion = await completer.sample(request(tokenizer, max_tokens=2000))
        served = samples(server)[-1]
    assert completion.text.startswith(text)
    assert completion.tokens_T == tuple(served.sampled_ids)
    assert completion.logprobs_T == pytest.approx(tuple(served.logprobs), abs=1e-12)
    within = sum(
        tokenizer.decode(served.sampled_ids[:n]).endswith("\ufffd") for n in range(1, len(served.sampled_ids))
    )
    assert within > 80
    # Streamed, in one piece, and three times with 32 or more places in a request, by how likely their tokens are.
    assert len(server.log.completions) <= 2 + 3 * (within // 32 + 1)


@pytest.mark.parametrize("name", [*ID_DIALECTS, "openai"])
async def test_no_sampling_parameter_is_left_to_the_server(name: str, tokenizer: HubTokenizer) -> None:
    async with dialect_server(name) as server, connected(server, tokenizer, server_type=server_type(name)) as c:
        await c.sample(request(tokenizer))
        assert server.log.completions[-1].left_to_default == ()
        body = server.log.completions[-1].body
        sent = body.get("sampling_params", body)
        assert (sent["temperature"], sent["top_p"]) == (0.7, 0.9)
        assert 5 in sent.values()


@pytest.mark.parametrize("name", ID_DIALECTS)
async def test_a_cut_off_completion_says_so(name: str, tokenizer: HubTokenizer) -> None:
    async with dialect_server(name) as server, connected(server, tokenizer, server_type=server_type(name)) as c:
        completion = await c.sample(request(tokenizer, max_tokens=4))
        assert completion.finish_reason == "length"
        assert len(completion.tokens_T or ()) == 4


async def test_a_plain_endpoint_gives_text_and_is_said_to(tokenizer: HubTokenizer) -> None:
    notes: list[str] = []
    async with dialect_server("openai") as server, connected(server, tokenizer, notes=notes) as completer:
        assert not completer.takes_ids
        assert len(server.log.probes) <= 3
        assert notes
        assert notes[0].startswith("tokens are made from text")
        completion = await completer.sample(request(tokenizer))
        assert completion.visible.startswith("Thought: I print it.")
        assert "</code>" not in completion.visible


async def test_exact_is_refused_where_it_cannot_be(tokenizer: HubTokenizer) -> None:
    async with dialect_server("openai") as server:
        with pytest.raises(EnvironmentUnusable, match="token_source"):
            await connect(endpoint(server), tokenizer, tokens="exact")


async def test_text_is_used_where_it_was_asked_for(tokenizer: HubTokenizer) -> None:
    async with dialect_server("vllm") as server, connected(server, tokenizer, tokens="retokenize") as completer:
        assert not completer.takes_ids


async def test_probes_sample_one_token_at_most_and_say_what_they_are(tokenizer: HubTokenizer) -> None:
    for name in (*ID_DIALECTS, "openai"):
        async with dialect_server(name) as server, connected(server, tokenizer, server_type=server_type(name)):
            assert server.log.completions == []
            assert 1 <= len(server.log.probes) <= 3
            assert all(len(p.sampled_ids) <= 1 for p in server.log.probes)


async def test_a_wrong_tokenizer_is_found_out_before_the_first_task() -> None:
    for entries in (900, 1300, 1700):
        other = load_tokenizer(str(tokenizer_folder(entries)))
        for name in ("vllm", "llamacpp"):
            async with dialect_server(name) as server:
                with pytest.raises(EnvironmentUnusable, match="tokenizer"):
                    await connect(endpoint(server), other)
    # SGLang has no tokenizer to compare with: what it can find out is that ids are not its own.
    async with dialect_server("sglang") as server:
        with pytest.raises(EnvironmentUnusable, match="tokenizer"):
            await connect(endpoint(server), load_tokenizer(str(tokenizer_folder(1700))))


async def test_an_sglang_without_seeds_is_still_exact(tokenizer: HubTokenizer) -> None:
    notes: list[str] = []
    async with ScriptedServer(SglangDialect(seeded=False), always(TEXT)) as server:
        async with connected(server, tokenizer, notes=notes) as completer:
            assert completer.takes_ids
            assert "sampling_seed" in notes[0]
            assert len([probe for probe in server.log.probes if probe.sampled_ids]) <= 3
            assert (await completer.sample(request(tokenizer))).tokens_T


async def test_a_refused_key_and_a_dead_endpoint_say_what_to_do(tokenizer: HubTokenizer) -> None:
    async with dialect_server("vllm", api_key="sk-right-key") as server:
        with pytest.raises(EnvironmentUnusable, match="OPENAI_API_KEY") as refused:
            await connect(endpoint(server, "sk-wrong-key"), tokenizer)
        assert "sk-wrong-key" not in str(refused.value)
        async with connected(server, tokenizer, key="sk-right-key") as completer:
            assert completer.takes_ids
    with pytest.raises(EnvironmentUnusable, match="base_url"):
        await connect(endpoint(server), tokenizer)


@pytest.mark.parametrize("name", [*ID_DIALECTS, "openai"])
@pytest.mark.parametrize("kind", ["429", "500", "503", "reset", "garbage", "cut_off"])
async def test_a_passing_fault_is_retried(name: str, kind: str, tokenizer: HubTokenizer) -> None:
    faults = (Fault(kind, calls=(0,), retry_after_s=0.01),)  # type: ignore[arg-type]
    async with dialect_server(name, script=always("Thought: plain.\n<code>\n1\n</code>"), faults=faults) as server:
        async with connected(server, tokenizer, server_type=server_type(name)) as completer:
            completion = await completer.sample(request(tokenizer))
            assert completion.visible.strip().startswith("Thought")
            assert len(server.log.completions) == 2
            assert completion.retries == 1, "on record"


@contextmanager
def full_house() -> Iterator[str]:
    """The address of somebody who takes no more connections, and refuses none."""
    with socket.socket() as listening, ExitStack() as waiting:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(4):
            caller = waiting.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(listening.getsockname())
        host, port = listening.getsockname()
        yield f"http://{host}:{port}/v1"


@pytest.mark.parametrize("kind", ["ids", "chat"])
async def test_a_connection_that_does_not_come_about_is_tried_again(
    kind: str, tokenizer: HubTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was asked for yet: no completion took too long."""
    monkeypatch.setattr("orchestrator.completion.http.CONNECT_TIMEOUT_S", 0.3)
    retry = RetryPolicy(attempts=2, backoff=Backoff(0.01, 8.0))
    with full_house() as address:
        there = Endpoint(address, "scripted", "", 600.0)
        completer: Completer = (
            IdCompleter(VllmDialect(), HttpClient(there), tokenizer, retry)
            if kind == "ids"
            else ChatCompleter(HttpClient(there), retry)
        )
        try:
            with pytest.raises(CompletionError, match=r"connection failed: none within 0.3 s \(2 attempts\)"):
                await completer.sample(request(tokenizer))
        finally:
            await completer.aclose()


SPOILT = {
    "fewer_logprobs": ID_DIALECTS,
    "nan_logprob": ID_DIALECTS,
    "positive_logprob": ID_DIALECTS,
    "foreign_ids": ID_DIALECTS,
    "missing_logprobs": ID_DIALECTS,
    "wrong_count": ID_DIALECTS,
    "other_prompt": ("vllm", "atropos"),  # only these return the prompt's ids
    "empty_choices": ("vllm", "openai"),
    "null_content": ("openai",),
}


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, names in SPOILT.items() for n in names])
async def test_a_spoilt_answer_is_never_taken(name: str, kind: str, tokenizer: HubTokenizer) -> None:
    async with dialect_server(name, faults=(Fault(kind),)) as server:  # type: ignore[arg-type]
        async with connected(server, tokenizer, server_type=server_type(name)) as completer:
            with pytest.raises(CompletionError):
                await completer.sample(request(tokenizer))


# Atropos' own server answers 500 without a word: there only our own limit keeps prompts short enough.
@pytest.mark.parametrize("name", ["vllm", "sglang", "llamacpp", "openai"])
async def test_a_prompt_that_is_too_long_is_the_policy_s_end(name: str, tokenizer: HubTokenizer) -> None:
    async with dialect_server(name, faults=(Fault("context_length"),)) as server:
        async with connected(server, tokenizer, server_type=server_type(name)) as completer:
            with pytest.raises(ContextLengthError):
                await completer.sample(request(tokenizer))
            assert len(server.log.completions) == 1


@pytest.mark.parametrize("name", [*ID_DIALECTS, "openai"])
async def test_a_cancelled_completion_is_cancelled_upstream(name: str, tokenizer: HubTokenizer) -> None:
    def slow(call: Call) -> Reply:
        return Reply(TEXT, delay_s=0 if call.number is None else 30)

    async with dialect_server(name, script=slow) as server:
        async with connected(server, tokenizer, server_type=server_type(name), tokens=_tokens(name)) as completer:
            call = asyncio.ensure_future(completer.sample(request(tokenizer)))
            while not server.log.completions:
                await asyncio.sleep(0.01)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            async with asyncio.timeout(120):
                while not server.log.completions[0].disconnected:
                    await asyncio.sleep(0.01)


def _tokens(name: str) -> Any:
    return "retokenize" if name == "openai" else "auto"


TURNS = (
    "\n\n  Thought: first.\n<code>\nx = '🙂' * 3\nprint(x)\n</code>",
    "Only words, no code at all.",
    Reply("Thought: long\n<code>\nprint(1", length=True),
    "Observation: made up",
    "Thought: done.\n<code>\nfinal_answer('größer')\n</code>",
)


@pytest.mark.parametrize("name", ID_DIALECTS)
async def test_an_episode_is_one_line_of_sampled_ids(name: str, tokenizer: HubTokenizer) -> None:
    for seed in range(8):
        async with dialect_server(name, script=by_task({"": [TURNS]}), seed=seed) as server:
            async with connected(server, tokenizer, server_type=server_type(name)) as completer:
                lease = Lease(a_plan(), completer, tokenizer, {})
                await _play(lease, len(TURNS))
                line = trajectory(Record(0.0, turns=tuple(lease.turns)), tokenizer, "</code>")
                sampled = [i for s in samples(server) for i in s.sampled_ids]
                logprobs = [p for s in samples(server) for p in s.logprobs]
                assert {turn.segment for turn in lease.turns} == {0}
                assert [t for t, learn in zip(line.tokens_T, line.trained_T, strict=True) if learn] == sampled
                ours = [p for p, learn in zip(line.logprobs_T or (), line.trained_T, strict=True) if learn]
                assert ours == pytest.approx(logprobs, abs=1e-12)
                last = samples(server)[-1]
                assert list(line.tokens_T) == last.prompt_ids + last.sampled_ids


async def _play(lease: Lease, turns: int) -> None:
    """The conversation as smolagents would lead it."""
    talk: tuple[Message, ...] = TALK
    for sequence in range(1, turns + 1):
        reply = await lease.complete(AgentRequest(sequence, CompletionKind.ACTION, talk), str(sequence).encode())
        assert reply.completion is not None
        said = reply.completion.visible
        if said and not said.strip().endswith("</code>"):
            said += "</code>"
        talk = (
            *talk,
            Message("assistant", said.strip()),
            Message("user", f"Observation:\nExecution logs:\n{sequence}"),
        )


async def test_a_line_that_is_full_ends_the_rollout_before_the_call(tokenizer: HubTokenizer) -> None:
    async with dialect_server("vllm", script=by_task({"": [TURNS]})) as server:
        async with connected(server, tokenizer) as completer:
            prompt = len(request(tokenizer).prompt_ids or ())
            lease = Lease(
                a_plan(limits=some_limits(max_token_length=prompt + 10), agent=an_agent()),
                completer,
                tokenizer,
                {},
            )
            first = await lease.complete(AgentRequest(1, CompletionKind.ACTION, TALK), b"1")
            assert first.completion is not None
            assert len(first.completion.tokens_T or ()) <= 10
            longer = (*TALK, Message("assistant", "nothing of the kind" * 5), Message("user", "go on"))
            assert (
                await lease.complete(AgentRequest(2, CompletionKind.ACTION, longer), b"2")
            ).ended == "context_length"
            assert len(server.log.completions) == 1


async def test_the_weight_version_is_kept_per_completion(tokenizer: HubTokenizer) -> None:
    async with dialect_server("sglang") as server, connected(server, tokenizer) as completer:
        server.model.weight_version = "step-7"
        assert (await completer.sample(request(tokenizer))).policy_version == "step-7"


@pytest.mark.parametrize("tokens", ["retokenize", "auto"])
async def test_an_endpoint_of_text_that_refuses_tools_is_found_at_the_start(
    tokens: str, tokenizer: HubTokenizer
) -> None:
    """As vLLM does that was started without a parser of calls."""
    async with dialect_server("vllm") as server:
        given = {"calls": "hermes", "tokens": tokens}
        if tokens == "auto":  # with ids nobody sends it tools
            async with connected(server, tokenizer, **given) as completer:
                assert completer.takes_ids
            return
        with pytest.raises(EnvironmentUnusable, match=r"refuses tools.*--env\.tool_call_format json"):
            await connect(endpoint(server), tokenizer, **given)
        async with connected(server, tokenizer, tokens=tokens) as completer:  # for agents without tools
            assert (await completer.sample(request(tokenizer))).visible


async def test_one_that_takes_tools_is_asked_with_one_and_loses_no_parameter(tokenizer: HubTokenizer) -> None:
    async with dialect_server("openai") as server, connected(server, tokenizer, calls="hermes") as completer:
        last = server.log.probes[-1]
        assert ("tools" in last.body, len(last.sampled_ids)) == (True, 1)
        assert len([probe for probe in server.log.probes if probe.sampled_ids]) <= 3
        assert isinstance(completer, ChatCompleter)
        assert completer.left_out == ()
