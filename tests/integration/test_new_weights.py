"""Weights that change while completions are sampled: every token's version, nothing lost or sampled twice."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import aiohttp
import pytest

from orchestrator.completion.base import (
    Completer,
    CompletionRequest,
    Endpoint,
    Interrupted,
    Tokenizer,
    UnusableSample,
    ids_of,
)
from orchestrator.completion.connect import connect
from orchestrator.completion.ids import IdCompleter
from orchestrator.completion.retry import RetryPolicy
from orchestrator.completion.tokenizer import HubTokenizer, load_tokenizer
from orchestrator.errors import CompletionError, CompletionTimeout
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.requests import AgentRequest
from orchestrator.rules.backoff import Backoff
from orchestrator.rules.outcome import Refused
from orchestrator.rules.policy import Policy
from orchestrator.types import Completion, CompletionKind, Message, PolicySpan, Sampling
from tests.fakes.inference import Call, Fault, Reply, Script, ScriptedServer, always, by_task
from tests.fakes.inference.faults import FaultPlan
from tests.fakes.inference.weights import Change, Changes, ChangingServer
from tests.fakes.plans import TALK, a_plan
from tests.fakes.runs import flags, lines, outcomes, place, run, write_tasks
from tests.fakes.tokenizer import tokenizer_folder

TEXT = "Thought: I count.\n<code>\nfor i in range(3):\n    print(i, i * i)\n</code>"
STOP = ("Observation:", "</code>")


@pytest.fixture(scope="module")
def tokenizer() -> HubTokenizer:
    return load_tokenizer(str(tokenizer_folder()))


def request(
    tokenizer: Tokenizer, *, max_tokens: int = 200, seed: int = 5, stop: tuple[str, ...] = STOP
) -> CompletionRequest:
    ids = ids_of(tokenizer.encode(tokenizer.render(TALK, generation_prompt=True)))
    return CompletionRequest(TALK, ids, stop, Sampling(1.0, 1.0, max_tokens, seed), "rollout", "task", 0, 1)


async def connected(server: ScriptedServer, tokenizer: HubTokenizer, policy: Policy | None = None) -> Completer:
    endpoint = Endpoint(server.base_url, server.model.name, timeout_s=600.0)
    return await connect(endpoint, tokenizer, tokens="exact", policy=policy)


def once(*changes: Change) -> Changes:
    """Of the first completion."""
    return lambda call: changes if call.number == 0 else ()


def versions_of(completion: Completion) -> list[PolicySpan]:
    """The span of each token."""
    return [PolicySpan(1, s.oldest, s.newest) for s in completion.sampled_by for _ in range(s.tokens)]


def check(completion: Completion, server: ChangingServer, *, exact: bool = True) -> None:
    """The completion is what was sampled, in order and once; each token's span has its true version in it."""
    parts = [(served, versions) for served, versions in server.truth if not served.probe]
    assert completion.tokens_T == tuple(token for served, _ in parts for token in served.sampled_ids)
    assert completion.logprobs_T == tuple(value for served, _ in parts for value in served.logprobs)
    truth = [version for _, versions in parts for version in versions]
    told = versions_of(completion)
    if exact:
        assert [span.version for span in told] == truth
    for span, version in zip(told, truth, strict=True):
        assert span.oldest is None or span.newest is None or span.oldest <= version <= span.newest
    assert completion.policy_version == completion.sampled_by[-1].newest


async def test_sglang_tells_the_version_of_each_token(tokenizer: HubTokenizer) -> None:
    changes = once(Change(4, "v1"), Change(9, "v2"))
    async with ChangingServer("sglang", always(TEXT), changes=changes, told="spans") as server:
        completer = await connected(server, tokenizer)
        completion = await completer.sample(request(tokenizer))
        await completer.aclose()
    check(completion, server)
    assert [span.tokens for span in completion.spans][:2] == [4, 5]


@pytest.mark.parametrize(("dialect", "told"), [("sglang", "spans"), ("sglang", "version"), ("vllm", "asked")])
@pytest.mark.parametrize("at", [1, 6, 17])
async def test_an_aborted_completion_is_continued_with_what_it_has(
    dialect: str, told: Any, at: int, tokenizer: HubTokenizer
) -> None:
    changes = once(Change(at, "v1", abort=True, paused_s=0.2))
    async with ChangingServer(dialect, always(TEXT), changes=changes, told=told) as server:
        completer = await connected(server, tokenizer)
        completion = await completer.sample(request(tokenizer))
        await completer.aclose()
    assert (completion.text, completion.retries, server.aborts) == (TEXT, 0, 1)
    assert completion.prompt_tokens == len(request(tokenizer).prompt_ids or ())
    check(completion, server, exact=told == "spans")
    assert completion.spans[0].oldest == "v0"
    assert completion.spans[-1].newest == "v1"
    first, second = (served for served, _ in server.truth)
    field = "max_new_tokens" if dialect == "sglang" else "max_tokens"
    asked = [s.body.get("sampling_params", s.body) for s in (first, second)]
    assert asked[0][field] - asked[1][field] == at
    seed = "sampling_seed" if dialect == "sglang" else "seed"
    assert asked[0][seed] != asked[1][seed], "the first tokens' chances must not come again"


async def test_a_completion_that_is_aborted_again_and_again_comes_to_its_end(tokenizer: HubTokenizer) -> None:
    def changes(call: Call) -> Sequence[Change]:
        return [Change(2, f"v{(call.number or 0) + 1}", abort=True)]

    async with ChangingServer("sglang", always(TEXT), changes=changes, told="spans") as server:
        completer = await connected(server, tokenizer)
        completion = await completer.sample(request(tokenizer, stop=()))
        await completer.aclose()
    assert completion.visible == TEXT
    assert completion.retries == 0
    assert server.aborts > 8
    check(completion, server)


async def test_a_stop_string_across_an_abort_ends_the_completion(tokenizer: HubTokenizer) -> None:
    """The server sees only its own part of the text, and goes on past `</code>`."""
    said = f"{TEXT}\nand more of it"
    whole = tokenizer.encode(said)
    at = max(n for n in range(len(whole)) if "</code>" not in tokenizer.decode(whole[:n]))
    async with ChangingServer(
        "vllm", always(Reply(said)), changes=once(Change(at, "v1", abort=True)), told="asked"
    ) as server:
        completer = await connected(server, tokenizer)
        completion = await completer.sample(request(tokenizer))
        await completer.aclose()
    parts = [served.sampled_text for served, _ in server.truth if not served.probe]
    assert "more" in parts[1]
    assert not any("</code>" in part for part in parts)
    assert completion.text.rstrip() == TEXT
    assert completion.visible == TEXT.removesuffix("</code>")
    assert completion.finish_reason == "stop"
    assert len(completion.tokens_T or ()) == len(completion.logprobs_T or ()) == completion.completion_tokens


@pytest.mark.parametrize("stop", [STOP, ()])
async def test_an_abort_behind_the_last_token_ends_the_completion(
    stop: tuple[str, ...], tokenizer: HubTokenizer
) -> None:
    """SGLang looks for an abort before it looks for an end: nothing may be sampled behind that."""
    changes = once(Change(-1, "v1", abort=True))
    async with ChangingServer("sglang", always(TEXT), changes=changes, told="spans") as server:
        completer = await connected(server, tokenizer)
        completion = await completer.sample(request(tokenizer, stop=stop))
        await completer.aclose()
    assert (completion.finish_reason, completion.retries, server.aborts) == ("stop", 0, 1)
    assert completion.visible == (TEXT if not stop else TEXT.removesuffix("</code>"))
    assert len(server.log.completions) == 1
    check(completion, server)


async def test_aborts_use_up_no_more_tokens_than_were_asked_for(tokenizer: HubTokenizer) -> None:
    changes = once(Change(6, "v1", abort=True))
    async with ChangingServer("sglang", always(TEXT), changes=changes, told="spans") as server:
        completer = await connected(server, tokenizer)
        ended = await completer.sample(request(tokenizer, max_tokens=6))
        assert (ended.finish_reason, ended.completion_tokens) == ("length", 6)
        assert len(server.log.completions) == 1
        cut = await completer.sample(request(tokenizer, max_tokens=10))
        await completer.aclose()
    assert (cut.finish_reason, cut.completion_tokens) == ("length", 10)


@pytest.mark.slow
@pytest.mark.parametrize("refuses", [False, True])
async def test_a_pause_is_waited_for_and_is_no_failure(refuses: bool, tokenizer: HubTokenizer) -> None:
    """Longer than the retries of a failure would last."""
    changes = once(Change(0, "v1", abort=True, paused_s=6.0))
    async with ChangingServer("vllm", always(TEXT), changes=changes, told="asked", refuses=refuses) as server:
        completer = await connected(server, tokenizer)
        ended = await asyncio.gather(*(completer.sample(request(tokenizer, seed=seed)) for seed in range(5)))
        await completer.aclose()
    assert {completion.text for completion in ended} == {TEXT}
    assert {completion.retries for completion in ended} == {0}


async def test_a_server_that_aborts_everything_at_once_is_a_failure(
    tokenizer: HubTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.completion.retry.AFTER_ABORT_S", 0.01)
    async with ChangingServer(
        "vllm", always(TEXT), changes=lambda call: [Change(0, abort=True)], told="asked"
    ) as server:
        completer = await connected(server, tokenizer)
        assert isinstance(completer, IdCompleter)
        completer._retry = RetryPolicy(backoff=Backoff(0.01, 0.01))
        with pytest.raises(CompletionError, match="aborted it before its first token"):
            await completer.sample(request(tokenizer))
        await completer.aclose()


async def test_what_was_sampled_before_an_abort_outlives_failures_behind_it(tokenizer: HubTokenizer) -> None:
    async with ChangingServer(
        "sglang", always(TEXT), changes=once(Change(5, "v1", abort=True)), told="spans"
    ) as server:
        completer = await connected(server, tokenizer)
        server._faults = FaultPlan((Fault("500", calls=[1]), Fault("reset", calls=[2])))
        completion = await completer.sample(request(tokenizer))
        await completer.aclose()
    assert completion.retries == 2
    check(completion, server)


@asynccontextmanager
async def a_lease(tokenizer: HubTokenizer, *faults: Fault) -> AsyncIterator[tuple[Lease, ChangingServer]]:
    """A lease at a server that aborts the first completion behind five tokens. Completion 0 is that one."""
    changes = once(Change(5, "v1", abort=True))
    async with ChangingServer("vllm", always(TEXT), changes=changes, told="asked") as server:
        completer = await connected(server, tokenizer)
        assert isinstance(completer, IdCompleter)
        completer._retry = RetryPolicy(backoff=Backoff(0.01, 0.01))
        server._faults = FaultPlan(faults)
        lease = Lease(a_plan(), completer, tokenizer, {})
        try:
            yield lease, server
        finally:
            await lease.aclose()
            await completer.aclose()


@pytest.mark.parametrize("kind", ["400", "403", "500"])
async def test_what_was_sampled_before_an_abort_is_no_free_draw_if_only_its_continuation_fails(
    kind: Any, tokenizer: HubTokenizer
) -> None:
    """The policy chose these tokens: a rollout that fails for them is not drawn again."""
    async with a_lease(tokenizer, Fault(kind, anywhere="6 times 7", calls=range(1, 100))) as (lease, server):
        reply = await lease.complete(AgentRequest(1, CompletionKind.ACTION, TALK), b"1")
        assert reply.ended == "no_answer"
        ended = await lease.ended()
        assert isinstance(ended, Refused)
        assert "a neutral question was answered" in ended.detail
        (turn,) = lease.turns
        assert turn.completion.finish_reason == "length"
        assert len(turn.completion.tokens_T or ()) == 5
        first = server.log.completions[0]
        assert turn.completion.tokens_T == tuple(first.sampled_ids)
        again = [s for s in server.log.completions[1:] if s.prompt_ids == first.prompt_ids]
        assert not again, "the tokens that were sampled are not sampled again"


async def test_what_every_request_behind_an_abort_fails_on_is_the_endpoints(tokenizer: HubTokenizer) -> None:
    async with a_lease(tokenizer, Fault("500", calls=range(1, 100))) as (lease, _):
        reply = await lease.complete(AgentRequest(1, CompletionKind.ACTION, TALK), b"1")
        assert (reply.ended, lease.turns) == ("llm_error", [])


async def test_an_endpoint_that_comes_back_after_an_abort_goes_on_behind_it(tokenizer: HubTokenizer) -> None:
    """All attempts of the completion failed, the control is the first that is served again."""
    async with a_lease(tokenizer, Fault("500", calls=range(1, 5))) as (lease, server):
        reply = await lease.complete(AgentRequest(1, CompletionKind.ACTION, TALK), b"1")
        assert reply.completion is not None
        assert reply.completion.text == TEXT
        server.truth = [
            told for told in server.truth if "Say hello." not in server.model.decode(told[0].prompt_ids)
        ]
        check(reply.completion, server, exact=False)


async def test_a_sample_that_cannot_be_used_is_not_continued_behind_its_end(tokenizer: HubTokenizer) -> None:
    async with ScriptedServer("sglang", always(TEXT), faults=(Fault("foreign_ids", times=1),)) as server:
        completer = await connected(server, tokenizer)
        completion = await completer.sample(request(tokenizer))
        await completer.aclose()
    assert (completion.text, completion.retries) == (TEXT, 1)
    first, second = server.log.completions
    assert first.prompt_ids == second.prompt_ids


async def test_a_server_that_does_not_know_the_question_is_asked_once(tokenizer: HubTokenizer) -> None:
    async with ScriptedServer("vllm", always(TEXT)) as server:
        completer = await connected(server, tokenizer)
        assert len(server.log.probes) == len(server.log.all) <= 3
        for seed in range(5):
            assert (await completer.sample(request(tokenizer, seed=seed))).policy_version is None
        await completer.aclose()
    assert [served.path for served in server.log.all].count("/weight_info") == 1


async def test_a_model_is_asked_for_by_the_name_that_a_trainer_gave_it(tokenizer: HubTokenizer) -> None:
    policy = Policy()
    async with ScriptedServer("vllm", always(TEXT)) as server:
        completer = await connected(server, tokenizer, policy)
        server.model.name = "policy-v3"
        await policy.serve("3", "policy-v3")
        completion = await completer.sample(request(tokenizer))
        await completer.aclose()
    assert completion.policy_version == "3"
    assert server.log.completions[-1].body["model"] == "policy-v3"


@pytest.mark.parametrize("dialect", ["vllm", "openai"])
async def test_a_sample_that_cannot_be_used_has_a_version_too(dialect: str, tokenizer: HubTokenizer) -> None:
    """It is on record, and may be trained on."""
    policy = Policy()
    filtered = Reply(TEXT, fault=Fault("content_filter"))
    async with ScriptedServer(dialect, always(filtered)) as server:
        completer = await connect(Endpoint(server.base_url, server.model.name), tokenizer, policy=policy)
        await policy.serve("3")
        with pytest.raises(UnusableSample) as unusable:
            await completer.sample(request(tokenizer))
        await completer.aclose()
    assert unusable.value.completion.policy_version == "3"


class Renaming(ScriptedServer):
    """Gives its model another name while a request is under way. `told`: the trainer says so at once."""

    def __init__(self, policy: Policy, *given: Any, told: bool, **named: Any) -> None:
        super().__init__(*given, **named)
        self._policy, self._told_first = policy, told
        self.refused = 0

    async def _serve(self, request: aiohttp.web.Request, served: Any) -> aiohttp.web.StreamResponse:
        if request.method == "POST" and not served.probe and not self.refused:
            self.refused += 1
            self.model.name = "policy-2"
            if self._told_first:
                await self._policy.serve("2", "policy-2")
            else:
                asyncio.get_running_loop().call_later(0.3, self._tell)
        return await super()._serve(request, served)

    def _tell(self) -> None:
        self.telling = asyncio.ensure_future(self._policy.serve("2", "policy-2"))


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("dialect", ["vllm", "openai"])
async def test_a_name_that_the_trainer_has_changed_since_is_no_fault_of_the_policy_s(
    dialect: str, told: bool, tokenizer: HubTokenizer
) -> None:
    policy = Policy()
    async with Renaming(policy, dialect, always(TEXT), told=told) as server:
        endpoint = Endpoint(server.base_url, server.model.name, timeout_s=600.0)
        completer = await connect(endpoint, tokenizer, policy=policy)
        server.model.name = "policy-1"
        await policy.serve("1", "policy-1")
        completion = await completer.sample(request(tokenizer))
        await completer.aclose()
    assert (completion.policy_version, completion.visible) == ("2", TEXT.removesuffix("</code>"))
    assert completion.retries >= 1
    assert [served.status for served in server.log.completions][-1] == 200


async def test_weights_that_change_under_the_first_completion_are_noticed(tokenizer: HubTokenizer) -> None:
    changes = once(Change(5, "v1"))
    async with ChangingServer("vllm", always(TEXT), changes=changes, told="asked") as server:
        completer = await connected(server, tokenizer)
        completion = await completer.sample(request(tokenizer))
        await completer.aclose()
    assert completion.spans == (PolicySpan(len(completion.tokens_T or ()), "v0", "v1"),)


async def test_however_many_completions_wait_a_paused_server_is_asked_by_one(tokenizer: HubTokenizer) -> None:
    changes = once(Change(0, "v1", abort=True, paused_s=3.0))
    async with ChangingServer("vllm", always(TEXT), changes=changes, told="asked", refuses=True) as server:
        completer = await connected(server, tokenizer)
        ended = await asyncio.gather(*(completer.sample(request(tokenizer, seed=seed)) for seed in range(100)))
        await completer.aclose()
    assert {completion.text for completion in ended} == {TEXT}
    assert [served.path for served in server.log.all].count("/is_paused") < 100


class NeverSaysPaused(ScriptedServer):
    """Refuses every completion. `/is_paused`: is not known, or never answered."""

    hangs = False

    async def _serve(self, request: aiohttp.web.Request, served: Any) -> aiohttp.web.StreamResponse:
        if request.path == "/is_paused" and self.hangs:
            await asyncio.Event().wait()
        return await super()._serve(request, served)


@pytest.mark.parametrize(("hangs", "questions"), [(False, 1), (True, 3)])
async def test_a_server_that_never_says_whether_it_is_paused_is_soon_not_asked(
    hangs: bool, questions: int, tokenizer: HubTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its failures would take ever longer to be noticed."""
    monkeypatch.setattr("orchestrator.completion.versions.ASK_S", 0.05)
    async with NeverSaysPaused("vllm", always(TEXT)) as server:
        completer = await connected(server, tokenizer)
        assert isinstance(completer, IdCompleter)
        completer._retry = RetryPolicy(backoff=Backoff(0.01, 0.01))
        server._faults, server.hangs = FaultPlan((Fault("503"),)), hangs
        for seed in range(3):
            with pytest.raises(CompletionError, match="HTTP 503"):
                await completer.sample(request(tokenizer, seed=seed))
        await completer.aclose()
    assert [served.path for served in server.log.all].count("/is_paused") == questions


async def test_a_server_that_is_paused_for_ever_is_waited_for_no_longer_than_a_completion_may_take(
    tokenizer: HubTokenizer,
) -> None:
    changes = once(Change(5, "v1", abort=True, paused_s=1e6))
    async with ChangingServer("vllm", always(TEXT), changes=changes, told="asked", refuses=True) as server:
        endpoint = Endpoint(server.base_url, server.model.name, timeout_s=1.5)
        completer = await connect(endpoint, tokenizer, tokens="exact")
        with pytest.raises(Interrupted) as ended:
            await completer.sample(request(tokenizer))
        await completer.aclose()
    assert isinstance(ended.value.cause, CompletionTimeout)
    assert len(ended.value.completion.tokens_T or ()) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dialect", "told", "refuses"),
    [("sglang", "spans", False), ("sglang", "version", False), ("vllm", "asked", False), ("vllm", "asked", True)],
)
async def test_of_hundreds_of_completions_none_is_lost_doubled_or_taken_for_another_version_s(
    dialect: str, told: Any, refuses: bool, tokenizer: HubTokenizer
) -> None:
    draws, updates = Random(3), itertools.count(1)

    def changes(call: Call) -> Sequence[Change]:
        found = []
        for at in sorted(draws.sample(range(20), draws.randint(0, 3))):
            kind = draws.random()
            if kind < 0.08:
                found.append(Change(at, abort=True, paused_s=0.3))
            else:
                version = f"v{next(updates):05}" if draws.random() < 0.7 else None
                found.append(Change(at, version, abort=kind < 0.4))
        return found

    def slow(call: Call) -> Reply:
        return Reply(TEXT, delay_s=draws.random() * 0.3)

    def asked(number: int) -> CompletionRequest:
        talk = (Message("user", f"question {number}"),)
        ids = ids_of(tokenizer.encode(tokenizer.render(talk, generation_prompt=True)))
        return replace(request(tokenizer, seed=number), messages=talk, prompt_ids=ids)

    requests = [asked(number) for number in range(200)]
    async with ChangingServer(dialect, slow, changes=changes, told=told, refuses=refuses) as server:
        server.model.weight_version = "v00000"
        completer = await connected(server, tokenizer)
        ended = await asyncio.gather(*(completer.sample(one) for one in requests))
        await completer.aclose()
    assert server.aborts > 50
    truth = _truth(server)
    for one, completion in zip(requests, ended, strict=True):
        count = len(completion.tokens_T or ())
        ids, logprobs, versions = truth.pop(tuple(one.prompt_ids or ()))
        assert count == len(ids) or completion.text.rstrip().endswith("</code>")
        assert (completion.tokens_T, completion.logprobs_T) == (tuple(ids[:count]), tuple(logprobs[:count]))
        for span, version in zip(versions_of(completion), versions[:count], strict=True):
            assert (span.oldest or "") <= version <= (span.newest or "")
            assert told != "spans" or span.version == version
    assert not truth


# ---------------------------------------------------------------- odd words

ODD_VERSIONS = [True, [], {"step": 3}, [3], {}]
ODD_SPANS = [
    True,
    "v1",
    {"version": "v1", "start": 0, "end": 1},
    [{"version": "v1", "start": 0, "end": 10_000}],
    [{"version": "v1", "start": 3, "end": -3}],
    [{"version": "v1"}],
    [None],
    [[]],
    [{"version": "v1", "start": 0, "end": 0}] * 10_000,
]


class Odd(ScriptedServer):
    """Says strange things of its weights, another one with each answer."""

    def __init__(self, dialect: str, words: Sequence[dict[str, Any]]) -> None:
        super().__init__(dialect, always(TEXT))
        self._words = itertools.cycle(words)

    async def _serve(self, request: aiohttp.web.Request, served: Any) -> aiohttp.web.StreamResponse:
        response = await super()._serve(request, served)
        if request.method != "POST" or not isinstance(response, aiohttp.web.Response) or served.call is None:
            return response
        answer = json.loads(response.body)  # type: ignore[arg-type]
        answer.get("meta_info", answer).update(next(self._words))
        return aiohttp.web.json_response(answer)


@pytest.mark.parametrize("dialect", ["sglang", "vllm", "openai"])
async def test_strange_words_of_versions_cost_no_sample_and_no_ids(dialect: str, tokenizer: HubTokenizer) -> None:
    """They are no part of the sample: its versions are not known, that is all."""
    words = [{"weight_version": version} for version in ODD_VERSIONS]
    words += [{"weight_version": "v1", "weight_versions": spans} for spans in ODD_SPANS]
    async with Odd(dialect, words) as server:
        completer = await connect(Endpoint(server.base_url, server.model.name, timeout_s=600.0), tokenizer)
        assert completer.takes_ids == (dialect != "openai")
        for seed in range(len(words)):
            completion = await completer.sample(request(tokenizer, seed=seed))
            assert (completion.visible, completion.retries) == (TEXT.removesuffix("</code>"), 0)
            told = {version for span in completion.sampled_by for version in (span.oldest, span.newest)}
            assert told <= {None, "v1"}
        await completer.aclose()


# ---------------------------------------------------------------- llama.cpp


class Adapters(ScriptedServer):
    """llama.cpp with one adapter, whose scale a test changes."""

    scale = 1.0
    silent = 0  # so many questions for its adapters get no answer

    async def _serve(self, request: aiohttp.web.Request, served: Any) -> aiohttp.web.StreamResponse:
        if request.path == "/lora-adapters":
            if self.silent:
                self.silent -= 1
                return aiohttp.web.Response(status=503)
            return aiohttp.web.json_response([{"id": 0, "path": "/models/a.gguf", "scale": self.scale}])
        return await super()._serve(request, served)


async def test_llamacpps_cache_is_not_used_once_its_adapters_have_changed(tokenizer: HubTokenizer) -> None:
    policy = Policy()
    async with Adapters("llamacpp", always(TEXT)) as server:
        completer = await connected(server, tokenizer, policy)
        before = await completer.sample(request(tokenizer))
        server.scale = 0.0
        after = await completer.sample(request(tokenizer))
        assert policy.newest == after.policy_version, "heard of at once"
        again = await completer.sample(request(tokenizer))
        await completer.aclose()
    asked = [served.body["cache_prompt"] for served in server.log.completions]
    assert asked == [True, True, False, False], "what was sampled with the old cache is sampled again"
    assert before.policy_version != after.policy_version == again.policy_version
    assert (before.retries, after.retries, again.retries) == (0, 1, 0)


async def test_a_llamacpp_that_does_not_tell_its_adapters_any_more_may_have_changed_them(
    tokenizer: HubTokenizer,
) -> None:
    async with Adapters("llamacpp", always(TEXT)) as server:
        completer = await connected(server, tokenizer)
        await completer.sample(request(tokenizer))
        server.silent = 1
        after = await completer.sample(request(tokenizer))
        await completer.aclose()
    assert after.retries >= 1
    assert after.policy_version is not None
    assert [served.body["cache_prompt"] for served in server.log.completions][-1] is False


async def test_an_adapter_that_changes_under_the_first_completion_is_noticed(tokenizer: HubTokenizer) -> None:
    async with Adapters("llamacpp", always(Reply(TEXT, delay_s=0.5))) as server:
        completer = await connected(server, tokenizer)
        first = asyncio.ensure_future(completer.sample(request(tokenizer)))
        while not server.log.completions:
            await asyncio.sleep(0.01)
        server.scale = 0.5
        assert (await first).retries == 1
        await completer.aclose()


async def test_a_llamacpp_without_adapters_is_asked_for_them_once(tokenizer: HubTokenizer) -> None:
    async with ScriptedServer("llamacpp", always(TEXT)) as server:
        completer = await connected(server, tokenizer)
        for seed in range(3):
            await completer.sample(request(tokenizer, seed=seed))
        await completer.aclose()
    assert [served.path for served in server.log.all].count("/lora-adapters") == 1
    assert all(served.body["cache_prompt"] for served in server.log.completions)


# ---------------------------------------------------------------- a whole run

TASKS = 10


def two_turns() -> Script:
    """Every rollout of a task says the same, whatever its seed: continued ones have others."""
    return by_task(
        {
            f"of q{n}!": [
                [f"Thought: look.\n<code>\nx = {n} * 100 + 7\nprint(x)\n</code>",
                 f"Thought: so it is {n}.\n<code>\nfinal_answer({n})\n</code>"]
            ]
            for n in range(TASKS)
        }
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("dialect", "told"), [("sglang", "spans"), ("vllm", "asked")])
async def test_a_run_under_which_weights_change_loses_nothing_and_knows_every_token_s_version(
    dialect: str, told: Any
) -> None:
    """Half of the requests are aborted or see new weights in the middle; the server pauses again and again."""
    updates = itertools.count(1)

    def changes(call: Call) -> Sequence[Change]:
        match (call.number or 0) % 6:
            case 1:
                return [Change(7, f"v{next(updates):03d}", abort=True, paused_s=0.3)]
            case 3:
                return [Change(3, f"v{next(updates):03d}"), Change(9, f"v{next(updates):03d}")]
            case 4:
                return [Change(5, abort=True)]
        return ()

    with place() as home:
        write_tasks(home / "tasks.jsonl", TASKS)
        async with ChangingServer(dialect, two_turns(), changes=changes, told=told) as server:
            server.model.weight_version = "v000"
            given = flags(home, server.base_url, launcher="docker", group_size=1)
            ended = await run(*given, directory=home)
        assert ended.code == 0, ended.stderr
        assert outcomes(home / "run") == {"finished": TASKS}
        verified = await run("run", directory=home, command="verify")
        assert verified.code == 0, verified.stdout
        recorded = lines(home / "run" / "rollouts.jsonl")
        groups = lines(home / "run" / "groups.jsonl")
    assert server.aborts >= 5
    truth = _truth(server)
    served = 0
    for rollout in recorded:
        prompt: list[int] = []
        for completion in rollout["completions"]:
            prompt += completion["prompt_ids"]
            count = len(completion["token_ids"])
            ids, logprobs, versions = truth.pop(tuple(prompt))
            # What a server samples behind a stop string that an abort had cut in two is left out.
            assert count == len(ids) or completion["text"].rstrip().endswith("</code>")
            ids, logprobs, versions = ids[:count], logprobs[:count], versions[:count]
            assert (completion["token_ids"], completion["logprobs"]) == (ids, logprobs)
            spans = completion.get("policy_spans")
            if spans is None:
                spans = [dict.fromkeys(("oldest", "newest"), completion["policy_version"]) | {"tokens": len(ids)}]
            every = [span for span in spans for _ in range(span["tokens"])]
            for span, version in zip(every, versions, strict=True):
                assert (span["oldest"] or "") <= version <= span["newest"]
                assert told != "spans" or span["oldest"] == version == span["newest"]
            assert completion["retries"] == 0
            prompt += ids
            served += 1
    assert not truth, "all that was sampled is on record"
    assert served == 2 * TASKS
    for group in groups:
        (facts,) = group["overrides"]
        assert facts["staleness"] is None or facts["staleness"] >= 0
        assert sum(span["tokens"] for span in facts["policy_spans"]) == facts["completion_tokens"]


def _truth(server: ChangingServer) -> dict[tuple[int, ...], tuple[list[int], list[float], list[str]]]:
    """What was sampled behind each prompt: ids, log-probs, versions. Aborted requests and those that continue them
    are one. Probes are left out."""
    found: dict[tuple[int, ...], tuple[list[int], list[float], list[str]]] = {}
    whole: dict[tuple[int, ...], tuple[int, ...]] = {}  # where a prompt's completion began, by where it is now
    for served, versions in server.truth:
        if served.probe:
            continue
        prompt = tuple(served.prompt_ids)
        start = whole.pop(prompt, prompt)
        ids, logprobs, told = found.setdefault(start, ([], [], []))
        ids += served.sampled_ids
        logprobs += served.logprobs
        told += versions
        if served.finish == "abort":
            whole[(*prompt, *served.sampled_ids)] = start
    # An abort may come when all is said: then there is nothing to continue.
    cut = [start for start in whole.values() if "</code>" not in server.model.decode(found[start][0])]
    assert not cut, "an aborted completion was never continued"
    return found
