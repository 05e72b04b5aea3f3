"""The example programs, one for each framework, and what a model says to them: it calls a tool twice at once, then
it answers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.fakes.runs import ROOT

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
SANDBOX_REQUIREMENTS = ROOT / "sandbox" / "requirements.txt"
QUESTION, ANSWER = "What is six times seven?", "42"


def calls(name: str, *arguments: Mapping[str, str]) -> str:
    """As the model writes them."""
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(one)}}}\n</tool_call>' for one in arguments
    )


def demanded(name: str, *arguments: Mapping[str, str]) -> str:
    """The same where the request demands a call: the prompt ends with its beginning."""
    return calls(name, *arguments).removeprefix('<tool_call>\n{"name": "')


PYTHON = ({"code": "print(6 * 7)"}, {"code": "print(7 * 6)"})
BASH = ({"command": "echo $((6 * 7))"}, {"command": "echo $((7 * 6))"})
SUBMIT = {"command": f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {ANSWER}"}
ASKED = ("I count in two ways.\n" + calls("run_python", *PYTHON), ANSWER)


@dataclass(frozen=True, slots=True)
class Program:
    """`modules`: for `env.program_preload`. `turns`: what the model says. `segments`: how many lines of tokens it
    makes, one if the framework sends back what was sampled."""

    name: str
    modules: tuple[str, ...]
    turns: tuple[str, ...] = ASKED
    segments: int = 1

    @property
    def path(self) -> Path:
        return ROOT / "examples" / "agents" / f"{self.name}.py"


PROGRAMS = (
    Program("openai_chat", ("openai",)),
    Program("openai_agents", ("agents",)),
    Program("anthropic_tools", ("anthropic",)),
    Program("litellm_tools", ("litellm",)),
    Program("langchain_agent", ("langchain.agents", "langchain_openai")),
    Program(
        "pydantic_ai_agent",
        ("pydantic_ai", "pydantic_ai.models.openai"),
        (demanded("run_python", *PYTHON), demanded("final_result", {"answer": ANSWER})),
    ),
    Program("autogen_agent", ("autogen_agentchat.agents", "autogen_ext.models.openai")),
    Program(
        "smolagents_code",
        ("smolagents", "openai"),
        ("I count.\n<code>\nx = 6 * 7\nprint(x)\n</code>", "That is it.\n<code>\nfinal_answer(x)\n</code>"),
    ),
    Program(
        "smolagents_tools",
        ("smolagents", "openai"),
        (demanded("run_python", *PYTHON), demanded("final_answer", {"answer": ANSWER})),
        segments=2,
    ),
    Program(
        "mini_swe_agent",
        ("minisweagent.agents.default", "minisweagent.environments.local", "minisweagent.models.litellm_model"),
        ("I count in two ways.\n" + calls("bash", *BASH), "I submit.\n" + calls("bash", SUBMIT)),
    ),
)


def versions() -> dict[str, str]:
    """Of the frameworks, by name."""
    asked = re.findall(r"^[\w-]+", REQUIREMENTS.with_suffix(".in").read_text(), re.MULTILINE)
    lists = SANDBOX_REQUIREMENTS.read_text() + REQUIREMENTS.read_text()
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)", lists, re.MULTILINE))
    return {name.removesuffix("-slim"): pinned[name] for name in (*asked, "smolagents")}
