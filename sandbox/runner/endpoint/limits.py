"""What clients are told of limits: time without end, no rate limits, and the length that a conversation may have.

The run's budgets hold. A client that gave up before them would ask again, and what was sampled would be lost.
"""

from collections.abc import Mapping
from typing import Any

_DAY_S = 86_400
_REQUESTS = 1_000_000
_OWNER, _CREATED_AT = "orchestrator", "1970-01-01T00:00:00Z"

# Variables by which clients are told how long to wait.
PATIENCE: Mapping[str, str] = {
    "OPENAI_TIMEOUT": str(_DAY_S),  # Haystack (30 s without it), Langroid (20 s)
    "MODEL_TIMEOUT": str(_DAY_S),  # CAMEL (180 s)
    "LLM_TIMEOUT": str(_DAY_S),  # OpenHands (300 s)
    "AIDER_TIMEOUT": str(_DAY_S),
    "BEEAI_DEFAULT_REQUEST_TIMEOUT": str(_DAY_S),
    "LANGCHAIN_OPENAI_STREAM_CHUNK_TIMEOUT_S": str(_DAY_S),  # LangChain (120 s)
    "API_TIMEOUT_MS": str(_DAY_S * 1000),  # Claude Code and the Claude Agent SDK (600 s)
}

# As OpenAI's and Anthropic's servers tell them.
RATES: Mapping[str, str] = {
    "x-ratelimit-limit-requests": str(_REQUESTS),
    "x-ratelimit-remaining-requests": str(_REQUESTS),
    "x-ratelimit-reset-requests": "0s",
    "anthropic-ratelimit-requests-limit": str(_REQUESTS),
    "anthropic-ratelimit-requests-remaining": str(_REQUESTS),
    "anthropic-ratelimit-requests-reset": _CREATED_AT,
}


def model(name: str, context_tokens: int) -> dict[str, Any]:
    """One entry of the list of models, with the names of all APIs. `context_tokens` 0: not known."""
    lengths = ("context_length", "context_window", "max_context_length", "max_model_len", "max_input_tokens")
    context = dict.fromkeys(lengths, context_tokens) if context_tokens else {}
    openai = {"id": name, "object": "model", "created": 0, "owned_by": _OWNER}
    return {**openai, "type": "model", "display_name": name, "created_at": _CREATED_AT, **context}


def models(name: str, context_tokens: int) -> dict[str, Any]:
    """The list of models: there is one."""
    anthropic = {"has_more": False, "first_id": name, "last_id": name}
    return {"object": "list", "data": [model(name, context_tokens)], **anthropic}
