"""Host tools that answer from a recorded run, without calling anything."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from orchestrator.errors import ToolError
from orchestrator.run.replay import digest
from orchestrator.tools.arguments import recordable
from orchestrator.tools.base import ToolFacts
from orchestrator.types import ToolCall

Place = TypeVar("Place")  # of a call in the record


class RecordedCalls(Generic[Place]):
    """The recorded answers to each call. Several answers to equal calls are given in order, the last one again and
    again.

    `calls`: their digests, and where each is in the record. `read`: the call there; blocking, raises OSError or
    ValueError.
    """

    def __init__(self, calls: Iterable[tuple[bytes, Place]], read: Callable[[Place], ToolCall]) -> None:
        self._places: dict[bytes, list[Place]] = {}
        self._read = read
        for call, place in calls:
            self._places.setdefault(call, []).append(place)

    async def answer(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The recorded answer. Raises ToolError if that was an error, or there is none."""
        query = digest(name, recordable(dict(arguments)))
        places = self._places.get(query)
        if not places:
            raise ToolError("this call is not in the recording")
        place = places.pop(0) if len(places) > 1 else places[0]
        try:
            call = await asyncio.to_thread(self._read, place)
            if digest(call.name, call.arguments) != query:
                raise ValueError("the file is not what it was")
        except (OSError, ValueError) as error:
            raise ToolError(f"the recording cannot be read any more: {error}") from error
        if call.output is None:
            raise ToolError(call.error or "the call failed")
        return call.output


class RecordedTool:
    """Looks like `tool`, but answers from the record."""

    def __init__(self, name: str, tool: ToolFacts, calls: RecordedCalls[Any]) -> None:
        self.description, self.inputs, self.output_type = tool.description, tool.inputs, tool.output_type
        self._name = name
        self._calls = calls

    async def call(self, arguments: Mapping[str, Any]) -> str:
        return await self._calls.answer(self._name, arguments)
