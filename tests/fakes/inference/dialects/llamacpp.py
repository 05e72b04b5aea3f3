"""llama.cpp's server: `/completion`, streamed or not, and its helpers.

Its two losses are here as they are there. In one piece, log-probs are given for all ids but as many as
the stop string has; streamed, an id that ends within a character has no event of its own, and neither
its id nor its log-prob is ever told. `tokens_predicted` counts it. The server ignores fields that it
does not know; this one refuses them. It takes several prompts at once, this one where their completions
are one forced token each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from heapq import nlargest
from typing import Any

from tests.fakes.inference.dialects.base import JSON, Answer, Ask, Endpoint, Refused, stops
from tests.fakes.inference.dialects.chat import ChatCompletions
from tests.fakes.inference.model import Model, as_messages, logprob

_INT, _FLOAT, _BOOL, _STRING, _ANY = (int,), (int, float), (bool,), (str,), (object,)
SAMPLING = {
    "n_predict": _INT,
    "temperature": _FLOAT,
    "top_k": _INT,
    "top_p": _FLOAT,
    "min_p": _FLOAT,
    "typical_p": _FLOAT,
    "top_n_sigma": _FLOAT,
    "xtc_probability": _FLOAT,
    "dynatemp_range": _FLOAT,
    "mirostat": _INT,
    "repeat_penalty": _FLOAT,
    "presence_penalty": _FLOAT,
    "frequency_penalty": _FLOAT,
    "dry_multiplier": _FLOAT,
    "seed": _INT,
    "stop": _ANY,
    "ignore_eos": _BOOL,
}
_OTHERS = {
    "prompt": _ANY,
    "stream": _BOOL,
    "cache_prompt": _BOOL,
    "return_tokens": _BOOL,
    "n_probs": _INT,
    "post_sampling_probs": _BOOL,
    "timings_per_token": _BOOL,
    "return_progress": _BOOL,
    "n_indent": _INT,
    "n_keep": _INT,
    "n_discard": _INT,
    "n_cmpl": _INT,
    "n_cache_reuse": _INT,
    "t_max_predict_ms": _INT,
    "response_fields": _ANY,
    "xtc_threshold": _FLOAT,
    "dynatemp_exponent": _FLOAT,
    "repeat_last_n": _INT,
    "dry_base": _FLOAT,
    "dry_allowed_length": _INT,
    "dry_penalty_last_n": _INT,
    "dry_sequence_breakers": _ANY,
    "mirostat_tau": _FLOAT,
    "mirostat_eta": _FLOAT,
    "min_keep": _INT,
    "lora": _ANY,
    "grammar": _STRING,
    "json_schema": _ANY,
    "logit_bias": _ANY,
    "samplers": _ANY,
    "id_slot": _INT,
}
FIELDS = SAMPLING | _OTHERS
_CERTAIN = 100.0  # of a logit's bias
_DEFAULTS: dict[str, Any] = {
    "stream": False,
    "cache_prompt": True,
    "return_tokens": False,
    "n_probs": 0,
    "n_predict": -1,
}


class Completion:
    """`/completion`."""

    def parse(self, body: Mapping[str, Any], model: Model) -> Ask:
        if unknown := sorted(set(body) - set(FIELDS)):
            raise self._refused(f"Field '{unknown[0]}': unknown")
        if "prompt" not in body:
            raise self._refused("[json.exception.out_of_range.403] key 'prompt' not found")
        for name, value in body.items():
            self._check(name, value)
        request = _DEFAULTS | {name: value for name, value in body.items() if value is not None}
        prompt = request["prompt"]
        forced = next((i for i, bias in request.get("logit_bias") or () if bias >= _CERTAIN), None)
        prompts = _prompts(prompt)
        if prompts is not None and (forced is None or request["n_predict"] != 1 or request["stream"]):
            raise self._refused("this scripted server takes several prompts for one forced token each only")
        ids = prompts[0] if prompts else prompt if isinstance(prompt, list) else model.encode(prompt)
        if not all(type(i) is int and 0 <= i < model.size for one in prompts or [ids] for i in one):
            raise self._refused("Prompt contains invalid tokens")
        return Ask(
            request=request,
            prompt_ids=ids,
            messages=None,
            max_tokens=None if request["n_predict"] < 0 else request["n_predict"],
            stop=stops(request.get("stop")),
            seed=request.get("seed"),
            left_to_default=tuple(sorted(set(SAMPLING) - set(body))),
            ignore_end=request.get("ignore_eos", False),
            stream=request["stream"],
            forced=forced,
        )

    def answer(self, ask: Ask, answer: Answer, model: Model) -> JSON:
        prompts = _prompts(ask.request["prompt"])
        if prompts is None:
            return self._answer(ask, answer, model)
        answers = []
        for index, ids in enumerate(prompts):
            logprobs = [logprob(i, len(ids)) for i, _ in zip(answer.ids, answer.logprobs or (), strict=False)]
            own = replace(answer, prompt_ids=ids, prompt_tokens=len(ids), logprobs=logprobs)
            answers.append(self._answer(replace(ask, prompt_ids=ids), own, model, index))
        return answers

    def _answer(self, ask: Ask, answer: Answer, model: Model, index: int = 0) -> JSON:
        final = self._final(ask, answer, model)
        ids = answer.ids
        final["content"] = None if answer.text_null else answer.visible
        if ask.request["return_tokens"] and not answer.empty:
            final["tokens"] = ids
        if ask.request["n_probs"] > 0 and answer.logprobs is not None and not answer.empty:
            told = [n for n in range(len(ids)) if _whole(model, ids[: n + 1])]
            if isinstance(answer.stopped_by, str):
                told = told[: max(0, len(told) - len(model.encode(answer.stopped_by)))]
            pieces = [b"" if i in model.special else _piece(model, i) for i in ids]
            final["completion_probabilities"] = [
                _entry(ids[n], pieces[n], answer.logprobs[n], _top(ask, n, model))
                for n in told
                if n < len(answer.logprobs)
            ]
        final["index"] = index
        wanted = ask.request.get("response_fields")
        return final if wanted is None else {name: final[name] for name in wanted if name in final}

    def events(self, ask: Ask, answer: Answer, model: Model) -> list[JSON]:
        events: list[JSON] = []
        logprobs = answer.logprobs
        visible = answer.visible.encode()
        unsent, sent, length = b"", 0, 0
        for n, token_id in enumerate([] if answer.empty else answer.ids):
            piece = b"" if token_id in model.special else _piece(model, token_id)
            unsent += piece
            length += len(piece)
            if _cut(unsent):
                continue
            # What may become a stop string is held back, what has become one is never sent.
            content = visible[sent : _safe(visible[:length], ask.stop, last=n + 1 == len(answer.ids))]
            sent += len(content)
            event: dict[str, Any] = {
                "index": 0,
                "content": None if answer.text_null else content.decode("utf-8", "replace"),
                "tokens": [token_id],
                "stop": False,
                "id_slot": -1,
                "tokens_predicted": n + 1,
                "tokens_evaluated": answer.prompt_tokens,
            }
            if ask.request["n_probs"] > 0 and logprobs is not None and n < len(logprobs):
                event["completion_probabilities"] = [_entry(token_id, unsent, logprobs[n], _top(ask, n, model))]
            events.append(event)
            unsent = b""
        return [*events, self._final(ask, answer, model)]

    def _final(self, ask: Ask, answer: Answer, model: Model) -> dict[str, Any]:
        """The last event of a stream; of an answer in one piece, all but text, ids and log-probs."""
        is_string = isinstance(answer.stopped_by, str)
        stop_type = "limit" if answer.finish == "length" else "word" if is_string else "eos"
        settings = {name: value for name, value in ask.request.items() if name in SAMPLING}
        evaluated = answer.prompt_tokens - answer.cached
        return {
            "index": 0,
            "content": "",
            "tokens": [],
            "id_slot": 0,
            "stop": True,
            "model": model.name,
            "tokens_predicted": answer.completion_tokens,
            "tokens_evaluated": answer.prompt_tokens,
            "generation_settings": settings,
            "prompt": model.decode(answer.prompt_ids),
            "has_new_line": "\n" in answer.visible,
            "truncated": len(answer.prompt_ids) + len(answer.ids) >= model.context_length,
            "stop_type": stop_type,
            "stopping_word": answer.stopped_by if is_string else "",
            "tokens_cached": len(answer.prompt_ids) + len(answer.ids) - 1,
            "timings": {"cache_n": answer.cached, "prompt_n": evaluated, "predicted_n": answer.completion_tokens},
        }

    def _check(self, name: str, value: Any) -> None:
        kinds = FIELDS[name]
        if value is None or kinds is _ANY:
            return
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not _BOOL):
            wanted = "boolean" if kinds is _BOOL else "string" if kinds is _STRING else "number"
            kind = {str: "string", bool: "boolean", list: "array", dict: "object"}.get(type(value), "number")
            raise self._refused(
                f"Field '{name}': [json.exception.type_error.302] type must be {wanted}, but is {kind}"
            )
        if name == "n_predict" and isinstance(value, int) and value < -1:
            limits = "Value must be between -1 <= value <= 2147483647"
            raise self._refused(f"Field '{name}': {limits}, but got {value}")

    def _refused(self, message: str) -> Refused:
        return Refused(400, LlamaCppDialect.body(400, message))


def _prompts(prompt: Any) -> list[list[int]] | None:
    """Several of them; None: it is one."""
    return prompt if isinstance(prompt, list) and prompt and all(isinstance(p, list) for p in prompt) else None


def _piece(model: Model, token_id: int) -> bytes:
    return model.pieces[token_id] if token_id < model.size else b""


def _entry(token_id: int, piece: bytes, value: float, top: list[JSON]) -> dict[str, Any]:
    entry = {"id": token_id, "token": piece.decode("utf-8", "replace"), "bytes": list(piece), "logprob": value}
    return entry | {"top_logprobs": top or [dict(entry)]}


def _top(ask: Ask, place: int, model: Model) -> list[JSON]:
    """The likeliest ids at a place of the completion; nothing where only one was asked for."""
    if ask.request["n_probs"] < 2:
        return []
    position = len(ask.prompt_ids) + place
    likeliest = nlargest(ask.request["n_probs"], range(model.size), key=lambda i: logprob(i, position))
    return [
        {"id": i, "token": model.decode([i]), "bytes": list(model.pieces[i]), "logprob": logprob(i, position)}
        for i in likeliest
    ]


def _whole(model: Model, ids: list[int]) -> bool:
    return not _cut(b"".join(_piece(model, i) for i in ids[-4:]))


def _cut(text: bytes) -> bool:
    """Whether `text` ends within a character, by the server's own test of the last bytes."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        needed = 2 if byte & 0xE0 == 0xC0 else 3 if byte & 0xF0 == 0xE0 else 4 if byte & 0xF8 == 0xF0 else 0
        if needed:
            return back < needed
    return False


def _safe(text: bytes, stop: tuple[str, ...], *, last: bool) -> int:
    """How much of `text` may be sent: not the beginning of a stop string, unless nothing follows."""
    if last:
        return len(text)
    held = 0
    for string in stop:
        word = string.encode()
        held = max(held, next((n for n in range(len(word) - 1, 0, -1) if text.endswith(word[:n])), 0))
    return len(text) - held


class LlamaCppDialect:
    """llama.cpp's HTTP server."""

    name = "llamacpp"

    def __init__(self) -> None:
        self.endpoints: Mapping[str, Endpoint] = {
            "/completion": Completion(),
            "/v1/chat/completions": ChatCompletions(self, ids_in_logprobs=True, entries="llamacpp"),
        }

    def query(self, method: str, path: str, body: Mapping[str, Any], model: Model) -> JSON:
        match method, path:
            case "GET", "/health":
                return {"status": "ok"}
            case "GET", "/v1/models" | "/models":
                meta = {"n_vocab": model.size, "n_ctx": model.context_length, "n_ctx_train": model.context_length}
                card = {"id": model.name, "object": "model", "created": 1_700_000_000, "owned_by": "llamacpp"}
                return {"object": "list", "data": [card | {"meta": meta}]}
            case "GET", "/props":
                return {
                    "default_generation_settings": {"n_ctx": model.context_length},
                    "total_slots": 1,
                    "model_path": model.name,
                    "chat_template": model.template,
                    "bos_token": "",
                    "eos_token": model.decode([model.end_id]),
                    "build_info": "b0-scripted",
                }
            case "POST", "/tokenize":
                self._known(body, "content", "add_special", "parse_special", "with_pieces")
                # As for a model whose texts begin with a token.
                begins = [model.end_id] * bool(body.get("add_special"))
                return {"tokens": begins + model.encode(body.get("content", ""))}
            case "POST", "/detokenize":
                self._known(body, "tokens")
                return {"content": model.decode(body.get("tokens", []))}
            case "POST", "/apply-template":
                self._known(body, "messages")
                return {"prompt": model.render(as_messages(body["messages"]))}
        raise Refused(404, {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}})

    def error(self, status: int, message: str) -> JSON:
        return self.body(status, message)

    def unauthorized(self, status: int, key: str) -> JSON:
        return {"error": {"code": status, "message": "Invalid API Key", "type": "authentication_error"}}

    def too_long(self, prompt_tokens: int, max_tokens: int, limit: int) -> Refused | None:
        # Only the prompt has to fit: the completion ends where the context does.
        if prompt_tokens < limit:
            return None
        error = {
            "code": 400,
            "message": f"request ({prompt_tokens} tokens) exceeds the available context size ({limit} tokens), "
            "try increasing it",
            "type": "exceed_context_size_error",
        }
        return Refused(400, {"error": error | {"n_prompt_tokens": prompt_tokens, "n_ctx": limit}})

    @staticmethod
    def body(status: int, message: str) -> JSON:
        kinds = {400: "invalid_request_error", 503: "unavailable_error"}
        return {"error": {"code": status, "message": message, "type": kinds.get(status, "server_error")}}

    def _known(self, body: Mapping[str, Any], *names: str) -> None:
        if unknown := sorted(set(body) - set(names)):
            raise Refused(400, self.body(400, f"Field '{unknown[0]}': unknown"))
