"""Adapters, each version under a name of its own, as trainers with LoRA serve them; and the server's key."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from orchestrator.completion.base import Endpoint
from orchestrator.completion.connect import connect
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.errors import EnvironmentUnusable
from orchestrator.rules.policy import Policy
from tests.integration.vllm.asking import connected, request
from tests.integration.vllm.server import AGENTS_CONTEXT, KEY, NAME, VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
LAYERS, WIDTH, RANK = 24, 896, 4


def adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter with drawn numbers, as PEFT saves it."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, WIDTH, generator=draw) * 0.05
        tensors[f"{name}.lora_B.weight"] = torch.randn(WIDTH, RANK, generator=draw) * 0.5
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**told, "base_model_name_or_path": NAME}))
    return folder


def load(server: VllmServer, folder: Path, name: str) -> None:
    status, told = server.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, KEY)
    assert status == 200, told


async def test_a_trainer_s_version_is_asked_for_by_its_adapter_s_name(
    equipped: VllmServer, tokenizer: HubTokenizer, tmp_path: Path
) -> None:
    policy, asked = Policy(), request(tokenizer, temperature=0.0, max_tokens=16)
    load(equipped, adapter(tmp_path / "one", 1), "policy-1")
    async with connected(equipped, tokenizer, key=KEY, policy=policy) as completer:
        base = await completer.sample(asked)
        await policy.serve("1", "policy-1")
        first = await completer.sample(asked)
        assert first.tokens_T != base.tokens_T
        assert first.policy_version == "1"

        await policy.serve("2", "policy-2")  # before the server has it: the refusal is waited out
        later = asyncio.ensure_future(completer.sample(asked))
        await asyncio.sleep(0.5)
        load(equipped, adapter(tmp_path / "two", 2), "policy-2")
        second = await later
    assert second.tokens_T not in (base.tokens_T, first.tokens_T)
    assert second.policy_version == "2"
    assert second.retries >= 1


async def test_an_adapter_may_be_the_model_of_a_run(
    equipped: VllmServer, tokenizer: HubTokenizer, tmp_path: Path
) -> None:
    """On the model list it has no length of its own; the base model's holds."""
    load(equipped, adapter(tmp_path / "three", 3), "policy-3")
    async with connected(equipped, tokenizer, model="policy-3", key=KEY, tokens="exact") as completer:
        assert completer.context_length == AGENTS_CONTEXT  # type: ignore[attr-defined]
        assert len((await completer.sample(request(tokenizer, max_tokens=4))).tokens_T or ()) == 4


@pytest.mark.parametrize("key", ["", "sk-wrong"])
async def test_a_wrong_key_is_told_at_the_start(equipped: VllmServer, tokenizer: HubTokenizer, key: str) -> None:
    with pytest.raises(EnvironmentUnusable, match=r"HTTP 401.*Unauthorized.*OPENAI_API_KEY"):
        await connect(Endpoint(equipped.base_url, NAME, key), tokenizer)
