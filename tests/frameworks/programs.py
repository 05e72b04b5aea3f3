"""The example programs, one for each framework."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.fakes.runs import ROOT


@dataclass(frozen=True, slots=True)
class Program:
    """`modules`: what `env.program_preload` is to import."""

    name: str
    modules: tuple[str, ...]

    @property
    def path(self) -> Path:
        return ROOT / "examples" / "agents" / f"{self.name}.py"


PROGRAMS = (
    Program("openai_chat", ("openai",)),
    Program("openai_agents", ("agents",)),
    Program("anthropic_tools", ("anthropic",)),
    Program("litellm_tools", ("litellm",)),
    Program("langchain_agent", ("langchain.agents", "langchain_openai")),
    Program("pydantic_ai_agent", ("pydantic_ai", "pydantic_ai.models.openai")),
    Program("smolagents_code", ("smolagents",)),
    Program("smolagents_tools", ("smolagents",)),
    Program("mini_swe_agent", ("minisweagent.agents.default",)),
)
