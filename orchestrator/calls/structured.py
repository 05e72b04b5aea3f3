"""A conversation as OpenAI's API and chat templates have it, with calls as data."""

import json
from collections.abc import Sequence
from typing import Any

from orchestrator.calls.parsed import ParsedText, parsed
from orchestrator.types import CallFormat, Message, Tools


def structured(
    messages: Sequence[Message],
    tools: Tools,
    format: CallFormat | None,
    *,
    for_api: bool = False,
    one_by_one: bool = False,
) -> list[dict[str, Any]]:
    """Messages as dictionaries. What an assistant called is data where results follow, or nothing at all.

    Elsewhere it stays the text that it is. Results answer the calls in their order. Arguments are objects, as
    templates want them; `for_api`: they are text, and a result without a call is a user's message. `one_by_one`:
    several calls in one message stay text, for templates that print one alone.
    """
    entries: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        one: dict[str, Any] = message.entry
        parts = calls_in(messages, place, tools, format)
        if parts is not None and not (one_by_one and len(parts.calls) > 1):
            waiting = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments if for_api else json.loads(call.arguments),
                    },
                }
                for call in parts.calls
            ]
            one |= {"content": parts.content, "tool_calls": list(waiting)}
        elif message.role == "tool" and waiting:
            call = waiting.pop(0)
            one |= {"tool_call_id": call["id"]} | ({} if for_api else {"name": call["function"]["name"]})
        elif message.role == "tool":
            one |= {"role": "user"} if for_api else {}
        else:
            waiting = []
        entries.append(one)
    return entries


def calls_in(
    messages: Sequence[Message], place: int, tools: Tools, format: CallFormat | None
) -> ParsedText | None:
    """What an assistant's message says and calls, if results follow or it is the last one. None: no calls."""
    if format is None or not tools or messages[place].role != "assistant":
        return None
    if place + 1 < len(messages) and messages[place + 1].role != "tool":
        return None
    parts = parsed(messages[place].content, format, tools, place)
    return parts if parts.calls else None
