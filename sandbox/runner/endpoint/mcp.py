"""The run's host tools for programs, under the Model Context Protocol: `/mcp`, its transport "streamable HTTP".

A POST brings one JSON-RPC message and gets one JSON answer; there are no streams, sessions or batches. A call goes
to the orchestrator as a call of a host tool: it is counted, bounded and recorded there.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sandbox.errors import ToolFailure
from sandbox.runner.endpoint.checks import BadRequest, sendable, shown, strict_json
from sandbox.types import ToolSpec

PATH = "/mcp"
VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26")  # of the protocol; for what is served here they are alike
MAX_ARGUMENT_BYTES = 256 * 1024
_MAX_ID_CHARS = 256
_PARSE_ERROR, _INVALID_REQUEST, _NO_METHOD, _INVALID_PARAMS = -32700, -32600, -32601, -32602
_OVER, _OTHER_VERSION = -32000, -32022
_OF_INPUTS = frozenset({"nullable"})  # smolagents' own, of an argument; the rest is JSON schema


class RpcError(Exception):
    """A message that cannot be served. `status`: of the HTTP answer. `data`: for the client's program."""

    def __init__(
        self, code: int, reason: str, *, status: int = 200, data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(reason)
        self.code, self.status, self.data = code, status, data


@dataclass(frozen=True, slots=True)
class RpcMessage:
    """What a client sends. `number` None: a notification, or a response of the client's; neither is answered."""

    method: str
    number: str | int | None
    params: Mapping[str, Any]


# Calls a host tool by its name, with the text of a JSON object. Raises ToolFailure, BadRequest.
Call = Callable[[str, str], str]


def demand_version(header: str | None) -> None:
    """Raises RpcError for a version of the protocol that is not spoken here. No header means 2025-03-26."""
    if header is not None and header.strip() not in VERSIONS:
        raise RpcError(
            _OTHER_VERSION,
            f"MCP-Protocol-Version must be one of {', '.join(VERSIONS)}, not {shown(header)}",
            status=400,
            data={"supported": list(VERSIONS), "requested": header[:_MAX_ID_CHARS]},
        )


def read_message(content: bytes) -> RpcMessage:
    """Raises RpcError."""
    try:
        raw = strict_json(content)
    except (ValueError, RecursionError):
        raise RpcError(_PARSE_ERROR, "the request is not JSON", status=400) from None
    if isinstance(raw, list):
        raise RpcError(_INVALID_REQUEST, "batches are not taken: send one message per request", status=400)
    if not isinstance(raw, dict) or raw.get("jsonrpc") != "2.0":
        raise RpcError(
            _INVALID_REQUEST, 'the request is no JSON-RPC message: it needs "jsonrpc": "2.0"', status=400
        )
    method, number, params = raw.get("method"), raw.get("id"), raw.get("params")
    if method is None and ("result" in raw or "error" in raw):
        return RpcMessage("", None, {})
    if not isinstance(method, str):
        raise RpcError(_INVALID_REQUEST, "the message has no method", status=400)
    if "id" in raw and not _is_id(number):
        raise RpcError(
            _INVALID_REQUEST,
            f"id must be a whole number, or text of at most {_MAX_ID_CHARS} characters",
            status=400,
        )
    if params is not None and not isinstance(params, dict):
        raise RpcError(_INVALID_REQUEST, "params must be an object", status=400)
    return RpcMessage(method, number, params or {})


def _is_id(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _MAX_ID_CHARS
    return isinstance(value, int) and not isinstance(value, bool)


def answer(message: RpcMessage, tools: Sequence[ToolSpec], call: Call) -> dict[str, Any]:
    """The answer to a message that wants one."""
    try:
        result = _result(message, tools, call)
    except RpcError as error:
        return error_answer(error, message.number)
    except BadRequest as error:
        over = error.status == 429
        return error_answer(RpcError(_OVER if over else _INVALID_PARAMS, str(error)), message.number)
    return {"jsonrpc": "2.0", "id": message.number, "result": result}


def unread(error: BadRequest) -> RpcError:
    """The error for a request whose body was not read."""
    return RpcError(_INVALID_REQUEST, str(error), status=error.status)


def error_answer(error: RpcError, number: str | int | None = None) -> dict[str, Any]:
    """An answer that says why there is no other."""
    data = {} if error.data is None else {"data": dict(error.data)}
    return {"jsonrpc": "2.0", "id": number, "error": {"code": error.code, "message": str(error), **data}}


def _result(message: RpcMessage, tools: Sequence[ToolSpec], call: Call) -> dict[str, Any]:
    match message.method:
        case "initialize":
            return _initialized(message.params)
        case "ping":
            return {}
        case "tools/list":
            if message.params.get("cursor") is not None:
                raise RpcError(_INVALID_PARAMS, "there is no such cursor: all tools are on the first page")
            return {"tools": [_listed(tool) for tool in tools]}
        case "tools/call":
            return _called(message.params, tools, call)
    raise RpcError(_NO_METHOD, f"there is no method {shown(message.method)}: tools are all that is here")


def _initialized(params: Mapping[str, Any]) -> dict[str, Any]:
    asked = params.get("protocolVersion")
    return {
        "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
        "capabilities": {"tools": {"listChanged": False}},
        "serverInfo": {"name": "orchestrator", "version": "1"},
    }


def _listed(tool: ToolSpec) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "inputSchema": input_schema(tool.inputs)}


def input_schema(inputs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON schema of a tool's arguments, as smolagents describes them."""
    properties = {}
    for name, shape in inputs.items():
        schema = {key: value for key, value in shape.items() if key not in _OF_INPUTS}
        if schema.get("type") == "any":
            del schema["type"]
        properties[name] = schema
    required = [name for name, shape in inputs.items() if not shape.get("nullable")]
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}


def _called(params: Mapping[str, Any], tools: Sequence[ToolSpec], call: Call) -> dict[str, Any]:
    name, arguments = params.get("name"), params.get("arguments")
    if not isinstance(name, str) or name not in {tool.name for tool in tools}:
        offered = ", ".join(tool.name for tool in tools) or "none"
        raise RpcError(_INVALID_PARAMS, f"there is no tool {shown(name)}; there are: {offered}")
    if arguments is not None and not isinstance(arguments, dict):
        raise RpcError(_INVALID_PARAMS, "arguments must be an object")
    checked = sendable(arguments or {}, "arguments", MAX_ARGUMENT_BYTES)
    try:
        text, failed = call(name, json.dumps(checked, ensure_ascii=False)), False
    except ToolFailure as failure:
        text, failed = str(failure), True
    return {"content": [{"type": "text", "text": text}], "isError": failed}
