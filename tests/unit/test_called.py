"""Completions of a program's own function, checked like an endpoint's answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from orchestrator import ConfigError, Orchestrator, SyncOrchestrator, load_config
from orchestrator.completion.base import CompletionRequest, Interrupted, UnusableSample, ids_of
from orchestrator.completion.callback import CallbackCompleter
from orchestrator.completion.retry import RetryPolicy
from orchestrator.completion.sampled import UNTOLD, RawSample
from orchestrator.completion.sglang import SglangDialect
from orchestrator.completion.tokenizer import HubTokenizer, load_tokenizer
from orchestrator.errors import CompletionError
from orchestrator.rules.backoff import Backoff
from orchestrator.rules.policy import Policy
from orchestrator.types import PolicySpan, Sampling
from tests.fakes.tokenizer import END, tokenizer_folder


@pytest.fixture(scope="module")
def tokenizer() -> HubTokenizer:
    return load_tokenizer(str(tokenizer_folder()), None)


def request(tokenizer: HubTokenizer, max_tokens: int = 100) -> CompletionRequest:
    prompt = ids_of(tokenizer.encode("<|im_start|>assistant\n"))
    return CompletionRequest((), prompt, ("</code>",), Sampling(1.0, 1.0, max_tokens, 7), "r", "t", 0, 1)


def completer(tokenizer: HubTokenizer, sample: Callable[[CompletionRequest], RawSample]) -> CallbackCompleter:
    async def sampler(request: CompletionRequest) -> RawSample:
        return sample(request)

    retry = RetryPolicy(attempts=1, pauses=1)
    return CallbackCompleter(sampler, tokenizer, model="m", timeout_s=60, policy=Policy(), retry=retry)


def answer(ids: list[int], reason: str = "", **more: Any) -> RawSample:
    return RawSample(ids, [-0.25] * len(ids), reason, UNTOLD, **more)


async def test_an_end_is_told_from_a_length_by_the_ids(tokenizer: HubTokenizer) -> None:
    said = tokenizer.encode("Hello")
    ended = await completer(tokenizer, lambda _: answer(tokenizer.encode(f"Hello{END}"))).sample(
        request(tokenizer)
    )
    cut = await completer(tokenizer, lambda _: answer(said)).sample(request(tokenizer, len(said)))
    assert (ended.finish_reason, ended.visible) == ("stop", "Hello")
    assert (cut.finish_reason, cut.visible) == ("length", "Hello")


async def test_a_stop_string_that_nobody_stopped_at_is_found(tokenizer: HubTokenizer) -> None:
    ids = tokenizer.encode(f"x = 1\n</code> and so on{END}")
    completion = await completer(tokenizer, lambda _: answer(ids)).sample(request(tokenizer))
    assert completion.finish_reason == "stop"
    assert completion.visible == "x = 1\n"
    assert completion.tokens_T == tuple(ids[: len(completion.tokens_T or ())])
    assert completion.text == "x = 1\n</code>"
    assert len(completion.logprobs_T or ()) == len(completion.tokens_T or ())


async def test_ids_without_log_probs_are_a_completion_without(tokenizer: HubTokenizer) -> None:
    ids = tokenizer.encode(f"Hello{END}")
    parts = [RawSample(ids[:2], [-0.5, -0.5], "aborted", UNTOLD), RawSample(ids[2:], None, "", UNTOLD)]
    completion = await completer(tokenizer, lambda _: parts.pop(0)).sample(request(tokenizer))
    assert completion.tokens_T == tuple(ids)
    assert completion.logprobs_T is None


async def test_spans_are_kept_and_what_is_no_answer_is_refused(tokenizer: HubTokenizer) -> None:
    ids = tokenizer.encode(f"Hello{END}")
    told = (PolicySpan(1, "3", "3"), PolicySpan(len(ids) - 1, "4", "4"))
    completion = await completer(tokenizer, lambda _: answer(ids, spans=told)).sample(request(tokenizer))
    assert completion.spans == told
    for wrong in (
        RawSample(ids, [-0.25], "", UNTOLD),
        RawSample([-1], [-0.25], "", UNTOLD),
        RawSample(ids, [0.5] * len(ids), "", UNTOLD),
        answer(ids, "error"),
    ):
        with pytest.raises(CompletionError, match="1 attempts"):
            await completer(tokenizer, lambda _, wrong=wrong: wrong).sample(request(tokenizer))
    with pytest.raises(CompletionError, match="not an answer in the dialect the program: TypeError"):
        await completer(tokenizer, lambda _: RawSample(None, [], "", UNTOLD)).sample(request(tokenizer))  # type: ignore[arg-type]


async def test_behind_an_id_that_the_tokenizer_does_not_have_nothing_is_sampled(tokenizer: HubTokenizer) -> None:
    """Also not where the sample was aborted: servers refuse such an id in a prompt."""
    parts = [answer([1, tokenizer.size], "aborted"), answer([2])]
    with pytest.raises(CompletionError, match=f"an id outside the tokenizer's {tokenizer.size}"):
        await completer(tokenizer, lambda _: parts.pop(0)).sample(request(tokenizer))
    assert len(parts) == 1


SAID = (1, 2, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_ids": "other"},
        {"prompt_ids": "shorter"},
        {"prompt_ids": "longer"},
        {"prompt_tokens": 3},
        {"sampled_tokens": 2},
        {"sampled_tokens": 4},
        {"logprobs": [-0.5, -0.5]},
        {"logprobs": [-0.5, -0.5, float("nan")]},
        {"logprobs": [-0.5, -0.5, True]},
        {"logprobs": [-0.5, -0.5, 2e-6]},
        {"ids": [1, 2, -1]},
        {"ids": [1, 2, True]},
        {"ids": [1, 2, 3, 4], "logprobs": [-0.5] * 4},
    ],
    ids=str,
)
async def test_an_answer_that_contradicts_itself_or_the_request_is_refused(
    tokenizer: HubTokenizer, wrong: dict[str, Any]
) -> None:
    asked = request(tokenizer, 3)
    assert asked.prompt_ids is not None
    prompt = asked.prompt_ids.tolist()
    echoes = {"other": [*prompt[:-1], prompt[-1] + 1], "shorter": prompt[1:], "longer": [*prompt, 5]}
    right = {"ids": list(SAID), "logprobs": [-0.5] * 3, "finish_reason": "", "prompt_tokens": len(prompt)}
    right |= {"prompt_ids": prompt, "sampled_tokens": 3}
    assert (await completer(tokenizer, lambda _: RawSample(**right)).sample(asked)).tokens_T == SAID
    wrong = {name: echoes.get(value, value) if name == "prompt_ids" else value for name, value in wrong.items()}
    if len(wrong.get("ids", SAID)) != len(SAID):
        wrong |= {"sampled_tokens": len(wrong["ids"])}
    with pytest.raises(CompletionError):
        await completer(tokenizer, lambda _: RawSample(**{**right, **wrong})).sample(asked)


async def test_a_log_prob_that_rounding_put_above_zero_is_zero(tokenizer: HubTokenizer) -> None:
    sampled = RawSample(list(SAID), [-0.5, 1e-7, 0], "", UNTOLD)
    completion = await completer(tokenizer, lambda _: sampled).sample(request(tokenizer, 3))
    assert completion.logprobs_T == (-0.5, 0.0, 0.0)
    assert set(map(type, completion.logprobs_T or ())) == {float}


async def never(request: CompletionRequest) -> RawSample:
    raise AssertionError("asked")


@pytest.mark.parametrize(
    ("env", "openai", "why"),
    [
        ({}, {"base_url": "http://localhost:1/v1"}, r"openai\.base_url: the program samples"),
        ({"cluster": "ray"}, {}, r"env\.cluster: the program samples in this process"),
        ({"tokenizer_name": "none"}, {}, r"env\.tokenizer_name: the program samples token ids"),
        ({"token_source": "retokenize"}, {}, r"env\.tokenizer_name: the program samples token ids"),
    ],
    ids=["an endpoint besides", "a cluster", "no tokenizer", "ids of text"],
)
async def test_settings_that_do_not_go_with_it(env: dict[str, Any], openai: dict[str, Any], why: str) -> None:
    config = load_config(env={"launcher": "process", **env}, openai={"model_name": "m", **openai})
    with pytest.raises(ConfigError, match=why):
        async with Orchestrator(config, sampler=never):
            pass


async def test_errors_of_awaited_work_reach_the_other_loop() -> None:
    config = load_config(env={"tokenizer_name": "none"}, openai={"model_name": "m"})
    orchestrator = SyncOrchestrator(config, sampler=never)

    async def work() -> None:
        await asyncio.sleep(0)

    with pytest.raises(ConfigError, match="set it to the tokenizer"):
        await orchestrator.awaited(work)
    orchestrator.close()
    with pytest.raises(RuntimeError, match="closed: make a new one"):
        await orchestrator.awaited(work)


async def test_what_is_broken_off_is_tried_again_and_then_a_sample(tokenizer: HubTokenizer) -> None:
    """A policy whose first text is long enough would get another draw for it."""
    ids = tokenizer.encode("Hello")
    asked: list[int] = []

    def sample(request: CompletionRequest) -> RawSample:
        asked.append(request.sampling.seed)
        return answer(ids, "time_limit")

    made = completer(tokenizer, sample)
    made._retry = RetryPolicy(attempts=2, backoff=Backoff(first_s=0.01, most_s=0.01))
    with pytest.raises(UnusableSample, match="broke off") as broken:
        await made.sample(request(tokenizer))
    assert asked == [7, 7], "with the same seed"
    assert broken.value.completion.tokens_T == tuple(ids)


@pytest.mark.parametrize("ids", [[10**6], []])
async def test_a_server_without_seeds_gives_no_second_sample(tokenizer: HubTokenizer, ids: list[int]) -> None:
    asked: list[CompletionRequest] = []

    def sample(request: CompletionRequest) -> RawSample:
        asked.append(request)
        return answer(ids, "stop")

    made = completer(tokenizer, sample)
    made._retry = RetryPolicy(attempts=3)
    made.seeded = False
    with pytest.raises(UnusableSample):
        await made.sample(request(tokenizer))
    assert len(asked) == 1
    assert not SglangDialect(seeded=False).seeded


@pytest.mark.parametrize(
    ("text", "most", "reason"),
    [(f"Hello{END}", 100, "stop"), ("x = 1\n</code>", 100, "stop"), ("Hello", 0, "length")],
    ids=["end", "stop string", "full"],
)
async def test_what_was_aborted_at_its_end_is_not_asked_for_again(
    tokenizer: HubTokenizer, text: str, most: int, reason: str
) -> None:
    """Servers look for an abort before they look for an end. `most` 0: as many tokens as the text has."""
    ids, asked = tokenizer.encode(text), []

    def sample(request: CompletionRequest) -> RawSample:
        asked.append(request.sampling.max_tokens)
        return answer(ids, "aborted")

    wanted = request(tokenizer, most or len(ids))
    completion = await completer(tokenizer, sample).sample(wanted)
    assert (completion.finish_reason, completion.tokens_T) == (reason, tuple(ids))
    assert asked == [wanted.sampling.max_tokens]


async def test_what_was_aborted_before_its_first_token_is_a_fault_of_the_server(tokenizer: HubTokenizer) -> None:
    with pytest.raises(CompletionError, match="aborted it before its first token"):
        await completer(tokenizer, lambda _: answer([], "aborted")).sample(request(tokenizer))


async def test_versions_told_by_token_are_those_of_the_completion(tokenizer: HubTokenizer) -> None:
    """As SGLang tells them."""
    ids = tokenizer.encode(f"Hello there{END}")
    told = [{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": len(ids)}]
    sampled = replace(answer(ids), weight_versions=told)
    completion = await completer(tokenizer, lambda _: sampled).sample(request(tokenizer))
    assert completion.sampled_by == (PolicySpan(1, "6", "6"), PolicySpan(len(ids) - 1, "7", "7"))


async def test_what_was_sampled_before_the_server_went_away_is_kept(tokenizer: HubTokenizer) -> None:
    ids = tuple(tokenizer.encode("Hello"))
    answers = [answer(list(ids), "aborted")]

    def sample(request: CompletionRequest) -> RawSample:
        if not answers:
            raise CompletionError("gone")
        return answers.pop()

    with pytest.raises(Interrupted, match=f"gone; {len(ids)} tokens were sampled before") as caught:
        await completer(tokenizer, sample).sample(request(tokenizer))
    assert [part.ids for part in caught.value.parts] == [ids]
    assert caught.value.completion.tokens_T == ids
    with pytest.raises(CompletionError, match="gone") as nothing:
        await completer(tokenizer, sample).sample(request(tokenizer))
    assert not isinstance(nothing.value, Interrupted)
