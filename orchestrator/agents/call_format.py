"""In which form agents call their tools: decided once, when a run opens."""

from orchestrator.completion.base import Tokenizer
from orchestrator.errors import ConfigError
from orchestrator.settings.sampling import SamplingSettings
from orchestrator.types import AgentSpec, CallFormat


def call_format(settings: SamplingSettings, agent: AgentSpec, tokenizer: Tokenizer | None) -> CallFormat | None:
    """The model's own format. None: in the text, or no agent of the team calls tools.

    Raises ConfigError where a format is named and the model's chat template shows no tools.
    """
    if not agent.calls_tools or settings.tool_call_format in ("json", "fenced"):
        return None
    named = settings.named_call_format
    if tokenizer is None:
        return named
    if tokenizer.shape.tools:
        return tokenizer.call_format
    if named is not None:
        raise ConfigError(
            f"env.tool_call_format: the model's chat template shows no tools, so it cannot be {named}; leave it "
            "at auto, or set json"
        )
    return None
