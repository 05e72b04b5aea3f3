"""Host tools that answer from a recorded run, without calling anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.errors import ToolError
from orchestrator.run.lines import dumps
from orchestrator.tools.arguments import recordable
from orchestrator.tools.base import ToolFacts
from orchestrator.types import ToolCall

Call = tuple[str, bytes]  # the tool's name and its arguments


class RecordedCalls:
    """The recorded answers to each call. Several answers to equal calls are given in order, the last one again and
    again."""

    def __init__(self, calls: Iterable[ToolCall]) -> None:
        self._answers: dict[Call, list[tuple[str | None, str | None]]] = {}
        for call in calls:
            key = call.name, dumps(dict(call.arguments))
            self._answers.setdefault(key, []).append((call.output, call.error))

    def answer(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The recorded answer. Raises ToolError if that was an error, or there is none."""
        answers = self._answers.get((name, dumps(dict(recordable(dict(arguments))))))
        if not answers:
            raise ToolError("this call is not in the recording")
        output, error = answers.pop(0) if len(answers) > 1 else answers[0]
        if output is None:
            raise ToolError(error or "the call failed")
        return output


class RecordedTool:
    """Looks like `tool`, but answers from the record."""

    def __init__(self, name: str, tool: ToolFacts, calls: RecordedCalls) -> None:
        self.description, self.inputs, self.output_type = tool.description, tool.inputs, tool.output_type
        self._name = name
        self._calls = calls

    async def call(self, arguments: Mapping[str, Any]) -> str:
        return self._calls.answer(self._name, arguments)
