"""What all APIs share: how a request is refused, its bounds, and readers that check what they read."""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

from sandbox.types import Completion, Message, Request, Role

MODEL = "policy"
MAX_CONVERSATION_BYTES = 3 << 20  # must fit a request to the orchestrator
MAX_MESSAGES = 1_000
MAX_STOPS, MAX_STOP_CHARS = 4, 64
MAX_DEPTH = 64
MAX_CALLS_TOGETHER = 2_000  # in all messages; the orchestrator takes no more
TOO_LONG = "context_length_exceeded"  # OpenAI's code, by which agents know that they have to compact
_MAX_SHOWN = 80
_MAX_DIGITS = 300  # of a whole number; a larger one is no double, which strict readers refuse

MAX_UNUSED = 64  # names of fields of one request

Body = dict[str, Any]
Refused = Mapping[str, str]  # name of a field to what to use instead
NONE: Refused = {}


class BadRequest(Exception):
    """A request that cannot be served; nothing was sampled. `param`: the field at fault. `code`: OpenAI's."""

    def __init__(
        self, reason: str, param: str | None = None, *, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(reason)
        self.param = param
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Served:
    """A request and the completion it got. `number` counts completions from 1."""

    number: int
    body: Body
    request: Request
    completion: Completion


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream. `data` None: the line `[DONE]`, with which OpenAI's older APIs end a stream."""

    data: Mapping[str, Any] | None
    name: str = ""


# The fields of the request being read that are passed over. Readers deep in a request note them here.
_UNUSED: ContextVar[set[str] | None] = ContextVar("unused", default=None)
_PLACE = re.compile(r"\[\d+\]")


@contextmanager
def noting_unused() -> Iterator[set[str]]:
    """In this block the names of fields without an effect are noted: `messages[].name` is one of any message."""
    unused: set[str] = set()
    token = _UNUSED.set(unused)
    try:
        yield unused
    finally:
        _UNUSED.reset(token)


def pass_over(one: Mapping[str, Any], used: Collection[str], where: str = "", refused: Refused = NONE) -> None:
    """Notes the fields that are not `used`. Raises BadRequest for one that is `refused`: without it, the request
    would mean something else. Null, false and what is empty are as good as absent."""
    unused = _UNUSED.get()
    for name, value in one.items():
        if name in used or is_nothing(value):
            continue
        path = f"{where}.{name}" if where else name
        if name in refused:
            raise BadRequest(f"{name} is not taken: {refused[name]}", path)
        if unused is not None and len(unused) < MAX_UNUSED:
            unused.add(_PLACE.sub("[]", path)[:_MAX_SHOWN])


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of an API's requests that have an effect, and those that cannot have theirs here, with what to
    use instead. All others are passed over."""

    used: Collection[str]
    refused: Refused

    def check(self, body: Body) -> None:
        """Raises BadRequest."""
        for name in _LIMITS:
            if body.get(name) == 0:
                raise BadRequest(f"{name} must be above 0: every answer is sampled", name)
        if body.get("skip_special_tokens") is False:
            raise BadRequest(
                "skip_special_tokens must be true: texts have no special tokens", "skip_special_tokens"
            )
        pass_over(body, {"model", *self.used}, refused=self.refused)


_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_FORM, _RUN, _PRINTED = (
    "use response_format",
    "the run decides the sampling",
    "the run's template prints the prompt",
)
_HOSTED, _TEXT = "nothing is hosted here, tools are functions of the program", "there is text only"
_KEPT = "no conversation is kept here, send all of its messages"
# What OpenAI's APIs and their relatives (vLLM, SGLang, llama.cpp, OpenRouter, Ollama ...) take, what changes an
# answer or its meaning, and what this endpoint does not do.
REFUSED: Refused = {
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex", "json_schema"), _FORM),
    **dict.fromkeys(("ebnf", "format", "grammar", "regex", "structural_tag", "structured_outputs"), _FORM),
    **dict.fromkeys(("output_config", "output_format", "response_schema"), _FORM),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "ignore_eos", "logit_bias", "logits_processors"), _RUN),
    **dict.fromkeys(("min_tokens", "stop_token_ids", "use_beam_search", "custom_logit_processor"), _RUN),
    **dict.fromkeys(("chat_template", "documents", "truncate_prompt_tokens"), _PRINTED),
    **dict.fromkeys(("plugins", "search_parameters", "tool_resources", "mcp_servers", "container"), _HOSTED),
    **dict.fromkeys(("audio", "images", "prompt_embeds", "input_embeds"), _TEXT),
    **dict.fromkeys(("conversation", "previous_response_id", "thread"), _KEPT),
    "background": "send the request and wait",
    "best_of": "send several requests",
    "chat_template_kwargs": "it is a setting of the run, env.chat_template_kwargs",
    "echo": "put the prompt before the text yourself",
    "extra_body": "its fields belong into the request itself",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "include_stop_str_in_output": "put the stop string behind the text yourself",
    "input": "the conversation is messages",
    "instructions": "send a system message",
    "moderation": "nothing here moderates: leave it out",
    "prediction": "leave it out",
    "prompt": "the conversation is messages",
    "prompt_logprobs": "the sampled tokens' log-probs alone are on record",
    "return_token_ids": "ids are on record, and not given out",
    "stop_sequences": "use stop",
    "system": "send a system message",
    "top_logprobs": "the sampled tokens' log-probs alone are on record, ask for those with logprobs",
    "transforms": "a conversation that is too long is refused: shorten it in the program",
    "web_search_options": "no search is hosted here, give the model a tool of the program",
}


def shown(value: object) -> str:
    """A value in an error's text: its beginning."""
    return repr(value[:_MAX_SHOWN] if isinstance(value, str) else value)[: _MAX_SHOWN + 10]


def strict_json(text: str | bytes) -> Any:
    """A JSON value as the orchestrator reads it too. Raises ValueError, RecursionError."""

    def integer(digits: str) -> int:
        return int(digits) if len(digits) <= _MAX_DIGITS else _no_number(digits)

    def finite(digits: str) -> float:
        return number if math.isfinite(number := float(digits)) else _no_number(digits)

    return json.loads(text, parse_constant=_no_number, parse_float=finite, parse_int=integer)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:_MAX_SHOWN]} is not JSON")


def object_of(value: Any, where: str) -> dict[str, Any]:
    """Raises BadRequest unless it is a JSON object."""
    if not isinstance(value, dict):
        raise BadRequest(f"{where} must be an object", where)
    return value


def list_of(value: Any, where: str, most: int) -> list[Any]:
    """Raises BadRequest unless it is a list of at most so many."""
    if not isinstance(value, list) or len(value) > most:
        raise BadRequest(f"{where} must be a list of at most {most}", where)
    return value


def text_of(value: Any, where: str, most: int = MAX_CONVERSATION_BYTES) -> str:
    """Raises BadRequest unless it is a text of at most so many characters."""
    if not isinstance(value, str) or len(value) > most:
        raise BadRequest(f"{where} must be a text of at most {most} characters", where)
    return value


def flag(body: Body, name: str) -> bool:
    """A field that is true, or false, null or absent. Raises BadRequest."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false", name)
    return value is True


def is_nothing(value: object) -> bool:
    """Whether a field with this value asks for nothing."""
    return value is None or value in (False, "", [], {})


def only(one: Mapping[str, Any], fields: Collection[str], where: str) -> None:
    """Raises BadRequest for a field of a part that would be ignored."""
    for name, value in one.items():
        if name not in fields and not is_nothing(value):
            raise BadRequest(f"{where} has a field that is not taken: {shown(name)}", where)


def kind_of(one: Mapping[str, Any], where: str) -> str:
    """The `type` of a part. Raises BadRequest."""
    kind = one.get("type")
    if not isinstance(kind, str):
        raise BadRequest(f"{where} needs a type", where)
    return kind


def role_of(one: Mapping[str, Any], where: str, roles: Mapping[str, Role]) -> Role:
    """The role of a message, of those that an API has. Raises BadRequest."""
    name = one.get("role")
    role = roles.get(name) if isinstance(name, str) else None
    if role is None:
        raise BadRequest(f"{where}.role must be one of {', '.join(roles)}", f"{where}.role")
    return role


def content_text(content: Any, where: str, kinds: Collection[str]) -> str:
    """The text of a content: a text, or a list of parts of these kinds. Raises BadRequest, for others by name."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be text, or a list of parts of text", where)
    return "".join(part_text(part, f"{where}[{index}]", kinds) for index, part in enumerate(content))


def part_text(part: Any, where: str, kinds: Collection[str]) -> str:
    """As `content_text`, for one part. The text of a `refusal` has its name."""
    part = object_of(part, where)
    kind = kind_of(part, where)
    if kind not in kinds:
        raise BadRequest(f"{kind[:_MAX_SHOWN]} is not taken: a content here is text ({', '.join(kinds)})", where)
    field = "refusal" if kind == "refusal" else "text"
    pass_over(part, ("type", field), where)
    return text_of(part.get(field), f"{where}.{field}")


def conversation(messages: Sequence[Message], where: str) -> tuple[Message, ...]:
    """The messages as they are. Raises BadRequest when there are none, or too many."""
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise BadRequest(f"a conversation has 1 to {MAX_MESSAGES} messages, and not {len(messages)}", where)
    if sum(len(message.calls) for message in messages) > MAX_CALLS_TOGETHER:
        raise BadRequest(f"a conversation of more than {MAX_CALLS_TOGETHER} calls of tools", where)
    if size_bytes(messages) > MAX_CONVERSATION_BYTES:
        raise BadRequest(f"a conversation of more than {MAX_CONVERSATION_BYTES} bytes", where)
    return tuple(messages)


def size_bytes(messages: Sequence[Message]) -> int:
    """Of everything in them that is text."""
    texts = (
        text
        for message in messages
        for text in (
            message.content,
            message.call_id,
            message.name,
            *(t for c in message.calls for t in (c.id, c.name, c.arguments)),
        )
    )
    return sum(len(text.encode("utf-8", "replace")) for text in texts)


def stop_strings(raw: Any, where: str) -> tuple[str, ...]:
    """Raises BadRequest."""
    stops = [raw] if isinstance(raw, str) else raw or []
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise BadRequest(f"{where} must be a text or a list of at most {MAX_STOPS}", where)
    if not all(isinstance(stop, str) and 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise BadRequest(f"each of {where} must be a text of 1 to {MAX_STOP_CHARS} characters", where)
    return tuple(stop.encode("utf-8", "replace").decode() for stop in stops)


def sendable(value: Any, where: str, max_bytes: int) -> Any:
    """Nested JSON as it can be sent: `?` for lone surrogates. Raises BadRequest if it is too deep or too long."""
    if _is_deeper(value, MAX_DEPTH):
        raise BadRequest(f"{where} is nested more than {MAX_DEPTH} deep", where)
    if len(json.dumps(value)) > max_bytes:
        raise BadRequest(f"{where} has more than {max_bytes} bytes", where)
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(one, levels - 1) for one in inner)


def single(body: Body) -> None:
    """Raises BadRequest if several completions are asked for."""
    if body.get("n") not in (None, 1) or isinstance(body.get("n"), bool):
        raise BadRequest("n must be 1: send several requests, each is a completion of its own", "n")


def stream_usage(body: Body) -> bool:
    """Whether a stream is to end with what it used. Raises BadRequest."""
    options = object_of(body.get("stream_options") or {}, "stream_options")
    pass_over(options, ("include_usage",), "stream_options")
    return flag(options, "include_usage")


def usage(completion: Completion) -> dict[str, int]:
    """In the form of OpenAI's older APIs."""
    prompt, sampled = completion.prompt_tokens, completion.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def openai_error(error: BadRequest) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kind = "rollout_over" if error.status == 429 else "invalid_request_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}
