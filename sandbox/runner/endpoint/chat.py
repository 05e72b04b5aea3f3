"""OpenAI's chat completions: `/v1/chat/completions`."""

import re
from collections.abc import Iterator
from typing import Any

from sandbox.runner.endpoint import checks, tools
from sandbox.runner.endpoint.checks import MODEL, REFUSED, BadRequest, Body, Event, Fields, Served
from sandbox.types import Call, Completion, Message, Request, Role

FIELDS = Fields(
    {
        *("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "logprobs", "stop", "n"),
        *("stream", "stream_options", "modalities"),
    },
    REFUSED,
)
_ROLES: dict[str, Role] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
}  # fmt: skip
_TEXTS = ("text", "input_text", "output_text")
# Of a message. Reasoning is passed over: it is on record with the completion that it was sampled in.
_USED = {"assistant": ("tool_calls", "refusal"), "tool": ("tool_call_id",)}
_NOT_IN_A_MESSAGE = {
    **dict.fromkeys(("audio", "documents", "files", "images", "videos"), "there is text only"),
    "function_call": "use tool_calls",
    "tool_call_id": "results of tools have the role tool",
    "tool_calls": "calls are the assistant's",
}
_NAME = re.compile("[a-zA-Z0-9_-]{1,64}")  # of who speaks; the orchestrator knows whether the template prints it
_NO_LOGPROB = -9999.0  # OpenAI's for what has none; JSON has no infinity

error = checks.openai_error


def request(body: Body) -> Request:
    """Raises BadRequest."""
    FIELDS.check(body)
    checks.single(body)
    checks.stream_usage(body)
    checks.flag(body, "stream")
    checks.flag(body, "parallel_tool_calls")
    if body.get("modalities") not in (None, [], ["text"]):
        raise BadRequest("modalities must be ['text']", "modalities")
    raw = checks.list_of(body.get("messages"), "messages", checks.MAX_MESSAGES)
    return Request(
        checks.conversation([_message(one, f"messages[{index}]") for index, one in enumerate(raw)], "messages"),
        stop=checks.stop_strings(body.get("stop"), "stop"),
        **tools.offer(body, _tool, tools.openai_choice(body, nested=True)),
        response_format=_format(body.get("response_format")),
        logprobs=checks.flag(body, "logprobs"),
    )


def answer(served: Served) -> dict[str, Any]:
    """The answer to a request that is not to be streamed."""
    completion = served.completion
    message: dict[str, Any] = {"role": "assistant", "content": _content(completion), "refusal": None}
    if completion.calls:
        message["tool_calls"] = [_call(one) for one in completion.calls]
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": _finish_reason(completion),
        "logprobs": _logprobs(served),
    }
    return {**_head(served, "chat.completion"), "choices": [choice], "usage": checks.usage(completion)}


def events(served: Served) -> Iterator[Event]:
    """As OpenAI's server streams: the role, the text, and for each call its head and then its arguments, no two
    calls in one event. Everything was sampled before the first byte is sent."""
    completion = served.completion
    asks_usage = checks.stream_usage(served.body)
    head = {**_head(served, "chat.completion.chunk"), **({"usage": None} if asks_usage else {})}

    def event(delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None) -> Event:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return Event({**head, "choices": [choice]})

    yield event({"role": "assistant", "content": None if _content(completion) is None else "", "refusal": None})
    if completion.text or served.request.logprobs:
        yield event({"content": completion.text}, _logprobs(served))
    for index, one in enumerate(completion.calls):
        call = _call(one)
        arguments = call["function"]["arguments"]
        call["function"]["arguments"] = ""
        yield event({"tool_calls": [{"index": index, **call}]})
        yield event({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})
    yield event({}, finish_reason=_finish_reason(completion))
    if asks_usage:
        yield Event({**head, "choices": [], "usage": checks.usage(completion)})
    yield Event(None)


def logprob_entries(completion: Completion) -> list[dict[str, Any]]:
    """Each sampled token with its log-prob. `bytes` is empty for a part of a character."""
    return [
        {
            "token": one.token,
            "logprob": max(one.logprob, _NO_LOGPROB),
            "bytes": [] if "\ufffd" in one.token else list(one.token.encode("utf-8", "replace")),
            "top_logprobs": [],
        }
        for one in completion.logprobs
    ]


def _message(one: Any, where: str) -> Message:
    one = checks.object_of(one, where)
    if one.get("role") == "function":
        raise BadRequest("the role function is not taken: use tool, with tool_call_id", f"{where}.role")
    role = checks.role_of(one, where, _ROLES)
    name = one.get("name") if role in ("system", "user") else None
    name = name if isinstance(name, str) and _NAME.fullmatch(name) else ""
    used = ("role", "content", *(["name"] if name else []), *_USED.get(role, ()))
    checks.pass_over(one, used, where, _NOT_IN_A_MESSAGE)
    content = one.get("content")
    if role == "assistant":
        return _assistant(one, content, where)
    text = checks.content_text(content, f"{where}.content", _TEXTS)
    return tools.result(one, "tool_call_id", text, where) if role == "tool" else Message(role, text, name=name)


def _assistant(one: dict[str, Any], content: Any, where: str) -> Message:
    raw_calls = checks.list_of(one.get("tool_calls") or [], f"{where}.tool_calls", tools.MAX_CALLS)
    calls = [_called(raw, f"{where}.tool_calls[{index}]") for index, raw in enumerate(raw_calls)]
    refusal = one.get("refusal")
    if content is None and refusal is not None:
        content = checks.text_of(refusal, f"{where}.refusal")
    elif refusal:
        raise BadRequest(f"{where} has a content and a refusal: only one of them is taken", f"{where}.refusal")
    if content is None and calls:
        content = ""
    text = checks.content_text(content, f"{where}.content", (*_TEXTS, "refusal"))
    return Message("assistant", text, tools.joined(calls, where))


def _called(raw: Any, where: str) -> Call:
    raw = checks.object_of(raw, where)
    if checks.kind_of({"type": "function", **raw}, where) != "function":
        raise BadRequest(f"{checks.shown(raw['type'])} is not taken: calls are of functions", where)
    checks.pass_over(raw, ("id", "type", "function", "index"), where)
    function = checks.object_of(raw.get("function"), f"{where}.function")
    checks.pass_over(function, ("name", "arguments"), f"{where}.function")
    return tools.call(raw.get("id"), function.get("name"), function.get("arguments"), where)


def _tool(one: dict[str, Any], where: str) -> tools.Tool:
    if (kind := one.get("type")) != "function":
        tools.refuse_hosted(kind, where)
    checks.pass_over(one, ("type", "function"), where, tools.REFUSED)
    return tools.tool(checks.object_of(one.get("function"), f"{where}.function"), f"{where}.function")


def _format(raw: Any) -> dict[str, Any] | None:
    if raw is None:
        return None
    raw = checks.object_of(raw, "response_format")
    checks.only(raw, ("type", "json_schema"), "response_format")
    return tools.response_format(raw.get("type"), raw.get("json_schema"), "response_format")


def _head(served: Served, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{served.number}", "object": kind, "created": 0, "model": MODEL}


def _content(completion: Completion) -> str | None:
    return completion.text or (None if completion.calls else "")


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish_reason(completion: Completion) -> str:
    """A completion that was cut says so, even with calls before the cut."""
    return "tool_calls" if completion.calls and completion.finish_reason == "stop" else completion.finish_reason


def _logprobs(served: Served) -> dict[str, Any] | None:
    return {"content": logprob_entries(served.completion), "refusal": None} if served.request.logprobs else None
