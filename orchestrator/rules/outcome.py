"""Decides the outcome of a rollout; no other module does. Pure.

| what ended it | outcome |
|---|---|
| a result: final answer | `finished`; `invalid_answer` unless it is UTF-8 text of at most 64 KiB |
| a result: steps used up, no answer | `max_steps`, `no_answer` |
| a result: the worker was killed for memory three times | `out_of_memory` |
| a result: the task's place cannot be had, or its healthcheck fails | `bad_task`, or see below |
| a result: the runner broke; or the container ended without a result | see below |
| the proxy refused to serve on | the name it gave: `budget`, `context_length`, `max_steps`, `timeout`, |
|  | `no_answer`, `llm_error`, `tool_error`, `bad_task`, `record_error` |
| the rollout's own clock | `timeout` |
| a service of the task ended | see below |
| the deadline | `timeout`, or see below |
| the Engine failed, the sandbox vanished or never came up | `docker_error`, `sandbox_lost`, `launch_error` |

A deadline mostly spent waiting for the endpoint is `llm_error` if nothing was sampled, or if the endpoint does not
answer a neutral prompt either. Time spent waiting for a host tool does not count here: an agent can choose slow
pages on purpose.
A sandbox that crashes before its first completion ran none of the model's code: `sandbox_lost`. After that, a
crash counts as the policy's doing, and no policy can earn another try by it: `out_of_memory` if the kernel killed
pid 1 or the runner for memory, else `sandbox_crashed`.
For the same reason a sandbox is believed that the task is to blame only before its first completion.
A service beside the agent is judged likewise: its end is `sandbox_lost` before the first sampled token, and where
the same service, left alone for as long, ends too. Else it is the policy's: `out_of_memory` if the kernel killed
it for memory, or `sandbox_crashed`.
An exit code alone proves nothing: `os._exit(0)` gives 0, any kill gives 137, and the Engine's OOM flag is also set
if only a child was killed and the container exited later by itself.
Nothing is scored without a sampled token: then `context_length` becomes `bad_task`. A program without a completion
is the operator's to mend, whatever it ended with: `agent_error`. So is an image without a shell for a shell agent,
which gives up without a completion. Only if it ended while its first completion was
awaited, the endpoint was slow or the program impatient: `llm_error`. For other agents, and for a completion
without a token, every other scored end becomes `sandbox_lost`. If a program gave up later, while a completion was
awaited, and the endpoint does not answer a neutral prompt either: `llm_error`.
"""

from dataclasses import dataclass, field

from orchestrator.errors import (
    CompletionError,
    DockerError,
    EngineUnfitError,
    LaunchError,
    RolloutError,
    SandboxLostError,
)
from orchestrator.rules.control import ControlAnswer
from orchestrator.rules.redact import redact
from orchestrator.types import (
    Ended,
    EndedName,
    Failed,
    FailedName,
    Outcome,
    Record,
    RequestNotes,
    SandboxExit,
    Step,
)

MAX_ANSWER_BYTES = 64 * 1024
KILLED = 137  # 128 + SIGKILL
MAX_LINES = 16  # of what a sandbox says of its program


@dataclass(frozen=True, slots=True)
class Submission:
    """The result that the sandbox submitted.

    `control`: what the endpoint answered to a neutral prompt, where a program gave up while a completion was
    awaited; None: it was not asked.
    """

    reason: str
    answer: bytes | None
    detail: str
    steps: tuple[Step, ...] = ()
    control: ControlAnswer | None = None
    requests: RequestNotes = field(default_factory=RequestNotes)
    step: int = 1  # of the task, which it ends

    @property
    def ends_step(self) -> bool:
        """Whether the agent has done what it could for this step, and is there for the next one."""
        over = self.reason in ("final_answer", "max_steps", "no_answer")
        return over and (self.control is None or self.control.served)


@dataclass(frozen=True, slots=True)
class Refused:
    """The lease ended because a call could not be served. `name` is an outcome's name."""

    name: str
    detail: str


@dataclass(frozen=True, slots=True)
class ClockExpired:
    """The sandbox used up its own time."""


@dataclass(frozen=True, slots=True)
class DeadlineExpired:
    """The deadline passed; the sandbox waited `sampling_s` of that time for completions.

    `control`: what the endpoint then answered to a neutral prompt; None: it was not asked.
    """

    sampling_s: float
    control: ControlAnswer | None = None


@dataclass(frozen=True, slots=True)
class ServiceEnd:
    """A service ended that was to go on. `lived_s`: since it began. `excuse`: why it was not the policy's doing;
    empty: it was."""

    name: str
    detail: str
    out_of_memory: bool
    lived_s: float
    excuse: str = ""


Ending = Submission | Refused | SandboxExit | ServiceEnd | ClockExpired | DeadlineExpired | RolloutError

_BY_ERROR: dict[type[RolloutError], FailedName] = {
    CompletionError: FailedName.LLM_ERROR,
    DockerError: FailedName.DOCKER_ERROR,
    LaunchError: FailedName.LAUNCH_ERROR,
    EngineUnfitError: FailedName.LAUNCH_ERROR,
    SandboxLostError: FailedName.SANDBOX_LOST,
}
_ENDED = frozenset(str(name) for name in EndedName)
_BY_REASON = {
    "max_steps": EndedName.MAX_STEPS,
    "no_answer": EndedName.NO_ANSWER,
    "out_of_memory": EndedName.OUT_OF_MEMORY,
}


def decide(
    ending: Ending, record: Record, *, program: bool = False, awaited: bool = False
) -> tuple[Outcome, str | None]:
    """(the outcome, the accepted answer). `program`: the agent is a program. `awaited`: a completion was asked for
    and not there yet when the rollout ended."""
    outcome, answer = _decide(ending, record)
    if isinstance(outcome, Ended) and record.sampled_tokens == 0:
        if outcome.name is EndedName.CONTEXT_LENGTH:
            return Failed(FailedName.BAD_TASK, f"the task does not fit: {outcome.detail}"), None
        gave_up = isinstance(ending, Submission) and ending.reason == "no_answer"
        if (program or gave_up) and not record.turns:
            return _of_program(ending, outcome, awaited=awaited), None
        return Failed(FailedName.SANDBOX_LOST, _unsampled(outcome)), None
    return outcome, answer


def _of_program(ending: Ending, ended: Ended, *, awaited: bool) -> Failed:
    """Why there is no completion. What the sandbox says of it is for display alone."""
    words = redact(ending.detail) if isinstance(ending, Submission) else f"{ended.name}, {ended.detail}"
    why = "\n".join([line for line in words.split("\n") if line.strip()][:MAX_LINES]) or str(ended.name)
    # A completion that cannot be served ends the rollout by another name. Requests that were refused are the
    # program's, also where the orchestrator or the endpoint refused them.
    if awaited:
        return Failed(FailedName.LLM_ERROR, f"the first completion was still awaited: {why}")
    return Failed(FailedName.AGENT_ERROR, f"no completion: {why}")


def _unsampled(ended: Ended) -> str:
    return f"{ended.name} without a sampled token" + f": {ended.detail}" * bool(ended.detail)


def _decide(ending: Ending, record: Record) -> tuple[Outcome, str | None]:
    match ending:
        case Submission(detail=detail, control=ControlAnswer(served=False) as control):
            what = f"a completion was still awaited: {redact(detail)}; {control.remark()}"
            return Failed(FailedName.LLM_ERROR, what), None
        case Submission(reason="final_answer", answer=answer):
            return _answered(answer)
        case Submission(reason="bad_task", detail=detail) if not record.turns:
            return Failed(FailedName.BAD_TASK, redact(detail)), None
        case Submission(reason="crashed" | "bad_task", detail=detail):
            return _crashed(record, SandboxExit(None, oom_killed=False, reason=detail)), None
        case Submission(reason=reason, detail=detail):
            return Ended(_BY_REASON[reason], detail), None
        case Refused(name=name, detail=detail):
            if name in _ENDED:
                return Ended(EndedName(name), detail), None
            return Failed(FailedName(name), detail), None
        case RolloutError():
            return failed(ending), None
        case SandboxExit():
            return _crashed(record, ending), None
        case ServiceEnd(name=name, detail=detail, excuse=excuse):
            what = f"the service {name}: {detail}"
            if not record.sampled_tokens or excuse:
                return Failed(FailedName.SANDBOX_LOST, f"{what}; {excuse}" if excuse else what), None
            ended = EndedName.OUT_OF_MEMORY if ending.out_of_memory else EndedName.SANDBOX_CRASHED
            return Ended(ended, what), None
        case ClockExpired():
            return Ended(EndedName.TIMEOUT, "the rollout's own clock"), None
        case DeadlineExpired(sampling_s=sampling_s, control=control):
            if sampling_s <= record.duration_s / 2:
                return Ended(EndedName.TIMEOUT, "the deadline"), None
            what = "the deadline, mostly waiting for the endpoint" + (f"; {control.remark()}" if control else "")
            # The endpoint works: the policy chose how many completions it waited for, and how long they were.
            if record.sampled_tokens and control is not None and control.served:
                return Ended(EndedName.TIMEOUT, what), None
            return Failed(FailedName.LLM_ERROR, what), None


def failed(error: RolloutError) -> Failed:
    """The outcome of a failure that is not the policy's."""
    return Failed(_BY_ERROR.get(type(error), FailedName.SANDBOX_LOST), str(error))


def _answered(answer: bytes | None) -> tuple[Outcome, str | None]:
    if answer is None:
        return Ended(EndedName.NO_ANSWER), None
    if len(answer) > MAX_ANSWER_BYTES:
        return Ended(EndedName.INVALID_ANSWER, f"over {MAX_ANSWER_BYTES} bytes"), None
    try:
        return Ended(EndedName.FINISHED), answer.decode("utf-8")
    except UnicodeDecodeError:
        return Ended(EndedName.INVALID_ANSWER, "no UTF-8 text"), None


def _crashed(record: Record, how: SandboxExit) -> Outcome:
    code = "?" if how.exit_code is None else how.exit_code
    detail = how.reason or f"exit code {code}"
    if not record.turns:
        return Failed(FailedName.SANDBOX_LOST, f"ended before the first completion: {detail}")
    if how.oom_killed and how.exit_code == KILLED:
        return Ended(EndedName.OUT_OF_MEMORY, detail)
    return Ended(EndedName.SANDBOX_CRASHED, detail)
