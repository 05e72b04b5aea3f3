"""What the proxy served to one rollout."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.types.completions import Turn
from orchestrator.types.confinement import SandboxExit
from orchestrator.types.differences import Difference
from orchestrator.types.grading import Grade, StepGrade
from orchestrator.types.services import ServiceRecord


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
class Crossing:
    """One request that came to the border of a sandbox, or one tunnel. Nothing of it is a key.

    `method`: CONNECT for a tunnel, and for what was refused before anything was asked inside one. `target`: path
    and query. `status`: of the answer that the sandbox got; None: there was none. `refusal`: why it did not leave,
    or why it broke off. `sent`, `received`: bytes of its body and of the answer's, as the sandbox has them; of a
    tunnel, all. `sent_sha256`, `received_sha256`: of whole bodies; None: not whole. `kept`: both bodies are in
    `egress/` of the run, by their hashes. `headers`: of the answer. `source`: who answered. `keys`: that were put
    in. `redacted`: how often the answer had one.
    """

    sequence: int
    started_s: float
    ended_s: float
    method: str
    scheme: str
    host: str
    port: int
    target: str
    status: int | None = None
    refusal: str = ""
    sent: int = 0
    received: int = 0
    sent_sha256: str | None = None
    received_sha256: str | None = None
    kept: bool = False
    headers: tuple[tuple[str, str], ...] = ()
    source: Literal["network", "cache", "record", "border"] = "border"
    keys: int = 0
    redacted: int = 0

    @property
    def url(self) -> str:
        """Without the usual port left out: the same for the same place."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.target}"


def count_crossings(requests: Iterable[tuple[object, object]]) -> Counter[str]:
    """Of requests to the outside, each as (refusal, source): how many `requests` there are, and of them how many
    were `refused`, `cached` (the cache answered) and `paid` (the network did)."""
    counts = Counter[str]()
    for refusal, source in requests:
        counts["requests"] += 1
        counts["refused"] += bool(refusal)
        counts["cached"] += source == "cache" and not refusal
        counts["paid"] += source == "network"
    return counts


@dataclass(frozen=True, slots=True)
class Parting:
    """A sandbox that goes on with a rollout is on its own from here: of the turns that it goes on behind, those at
    the places `kept` (from 0 on) are its own. `why`: what differs."""

    kept: tuple[int, ...]
    why: str


Entry = Turn | ToolCall | Crossing | Parting  # what a sandbox is served, and where it leaves the record


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


_ROLLOUT_ID = re.compile(r"g\d{6,16}-r\d{2,16}-a\d{1,16}", re.ASCII)  # as `rules.plan` makes them
_MOST = 1 << 53  # every reader of JSON has such numbers exactly


def _demand_count(name: str, value: int, least: int) -> None:
    """Raises ValueError: records may be forged."""
    if not least <= value <= _MOST:
        raise ValueError(f"{name} is not from {least} to {_MOST}")


@dataclass(frozen=True, slots=True)
class Word:
    """What a user put behind the prompt of a turn, which is counted from 1 on."""

    turn: int
    text: str

    def __post_init__(self) -> None:
        _demand_count("turn", self.turn, 1)


@dataclass(frozen=True, slots=True)
class Branch:
    """Where a rollout branched from another one. `turn`: the first that it sampled itself, from 1 on. `words`: of
    users, in its prompts, with those that it has from its parent. `run`: the directory of the parent's run; empty:
    it is the same run."""

    parent: str
    turn: int
    words: tuple[Word, ...] = ()
    run: str = ""

    def __post_init__(self) -> None:
        if not _ROLLOUT_ID.fullmatch(self.parent):
            raise ValueError("parent is not the id of a rollout, like g000003-r01-a0")
        _demand_count("turn", self.turn, 1)


@dataclass(frozen=True, slots=True)
class Continued:
    """A rollout went on in a fresh sandbox. `turn`: the last that was there, from 1 on. `reason`: why the sandbox
    before it is gone. `tokens`: that were sampled before, and kept. `refused`: why it did not go on behind its
    last turn; empty: it did."""

    turn: int
    tokens: int
    reason: str
    refused: str = ""

    def __post_init__(self) -> None:
        _demand_count("turn", self.turn, 0)
        _demand_count("tokens", self.tokens, 0)


@dataclass(frozen=True, slots=True)
class Record:
    """All that is known of one attempt. `steps` and `answer` are the sandbox's word; the orchestrator saw the rest
    itself. Times in seconds since `started_at`."""

    started_at: float  # unix time of the assignment, or of the failed launch
    turns: tuple[Turn, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    crossings: tuple[Crossing, ...] = ()
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
    branch: Branch | None = None  # None: it began with the task
    continued: tuple[Continued, ...] = ()  # how often its sandbox was lost; only the last may be refused
    services: tuple[ServiceRecord, ...] = ()  # in the order in which they were started

    @property
    def own_turns(self) -> tuple[Turn, ...]:
        """Those that were sampled for it, not for the rollout from which it branched."""
        return tuple(turn for turn in self.turns if not turn.inherited)

    @property
    def fork(self) -> Branch | None:
        """Where it branched from a rollout of its own run, and so of its group. None: it did not."""
        return self.branch if self.branch is not None and not self.branch.run else None

    @property
    def action_steps(self) -> int:
        """Steps of the main agent, counted from the turns."""
        return sum(turn.is_step for turn in self.turns)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens over all turns but inherited ones; those of a repeated prompt count again."""
        return sum(turn.completion.prompt_tokens for turn in self.own_turns)

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled over all turns but inherited ones, by the endpoint's count."""
        return sum(turn.completion.completion_tokens for turn in self.own_turns)

    @property
    def crossing_counts(self) -> Counter[str]:
        """As `count_crossings` counts them."""
        return count_crossings((one.refusal, one.source) for one in self.crossings)

    @property
    def policy_versions(self) -> tuple[str, ...]:
        """The policy versions that sampled it, in the order they came; empty if the endpoint names none."""
        spans = (span for turn in self.own_turns for span in turn.completion.sampled_by)
        named = (version for span in spans for version in (span.oldest, span.newest))
        return tuple(dict.fromkeys(version for version in named if version is not None))

    @property
    def policy_version(self) -> str | None:
        """The policy version that sampled last; None if the endpoint does not name it."""
        return self.turns[-1].completion.policy_version if self.turns else None
