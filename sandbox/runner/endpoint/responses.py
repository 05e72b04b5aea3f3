"""OpenAI's Responses: `/v1/responses`. Conversations of served responses are kept for `previous_response_id`."""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from itertools import count
from typing import Any

from sandbox.runner.endpoint import checks, tools
from sandbox.runner.endpoint.chat import logprob_entries
from sandbox.runner.endpoint.checks import MODEL, REFUSED, BadRequest, Body, Event, Fields, Served
from sandbox.types import Message, Request, Role

MAX_KEPT, MAX_KEPT_BYTES = 256, 16 << 20
_MAX_LISTED = 10_000
_ALL = "send the whole conversation as input"
FIELDS = Fields(
    {
        *("input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "text", "include", "truncation"),
        *("previous_response_id", "stream", "stream_options"),
        "max_tool_calls",  # of hosted tools, and there are none
        *("metadata", "store"),
    },
    {
        **REFUSED,
        "conversation": f"{_ALL}, or previous_response_id",
        "logprobs": "include message.output_text.logprobs",
        "messages": "the conversation is input",
        "prompt": "nothing is stored here, send instructions and input",
        "response_format": "use text.format",
        **dict.fromkeys(("stop", "stop_sequences"), "the API has none, use /v1/chat/completions"),
        **dict.fromkeys(("n", "best_of"), "send several requests, each is a completion of its own"),
        "system": "send instructions",
    },
)
# Reasoning is on record and never given out, so there is nothing encrypted to include.
_INCLUDE = ("message.output_text.logprobs", "reasoning.encrypted_content")
_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text")
_ITEM = ("type", "id", "status")  # of any item, as it was given out
_PARAMS = {"messages": "input", "response_format": "text.format", "logprobs": "include", "stop": "input"}


class Responses:
    """The API with the conversations it served: the last MAX_KEPT, and not more than MAX_KEPT_BYTES."""

    def __init__(self) -> None:
        self._conversations: OrderedDict[str, tuple[Message, ...]] = OrderedDict()
        self._bytes = 0
        self._keeping = threading.Lock()

    def error(self, refusal: BadRequest) -> dict[str, Any]:
        """The orchestrator names a field as chat completions do: it gets the name that it has here."""
        answer = checks.openai_error(refusal)
        answer["error"]["param"] = _PARAMS.get(refusal.param or "", refusal.param)
        return answer

    def request(self, body: Body) -> Request:
        """Raises BadRequest."""
        before = self._before(body.get("previous_response_id"))
        FIELDS.check(body)
        for name in ("stream", "parallel_tool_calls", "store"):
            checks.flag(body, name)
        checks.stream_usage(body)
        _metadata(body)
        if body.get("truncation") not in (None, "disabled"):
            reason = "a conversation that is too long is refused"
            raise BadRequest(f"truncation must be disabled: {reason}", "truncation")
        included = checks.list_of(body.get("include") or [], "include", 100)
        for one in included:
            if one not in _INCLUDE:
                raise BadRequest(f"{checks.shown(one)} is not taken: there are {', '.join(_INCLUDE)}", "include")
        instructions = checks.text_of(body.get("instructions") or "", "instructions")
        first = (Message("system", instructions),) if instructions else ()
        return Request(
            checks.conversation((*first, *before, *_input(body.get("input"))), "input"),
            **tools.offer(body, _tool, tools.openai_choice(body, nested=False)),
            response_format=_format(body),
            logprobs=_INCLUDE[0] in included,
        )

    def answer(self, served: Served) -> dict[str, Any]:
        """The answer to a request that is not to be streamed."""
        self._keep(served)
        return _response(served)

    def events(self, served: Served) -> Iterator[Event]:
        """The answer to a request that is to be streamed."""
        self._keep(served)
        return _events(served)

    def count(self, tokens: int) -> dict[str, Any]:
        """The answer to `/v1/responses/input_tokens`."""
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def _before(self, name: Any) -> tuple[Message, ...]:
        """The conversation that a request continues. Raises BadRequest."""
        if name is None:
            return ()
        conversation = self._conversations.get(name) if isinstance(name, str) else None
        if conversation is None:
            reason = f"{checks.shown(name)} is not kept (any more): {_ALL}"
            raise BadRequest(reason, "previous_response_id", code="previous_response_not_found")
        return conversation

    def _keep(self, served: Served) -> None:
        if served.body.get("store") is False:
            return
        messages = served.request.messages
        if served.body.get("instructions"):
            messages = messages[1:]  # as in OpenAI's: the next request has its own
        reply = Message("assistant", served.completion.text, served.completion.calls)
        if messages and (last := messages[-1]).role == "assistant":  # the completion continued it
            messages = messages[:-1]
            reply = Message("assistant", last.content + reply.content, (*last.calls, *reply.calls))
        conversation = (*messages, reply)
        with self._keeping:
            self._conversations[_id(served)] = conversation
            self._bytes += checks.size_bytes(conversation)
            while len(self._conversations) > MAX_KEPT or self._bytes > MAX_KEPT_BYTES:
                _, oldest = self._conversations.popitem(last=False)
                self._bytes -= checks.size_bytes(oldest)


def _response(served: Served) -> dict[str, Any]:
    """The whole response."""
    completion = served.completion
    cut = completion.finish_reason == "length"
    return {
        **_head(served),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(served),
        "usage": {
            "input_tokens": completion.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": completion.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": completion.prompt_tokens + completion.completion_tokens,
        },
    }


def _events(served: Served) -> Iterator[Event]:
    """One event for all of a text or of a call's arguments: they were sampled before the first byte is sent."""
    numbers = count()

    def event(kind: str, /, **data: Any) -> Event:
        return Event({"type": kind, "sequence_number": next(numbers), **data}, kind)

    response = _response(served)
    start = {**_head(served), "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield event("response.created", response=start)
    yield event("response.in_progress", response=start)
    for index, item in enumerate(response["output"]):
        place: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        if item["type"] == "message":
            [part] = item["content"]
            empty = {**item, "status": "in_progress", "content": []}
            yield event("response.output_item.added", output_index=index, item=empty)
            place["content_index"] = 0
            no_text = {**part, "text": "", "logprobs": []}
            yield event("response.content_part.added", **place, part=no_text)
            text = part["text"]
            yield event("response.output_text.delta", **place, delta=text, logprobs=part["logprobs"])
            yield event("response.output_text.done", **place, text=text, logprobs=part["logprobs"])
            yield event("response.content_part.done", **place, part=part)
        else:
            empty = {**item, "status": "in_progress", "arguments": ""}
            yield event("response.output_item.added", output_index=index, item=empty)
            arguments = item["arguments"]
            yield event("response.function_call_arguments.delta", **place, delta=arguments)
            yield event("response.function_call_arguments.done", **place, name=item["name"], arguments=arguments)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event(f"response.{response['status']}", response=response)


def _input(raw: Any) -> list[Message]:
    """The messages of an input. What an assistant says and the calls after it are one message."""
    if isinstance(raw, str):
        return [Message("user", raw)]
    messages: list[Message] = []
    for index, item in enumerate(checks.list_of(raw, "input", _MAX_LISTED)):
        where = f"input[{index}]"
        item = checks.object_of(item, where)
        kind = item.get("type") or ("message" if "role" in item else None)
        match kind:
            case "message":
                messages.append(_message(item, where))
            case "function_call":
                checks.pass_over(item, (*_ITEM, "call_id", "name", "arguments"), where)
                call = tools.call(item.get("call_id"), item.get("name"), item.get("arguments"), where)
                tools.add_call(messages, call, where)
            case "function_call_output":
                checks.pass_over(item, (*_ITEM, "call_id", "output"), where)
                text = checks.content_text(item.get("output"), f"{where}.output", _TEXTS)
                messages.append(tools.result(item, "call_id", text, where))
            case "reasoning":
                pass  # on record with the completion that it was sampled in
            case "item_reference":
                raise BadRequest(f"item_reference is not taken: send the item, or {_ALL}", where)
            case _:
                item_kinds = "message, function_call, function_call_output and reasoning"
                raise BadRequest(f"{checks.shown(kind)} is not taken: items are {item_kinds}", where)
    return messages


def _message(item: dict[str, Any], where: str) -> Message:
    checks.pass_over(item, (*_ITEM, "role", "content", "phase"), where)
    role = checks.role_of(item, where, _ROLES)
    kinds = (*_TEXTS, "refusal") if role == "assistant" else _TEXTS
    return Message(role, checks.content_text(item.get("content"), f"{where}.content", kinds))


def _tool(one: dict[str, Any], where: str) -> tools.Tool:
    if (kind := one.get("type")) != "function":
        tools.refuse_hosted(kind, where)
    return tools.tool(one, where)


def _format(body: Body) -> dict[str, Any] | None:
    text = checks.object_of(body.get("text") or {}, "text")
    checks.pass_over(text, ("format",), "text")
    if text.get("format") is None:
        return None
    asked = dict(checks.object_of(text["format"], "text.format"))
    kind = asked.pop("type", None)
    if kind != "json_schema":
        checks.only(asked, (), "text.format")
    return tools.response_format(kind, asked, "text.format")


def _metadata(body: Body) -> None:
    """It comes back with the response. Raises BadRequest."""
    metadata = checks.object_of(body.get("metadata") or {}, "metadata")
    if len(metadata) > 16 or not all(isinstance(value, str) for value in metadata.values()):
        raise BadRequest("metadata must be at most 16 texts", "metadata")


def _id(served: Served) -> str:
    return f"resp_{served.number}"


def _head(served: Served) -> dict[str, Any]:
    """What a response says of itself and of its request."""
    body, asked = served.body, served.request
    format_ = (body.get("text") or {}).get("format") or {"type": "text"}
    return {
        "id": _id(served),
        "object": "response",
        "created_at": 0,
        "model": MODEL,
        "error": None,
        "background": False,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "store": body.get("store") is not False,
        "text": {"format": format_},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [
            {"type": "function", "parameters": None, "strict": None, **one["function"]} for one in asked.tools
        ],
        "truncation": "disabled",
        # The run decides them.
        "max_output_tokens": None,
        "temperature": None,
        "top_p": None,
    }


def _output(served: Served) -> list[dict[str, Any]]:
    completion = served.completion
    output: list[dict[str, Any]] = []
    # An empty text is an item where there is nothing else.
    if completion.text or not completion.calls:
        part = {
            "type": "output_text",
            "text": completion.text,
            "annotations": [],
            "logprobs": logprob_entries(completion) if served.request.logprobs else [],
        }
        head = {"type": "message", "id": f"msg_{served.number}", "role": "assistant"}
        output.append({**head, "status": "completed", "content": [part]})
    for index, call in enumerate(completion.calls):
        head_of_call = {"type": "function_call", "id": f"fc_{served.number}_{index}", "call_id": call.id}
        output.append({**head_of_call, "name": call.name, "arguments": call.arguments, "status": "completed"})
    if completion.finish_reason == "length":
        output[-1]["status"] = "incomplete"
    return output
