"""What a dialect is: how requests of one kind of inference server look, and its answers and errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

from tests.fakes.inference.model import ChatMessage, Model

JSON = Any


class Refused(Exception):
    """The request is not served: status and body as the real server would give them.

    `reason` goes into the log, for servers that do not tell theirs.
    """

    def __init__(self, status: int, body: JSON, reason: str = "") -> None:
        super().__init__(f"{status}: {body}")
        self.status = status
        self.body = body
        self.reason = reason or str(body)


class Strict(BaseModel):
    """A request of which every field is known. Real servers often ignore the others; a test wants to know."""

    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for a completion, understood. `max_tokens` None: as many as there is room for.

    `forced`: the one id that a logit bias leaves.
    """

    request: Any
    prompt_ids: list[int]
    messages: tuple[ChatMessage, ...] | None
    max_tokens: int | None
    stop: tuple[str, ...]
    seed: int | None
    left_to_default: tuple[str, ...]
    ignore_end: bool = False
    stream: bool = False
    forced: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server has to say; faults may have been at it.

    visible: text before the stop string or end token. logprobs None: it gives none.
    empty: an answer without any choice. text_null: its text is missing.
    signed: `last_version` and `versions`, of each token, are what it says of its weights.
    """

    ids: list[int]
    logprobs: list[float] | None
    finish: str
    stopped_by: str | int | None
    visible: str
    prompt_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    cached: int
    number: int
    empty: bool = False
    text_null: bool = False
    signed: bool = False
    versions: list[str] | None = None
    last_version: str | None = None

    def version_spans(self) -> list[dict[str, Any]]:
        """SGLang's way of telling `versions`."""
        spans: list[dict[str, Any]] = []
        for place, version in enumerate(self.versions or ()):
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": place, "end": place})
            spans[-1]["end"] = place + 1
        return spans

    def text(self, model: Model, *, stop_string: bool, skip_special: bool) -> str | None:
        """The text as servers cut it: up to the stop string (or its end), special tokens dropped or kept."""
        if self.text_null:
            return None
        text = self.visible
        if isinstance(self.stopped_by, str):
            text += self.stopped_by if stop_string else ""
        elif self.stopped_by is not None and not skip_special:
            text += model.decode([self.stopped_by])
        return text


def masked(logprobs: list[float]) -> list[float]:
    """Of what a grammar leaves over: the likelier. Of SGLang (ModelRunner._preprocess_logits) and vLLM
    (GPUModelRunner.sample_tokens), which mask before they take log-probs."""
    return [value / 2 for value in logprobs]


class Endpoint(Protocol):
    """One path that makes completions."""

    def parse(self, body: Mapping[str, Any], model: Model) -> Ask:
        """Raises Refused."""

    def answer(self, ask: Ask, answer: Answer, model: Model) -> JSON:
        """The body of an answer that comes in one piece."""

    def events(self, ask: Ask, answer: Answer, model: Model) -> list[JSON]:
        """The events of a streamed answer."""


class Dialect(Protocol):
    """One kind of inference server."""

    name: str
    endpoints: Mapping[str, Endpoint]

    def query(self, method: str, path: str, body: Mapping[str, Any], model: Model) -> JSON:
        """The answer to anything that is no completion. Raises Refused, also for unknown paths."""

    def error(self, status: int, message: str) -> JSON:
        """The body of an error."""

    def unauthorized(self, status: int, key: str) -> JSON:
        """The body of a 401 or 403."""

    def too_long(self, prompt_tokens: int, max_tokens: int, limit: int) -> Refused | None:
        """The refusal of a request that does not fit the context; None: it is served."""


def left_to_default(request: BaseModel, sampling: frozenset[str]) -> tuple[str, ...]:
    """Sampling parameters that the server will choose itself."""
    return tuple(sorted(sampling - request.model_fields_set))


def stops(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings of a request, given as one or as a list."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def no_stream(server: str) -> str:
    return f"this scripted {server} does not stream"
