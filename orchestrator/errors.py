"""What can go wrong, named by who broke it.

`executor` turns a `RolloutError` of an attempt into its outcome, except `AuthenticationError`, which ends the run.
At the start of a run, `host.open` turns it into `EnvironmentUnusable`; `host.breaker` and `launch.pool` wait and
try again. `cli` prints one line that says what to do, and exits with 2 for `ConfigError`, 3 for
`EnvironmentUnusable` and `AuthenticationError`, 1 for the rest. Any other exception that escapes is a bug and ends
the process.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class OrchestratorError(Exception):
    """Base of everything raised on purpose. `str(error)` is one line for the user, without secrets."""


class ConfigError(OrchestratorError):
    """The operator asked for something invalid. The text says which key and what would be valid. Exit 2."""


class EnvironmentUnusable(OrchestratorError):
    """Docker, image, tokenizer, endpoint, agent or scorer cannot be used. The text says what to do. Exit 3."""


class ImageUnusable(EnvironmentUnusable):
    """No sandbox can be made of an image, or none for the user that it is to run as, and that is not the machine's
    doing. The run's own image: exit 3. A task's: outcome `bad_task`."""


class BuildError(OrchestratorError):
    """A task's Dockerfile cannot be built, and that is not the machine's doing. Outcome `bad_task`."""


class NotServing(EnvironmentUnusable):
    """The endpoint is away or still loading, and was waited for as long as that was asked for. Exit 3."""


class AgentUnusable(EnvironmentUnusable):
    """The agent, a program of the operator's, never gets to a completion: the run is ended. Exit 3."""


class ScorerUnusable(EnvironmentUnusable):
    """The operator's scorer, or the judge, fails in its trial before anything is sampled. Exit 3."""


class RunLocked(OrchestratorError):
    """Another orchestrator is using this run directory. Exit 1."""


class OutputError(OrchestratorError):
    """A result cannot be written, for example on a full disk. Complete lines stay on disk. Exit 1."""


class NothingToCompare(OrchestratorError):
    """Data hold nothing of what a comparison needs. Exit 1: nothing was shown."""


class RunUnhealthy(OrchestratorError):
    """Most rollouts break, or a service that all of them need stays away: the run is ended. Exit 1."""


class CostReached(OrchestratorError):
    """`env.max_cost` leaves no room for another completion: the run is ended. Exit 1."""


class RolloutError(OrchestratorError):
    """One attempt broke for reasons that are not the policy's. Never scored."""


class LaunchError(RolloutError):
    """The sandbox did not come up: created, started, parked, confined. Outcome `launch_error`."""


class EngineUnfitError(LaunchError):
    """The Engine answers but cannot make sandboxes, and waiting does not help: its storage fails, or it lacks the
    runtime. The text says what to do."""


class SandboxLostError(RolloutError):
    """A sandbox vanished, or crashed before model-written code ran. Outcome `sandbox_lost`."""


class DockerError(RolloutError):
    """The Engine refused, hung or went away. Outcome `docker_error`."""


class CompletionError(RolloutError):
    """The inference endpoint did not give a usable completion. Outcome `llm_error`."""


class CompletionTimeout(CompletionError):
    """A completion did not come in time."""


class AuthenticationError(CompletionError):
    """The endpoint refuses a request (401, 403). If it refuses every request, the run stops: exit 3."""


class QuotaError(AuthenticationError):
    """The account has no credit left (402, `insufficient_quota`). As for a key that is refused."""


class ParameterError(AuthenticationError):
    """The endpoint cannot sample as the settings say, whoever asks. As for a key that is refused."""


class ToolServiceError(RolloutError):
    """A host tool's service failed, and `env.fail_on_tool_error` is set. Outcome `tool_error`."""


class ContextLengthError(OrchestratorError):
    """The prompt no longer fits the model. A policy outcome, not a failure: `context_length`."""


class FullContext(ContextLengthError):
    """The prompt leaves no room in what the endpoint says that it holds: nobody need be asked whether it is so."""


class ProtocolError(OrchestratorError):
    """A sandbox sent something invalid. The call is answered with INVALID_ARGUMENT."""


class ToolError(OrchestratorError):
    """A host tool failed. The agent gets the text as an observation."""


class ScorerError(OrchestratorError):
    """The scorer broke. Outcome `scorer_error`, never a reward of zero."""


class RecordError(OrchestratorError):
    """The record does not add up. Outcome `record_error`; never written as training data."""


@contextmanager
def os_error_as(kind: type[OrchestratorError], what: str, advice: str = "") -> Iterator[None]:
    """Within this block the system's refusal is raised as `kind`: what failed, the system's reason, the advice."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror}{advice}") from error
