"""Fixtures that run code steps in real worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox.errors import CodeError, ToolFailure
from sandbox.runner.executor import Reach, WorkerExecutor
from sandbox.runner.worker_link import WorkerLink
from sandbox.types import AgentSettings, ToolSpec
from tests.fakes.worker_host import worker_link

SEARCH = ToolSpec(
    "search",
    "Looks something up.",
    {
        "query": {"type": "string", "description": "What."},
        "limit": {"type": "integer", "description": "How many.", "nullable": True},
    },
    "string",
)
LOOKUP = ToolSpec("lookup", "Finds entries.", {"word": {"type": "string", "description": "Which."}}, "array")


class Steps:
    """Runs steps and keeps what the agent would see of them."""

    def __init__(self, link: WorkerLink, workspace: Path) -> None:
        self.link = link
        self.workspace = workspace
        self.calls: list[tuple[str, str]] = []
        self.search: Callable[[str], str] = lambda arguments: f"found by {arguments}"
        self.kills: int | None = None
        self.begin()

    def begin(self, timeout_s: float = 20.0, max_output_chars: int = 20_000) -> None:
        """A fresh worker and a fresh executor."""
        settings = AgentSettings(max_steps=9, step_timeout_s=timeout_s, max_output_chars=max_output_chars)
        self.link.replace()
        self.executor = WorkerExecutor(
            self.link, settings, Reach((SEARCH, LOOKUP)), self._call, lambda: self.kills
        )
        self.executor.send_variables(variables={})

    def _call(self, name: str, arguments: str) -> str:
        self.calls.append((name, arguments))
        return self.search(arguments)

    def value(self, code: str) -> str | None:
        """The last value's text; the step must not fail."""
        output = self.executor(code)
        assert not output.is_final_answer
        return output.output

    def printed(self, code: str) -> str:
        """What the step printed; it must not fail."""
        return self.executor(code).logs

    def error(self, code: str) -> str:
        """The text of the step's failure."""
        with pytest.raises(CodeError) as caught:
            self.executor(code)
        return str(caught.value)

    def answer(self, code: str) -> bytes | None:
        """The answer the step gave."""
        output = self.executor(code)
        assert output.is_final_answer
        assert self.executor.answered
        return self.executor.answer


@pytest.fixture(scope="session")
def _link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerLink, Path]]:
    workspace = tmp_path_factory.mktemp("workspace")
    with worker_link(workspace) as link:
        yield link, workspace


@pytest.fixture
def steps(_link: tuple[WorkerLink, Path]) -> Steps:
    """A fresh worker with an empty state."""
    return Steps(*_link)


def failing(text: str) -> Callable[[str], str]:
    """A host tool that fails."""

    def fail(arguments: str) -> str:
        raise ToolFailure(text)

    return fail
