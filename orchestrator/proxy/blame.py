"""Who is at fault when a completion fails: the rule of blame, decided for one completion.

A policy that has sampled nothing cannot have chosen a failure. After its first token a control decides: a prompt
without a word of the policy's. Where the control gets an answer, the failure is the policy's own end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.completion.base import Refusal, UnusableSample
from orchestrator.control import CACHE_S, ControlAnswer
from orchestrator.errors import (
    AuthenticationError,
    CompletionError,
    CompletionTimeout,
    ContextLengthError,
    OrchestratorError,
)
from orchestrator.types import Completion

# What the policy's own end is called; any other is `no_answer`.
_POLICYS: Mapping[type[Exception], str] = {CompletionTimeout: "timeout", ContextLengthError: "context_length"}
# Answers about one request that no outage gives: the answer of a control of some seconds ago will do.
_REFUSED = (Refusal, UnusableSample, ContextLengthError)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the lease ends with. `fatal`: ends the whole run. `sampled`: what was sampled all the same."""

    outcome: str
    detail: str
    fatal: AuthenticationError | None = None
    sampled: Completion | None = None


def needs_control(error: Exception, *, sampled: bool) -> bool:
    """Whether the policy could have chosen this failure, or it would end the run. `sampled`: it has a token."""
    return sampled or isinstance(error, UnusableSample | AuthenticationError)


def control_age_s(error: Exception) -> float:
    """How old the answer of a control may be, in seconds."""
    return CACHE_S if isinstance(error, _REFUSED) else 0.0


def may_pass(error: Exception) -> bool:
    """Whether the same request may be served a moment later."""
    return isinstance(error, CompletionError) and not isinstance(error, _REFUSED)


def verdict(error: Exception, control: ControlAnswer | None, *, sampled: bool) -> Verdict:
    """`control`: None where none was asked."""
    infrastructure = isinstance(error, CompletionError | ContextLengthError)
    ours = "llm_error" if infrastructure else "record_error"
    what = str(error) if isinstance(error, OrchestratorError) else f"no completion: {type(error).__name__}"
    if control is None:
        return Verdict("context_length" if isinstance(error, ContextLengthError) else ours, what)
    what = f"{what}; {control.told()}"
    both = isinstance(error, AuthenticationError) and isinstance(control.failure, AuthenticationError)
    fatal = error if both and isinstance(error, AuthenticationError) else None
    if not control.served or not (sampled or isinstance(error, UnusableSample)):
        return Verdict(ours, what, fatal)
    unusable = error.completion if isinstance(error, UnusableSample) else None
    return Verdict(_POLICYS.get(type(error), "no_answer"), what, fatal, unusable)
