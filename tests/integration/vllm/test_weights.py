"""What docs/training.md says of servers that are paused, abort, sleep and get other weights, held against a real
vLLM in its development mode."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from orchestrator.completion.base import Completer, CompletionRequest
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.types import Completion
from tests.integration.vllm.asking import connected, request
from tests.integration.vllm.reference import Reference
from tests.integration.vllm.server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
TOKENS = 40
MOST_OFF = 0.08


@pytest.fixture(autouse=True)
def awake(plain: VllmServer) -> Iterator[None]:
    """Leaves the server as it was."""
    yield
    plain.post("/wake_up")
    plain.post("/resume")


@asynccontextmanager
async def under_way(
    plain: VllmServer, completer: Completer, *asked: CompletionRequest
) -> AsyncIterator[list[asyncio.Task[Completion]]]:
    """Completions of which some tokens are sampled already."""
    sampled = await generated(plain)
    tasks = [asyncio.ensure_future(completer.sample(one)) for one in asked]
    while await generated(plain) < sampled + 8 * len(asked):
        assert not any(task.done() for task in tasks)
        await asyncio.sleep(0.05)
    yield tasks


async def generated(plain: VllmServer) -> float:
    """How many tokens the server has sampled."""
    _, text = await asyncio.to_thread(plain.ask, "/metrics")
    return sum(
        float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:generation_tokens_total")
    )


async def post(plain: VllmServer, path: str, **body: object) -> None:
    await asyncio.to_thread(lambda: plain.post(path, **body))


def endless(tokenizer: HubTokenizer, seed: int = 1) -> CompletionRequest:
    """That is not over before TOKENS tokens, by all experience."""
    return request(
        tokenizer, "Count from 100 to 300, one number in a line.", temperature=0.7, max_tokens=TOKENS, seed=seed
    )


@pytest.mark.parametrize(
    "how", ["/pause", "/pause?mode=wait", "/pause?mode=keep", "/sleep?level=1", "/abort_requests"]
)
async def test_what_is_stopped_is_continued_without_a_retry(
    plain: VllmServer, tokenizer: HubTokenizer, reference: Reference, how: str
) -> None:
    asked = [endless(tokenizer, seed) for seed in (1, 2)]
    async with connected(plain, tokenizer) as completer:
        async with under_way(plain, completer, *asked) as tasks:
            await post(plain, how)
            await asyncio.sleep(1.0)
            if how not in ("/pause?mode=wait", "/abort_requests"):
                assert not any(task.done() for task in tasks), "nothing is sampled meanwhile"
            await post(plain, "/wake_up" if "sleep" in how else "/resume")
            completions = [await task for task in tasks]
    for one, completion in zip(asked, completions, strict=True):
        ids, logprobs = completion.tokens_T or (), completion.logprobs_T or ()
        assert (len(ids), completion.finish_reason, completion.retries) == (TOKENS, "length", 0)
        distance = reference.distance(list(one.prompt_ids or ()), ids, logprobs)
        assert distance.own < MOST_OFF < distance.shifted


@pytest.mark.parametrize("how", ["/pause", "/sleep"])
async def test_what_is_asked_while_it_is_stopped_waits(
    plain: VllmServer, tokenizer: HubTokenizer, how: str
) -> None:
    async with connected(plain, tokenizer) as completer:
        await post(plain, how)
        asked = asyncio.ensure_future(completer.sample(request(tokenizer, max_tokens=4)))
        await asyncio.sleep(1.0)
        assert not asked.done()
        await post(plain, how)  # aborts it before its first token: it waits, and is asked for anew
        await asyncio.sleep(1.0)
        assert not asked.done()
        await post(plain, "/wake_up" if "sleep" in how else "/resume")
        completion = await asked
    assert (len(completion.tokens_T or ()), completion.retries) == (4, 0)


async def test_a_chat_that_is_aborted_is_sampled_again(plain: VllmServer, tokenizer: HubTokenizer) -> None:
    async with connected(plain, tokenizer, tokens="retokenize") as completer:
        async with under_way(plain, completer, endless(tokenizer)) as (task,):
            await post(plain, "/abort_requests")
            completion = await task
    assert (completion.completion_tokens, completion.finish_reason, completion.retries) == (TOKENS, "length", 1)


@pytest.fixture(scope="module")
def other(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    import torch
    from safetensors.torch import load_file, save_file

    target = tmp_path_factory.mktemp("other") / "weights"
    shutil.copytree(folder, target)
    weights, draw = load_file(target / "model.safetensors"), torch.Generator().manual_seed(1)
    for name, tensor in weights.items():
        if "down_proj" in name or "o_proj" in name:
            noise = 1 + 0.1 * torch.randn(tensor.shape, generator=draw)
            weights[name] = (tensor.float() * noise).to(tensor.dtype)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


async def load(plain: VllmServer, weights: Path, version: str, pause: str = "/pause") -> None:
    """As a trainer does it: pause, new weights, version, an empty cache, on."""
    await post(plain, pause)
    await post(plain, "/collective_rpc", method="reload_weights", kwargs={"weights_path": str(weights)})
    await post(plain, "/update_weight_version", new_version=version)
    await post(plain, "/reset_prefix_cache?reset_running_requests=true")
    await post(plain, "/resume")


async def test_tokens_are_attributed_to_the_weights_that_sampled_them(
    plain: VllmServer,
    tokenizer: HubTokenizer,
    folder: Path,
    other: Path,
    reference: Reference,
    figures: Callable[[str], None],
) -> None:
    """Each token with one version by name is of that version: nearer to its weights than to the others'."""
    asked: list[CompletionRequest] = []
    completions: list[Completion] = []
    await load(plain, folder, "v1")
    async with connected(plain, tokenizer) as completer:
        for number, (weights, version) in enumerate(((other, "v2"), (folder, "v3"))):
            some = [endless(tokenizer, 10 * number + seed) for seed in range(3)]
            async with under_way(plain, completer, *some[:2]) as tasks:
                await load(plain, weights, version, "/pause?mode=keep" if number % 2 else "/pause")
                tasks += [asyncio.ensure_future(completer.sample(one)) for one in some[2:]]
                completions += [await task for task in tasks]
            asked += some
    both = {"odd": reference, "even": Reference(other)}
    named = bracketed = 0
    near: list[float] = []
    far: list[float] = []
    for one, completion in zip(asked, completions, strict=True):
        ids, logprobs = completion.tokens_T or (), completion.logprobs_T or ()
        assert sum(span.tokens for span in completion.sampled_by) == len(ids)
        begun = 0
        for span in completion.sampled_by:
            assert span.oldest is not None
            part = slice(begun, begun + span.tokens)
            prompt = [*(one.prompt_ids or ()), *ids[:begun]]
            begun += span.tokens
            if span.oldest != span.newest:
                bracketed += span.tokens
                continue
            named += span.tokens
            odd = int(span.oldest.removeprefix("v")) % 2
            own, others = ("odd", "even") if odd else ("even", "odd")
            near.append(both[own].distance(prompt, ids[part], logprobs[part]).own)
            far.append(both[others].distance(prompt, ids[part], logprobs[part]).own)
            if span.tokens > 5:
                assert near[-1] < far[-1], span
    figures(
        f"weights that change: {named} tokens of one version, mean |Δ| {sum(near) / len(near):.4f} to it and "
        f"{sum(far) / len(far):.3f} to the others; {bracketed} bracketed by two"
    )
    assert named > 60
    assert sum(near) / len(near) < MOST_OFF
