"""What the proxy served to one rollout."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.types.completions import Turn
from orchestrator.types.confinement import SandboxExit
from orchestrator.types.differences import Difference
from orchestrator.types.grading import Grade, StepGrade


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a host tool, as performed. Exactly one of `output` and `error` is set."""

    sequence: int
    name: str
    arguments: Mapping[str, Any]
    output: str | None
    error: str | None
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """One agent step as the sandbox reports it. Untrusted: for display only."""

    step_number: int
    model_output: str
    code: str
    observations: str
    error_type: str
    error: str
    is_final_answer: bool
    duration_s: float
    agent: str = ""


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file that model-written code left. `path`: relative to the rollout's folder, safe to open there."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Output:
    """The files received from the sandbox's `output/`. `left_out`: the sandbox's count of files it did not send
    (links, devices, files over the limits).

    `complete` False: the stream broke off, and `files` are those received before. `folder`: where they are, for a
    scorer; empty where that is not known. It is not on record.
    """

    files: tuple[OutputFile, ...] = ()
    left_out: int = 0
    complete: bool = True
    folder: str = ""


@dataclass(frozen=True, slots=True)
class RequestNotes:
    """Of a program's requests, as its sandbox tells: fields that had no effect, and requests that were not served
    (on record are those after the first completion). For people."""

    unused_fields: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """All that is known of one attempt. `steps` and `answer` are the sandbox's word; the orchestrator saw the rest
    itself. Times in seconds since `started_at`."""

    started_at: float  # unix time of the assignment, or of the failed launch
    turns: tuple[Turn, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    steps: tuple[Step, ...] = ()
    answer: str | None = None
    sandbox_id: str = ""
    exit: SandboxExit | None = None
    launch_s: float = 0.0
    duration_s: float = 0.0
    waiting_s: float = 0.0
    cpu_s: float | None = None
    notes: tuple[str, ...] = ()
    requests: RequestNotes = RequestNotes()
    output: Output | None = None  # None: no files were asked for, or none were received
    grade: Grade | None = None  # None: its task has no grader, or it ended in a way that is not scored
    step_grades: tuple[StepGrade, ...] = ()  # of a task with steps, those that were graded; `grade` is of all
    changes: Difference | None = None  # None: the root was read-only, or it is not known (then a note says why)
    node: str = ""  # of a cluster; empty: the orchestrator's own machine

    @property
    def action_steps(self) -> int:
        """Steps of the main agent, counted from the turns."""
        return sum(turn.is_step for turn in self.turns)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens over all turns; those of a repeated prompt count again."""
        return sum(turn.completion.prompt_tokens for turn in self.turns)

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled over all turns, by the endpoint's count."""
        return sum(turn.completion.completion_tokens for turn in self.turns)

    @property
    def policy_versions(self) -> tuple[str, ...]:
        """The policy versions that sampled it, in the order they came; empty if the endpoint names none."""
        spans = (span for turn in self.turns for span in turn.completion.sampled_by)
        named = (version for span in spans for version in (span.oldest, span.newest))
        return tuple(dict.fromkeys(version for version in named if version is not None))

    @property
    def policy_version(self) -> str | None:
        """The policy version that sampled last; None if the endpoint does not name it."""
        return self.turns[-1].completion.policy_version if self.turns else None
