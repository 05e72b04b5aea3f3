"""A sandbox's requests to its lease and the replies, as plain values. `outcome` has the ones for its end."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.types import Completion, CompletionKind, Message, Step


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
    """A request for a completion. `agent`: the managed agent that asks; empty: the main one. `steps`: ended since
    the last request."""

    sequence: int
    kind: CompletionKind
    messages: tuple[Message, ...]
    stop: tuple[str, ...] = ()
    agent: str = ""
    steps: tuple[Step, ...] = ()
