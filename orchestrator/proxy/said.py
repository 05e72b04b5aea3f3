"""What a sandbox and its lease say to each other, checked and converted: requests, replies, results, refusals."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.types import Completion, CompletionKind, Message, Step

MAX_ANSWER_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Submission:
    """What the sandbox says became of the episode."""

    reason: str
    answer: bytes | None
    detail: str
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """The lease ended because something could not be served. `name` is an outcome's name."""

    name: str
    detail: str


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to Complete: a completion, or the name of the outcome that ended the lease."""

    completion: Completion | None = None
    ended: str | None = None


@dataclass(frozen=True, slots=True)
class ToolReply:
    """Answer to CallTool."""

    output: str | None = None
    error: str | None = None
    ended: str | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for a completion. `agent`: the managed agent that asks; empty: the main one. `steps`: those that
    ended since the last request."""

    sequence: int
    kind: CompletionKind
    messages: tuple[Message, ...]
    stop: tuple[str, ...]
    agent: str
    steps: tuple[Step, ...]
