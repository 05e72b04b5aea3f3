"""What all APIs share about tools: what is offered, what must be called, and calls; and the form of an answer.

Each API has its own spelling; a Request has that of OpenAI's chat completions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sandbox.runner.endpoint.checks import (
    MAX_CONVERSATION_BYTES,
    BadRequest,
    Body,
    Refused,
    list_of,
    object_of,
    only,
    pass_over,
    sendable,
    shown,
    strict_json,
    text_of,
)
from sandbox.types import Call, Completion, ToolChoice

MAX_TOOLS, MAX_TOOLS_BYTES = 128, 256 * 1024
MAX_CALLS = 128
MAX_NAME_CHARS = 256  # of calls: what a model called need not be a tool
MAX_FORMAT_BYTES = 64 * 1024
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

# Of a tool, in any API.
REFUSED: Refused = {
    "defer_loading": "all tools are shown to the model",
    "input_examples": "write them into the description",
}

Tool = Mapping[str, Any]


def tool(one: Mapping[str, Any], where: str, schema: str = "parameters") -> Tool:
    """A tool in the form of chat completions, whatever the order of its fields was. Raises BadRequest."""
    beside = ("type", "allowed_callers")  # of the APIs whose tools are flat
    pass_over(one, ("name", "description", schema, "strict", *beside), where, REFUSED)
    if one.get("allowed_callers") not in (None, [], ["direct"]):
        raise BadRequest(f"{where}.allowed_callers: the model alone calls tools here", where)
    name = one.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadRequest(f"{where}.name must be 1 to 64 of the characters a-z A-Z 0-9 _ -", where)
    function: dict[str, Any] = {"name": name}
    if (description := one.get("description")) is not None:
        function["description"] = text_of(description, f"{where}.description")
    if (parameters := one.get(schema)) is not None:
        function["parameters"] = object_of(parameters, f"{where}.{schema}")
    if (strict := one.get("strict")) is not None:
        if not isinstance(strict, bool):
            raise BadRequest(f"{where}.strict must be true or false", where)
        function["strict"] = strict
    return {"type": "function", "function": function}


def listed(body: Body) -> list[tuple[str, dict[str, Any]]]:
    """(where it is, it) of each of the `tools`. Raises BadRequest."""
    tools = list_of(body.get("tools") or [], "tools", MAX_TOOLS)
    return [(f"tools[{index}]", object_of(one, f"tools[{index}]")) for index, one in enumerate(tools)]


def refuse_hosted(kind: object, where: str) -> None:
    """Raises BadRequest for a kind of tool that its API's server would run."""
    raise BadRequest(
        f"{shown(kind)} is not taken: nothing is hosted here, tools are functions of the program", where
    )


def offered(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """The tools as they are sent. Raises BadRequest."""
    names = [one["function"]["name"] for one in tools]
    if len(set(names)) < len(names):
        raise BadRequest("two tools have the same name", "tools")
    sent: list[Tool] = sendable(list(tools), "tools", MAX_TOOLS_BYTES)
    return tuple(sent)


def chosen(choice: ToolChoice, name: Any, tools: Sequence[Tool]) -> tuple[ToolChoice, str]:
    """(choice, the one tool that must be called, or empty). Raises BadRequest if it cannot be."""
    if choice == "required" and not tools:
        raise BadRequest("tool_choice asks for a call, and there are no tools", "tool_choice")
    if name is None:
        return choice, ""
    if not isinstance(name, str) or name not in {one["function"]["name"] for one in tools}:
        raise BadRequest(f"tool_choice names {shown(name)}, which is none of the tools", "tool_choice")
    return choice, name


def openai_choice(body: Body, *, nested: bool) -> tuple[ToolChoice, Any]:
    """(`tool_choice`, the name in it) of OpenAI's APIs. `nested`: the name is in `function`. Raises BadRequest."""
    choice = body.get("tool_choice")
    match choice:
        case None | "auto":
            return "auto", None
        case "none":
            return "none", None
        case "required":
            return "required", None
    if not isinstance(choice, dict):
        raise BadRequest("tool_choice must be auto, none, required, or name a function", "tool_choice")
    if choice.get("type") != "function":
        told = "offer those tools only" if choice.get("type") == "allowed_tools" else "name a function"
        raise BadRequest(f"{shown(choice.get('type'))} is not taken: {told}", "tool_choice")
    named = object_of(choice.get("function"), "tool_choice.function") if nested else choice
    only(named, ("name",) if nested else ("type", "name"), "tool_choice")
    return "required", named.get("name", "")


def call(call_id: Any, name: Any, arguments: Any, where: str) -> Call:
    """Raises BadRequest."""
    call_id, name = text_of(call_id, f"{where}.id", MAX_NAME_CHARS), text_of(name, f"{where}.name", MAX_NAME_CHARS)
    if not call_id or not name:
        raise BadRequest(f"{where} needs an id and a name", where)
    return Call(
        call_id, name, _object_text(text_of(arguments, f"{where}.arguments") or "{}", f"{where}.arguments")
    )


def _object_text(raw: Any, where: str) -> str:
    """The text of a JSON object, as it is if it can be sent. Raises BadRequest."""
    text = text_of(raw, where) or "{}"
    try:
        value = strict_json(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BadRequest(f"{where} must be the text of a JSON object", where)
    checked = sendable(value, where, MAX_CONVERSATION_BYTES)
    return text if checked == value else json.dumps(checked, ensure_ascii=False)


def joined(calls: Sequence[Call], where: str) -> tuple[Call, ...]:
    """The calls of one message. Raises BadRequest."""
    if len(calls) > MAX_CALLS or len({one.id for one in calls}) < len(calls):
        raise BadRequest(f"{where} has more than {MAX_CALLS} calls, or two with one id", where)
    return tuple(calls)


def arguments_object(arguments: str) -> dict[str, Any]:
    """Arguments for the API that gives them as an object. What is none is kept as text, under `arguments`."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def arguments_text(value: Any, where: str) -> str:
    """The other way round. Raises BadRequest."""
    checked = sendable(object_of(value, where), where, MAX_CONVERSATION_BYTES)
    return json.dumps(checked, ensure_ascii=False)


def given(completion: Completion, body: Body) -> Completion:
    """The completion as the program gets it: where it wants one call at a time, the first one."""
    choice = body.get("tool_choice")
    one_by_one = isinstance(choice, dict) and choice.get("disable_parallel_tool_use") is True
    if body.get("parallel_tool_calls") is False or one_by_one:
        return replace(completion, calls=completion.calls[:1])
    return completion


def response_format(kind: Any, schema: Any, where: str) -> dict[str, Any] | None:
    """The form of an answer as chat completions spell it; None: any text. Raises BadRequest.

    `schema`: the object with `name`, `schema`, `description` and `strict`, for the kind json_schema.
    """
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise BadRequest(f"{shown(kind)} is not taken: there are text, json_object and json_schema", where)
    only(object_of(schema, where), ("name", "schema", "description", "strict"), where)
    text_of(schema.get("name"), f"{where}.name", 64)
    object_of(schema.get("schema"), f"{where}.schema")
    asked = {"type": "json_schema", "json_schema": {name: one for name, one in schema.items() if one is not None}}
    checked: dict[str, Any] = sendable(asked, where, MAX_FORMAT_BYTES)
    return checked
