"""What a run sends into all its sandboxes: tools that run there, prompts, a program. Frozen values."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SandboxTool:
    """A function of a module whose source is sent along; it runs where model-written code runs."""

    name: str
    description: str
    inputs: Mapping[str, Mapping[str, Any]]
    output_type: str
    module: str
    source: str


@dataclass(frozen=True, slots=True)
class ProgramFile:
    """A file of an agent program. `path` is relative, without `..`."""

    path: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Equipment:
    """`prompt_templates` None: smolagents' own. `program` is empty unless the agent is a program."""

    sandbox_tools: tuple[SandboxTool, ...] = ()
    prompt_templates: Mapping[str, Any] | None = None
    program: tuple[ProgramFile, ...] = ()

    def describe(self) -> dict[str, object]:
        """For run.json: names and digests."""
        return {
            "sandbox_tools": {tool.name: _digest(tool.source.encode()) for tool in self.sandbox_tools},
            "prompt_templates": None
            if self.prompt_templates is None
            else _digest(repr(sorted(self.prompt_templates.items())).encode()),
            "program": {file.path: _digest(file.content) for file in self.program},
        }


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
