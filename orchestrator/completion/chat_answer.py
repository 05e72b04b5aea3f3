"""Reads the answer of a chat endpoint: text, reasoning, calls, ids, why it ended.

Services word the same answer in many ways. What is not used is not checked: an endpoint's log-probs are recorded
where they are whole, and left out elsewhere.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.calls.formats import written
from orchestrator.calls.parsed import parsed, same_calls
from orchestrator.completion.base import RECORDED, CompletionRequest, Finish
from orchestrator.completion.finish import FinishReasons, end_of
from orchestrator.completion.line import cut_at_stop
from orchestrator.completion.reasoning import reasoning_chars, tagged
from orchestrator.completion.retry import Retryable, SpoiltSample
from orchestrator.completion.versions import version_text
from orchestrator.rules.text import MAX_JSON_INTEGER, valid
from orchestrator.types import Call, Completion

MAX_TOKEN_CHARS = 1024  # no token is longer: the longest ones are of 128 and more spaces
MAX_TEMPLATE_TOKENS = 100_000  # that a server may put around a conversation: a system prompt of its own, tools
# Fields for reasoning that is sent apart from the answer: of vLLM, DeepSeek, OpenRouter, Ollama, LiteLLM.
_REASONING = ("reasoning_content", "reasoning", "thinking", "reasoning_details", "thinking_blocks")
_TEXTS = ("text", "content", "thinking", "reasoning", "summary", "refusal")  # of a part, wherever its text stands
_MOST_PARTS = 10_000


def completion_of(
    answer: Any, request: CompletionRequest, reasons: FinishReasons, quote: Callable[[Any], str]
) -> tuple[Completion, str]:
    """(the answer, checked; why it cannot be used, or nothing). `quote`: a part of the answer for an error's text.
    Raises Retryable, and what reading nonsense raises."""
    choices = answer["choices"]
    if not isinstance(choices, list) or not choices:
        raise Retryable("an answer without choices")
    choice = choices[0]
    error = choice.get("error")
    message = choice["message"] if not error else choice.get("message") or {}
    content, reasoning = _parts(message.get("content"))
    if content is None and isinstance(message.get("refusal"), str):
        content = message["refusal"]
    reasoning = next((tagged(text) for name in _REASONING if (text := _flat(message.get(name))).strip()), "") or (
        tagged(reasoning) if reasoning.strip() else ""
    )
    calls = _calls(message) if request.wishes.tools else []
    words = _with_calls(content or "", calls, request) if calls else content
    text = valid(reasoning + (words or ""))  # a server may cut a character in two
    # Where the server sent reasoning apart from the answer, no part of the answer is reasoning.
    thought = len(valid(reasoning)) if reasoning else reasoning_chars(text, None)
    tokens, logprobs = _ids_and_logprobs(choice)
    usage = answer.get("usage") or {}
    most, prompt_chars = request.sampling.max_tokens, sum(len(m.content) for m in request.messages)
    if len(text) > most * MAX_TOKEN_CHARS:
        raise Retryable(f"{len(text)} characters where {most} tokens were asked for")
    # Budgets count these numbers: an impossible one must not end a rollout.
    sampled = min(most, _count(usage, "completion_tokens") or len(tokens or logprobs or ()) or int(text != ""))
    prompt = _count(usage, "prompt_tokens")
    visible = cut_at_stop(text[thought:], request.stop)
    reason = choice.get("finish_reason")
    if end_of(reason) is None and end_of(choice.get("native_finish_reason")) is not None:
        reason = choice["native_finish_reason"]
    there = bool(text) or sampled > 0
    if error and not there:
        raise Retryable(f"an answer that the server broke off: {quote(error)}")
    finish: Finish = (
        "broken_off" if error else reasons.end(reason, there=there, full=sampled >= most and not calls)
    )
    recorded = RECORDED[finish]
    completion = Completion(
        text=text,
        visible=visible,
        # A server that is not told of a stop string goes on behind it.
        finish_reason="stop" if recorded == "length" and len(visible) < len(text) - thought else recorded,
        tokens_T=tokens,
        logprobs_T=logprobs,
        prompt_tokens=prompt if prompt <= 4 * prompt_chars + MAX_TEMPLATE_TOKENS else 0,
        completion_tokens=max(1, sampled),
        policy_version=_version(answer),
        reasoning_chars=thought,
    )
    if finish == "broken_off":
        why = quote(error) if error else f"finish reason {str(reason)[:40]!r}"
        raise SpoiltSample(f"an answer that the server broke off: {why}", completion)
    if finish in ("content_filter", "out_of_time"):
        return completion, f"a sample that ended by {str(reason)[:40]!r}"
    empty = (words is None and not reasoning) or not sampled
    return completion, "a sample without text" if empty else ""


def _parts(content: Any) -> tuple[str | None, str]:
    """(the text, the reasoning) of a message's content, a text or a list of parts. None: there is no text."""
    if content is None or isinstance(content, str):
        return content, ""
    parts = [content] if isinstance(content, Mapping) else content
    if not isinstance(parts, list) or len(parts) > _MOST_PARTS:
        raise Retryable("an answer whose content is neither a text nor a list of parts")
    texts: list[str] = []
    thoughts: list[str] = []
    for part in parts:
        kind = str(part.get("type", "")) if isinstance(part, Mapping) else ""
        if isinstance(part, Mapping) and not any(name in part for name in _TEXTS):
            continue  # a call, an image, a citation
        (thoughts if "think" in kind or "reason" in kind else texts).append(_flat(part))
    return ("".join(texts) if texts else None), "".join(thoughts)


def _flat(value: Any, levels: int = 4) -> str:
    """The text of a part, which may be in a list, or in a field of it."""
    if isinstance(value, str):
        return value
    if not levels:
        return ""
    if isinstance(value, list):
        return "".join(_flat(one, levels - 1) for one in value[:_MOST_PARTS])
    if isinstance(value, Mapping):
        return next((text for name in _TEXTS if (text := _flat(value.get(name), levels - 1))), "")
    return ""


def _calls(message: Mapping[str, Any]) -> list[Call]:
    """The calls that the server read from the answer. Arguments may be no JSON: models write what they like."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    functions = [one.get("function", one) for one in message.get("tool_calls") or ()]
    functions += [message["function_call"]] if message.get("function_call") and not functions else []
    if not functions:
        functions = [part for part in parts if isinstance(part, Mapping) and part.get("type") == "tool_use"]
    calls = []
    for function in functions:
        name, arguments = function.get("name"), function.get("arguments", function.get("input"))
        if not isinstance(arguments, str | None):
            arguments = json.dumps(arguments)
        # The model wrote it: a call without a name is malformed, as in a text. No fault of the server's.
        calls.append(Call("", name if isinstance(name, str) else "", arguments or "{}"))
    return calls


def _with_calls(content: str, calls: list[Call], request: CompletionRequest) -> str:
    """The text with its calls. A server may give a call in the text and as data: each counts once."""
    format = request.call_format or "hermes"
    text = parsed(content, format, request.wishes.tools, request.sequence)
    if text.calls and same_calls(text.calls, calls):
        return content
    return written(text.content if text.calls else content, calls, format)


def _ids_and_logprobs(choice: Mapping[str, Any]) -> tuple[tuple[int, ...] | None, tuple[float, ...] | None]:
    """(ids, log-probs), each where the endpoint gives a whole list of them. A chat's are recorded and not trained
    with, so what is wrong with them costs no sample."""
    field = choice.get("logprobs")
    entries = field.get("content") if isinstance(field, dict) else None
    entries = entries if isinstance(entries, list) and all(isinstance(one, dict) for one in entries) else []
    ids: Any = choice.get("token_ids")
    if ids is None:
        ids = [entry.get("id") for entry in entries]
    usable = isinstance(ids, list) and ids and all(type(i) is int and 0 <= i < 2**31 for i in ids)
    values = [entry.get("logprob") for entry in entries]
    real = all(type(v) in (int, float) and math.isfinite(v) and v <= 1e-6 for v in values)
    logprobs = tuple(min(0.0, float(v)) for v in values) if values and real else None
    tokens = tuple(ids) if usable else None
    if tokens is not None and logprobs is not None and len(tokens) != len(logprobs):
        logprobs = None
    return tokens, logprobs


def _version(answer: Mapping[str, Any]) -> str | None:
    field = (answer.get(name) for name in ("weight_version", "policy_version"))
    return next((version_text(version) for version in field if version is not None), None)


def _count(usage: Mapping[str, Any], name: str) -> int:
    value = usage.get(name)
    # A record with a larger number could not be read back.
    return value if type(value) is int and 0 < value <= MAX_JSON_INTEGER else 0
