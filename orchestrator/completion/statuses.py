"""What a status of an endpoint means, with the words beside it; and errors that come with HTTP 200.

| status, words | meaning |
|---|---|
| 402, or words of an empty account | QuotaError: tried again, then a control decides about the run |
| 401, 403 | AuthenticationError, likewise |
| 400, 413, 422, 500 with words of a context that is full | ContextLengthError |
| 408, 409, 425, 429, 5xx | Retryable |
| 400, 413, 422, 451 | Refusal that a text may have caused |
| any other | Refusal that no text has caused: tried again |
"""

import re
from collections.abc import Mapping
from typing import Any

from orchestrator.completion.base import Endpoint, Refusal
from orchestrator.completion.retry import Retryable, retry_after_s
from orchestrator.errors import AuthenticationError, ContextLengthError, QuotaError

NOT_IMPLEMENTED = 501  # the server says that it will never do this
WORDS_CHARS = 8_000  # of an error, looked at for names of parameters
_CONTEXT_WORDS = (
    "context length", "context_length", "context size", "context window", "maximum context",
    "max_model_len", "longer than the model", "exceeds the available context", "too many tokens",
    "input is too long", "exceed_context_size", "prompt is too long", "maximum model length",
    "maximum prompt length", "maximum allowed length", "maximum input length", "max_seq_len",
    "input length should be", "input token count", "`max_new_tokens` must be <=",
    "max_tokens must be at least 1",  # we ask for one at least: vLLM had no room for it
)  # fmt: skip
# Not among them: "exceeded your current quota", which Gemini also says of a minute's limit.
_QUOTA_WORDS = re.compile(
    r"insufficient[_ ](quota|balance|credits?|funds)|credit balance is too low|billing[_ ]hard[_ ]limit"
    r"|billing_not_active|account is not active|payment required",
    re.IGNORECASE,
)
# Words of a 400 that no text causes: the server lacks the model, takes no tools, or is a gateway without a server.
_PLACE_WORDS = re.compile(
    r"model[_ ]not[_ ]found|invalid model name|(model|deployment)\W.{0,80}\b(does not exist|not found|not loaded)"
    r"|unknown model|no healthy upstream|no available server"
    r"|tool choice requires|not support (tools|function)|tools? (is|are) not supported|supports? tool use",
    re.IGNORECASE,
)
_UNKNOWN_MODEL = 404
# Fields of answers in the dialects: beside one of them an `error` means nothing.
_RESULTS = ("choices", "data", "models", "meta_info", "logprobs", "tokens", "content", "text")
_OF_TYPE = (("rate", 429), ("auth", 401), ("permission", 403), ("invalid_request", 400), ("badrequest", 400))


def failure(endpoint: Endpoint, status: int, text: str, *, after: str | None = None, label: str = "") -> Exception:
    """The error for an answer with this status and text. `label`: what to call the status."""
    words, detail = endpoint.redact(text, WORDS_CHARS), f"{label or f'HTTP {status}'}: {endpoint.redact(text)}"
    if status == 402 or (status in (400, 403, 429) and _QUOTA_WORDS.search(words)):
        return QuotaError(
            f"the endpoint {endpoint.shown} serves nothing more for this account ({detail}); pay for more, or use "
            "another key"
        )
    if status in (401, 403):
        what = "the key" if endpoint.api_key or endpoint.headers else "a request without a key"
        return AuthenticationError(
            f"the endpoint {endpoint.shown} refuses {what} ({detail}); set --openai.api_key or OPENAI_API_KEY"
        )
    if is_context_length(status, words):
        return ContextLengthError(endpoint.redact(text))
    if status == 407:
        return Refusal(f"{detail}; the proxy of HTTP_PROXY or HTTPS_PROXY wants a user and a password", status)
    if status in (408, 409, 425, 429) or (status >= 500 and status != NOT_IMPLEMENTED):
        return Retryable(detail, retry_after_s(after), status, words)
    if status == 400 and _PLACE_WORDS.search(words):
        status = _UNKNOWN_MODEL
    return Refusal(detail, status, words)


def error_in(answer: Any) -> tuple[int, Any] | None:
    """(the status that it would have, what it says) of an error that came with HTTP 200; None: it is no error."""
    if not isinstance(answer, Mapping) or any(answer.get(name) for name in _RESULTS):
        return None
    error = answer.get("error") or answer.get("errors")
    if not error:
        is_error = (
            answer.get("object") == "error" or answer.get("type") == "error" or answer.get("success") is False
        )
        if not is_error and not ("choices" not in answer and ("message" in answer or "detail" in answer)):
            return None
        error = answer
    return status_of(error), error


def status_of(error: Any) -> int:
    """The status that an error names; 500 where it names none."""
    one = error[0] if isinstance(error, list) and error else error
    if not isinstance(one, Mapping):
        return 500
    for name in ("code", "status", "status_code", "http_status"):
        value = str(one.get(name))
        if re.fullmatch("[45][0-9][0-9]", value):
            return int(value)
    kind = f"{one.get('type')} {one.get('code')}".lower()
    return next((status for word, status in _OF_TYPE if word in kind), 500)


def is_context_length(status: int, text: str) -> bool:
    """Whether an error says that the prompt is too long, which servers word in many ways."""
    lowered = text.lower()
    return status in (400, 413, 422, 500) and any(word in lowered for word in _CONTEXT_WORDS)
