"""The shapes of the lines of a run's files, from which the published schemas are made, and their strict reading.

Any other line is refused, with the place and the reason. For display, files are read with `lenient`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypeVar

import orjson
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from orchestrator.rules.pools import Pool
from orchestrator.rules.text import MAX_JSON_INTEGER
from orchestrator.run.lines import demand_modest, demand_short_talks
from orchestrator.types import (
    AgentSpec,
    Branch,
    CompletionKind,
    Continued,
    Crossing,
    Difference,
    EndedName,
    FailedName,
    Grade,
    Limits,
    Message,
    OutputFile,
    PolicySpan,
    Sampling,
    SandboxExit,
    SandboxSpec,
    ServiceRecord,
    Step,
    StepGrade,
    TokenSource,
    ToolCall,
)

_REASON_CHARS = 200

T = TypeVar("T")
Whole = Annotated[int, Field(ge=0, le=MAX_JSON_INTEGER)]
Real = Annotated[float, Field(allow_inf_nan=False, le=MAX_JSON_INTEGER)]
Ids = tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...]  # as `completion.base.ids_of` takes them
Offer = tuple[dict[str, Any], ...]


class ServedLine(TypedDict):
    """One completion, as it was served. Its prompt: the first `kept` messages of the last one, then `messages`.

    The first `reasoning_chars` characters of `text` are reasoning; `visible` is what the agent got of the rest.
    `policy_version` sampled the last token; `policy_spans` is there where it did not sample all of them.
    `abandoned`: the program hung up before it got the completion, so that no line has it. `server_end`: the server
    alone says that its last token ends a turn. `inherited`: another rollout sampled it, from which this one
    branches.
    """

    kept: Whole
    messages: tuple[Message, ...]
    segment: Whole
    prompt_ids: Ids | None
    text: str
    visible: str
    finish_reason: Literal["stop", "length", "content_filter"]
    token_ids: Ids | None
    logprobs: tuple[Real, ...] | None
    prompt_tokens: Whole
    completion_tokens: Whole
    policy_version: str | None
    policy_spans: NotRequired[tuple[PolicySpan, ...]]
    reasoning_chars: NotRequired[Whole]
    server_end: NotRequired[bool]
    abandoned: NotRequired[bool]
    inherited: NotRequired[bool]


class CompletionLine(ServedLine):
    """One completion with the facts of its turn. Times in seconds since the rollout's `started_at`.

    `tools`: what the prompt offers, as a place in the rollout's `tools`, from 0; missing: as the completion
    before, none before the first. In schema 1 the tools themselves stand here. `opening`: how the answer was begun
    before it was sampled.
    """

    sequence: Whole
    kind: CompletionKind
    agent: NotRequired[str]
    closing: str
    tools: NotRequired[Whole | Offer]
    opening: NotRequired[str]
    started_s: Real
    ended_s: Real
    retries: Whole


class SandboxLine(TypedDict):
    """The sandbox, and how it ended if it ended by itself."""

    id: str
    exit: SandboxExit | None


class OutputLine(TypedDict):
    """The files that a rollout left, below `output/` and its id. `left_out`: how many it did not send."""

    files: tuple[OutputFile, ...]
    left_out: NotRequired[Whole]
    complete: NotRequired[bool]


class PlanLine(TypedDict):
    """The plan of a rollout, without the task: that stays in the data set."""

    sampling: Sampling
    agent: AgentSpec
    sandbox: SandboxSpec
    limits: Limits


class UngradedLine(TypedDict):
    """How a rollout ended that only lacks its score. On resume it is graded from its line."""

    outcome: EndedName
    reason: str


class HeadLine(TypedDict):
    """The fields of an attempt that are counted. Times in seconds."""

    schema: Literal[1, 2]
    rollout_id: str
    task_id: str
    group: Whole
    group_size: NotRequired[Annotated[int, Field(ge=1, le=MAX_JSON_INTEGER)]]
    index: Whole
    attempt: Whole
    outcome: EndedName | FailedName
    reason: str
    ungraded: NotRequired[UngradedLine | None]
    score: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None
    score_parts: dict[str, Annotated[float, Field(allow_inf_nan=False)]] | None
    score_evidence: NotRequired[dict[str, Any] | None]
    duration_s: Real
    cpu_s: Real | None


class AttemptLine(HeadLine):
    """One attempt, as a line of rollouts.jsonl. Times in seconds; `started_at` is Unix time. `reference`: the
    task's reference answer. `untrained_share`: how much of what was sampled is not in the main line, from 0 to
    1. `tools`: the different sets of tools that prompts offer, each once. `branch`: the rollout from which it
    branched, and the first turn of its own. `crossings`: what it asked of the outside. `continued`: how often its
    sandbox was lost and it went on in another one, or why it could not. `services`: what ran beside its agent."""

    level: str | None
    source: str
    answer: str | None
    reference: NotRequired[str | None]
    token_source: TokenSource | None
    segment: NotRequired[Whole | None]
    started_at: Real
    launch_s: Real
    waiting_s: Real
    untrained_share: NotRequired[Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None]
    sandbox: SandboxLine
    node: NotRequired[str | None]
    plan: PlanLine
    tools: NotRequired[tuple[Offer, ...]]
    completions: tuple[CompletionLine, ...]
    tool_calls: tuple[ToolCall, ...]
    steps: tuple[Step, ...]
    output: NotRequired[OutputLine | None]
    changes: NotRequired[Difference | None]
    grade: NotRequired[Grade | None]
    step_grades: NotRequired[tuple[StepGrade, ...]]
    branch: NotRequired[Branch]
    continued: NotRequired[tuple[Continued, ...]]
    crossings: NotRequired[tuple[Crossing, ...]]
    services: NotRequired[tuple[ServiceRecord, ...]]
    notes: tuple[str, ...]
    unused_fields: NotRequired[tuple[str, ...]]
    refused_requests: NotRequired[tuple[str, ...]]


class BadTaskLine(TypedDict):
    """A row that no task could be made of, as a line of rollouts.jsonl."""

    schema: Literal[1]
    rollout_id: str
    task_id: str
    group: Whole
    outcome: Literal["bad_task"]
    reason: str


class DroppedLine(TypedDict):
    """A group that was not written, as a line of dropped.jsonl. A group that comes again on resume and is written
    then keeps its line."""

    schema: Literal[1]
    group: Whole
    task_id: str
    reason: str


class ResultLine(TypedDict):
    """What the curriculum goes by, as a line of curriculum.jsonl: of a group's rollouts with a score, how many
    solved the task, and whether their scores differ. `round`, `pool`, `retest`: why it was drawn. No task and
    nothing scored: no result came of the group. `turn`: where these rollouts began, by `env.start_at`."""

    schema: Literal[1]
    group: Whole
    task_id: str
    scored: Whole
    solved: Whole
    differ: bool
    turn: NotRequired[Whole]
    round: NotRequired[Whole]
    pool: NotRequired[Pool]
    retest: NotRequired[bool]


def read_line(adapter: TypeAdapter[T], text: bytes) -> T:
    """Raises ValueError: one line with the place in the value and what is wrong there."""
    try:
        demand_modest(text)
        value = adapter.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        # For a union, pydantic's place begins with the name of a class, which is not in the file.
        place = ".".join(str(part) for part in first["loc"] if not str(part).endswith("Line"))
        raise ValueError(f"{place}: {first['msg']}"[:_REASON_CHARS] if place else first["msg"]) from None
    except orjson.JSONDecodeError as error:
        raise ValueError(error.msg) from None
    demand_short_talks(value)
    return value
