"""verl's rollouts as its default trainer runs them, without the trainer: Ray, worker processes, TransferQueue.

    python -m tests.fakes.verl_run HOME

Reads HOME/job.json: `model`, `loops` (the file of agent loops), `workers`, `n` (samples of a prompt), `prompts`
(rows of a data set), `turns` (what the model says). Prints JSON: the prompts' `status` by number, and every
sample's fields. A question with the word "broken" makes the servers fail.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import ray
import transfer_queue
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import get_router_handle

from tests.fakes.inference.script import always
from tests.fakes.verl_servers import Servers

STEP = 3
ENDED = ("finished", "failure")
FIELDS = ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores", "extra_fields")


@ray.remote
class ServerActor:
    """One scripted server with the method of verl's vLLM actor, in a process of its own."""

    def __init__(self, number: int, turns: list[str]) -> None:
        self._number = number
        self._servers = Servers(always(*turns))
        self._servers.version = STEP

    async def generate(
        self,
        *,
        request_id: str,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        priority: int = 0,
    ) -> TokenOutput:
        if "broken" in self._servers.model.decode(prompt_ids):
            raise RuntimeError("CUDA error")
        return await self._servers.generate(self._number, prompt_ids, sampling_params, request_id)


def _config(job: dict[str, Any]) -> DictConfig:
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer")
    config.actor_rollout_ref.model.path = job["model"]
    rollout = {"name": "vllm", "prompt_length": 4096, "response_length": 2048, "calculate_log_probs": True}
    for name, value in {**rollout, "n": job["n"]}.items():
        config.actor_rollout_ref.rollout[name] = value
    config.actor_rollout_ref.rollout.agent.num_workers = job["workers"]
    config.actor_rollout_ref.rollout.agent.agent_loop_config_path = job["loops"]
    config.transfer_queue.enable = True
    config.transfer_queue.backend.SimpleStorage.num_data_storage_units = 1
    return config


async def _ended(uids: list[str]) -> dict[str, dict[str, Any]]:
    """The tags of all that is in the queue, once every prompt has ended."""
    while True:
        tags = (await transfer_queue.async_kv_list()).get("train", {})
        if all(tags.get(uid, {}).get("status") in ENDED for uid in uids):
            return tags
        await asyncio.sleep(0.1)


def main() -> None:
    """Runs the job."""
    job = json.loads((Path(sys.argv[1]) / "job.json").read_text())
    config = _config(job)
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    transfer_queue.init(config.transfer_queue)
    actors = {str(n): ServerActor.options(num_cpus=0).remote(n, job["turns"]) for n in range(2)}
    client = FullyAsyncLLMServerClient(config, load_balancer_handle=get_router_handle(actors))
    manager = AgentLoopManagerTQ.create(config, client)

    uids = [f"uid{n}" for n in range(len(job["prompts"]))]
    shared = {"agent_name": "orchestrator", "global_steps": STEP}
    rows = [
        {**row, **shared, "uid": uid, "index": n}
        for n, (uid, row) in enumerate(zip(uids, job["prompts"], strict=True))
    ]
    tags = [{"is_prompt": True, "status": "pending", "global_steps": STEP} for _ in uids]
    batch = list_of_dict_to_tensordict(rows)
    transfer_queue.kv_batch_put(keys=uids, partition_id="train", fields=batch, tags=tags)
    manager.generate_sequences(batch)

    found = asyncio.run(_ended(uids))
    samples = {}
    for key in sorted(found.keys() - set(uids)):
        fields = transfer_queue.kv_batch_get(keys=[key], partition_id="train", select_fields=list(FIELDS))
        samples[key] = {"tag": found[key], **{name: _plain(fields[name]) for name in FIELDS}}
    print(json.dumps({"status": [found[uid]["status"] for uid in uids], "samples": samples}))
    for worker in manager.agent_loop_workers:
        ray.kill(worker)  # as verl ends them
    ray.shutdown()


def _plain(column: Any) -> Any:
    (value,) = list(column)
    value = getattr(value, "data", value) if not hasattr(value, "tolist") else value
    return value.tolist() if hasattr(value, "tolist") else value


if __name__ == "__main__":
    main()
