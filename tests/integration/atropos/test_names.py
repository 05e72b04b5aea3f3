"""Atropos' own settings, with atroposlib installed."""

from __future__ import annotations

from orchestrator.settings.endpoint import OpenAISettings
from orchestrator.settings.table import EnvSettings


def test_names_of_atropos_are_all_accepted() -> None:
    from atroposlib.envs.base import APIServerConfig, BaseEnvConfig  # seconds: only this test needs it

    assert set(BaseEnvConfig.model_fields) <= set(EnvSettings.rows())
    ours = {"startup_timeout", "headers", "weight", "prompt_price", "completion_price"}
    assert set(APIServerConfig.model_fields) | ours == set(OpenAISettings.rows())
