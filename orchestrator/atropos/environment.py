"""`OrchestratorEnv`: the engine as an Atropos environment.

Atropos users load it as any environment: `OrchestratorEnv(config, server_configs)`, `config_init`, `cli()`,
`setup`, `get_next_item`, `collect_trajectories`, `evaluate`. Its three managers are our own, since those of
atroposlib 0.4.0, which gets no fixes, lose groups, steps and whole runs (see `feed.py`).
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atroposlib.envs.base import APIServer, BaseEnv
from huggingface_hub import try_to_load_from_cache

from orchestrator.atropos.service import Service
from orchestrator.atropos.settings import (
    OrchestratorEnvConfig,
    OrchestratorServerConfig,
    as_config,
    as_env_config,
    as_server_configs,
)
from orchestrator.atropos.stream import Item
from orchestrator.commands import process
from orchestrator.completion.find_tokenizer import find_tokenizer
from orchestrator.completion.tokenizer import HubTokenizer, tokenizer_folder
from orchestrator.errors import ConfigError
from orchestrator.settings.config import Config

# Importing atroposlib sets its loggers to DEBUG; they would write a line every 0.1 s.
logging.getLogger("atroposlib").setLevel(logging.WARNING)
logging.getLogger("atroposlib.envs.base").setLevel(logging.WARNING)

Backlog = list[Item]


class EngineServer(APIServer):  # type: ignore[misc]
    """Stands in for Atropos' inference clients and sends nothing: the engine has clients of its own."""

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """Nothing to check: no request goes through here."""

    async def _chat_completion_wrapper(self, **kwargs: Any) -> Any:
        raise NotImplementedError("OrchestratorEnv samples through its engine; use collect_trajectories")

    _completion_wrapper = _tokens_and_logprobs_completion_wrapper = _chat_completion_wrapper


class OrchestratorEnv(BaseEnv):  # type: ignore[misc]
    """One smolagents agent per rollout, each in a container of its own."""

    name = "smolagents"
    env_config_cls = OrchestratorEnvConfig
    server_cls = EngineServer

    def __init__(
        self,
        config: Any,
        server_configs: Any,
        slurm: bool = False,
        testing: bool = False,
        *,
        own: Config | None = None,
        tokenizer: HubTokenizer | None = None,
    ) -> None:
        """Loads the tokenizer. Raises ConfigError, EnvironmentUnusable. `own`, `tokenizer`: see `from_config`."""
        self.own_config = own or as_config(config, server_configs)
        self.service = Service(
            self.own_config,
            make=self._make,
            evaluate=self.evaluate,
            log=self.wandb_log,
            evaluates=type(self).evaluate is not OrchestratorEnv.evaluate,
        )
        tokenizer = tokenizer or find_tokenizer(self.own_config.env, self.own_config.openai[0].model_name)
        if tokenizer is None:
            raise ConfigError(
                "env.tokenizer_name: Atropos needs one; name the model's, or use `orchestrator process`"
            )
        super().__init__(
            as_env_config(self.own_config.env, _folder(tokenizer.name)),
            as_server_configs(self.own_config.openai),
            slurm=slurm,
            testing=testing,
        )

    @classmethod
    def from_config(cls, config: Config, tokenizer: HubTokenizer | None = None) -> OrchestratorEnv:
        """From what `load_config` gives. `tokenizer`: the one that it names, where that is loaded already."""
        return cls(None, None, own=config, tokenizer=tokenizer)

    @classmethod
    def config_init(cls) -> tuple[Any, list[Any]]:
        """Our defaults, with one server, so that flags can set it."""
        return OrchestratorEnvConfig(), [OrchestratorServerConfig()]

    # ------------------------------------------------------------ what Atropos asks for

    async def setup(self) -> None:
        """Opens Docker, endpoint and tasks. Raises EnvironmentUnusable, ConfigError. `close` when done."""
        await self.service.open()

    async def close(self) -> None:
        """Removes every sandbox. BaseEnv has no such hook: the managers here close the service."""
        await self.service.close()

    async def get_next_item(self) -> Item:
        """The next task, without end."""
        return await self.service.work.stream.next()

    async def collect_trajectories(self, item: Item) -> tuple[Any, Backlog]:
        """One group, complete, or None where its policy drops it. Cancelling removes its sandboxes; what its
        finished rollouts sampled, or the whole group, is used when the item comes again."""
        groups = await self.service.groups(item)
        return (groups[0] if len(groups) == 1 else groups) or None, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> Mapping[str, float]:
        """Measures the evaluation tasks at the trainer's present step."""
        return await self.service.evaluate_now()

    async def cleanup(self) -> None:
        """Does nothing: Atropos calls it after every group."""

    # ------------------------------------------------------------ the managers

    async def env_manager(self) -> None:
        """`serve`: feeds the trainer. Ends the process with its exit code where that is not 0."""
        if code := await self.serve():
            raise SystemExit(code)

    async def serve(self) -> int:
        """0: total_steps groups are delivered; 1: not all; 128 + n after a signal."""
        return await self.service.serve()

    async def process_manager(self) -> None:
        """`process`: Atropos' own makes one group at a time and ends with 0 even when nothing was written."""
        if code := await process.work(self.own_config):
            raise SystemExit(code)

    async def _run_evaluate(self) -> None:
        async with self.service.opened():
            await self.evaluate()

    @classmethod
    def cli(cls) -> None:
        """`serve`, `process` or `evaluate` with the flags of `orchestrator`: Atropos' parser takes -1 for 1 and
        prints keys."""
        from orchestrator.cli import main

        sys.exit(main(carry_out={"serve": cls.run_serve, "process": cls.run_process}))

    @classmethod
    def run_serve(cls, config: Config, tokenizer: HubTokenizer | None = None) -> int:
        """What `orchestrator serve` does."""
        return asyncio.run(cls.from_config(config, tokenizer).serve())

    @classmethod
    def run_process(cls, config: Config) -> int:
        """What `orchestrator process` does."""
        return asyncio.run(process.work(cls.from_config(config).own_config))

    # ------------------------------------------------------------ wandb

    async def _make(self, item: Item) -> Sequence[Mapping[str, Any]]:
        """Makes an item's groups through the methods that a subclass may override."""
        made, _ = await self.collect_trajectories(item)
        made = await self.postprocess_histories(made) if made else None
        if not made:
            return ()
        groups = made if isinstance(made, list) else [made]
        for group in groups:
            await self.add_rollouts_for_wandb(group, item)
        return groups

    async def add_rollouts_for_wandb(self, scored_data: Any, item: Any = None) -> None:
        """As in Atropos, but with no more rollouts than the group has."""
        if not self.service.tracking.wanted:
            return
        limit = self.config.num_rollouts_per_group_for_logging
        count = len(scored_data["tokens"]) if limit == -1 else min(limit, len(scored_data["tokens"]))
        rows = [(self.tokenizer.decode(scored_data["tokens"][i]), scored_data["scores"][i]) for i in range(count)]
        self.rollouts_for_wandb.append(rows)
        del self.rollouts_for_wandb[: -self.config.num_rollouts_to_keep or None]

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Logs these, our own and a table of rollouts, with the environment's name in front as Atropos does."""
        metrics = {**(wandb_metrics or {}), **self.service.metrics_now()}
        if not self.service.tracking.wanted:
            return
        metrics = await self.create_rollout_table(metrics)
        self.rollouts_for_wandb: list[Any] = []
        name = self.service.registered_name
        named = {f"{name}_{key}": value for key, value in metrics.items()} if name else metrics
        self.service.tracking.log(named, self.service.step)

    def save_checkpoint(self, step: int, data: Any = None) -> None:
        """Saves the position in the task stream; `data` is ignored."""
        self.service.save_checkpoint(step)


def _folder(name: str) -> str:
    """The folder of a tokenizer loaded by this name: Atropos would ask the hub again, and wait without network."""
    if tokenizer_folder(name):
        return name
    cached = try_to_load_from_cache(name, "tokenizer_config.json")
    return str(Path(cached).parent) if isinstance(cached, str) else name
