"""What was sampled, and by which policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from orchestrator.types.messages import Message, Tools

# What `openai.server_type` names: the protocol of an endpoint.
ServerType = Literal["auto", "openai", "vllm", "sglang", "llamacpp", "atropos", "trl"]


class CompletionKind(StrEnum):
    """What a completion is for. It decides the stop strings."""

    ACTION = "action"
    PLAN = "plan"
    FINAL = "final"


@dataclass(frozen=True, slots=True)
class PolicySpan:
    """So many tokens in a row, and the policy that sampled them. `oldest` and `newest` differ where the weights
    changed at a place among them that nobody knows; None: unknown."""

    tokens: int
    oldest: str | None
    newest: str | None

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"a span of {self.tokens} tokens")

    @property
    def version(self) -> str | None:
        """The one version that sampled all of it; None: not known."""
        return self.newest if self.oldest == self.newest else None


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer, as the inference server produced it. T = tokens sampled.

    `text`: all that was sampled (stop string and end-of-turn token included) if the endpoint returns it, else what
    it returned. `visible`: what the agent gets, cut before the stop string.
    `logprobs_T`: natural log, raw model distribution (temperature 1, whole vocabulary).
    `policy_version`: the version that sampled its last token. `spans`: which version sampled which tokens, in
    order; empty: the endpoint says no more than `policy_version`.
    `retries`: failed requests before this answer, all with the same seed.
    `reasoning_chars`: so many first characters of `text` are reasoning; `visible` comes after them.
    `server_end`: the server alone says that its last token ends a turn.
    """

    text: str
    visible: str
    finish_reason: Literal["stop", "length", "content_filter"]
    tokens_T: tuple[int, ...] | None
    logprobs_T: tuple[float, ...] | None
    prompt_tokens: int
    completion_tokens: int
    policy_version: str | None = None
    retries: int = 0
    reasoning_chars: int = 0
    spans: tuple[PolicySpan, ...] = ()
    server_end: bool = False

    def __post_init__(self) -> None:
        tokens, logprobs = self.tokens_T, self.logprobs_T
        if tokens is not None and logprobs is not None and len(tokens) != len(logprobs):
            raise ValueError(f"{len(tokens)} tokens but {len(logprobs)} log-probs")
        if self.spans and tokens is not None and (count := sum(span.tokens for span in self.spans)) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens but spans of {count}")

    def sampled_from(self, spans: tuple[PolicySpan, ...]) -> Completion:
        """The same, attributed to these policies. `spans` is kept only where it says more than a version."""
        one = len(spans) == 1 and spans[0].oldest == spans[0].newest
        version = spans[-1].newest if spans else self.policy_version
        if (one or not spans) and not self.spans and version == self.policy_version:
            return self
        return replace(self, policy_version=version, spans=() if one else spans)

    @property
    def sampled_by(self) -> tuple[PolicySpan, ...]:
        """Which version sampled which tokens: `spans`, else all by `policy_version`."""
        if self.spans:
            return self.spans
        return (PolicySpan(self.sampled_tokens, self.policy_version, self.policy_version),)

    @property
    def sampled_tokens(self) -> int:
        """How many tokens were sampled: the ids, else the endpoint's count."""
        return self.completion_tokens if self.tokens_T is None else len(self.tokens_T)

    @property
    def reasoning(self) -> str:
        """The reasoning before the answer, tags included. The agent does not get it."""
        return self.text[: self.reasoning_chars]

    @property
    def unseen(self) -> str:
        """What was sampled after the text the agent got: a stop string, the end of the turn."""
        return self.text[self.reasoning_chars :].removeprefix(self.visible)


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion as it was asked for and served.

    The prompt is the first `kept` messages of the previous turn's conversation, then `messages`.
    `segment` counts id lines: a turn that does not continue the line opens the next one.
    `prompt_ids` are the ids added to the line before sampling (all of them in a segment's first
    turn); None if the endpoint takes no ids. `closing` is the text the agent appended to the
    segment's previous completion (its code tag, if sampling stopped without one). `agent`: the
    managed agent that asked, as the sandbox says; empty: the main one.
    `tools`: what the prompt offers. `opening`: how the answer was begun for the model, which went on behind it.
    `abandoned`: nobody got this answer, as who asked for it had hung up. The segment goes on before it.
    `inherited`: another rollout sampled it, from which this one branches: here it is context, not trained, and its
    tokens are counted there.
    """

    sequence: int
    kind: CompletionKind
    kept: int
    messages: tuple[Message, ...]
    segment: int
    prompt_ids: tuple[int, ...] | None
    closing: str
    completion: Completion
    started_s: float
    ended_s: float
    agent: str = ""
    tools: Tools = ()
    opening: str = ""
    abandoned: bool = False
    inherited: bool = False

    @property
    def is_step(self) -> bool:
        """Whether it is a step of the main agent. A managed agent's steps are part of the step that called it."""
        return self.kind is CompletionKind.ACTION and not self.agent
