"""How many tokens an agent's prompt has at least: the system prompt of smolagents' agent without tools."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import yaml

from orchestrator.completion.base import Tokenizer
from orchestrator.completion.prompt_text import prompt_text
from orchestrator.engine.orchestrator import Orchestrator
from orchestrator.errors import ConfigError
from orchestrator.types import AgentSpec, Message

_FILES = {"code": "code_agent.yaml", "tool_calling": "toolcalling_agent.yaml"}


def demand_prompt_room(orchestrator: Orchestrator, limit: int, advice: Callable[[int], str]) -> None:
    """Raises ConfigError unless the agent's prompt has fewer tokens than `limit`. `advice`: the error's text, of
    the least that it has."""
    tokenizer, env, agent = orchestrator.hosts.tokenizer, orchestrator.config.env, orchestrator.maker.agent_spec()
    ours = agent.kind not in _FILES or (agent.kind == "tool_calling" and agent.call_format is not None)
    if tokenizer is None or env.prompt_templates is not None or ours:
        return  # the prompt's text is not smolagents' own
    if limit <= (least := least_prompt_tokens(tokenizer, agent)):
        raise ConfigError(advice(least))


def least_prompt_tokens(tokenizer: Tokenizer, agent: AgentSpec) -> int:
    """Tokens of that prompt in the chat template. A smaller limit leaves no room for any rollout."""
    from jinja2 import Template

    # The file is found without importing smolagents, which takes half a second.
    spec = find_spec("smolagents")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "prompts" / _FILES[agent.kind]
    template = yaml.safe_load(source.read_text("utf-8"))["system_prompt"]
    text = Template(template).render(
        tools={},
        managed_agents={},
        authorized_imports="any package",
        custom_instructions=agent.instructions,
        code_block_opening_tag=agent.code_tags[0],
        code_block_closing_tag=agent.code_tags[1],
    )
    prompt = prompt_text(tokenizer, (Message("system", text),))
    return len(tokenizer.encode(prompt.text, prompt.plain))
