"""Anthropic's Messages: `/v1/messages`."""

from collections.abc import Iterator
from typing import Any

from sandbox.runner.endpoint import checks, tools
from sandbox.runner.endpoint.checks import MODEL, REFUSED, TOO_LONG, BadRequest, Body, Event, Fields, Served
from sandbox.types import Completion, Message, Request, Role, ToolChoice

FIELDS = Fields(
    {"messages", "system", "tools", "tool_choice", "stop_sequences", "stream", "output_config"},
    {
        **REFUSED,
        **dict.fromkeys(("output_format", "response_format"), "use output_config.format"),
        "n": "send several requests, each is a completion of its own",
        "stop": "use stop_sequences",
    },
)
_ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "system": "system"}
_TEXTS = ("text",)
_CHOICES: dict[str, ToolChoice] = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}
_ERRORS = {404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


def error(refusal: BadRequest) -> dict[str, Any]:
    """An error in Anthropic's form."""
    reason = f"prompt is too long: {refusal}" if refusal.code == TOO_LONG else str(refusal)
    error: dict[str, Any] = {"type": _ERRORS.get(refusal.status, "invalid_request_error"), "message": reason}
    if refusal.param == "thread":  # Anthropic's tool runner asks for one, and goes on without when it is told so
        error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": error}


def request(body: Body) -> Request:
    """Raises BadRequest."""
    FIELDS.check(body)
    checks.flag(body, "stream")
    system = checks.content_text(body.get("system") or "", "system", _TEXTS)
    messages = [Message("system", system)] if system else []
    for index, one in enumerate(checks.list_of(body.get("messages"), "messages", checks.MAX_MESSAGES)):
        messages += _messages(one, f"messages[{index}]")
    return Request(
        checks.conversation(messages, "messages"),
        stop=checks.stop_strings(
            checks.list_of(body.get("stop_sequences") or [], "stop_sequences", 100), "stop_sequences"
        ),
        **tools.offer(body, _tool, _choice(body)),
        response_format=_format(body),
    )


def answer(served: Served) -> dict[str, Any]:
    """The answer to a request that is not to be streamed."""
    completion = served.completion
    return {
        "id": f"msg_{served.number}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": _content(completion),
        "stop_reason": _stop_reason(completion),
        "stop_sequence": completion.stop or None,
        "usage": {"input_tokens": completion.prompt_tokens, "output_tokens": completion.completion_tokens},
    }


def events(served: Served) -> Iterator[Event]:
    """One event for all of a block: it was sampled before the first byte is sent."""

    def event(kind: str, /, **data: Any) -> Event:
        return Event({"type": kind, **data}, kind)

    completion = served.completion
    response = answer(served)
    used = {**response["usage"], "output_tokens": 0}
    yield event(
        "message_start",
        message={**response, "content": [], "stop_reason": None, "stop_sequence": None, "usage": used},
    )
    arguments = iter(call.arguments for call in completion.calls)
    for index, block in enumerate(response["content"]):
        if block["type"] == "text":
            start, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            start, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": next(arguments)}
        yield event("content_block_start", index=index, content_block=start)
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    end = {"stop_reason": response["stop_reason"], "stop_sequence": response["stop_sequence"]}
    yield event("message_delta", delta=end, usage=response["usage"])
    yield event("message_stop")


def count(tokens: int) -> dict[str, Any]:
    """The answer to `/v1/messages/count_tokens`."""
    return {"input_tokens": tokens}


def _messages(one: Any, where: str) -> list[Message]:
    """A turn as messages: each result of a tool is one of its own."""
    one = checks.object_of(one, where)
    checks.pass_over(one, ("role", "content"), where)
    role = checks.role_of(one, where, _ROLES)
    content = one.get("content")
    if isinstance(content, str):
        return [Message(role, content)]
    messages: list[Message] = []
    for index, block in enumerate(checks.list_of(content, f"{where}.content", checks.MAX_MESSAGES)):
        _add(messages, role, checks.object_of(block, f"{where}.content[{index}]"), f"{where}.content[{index}]")
    return messages or [Message(role, "")]


def _add(messages: list[Message], role: Role, block: dict[str, Any], where: str) -> None:
    """Adds a block to a turn. Texts are joined to the text before them, calls to the message before them."""
    kind = checks.kind_of(block, where)
    match kind, role:
        case "tool_result", "user":
            messages.append(_result(block, where))
        case "tool_use", "assistant":
            checks.pass_over(block, ("type", "id", "name", "input"), where)
            arguments = tools.arguments_text(block.get("input"), f"{where}.input")
            tools.add_call(messages, tools.call(block.get("id"), block.get("name"), arguments, where), where)
        case (("thinking" | "redacted_thinking"), "assistant"):
            pass  # on record with the completion that it was sampled in
        case "text", _:
            text = checks.part_text(block, where, _TEXTS)
            if messages and messages[-1].role == role and not messages[-1].calls:
                messages[-1] = Message(role, messages[-1].content + text)
            else:
                messages.append(Message(role, text))
        case _:
            raise BadRequest(f"{kind[:80]} is not taken in a turn of the {role}: contents here are text", where)


def _result(block: dict[str, Any], where: str) -> Message:
    checks.pass_over(block, ("type", "tool_use_id", "content", "is_error"), where)
    text = checks.content_text(block.get("content") or "", f"{where}.content", _TEXTS)
    if checks.flag(block, "is_error") and not text.lower().startswith("error"):
        text = f"Error: {text}"
    return tools.result(block, "tool_use_id", text, where)


def _tool(one: dict[str, Any], where: str) -> tools.Tool:
    if (kind := one.get("type")) not in (None, "custom"):
        tools.refuse_hosted(kind, where)
    checks.object_of(one.get("input_schema"), f"{where}.input_schema")
    return tools.tool(one, where, "input_schema")


def _choice(body: Body) -> tuple[ToolChoice, Any]:
    raw = checks.object_of(body.get("tool_choice") or {"type": "auto"}, "tool_choice")
    kind = raw.get("type")
    choice = _CHOICES.get(kind) if isinstance(kind, str) else None
    if choice is None:
        raise BadRequest(f"tool_choice.type must be one of {', '.join(_CHOICES)}", "tool_choice")
    checks.flag(raw, "disable_parallel_tool_use")
    checks.only(raw, ("type", "disable_parallel_tool_use", *(["name"] if kind == "tool" else [])), "tool_choice")
    return choice, raw.get("name", "") if kind == "tool" else None


def _format(body: Body) -> dict[str, Any] | None:
    config = checks.object_of(body.get("output_config") or {}, "output_config")
    checks.pass_over(
        config, ("format",), "output_config", {"task_budget": "the run's budgets hold, and are not told"}
    )
    if config.get("format") is None:
        return None
    where = "output_config.format"
    form = checks.object_of(config["format"], where)
    checks.only(form, ("type", "schema"), where)
    if form.get("type") != "json_schema":
        raise BadRequest(f"{checks.shown(form.get('type'))} is not taken: there is json_schema", where)
    return tools.response_format("json_schema", {"name": "output", "schema": form.get("schema")}, where)


def _content(completion: Completion) -> list[dict[str, Any]]:
    """An empty text is a block where there is nothing else."""
    blocks: list[dict[str, Any]] = []
    if completion.text or not completion.calls:
        blocks.append({"type": "text", "text": completion.text})
    blocks += (
        {"type": "tool_use", "id": call.id, "name": call.name, "input": tools.arguments_object(call.arguments)}
        for call in completion.calls
    )
    return blocks


def _stop_reason(completion: Completion) -> str:
    if completion.finish_reason == "length":
        return "max_tokens"
    if completion.stop:
        return "stop_sequence"
    return "tool_use" if completion.calls else "end_turn"
