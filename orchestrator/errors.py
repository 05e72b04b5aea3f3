"""What can go wrong, named by who broke it.

`RolloutError`s are caught in one place (`executor.attempt`) and become an
outcome; everything else that escapes is a bug and stops the process. The
commands turn `ConfigError` into exit code 2, `EnvironmentUnusable` into 3 and
the others below into 1, each as one line that says what to do.
"""

from __future__ import annotations


class OrchestratorError(Exception):
    """Base of everything raised on purpose. `str(error)` is one line for the user, without secrets."""


class ConfigError(OrchestratorError):
    """The operator asked for something invalid; says which key and what would be valid. Exit 2."""


class EnvironmentUnusable(OrchestratorError):
    """Docker, image, tokenizer or endpoint cannot serve; says what to do. Exit 3."""


class RunLocked(OrchestratorError):
    """Another orchestrator works in this run directory. Exit 1."""


class OutputError(OrchestratorError):
    """A result cannot be written: the disk is full. What is on disk is whole. Exit 1."""


class RunUnhealthy(OrchestratorError):
    """Most rollouts break, or what all of them need stays away: going on would lead nowhere. Exit 1."""


class RolloutError(OrchestratorError):
    """One attempt broke for reasons that are not the policy's. Never scored."""


class LaunchError(RolloutError):
    """The sandbox did not come up: created, started, parked, confined. Outcome `launch_error`."""


class EngineUnfitError(LaunchError):
    """The Engine answers and cannot make sandboxes for a reason that no waiting ends: its storage fails, it lacks
    the runtime. Says what to do."""


class SandboxLostError(RolloutError):
    """A sandbox vanished, or crashed before model-written code ran. Outcome `sandbox_lost`."""


class DockerError(RolloutError):
    """The Engine refused, hung or went away. Outcome `docker_error`."""


class CompletionError(RolloutError):
    """The inference endpoint did not give a usable completion. Outcome `llm_error`."""


class CompletionTimeout(CompletionError):
    """A completion did not come in time."""


class AuthenticationError(CompletionError):
    """The endpoint refuses a request (401, 403). Where it refuses everything, the run stops: exit 3."""


class ToolServiceError(RolloutError):
    """A host tool's service failed, where the operator wants no rollout without it. Outcome `tool_error`."""


class ContextLengthError(OrchestratorError):
    """The prompt no longer fits the model. A policy outcome, not a failure: `context_length`."""


class ProtocolError(OrchestratorError):
    """A sandbox sent what we refuse. Becomes INVALID_ARGUMENT."""


class ToolError(OrchestratorError):
    """A host tool failed; the text is an observation for the agent."""


class ScorerError(OrchestratorError):
    """Our grading broke. Outcome `scorer_error`, never a reward of zero."""


class RecordError(OrchestratorError):
    """The record does not add up. Outcome `record_error`; never written as training data."""
