"""`trajectory.json`: a conversation before the first turn, in ATIF (Agent Trajectory Interchange Format).

As in Harbor, the agent gets it as what was said before: what users and the agent said, the tools that it called,
and their results. System prompts are left out, as the agent has its own, and so is reasoning.
"""

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrator.rules.text import printable
from orchestrator.tasks.base import BadRow
from orchestrator.tasks.harbor.refusal import Refusal
from orchestrator.types import Call, ContextMessage

FILE = "trajectory.json"
MAX_BYTES = 1 << 20
_MAX_MESSAGES, _MAX_CALLS = 1_000, 128
_VERSION = re.compile(r"ATIF-v1\.[0-8]")
_NAME = r"^[A-Za-z0-9_.:-]+$"  # chat templates print names and ids as they are


class _Part(BaseModel):
    type: Literal["text", "image", "audio"]
    text: str | None = None


_Content = str | list[_Part]


class _Call(BaseModel):
    tool_call_id: Annotated[str, Field(max_length=64, pattern=_NAME)]
    function_name: Annotated[str, Field(max_length=64, pattern=_NAME)]
    arguments: dict[str, Any]


class _Result(BaseModel):
    source_call_id: str | None = None
    content: _Content | None = None


class _Observation(BaseModel):
    results: list[_Result]


class _Step(BaseModel):
    step_id: int
    source: Literal["system", "user", "agent"]
    message: _Content
    tool_calls: Annotated[list[_Call], Field(max_length=_MAX_CALLS)] | None = None
    observation: _Observation | None = None


class _Trajectory(BaseModel):
    model_config = ConfigDict(strict=True)
    schema_version: str
    steps: Annotated[list[_Step], Field(min_length=1, max_length=_MAX_MESSAGES)]


def context_of(text: str) -> tuple[ContextMessage, ...]:
    """The conversation. Raises BadRow, Refusal."""
    try:
        document = _Trajectory.model_validate(json.loads(text))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise BadRow(f"{FILE} is no ATIF: {printable(place)[:80]}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{FILE} is no JSON: {printable(str(error))[:100]}") from None
    if not _VERSION.fullmatch(document.schema_version):
        raise BadRow(
            f"{FILE} has the schema_version {ascii(document.schema_version)[:30]}; ATIF-v1.0 to v1.8 are read"
        )
    talk = [message for number, step in enumerate(document.steps, 1) for message in _messages(number, step)]
    if len(talk) > _MAX_MESSAGES:
        raise BadRow(f"{FILE} has more than {_MAX_MESSAGES} messages")
    try:
        "".join(text for one in talk for text in (one.content, *(call.arguments for call in one.calls))).encode()
    except UnicodeEncodeError:
        raise BadRow(f"{FILE} has characters that no text can have (lone surrogates)") from None
    return tuple(talk)


def _messages(number: int, step: _Step) -> Iterator[ContextMessage]:
    if step.step_id != number:
        raise BadRow(f"{FILE}: step {number} has the step_id {step.step_id}")
    calls = tuple(
        Call(call.tool_call_id, call.function_name, json.dumps(call.arguments, ensure_ascii=False))
        for call in step.tool_calls or ()
    )
    ids = [call.id for call in calls]
    if (calls and step.source != "agent") or len({*ids}) < len(ids):
        raise BadRow(f"{FILE}: step {number} has calls that only an agent makes, or two with one id")
    if step.source == "system":
        return
    said = _text(step.message)
    if said or calls:
        yield ContextMessage("user" if step.source == "user" else "assistant", said, calls)
    results = step.observation.results if step.observation else []
    for result in results:
        if result.source_call_id is not None and result.source_call_id not in ids:
            raise BadRow(f"{FILE}: step {number} has a result of a call that it does not make")
    for call in calls:  # chat templates want one result of each
        texts = [_text(one.content or "") for one in results if one.source_call_id == call.id]
        yield ContextMessage("tool", "\n".join(texts), call_id=call.id)
    if more := "\n".join(_text(one.content or "") for one in results if one.source_call_id is None):
        yield ContextMessage("user", more)


def _text(content: _Content) -> str:
    if isinstance(content, str):
        return content
    if any(part.type != "text" for part in content):
        raise Refusal("pictures or sounds", f"{FILE} holds pictures or sounds, and conversations here are text")
    return "\n".join(part.text or "" for part in content)
