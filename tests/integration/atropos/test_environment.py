"""OrchestratorEnv as Atropos users have it, and what is refused before anything starts."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.atropos import OrchestratorEnv
from orchestrator.atropos.environment import OrchestratorEnvConfig
from orchestrator.atropos.settings import OrchestratorServerConfig, as_config
from orchestrator.errors import ConfigError, EnvironmentUnusable
from orchestrator.settings.config import Config
from orchestrator.settings.sources import load_config
from orchestrator.settings.table import EnvSettings
from tests.fakes import runs
from tests.fakes.inference import ScriptedServer
from tests.fakes.runs import DEADLINE_S, answers, essence, flags, run, running
from tests.fakes.tokenizer import tokenizer_folder
from tests.fakes.trainers import Trainer, run_api

TASKS = 2


def env_values(home: Path, **more: Any) -> dict[str, Any]:
    return {
        "dataset": f"jsonl:{home / 'tasks.jsonl'}",
        "run_dir": str(home / "here"),
        "launcher": "process",
        "tokenizer_name": str(tokenizer_folder()),
        "group_size": 2,
        "max_concurrent_sandboxes": 4,
        "seed": 7,
        **more,
    }


def configured(home: Path, base_url: str, **env: Any) -> Config:
    return load_config(
        env=env_values(home, **env), openai={"base_url": base_url, "model_name": "scripted"}, environ={}, cwd=home
    )


async def test_all_ways_give_the_groups_of_process(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    async with ScriptedServer("vllm", answers(TASKS)) as server:
        ended = await run(*flags(home, server.base_url, run_dir=home / "own"), directory=home)
        assert ended.code == 0, ended.stderr
        expected = essence(home / "own" / "groups.jsonl")
        assert len(expected) == TASKS
        # By Atropos' entry point.
        monkeypatch.setattr(runs, "COMMAND", (sys.executable, "-m", "orchestrator.atropos"))
        ended = await run(*flags(home, server.base_url, run_dir=home / "theirs"), directory=home)
        assert ended.code == 0, ended.stderr
        assert essence(home / "theirs" / "groups.jsonl") == expected
        # By the methods that Atropos' own loops call, from Atropos' own configuration classes.
        config, servers = OrchestratorEnv.config_init()
        config = type(config)(**{**config.model_dump(), **env_values(home)})
        servers = [servers[0].model_copy(update={"base_url": server.base_url, "model_name": "scripted"})]
        servers[0].model_fields_set.update({"base_url", "model_name"})
        env = OrchestratorEnv(config, servers)
        await env.setup()
        try:
            with (home / "collected.jsonl").open("w") as file:
                for _ in range(TASKS):
                    item = await env.get_next_item()
                    group, backlog = await env.collect_trajectories(item)
                    await env.cleanup()
                    assert not backlog
                    file.write(json.dumps(group) + "\n")
        finally:
            await env.close()
        assert essence(home / "collected.jsonl") == expected


def test_settings_come_back_from_atropos_classes_as_they_were() -> None:
    config = as_config(OrchestratorEnvConfig(), [OrchestratorServerConfig()])
    assert config.env == EnvSettings()
    given = OrchestratorEnvConfig(group_size=3, process_timeout=7, untrained_outcomes=["timeout"])
    config = as_config(given, OrchestratorServerConfig(base_url="http://h:1/v1", api_key="sk-secret-1234567890"))
    assert (config.env.group_size, config.env.rollout_timeout) == (3, 7.0)
    assert config.env.untrained_outcomes == ("timeout",)
    assert config.openai[0].key() == "sk-secret-1234567890"
    with pytest.raises(ConfigError, match=r"env\.max_steps"):
        as_config(OrchestratorEnvConfig(max_steps=0), OrchestratorServerConfig())


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"batch_size": 9}, r"groups of 2 never fill .* of 9; set --env.group_size 1, .* multiple of 2"),
        ({"group_policy": "partial:1"}, "use backfill or drop"),
        ({"max_token_length": 300}, r"max_token_length: 300 tokens are fewer .* system prompt .* \d+ or more"),
        ({"inference_weight": 0}, "above 0"),
    ],
)
async def test_what_no_trainer_could_use_is_refused_with_the_fix(
    home: Path, env: dict[str, Any], reason: str
) -> None:
    async with ScriptedServer("vllm", answers(TASKS)) as server:
        with pytest.raises(ConfigError, match=reason):
            await OrchestratorEnv.from_config(configured(home, server.base_url, **env)).serve()
        assert not server.log.completions


async def test_endpoint_without_ids_is_refused_unless_retokenize_is_asked_for(home: Path) -> None:
    async with run_api() as api, ScriptedServer("openai", answers(TASKS)) as server:
        with pytest.raises(EnvironmentUnusable, match=r"--env\.token_source retokenize"):
            await OrchestratorEnv.from_config(configured(home, server.base_url)).serve()
        asked = configured(
            home,
            server.base_url,
            token_source="retokenize",
            rollout_server_url=api.url,
            total_steps=2,
            run_dir=str(home / "asked"),
        )
        serving = asyncio.create_task(OrchestratorEnv.from_config(asked).serve())
        trainer = await Trainer.registered(api.url, batch_size=2)
        await trainer.take(2)
        assert await asyncio.wait_for(serving, DEADLINE_S) == 0
        facts = [facts for group in trainer.groups for facts in group["overrides"]]
        assert {f["token_source"] for f in facts} == {"retokenized"}
        assert all(group["inference_logprobs"] is None for group in trainer.groups)


async def test_trainer_with_lines_shorter_than_the_prompt_is_refused(home: Path) -> None:
    async with run_api() as api, ScriptedServer("vllm", answers(TASKS)) as server:
        await Trainer.registered(api.url, batch_size=4, max_token_len=500)
        given = flags(home, server.base_url, rollout_server_url=api.url)
        async with running(*given, directory=home, command="serve") as serve:
            ended = await serve.ended()
        assert ended.code == 2, ended.stderr
        assert "the trainer's max_token_len: 499 tokens are fewer" in ended.stderr
        assert not ended.traceback
        assert not server.log.completions
