"""`examples/harbor-agent` without Harbor, which needs a newer Python: its classes, as far as needed."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pydantic
import pytest

from orchestrator.completion.tokenizer import load_tokenizer
from tests.fakes.inference import Call, ScriptedServer
from tests.fakes.tokenizer import tokenizer_folder

FILE = Path(__file__).parents[2] / "examples" / "harbor-agent" / "exact_ids.py"
SAYS = ["I look.\n```bash\nls; exit 3\n```", "Again.\n```bash\nsleep 99\n```", "Done."]


class AgentOptions(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")


class BaseAgent:
    options_model: Any

    def __init__(self, **options: Any) -> None:
        self.options = self.options_model(**options)
        self.model_name, self.session_id = "scripted", "fix-sum__abc"


class UnknownApiError(RuntimeError):
    pass


@dataclass
class Environment:
    """Where commands are run."""

    commands: list[str] = field(default_factory=list)

    async def exec(self, command: str, timeout_sec: int) -> SimpleNamespace:
        self.commands.append(command)
        if "sleep" in command:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        return SimpleNamespace(stdout="total.py\n", stderr=None, return_code=3)


@pytest.fixture
def agent_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    offered = {
        "harbor.agents.base": {"BaseAgent": BaseAgent},
        "harbor.agents.installed.base": {"UnknownApiError": UnknownApiError},
        "harbor.agents.options": {"AgentOptions": AgentOptions},
        "harbor.environments.base": {"BaseEnvironment": object},
        "harbor.models.agent.context": {"AgentContext": object},
        "harbor.models.agent.rollout_detail": {"RolloutDetail": dict},
    }
    for name, values in offered.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("exact_ids", FILE)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made.ExactIds


def script(call: Call) -> str:
    return SAYS[min(sum(message.role == "assistant" for message in call.messages), 2)]


async def test_each_prompt_is_what_was_sent_and_sampled_before(agent_class: Any) -> None:
    environment, context = Environment(), SimpleNamespace()
    async with ScriptedServer("vllm", script) as server:
        agent = agent_class(endpoint=server.base_url, tokenizer=str(tokenizer_folder()), command_timeout_s=7)
        await agent.run("Fix it.", environment, context)
    assert environment.commands == ["ls; exit 3\n", "sleep 99\n"]
    (details,) = context.rollout_details
    prompts, completions = details["prompt_token_ids"], details["completion_token_ids"]
    assert [len(ids) for ids in completions] == [len(logprobs) for logprobs in details["logprobs"]]
    assert len(prompts) == 3
    for number in (1, 2):
        before = prompts[number - 1] + completions[number - 1]
        assert prompts[number][: len(before)] == before
    assert context.n_input_tokens == sum(map(len, prompts))
    assert context.n_output_tokens == sum(map(len, completions))
    tokenizer = load_tokenizer(str(tokenizer_folder()))
    assert "total.py\n\n[exit code 3]" in tokenizer.decode(prompts[1])
    assert "Command timed out after 7 seconds" in tokenizer.decode(prompts[2])


async def test_what_the_endpoint_does_is_no_reward(agent_class: Any) -> None:
    agent = agent_class(endpoint="http://127.0.0.1:9/v1", tokenizer=str(tokenizer_folder()))
    with pytest.raises(UnknownApiError, match=r"127\.0\.0\.1:9"):
        await agent.run("Fix it.", Environment(), SimpleNamespace())
