"""A chat endpoint and a model list, nothing else: OpenAI itself (`hosted`) or one of its many relatives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.fakes.inference.dialects.base import JSON, Endpoint, Refused
from tests.fakes.inference.dialects.chat import ChatCompletions
from tests.fakes.inference.model import Model


class OpenAIDialect:
    """Text in, text out. The options are those of ChatCompletions."""

    name = "openai"

    def __init__(self, *, hosted: bool = False, new_limit: bool = False, ids_in_logprobs: bool = False) -> None:
        chat = ChatCompletions(self, hosted=hosted, new_limit=new_limit, ids_in_logprobs=ids_in_logprobs)
        self.endpoints: Mapping[str, Endpoint] = {"/v1/chat/completions": chat}

    def query(self, method: str, path: str, body: Mapping[str, Any], model: Model) -> JSON:
        if (method, path) == ("GET", "/v1/models"):
            card = {"id": model.name, "object": "model", "created": 1_700_000_000, "owned_by": "system"}
            return {"object": "list", "data": [card]}
        raise Refused(404, self.error(404, f"Invalid URL ({method} {path})"))

    def error(self, status: int, message: str) -> JSON:
        kinds = {429: "rate_limit_error"}
        kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": None, "code": None}}

    def unauthorized(self, status: int, key: str) -> JSON:
        # Real: part of the key stands in the text.
        shown = f"{key[:4]}{'*' * 12}{key[-4:]}" if key else "''"
        error = self.error(status, f"Incorrect API key provided: {shown}.")
        error["error"]["code"] = "invalid_api_key"
        return error

    def too_long(self, prompt_tokens: int, max_tokens: int, limit: int) -> Refused | None:
        if prompt_tokens + max_tokens <= limit and prompt_tokens < limit:
            return None
        error = self.error(
            400,
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the messages, {max_tokens} in the "
            "completion). Please reduce the length of the messages or completion.",
        )
        error["error"] |= {"param": "messages", "code": "context_length_exceeded"}
        return Refused(400, error)
