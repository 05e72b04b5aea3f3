"""What all APIs share about tools: what is offered, what must be called, and calls; and the form of an answer.

Each API has its own spelling; a Request has that of OpenAI's chat completions.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sandbox.runner.endpoint import checks
from sandbox.runner.endpoint.checks import BadRequest, Body, Refused
from sandbox.types import Call, Completion, Message, ToolChoice

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
    checks.pass_over(one, ("name", "description", schema, "strict", *beside), where, REFUSED)
    if one.get("allowed_callers") not in (None, [], ["direct"]):
        raise BadRequest(f"{where}.allowed_callers: the model alone calls tools here", where)
    name = one.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadRequest(f"{where}.name must be 1 to 64 of the characters a-z A-Z 0-9 _ -", where)
    function: dict[str, Any] = {"name": name}
    if (description := one.get("description")) is not None:
        function["description"] = checks.text_of(description, f"{where}.description")
    if (parameters := one.get(schema)) is not None:
        function["parameters"] = checks.object_of(parameters, f"{where}.{schema}")
    if (strict := one.get("strict")) is not None:
        if not isinstance(strict, bool):
            raise BadRequest(f"{where}.strict must be true or false", where)
        function["strict"] = strict
    return {"type": "function", "function": function}


def refuse_hosted(kind: object, where: str) -> None:
    """Raises BadRequest for a kind of tool that its API's server would run."""
    raise BadRequest(
        f"{checks.shown(kind)} is not taken: nothing is hosted here, tools are functions of the program", where
    )


def offer(
    body: Body, read: Callable[[dict[str, Any], str], Tool], choice: tuple[ToolChoice, Any]
) -> dict[str, Any]:
    """The fields of a Request about tools. `read` gets each of the body's `tools` and its place. `choice`: what
    `tool_choice` says, and the one tool that must be called, or None. Raises BadRequest."""
    raw = checks.list_of(body.get("tools") or [], "tools", MAX_TOOLS)
    tools = [read(checks.object_of(one, f"tools[{index}]"), f"tools[{index}]") for index, one in enumerate(raw)]
    names = {one["function"]["name"] for one in tools}
    if len(names) < len(tools):
        raise BadRequest("two tools have the same name", "tools")
    sent = tuple(checks.sendable(tools, "tools", MAX_TOOLS_BYTES))
    kind, name = choice
    if kind == "required" and not tools:
        raise BadRequest("tool_choice asks for a call, and there are no tools", "tool_choice")
    if name is not None and (not isinstance(name, str) or name not in names):
        raise BadRequest(f"tool_choice names {checks.shown(name)}, which is not one of the tools", "tool_choice")
    return {"tools": sent, "tool_choice": kind, "tool_name": name or ""}


def openai_choice(body: Body, *, nested: bool) -> tuple[ToolChoice, Any]:
    """(`tool_choice`, the name in it) of OpenAI's APIs. `nested`: the name is in `function`. Raises BadRequest."""
    choice: Any = "auto" if body.get("tool_choice") is None else body["tool_choice"]
    if choice in ("auto", "none", "required"):
        return choice, None
    if not isinstance(choice, dict):
        raise BadRequest("tool_choice must be auto, none, required, or name a function", "tool_choice")
    if choice.get("type") != "function":
        cure = "offer those tools only" if choice.get("type") == "allowed_tools" else "name a function"
        raise BadRequest(f"{checks.shown(choice.get('type'))} is not taken: {cure}", "tool_choice")
    function = checks.object_of(choice.get("function"), "tool_choice.function") if nested else choice
    checks.only(function, ("name",) if nested else ("type", "name"), "tool_choice")
    return "required", function.get("name", "")


def call(call_id: Any, name: Any, arguments: Any, where: str) -> Call:
    """Raises BadRequest."""
    call_id, name = (
        checks.text_of(call_id, f"{where}.id", MAX_NAME_CHARS),
        checks.text_of(name, f"{where}.name", MAX_NAME_CHARS),
    )
    if not call_id or not name:
        raise BadRequest(f"{where} needs an id and a name", where)
    return Call(call_id, name, _object_text(arguments, f"{where}.arguments"))


def _object_text(raw: Any, where: str) -> str:
    """The text of a JSON object, as it is if it can be sent. Raises BadRequest."""
    text = checks.text_of(raw, where) or "{}"
    try:
        value = checks.strict_json(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BadRequest(f"{where} must be the text of a JSON object", where)
    checked = checks.sendable(value, where, checks.MAX_CONVERSATION_BYTES)
    return text if checked == value else json.dumps(checked, ensure_ascii=False)


def joined(calls: Sequence[Call], where: str) -> tuple[Call, ...]:
    """The calls of one message. Raises BadRequest."""
    if len(calls) > MAX_CALLS or len({one.id for one in calls}) < len(calls):
        raise BadRequest(f"{where} has more than {MAX_CALLS} calls, or two with one id", where)
    return tuple(calls)


def add_call(messages: list[Message], call: Call, where: str) -> None:
    """Adds a call to the assistant's message at the end, or as a message of its own. Raises BadRequest."""
    last = messages.pop() if messages and messages[-1].role == "assistant" else Message("assistant", "")
    messages.append(Message("assistant", last.content, joined((*last.calls, call), where)))


def result(one: Mapping[str, Any], id_field: str, text: str, where: str) -> Message:
    """The message with a tool's result; `one[id_field]` names its call. Raises BadRequest."""
    call_id = checks.text_of(one.get(id_field), f"{where}.{id_field}", MAX_NAME_CHARS)
    if not call_id:
        raise BadRequest(f"{where}.{id_field} must say which call this answers", f"{where}.{id_field}")
    return Message("tool", text, call_id=call_id)


def arguments_object(arguments: str) -> dict[str, Any]:
    """Arguments for the API that gives them as an object. Text that is not an object is kept under `arguments`."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def arguments_text(value: Any, where: str) -> str:
    """The other way round. Raises BadRequest."""
    checked = checks.sendable(checks.object_of(value, where), where, checks.MAX_CONVERSATION_BYTES)
    return json.dumps(checked, ensure_ascii=False)


def as_wanted(completion: Completion, body: Body) -> Completion:
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
        raise BadRequest(f"{checks.shown(kind)} is not taken: there are text, json_object and json_schema", where)
    checks.only(checks.object_of(schema, where), ("name", "schema", "description", "strict"), where)
    checks.text_of(schema.get("name"), f"{where}.name", 64)
    checks.object_of(schema.get("schema"), f"{where}.schema")
    form = {"type": "json_schema", "json_schema": {name: one for name, one in schema.items() if one is not None}}
    checked: dict[str, Any] = checks.sendable(form, where, MAX_FORMAT_BYTES)
    return checked
