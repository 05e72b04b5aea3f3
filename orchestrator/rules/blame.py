"""The rule of blame: who is at fault when a completion fails.

A policy that has sampled nothing cannot have caused the failure. After its first token a control decides: a prompt
that holds nothing of the policy's. If the control is answered, the failure is the policy's doing and is scored.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.completion.base import Interrupted, Refusal, UnusableSample
from orchestrator.errors import (
    AuthenticationError,
    CompletionError,
    CompletionTimeout,
    ContextLengthError,
    FullContext,
    OrchestratorError,
    ParameterError,
)
from orchestrator.rules.control import CACHE_S, ControlAnswer
from orchestrator.types import Completion

# The outcome if the policy is at fault; for any other error it is `no_answer`.
_POLICYS: Mapping[type[Exception], str] = {CompletionTimeout: "timeout", ContextLengthError: "context_length"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the lease ends. `fatal`: an error that ends the whole run. `sampled`: an unusable completion, to be
    recorded."""

    outcome: str
    detail: str
    fatal: AuthenticationError | None = None
    sampled: Completion | None = None


def needs_control(error: Exception, *, sampled: bool) -> bool:
    """Whether the policy could have caused this failure, or the failure could end the run. `sampled`: the policy
    has sampled a token."""
    if isinstance(error, FullContext):
        return False
    return sampled or isinstance(error, UnusableSample | AuthenticationError)


def control_age_s(error: Exception) -> float:
    """How old the control's answer may be, in seconds: some, for an error about one request, which no outage
    causes."""
    cause = _cause(error)
    of_request = isinstance(cause, UnusableSample | ContextLengthError)
    of_request |= isinstance(cause, Refusal) and cause.of_text
    return CACHE_S if of_request else 0.0


def may_pass(error: Exception) -> bool:
    """Whether the same request could be served if it is sent again. So could one that was refused: by a server
    behind the same address that the control did not meet. A sample that cannot be used was one."""
    cause = _cause(error)
    return isinstance(cause, CompletionError) and not isinstance(cause, UnusableSample)


def verdict(error: Exception, control: ControlAnswer | None, *, sampled: bool) -> Verdict:
    """The verdict on `error`. `control` None: none was asked. `sampled`: the policy has sampled a token."""
    infrastructure = isinstance(error, CompletionError | ContextLengthError)
    ours = "llm_error" if infrastructure else "record_error"
    what = str(error) if isinstance(error, OrchestratorError) else f"no completion: {type(error).__name__}"
    if control is None:
        return Verdict("context_length" if isinstance(error, ContextLengthError) else ours, what)
    what, cause = f"{what}; {control.remark()}", _cause(error)
    both = isinstance(control.failure, AuthenticationError)
    fatal = cause if both and isinstance(cause, AuthenticationError) else None
    # A parameter was refused to a neutral request, too: of the same kind, which only the operator chooses.
    of_settings = isinstance(cause, ParameterError)
    if not control.served or of_settings or not (sampled or isinstance(error, UnusableSample)):
        return Verdict(ours, what, fatal)
    unusable = error.completion if isinstance(error, UnusableSample) else None
    return Verdict(_POLICYS.get(type(cause), "no_answer"), what, fatal, unusable)


def _cause(error: Exception) -> Exception:
    """Why a completion came to nothing; of one that was aborted, why it was not continued."""
    return error.cause if isinstance(error, Interrupted) else error
