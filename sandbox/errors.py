"""What can end a step, and what can end the episode.

Step errors are ordinary exceptions: smolagents turns them into an observation and goes on. Ends of
the episode are `BaseException`s, because smolagents catches every `Exception` around a completion
and would hand it to the model as text.
"""


class CodeError(Exception):
    """The step's code failed; `str(error)` is the observation."""


class ToolFailure(Exception):
    """A host tool failed; the model-written code that called it gets this text."""


class Interrupted(Exception):
    """The `bell` rang while the runner waited for a frame (`WorkerLink.receive`)."""


class RequestRefused(Exception):
    """The orchestrator cannot serve a request, and sampled nothing; `str(error)` says why. `param`: OpenAI's name
    of the field at fault, or empty. `too_long`: the conversation has more tokens than it may."""

    def __init__(self, message: str, param: str = "", *, too_long: bool = False) -> None:
        super().__init__(message)
        self.param = param
        self.too_long = too_long


class ClientGone(Exception):
    """The program hung up before it got an answer: nobody waits for one."""


class WorkerLost(Exception):
    """The code worker cannot be used any more; `replace` it."""


class StepTimeout(WorkerLost):
    """The step's time is over."""


class WorkerDied(WorkerLost):
    """The worker process ended by itself. `status`: exit code, or minus the signal that killed it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"exit status {status}")
        self.status = status


class WorkerReplaced(WorkerLost):
    """A managed agent's step lost the worker in which its caller's step was waiting."""


class WorkerMisbehaved(WorkerLost):
    """The worker sent what the harness never sends, closed its pipe, or cannot load a sandbox tool."""


class EpisodeEnd(BaseException):
    """The agent loop stops here."""


class LeaseEnded(EpisodeEnd):
    """The orchestrator ended the rollout: no result is submitted."""


class ChannelLost(EpisodeEnd):
    """The orchestrator cannot be reached any more."""


class StepsUsedUp(EpisodeEnd):
    """The main agent took all its steps without an answer."""


class MemoryUsedUp(EpisodeEnd):
    """The code worker was killed for memory in too many consecutive steps."""


class EpisodeCrashed(EpisodeEnd):
    """The runner failed, or the orchestrator refused a call; `str(error)` says how."""


class PlaceUnusable(EpisodeEnd):
    """Code cannot work in the directory that the task names, or its healthcheck fails; `str(error)` says why."""


class SupervisorGone(EpisodeEnd):
    """Pid 1 has ended, and the whole sandbox ends with it. Only the orchestrator can tell why."""
