"""The codec of a run's record: converts attempts to lines of the run's files, and back.

The typed dictionaries here define the lines of rollouts.jsonl; the published schemas are made from them. Reading
is strict: any other line is refused, with the place and the reason. For display, files are read with `lenient`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Literal, NotRequired, TypeVar

import orjson
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from orchestrator.calls.declared import text_of
from orchestrator.completion.trajectory import main_segment, untrained_share
from orchestrator.rules.pools import Choice, GroupResult, Pool
from orchestrator.rules.text import MAX_JSON_INTEGER
from orchestrator.run.files import SCHEMA
from orchestrator.run.lines import demand_modest, demand_short_talks
from orchestrator.types import (
    AgentSpec,
    Attempt,
    BadTask,
    Branch,
    Completion,
    CompletionKind,
    Continued,
    Crossing,
    Difference,
    Ended,
    EndedName,
    Failed,
    FailedName,
    Grade,
    Limits,
    ManagedAgent,
    Member,
    Message,
    Outcome,
    Output,
    OutputFile,
    PolicySpan,
    Record,
    RequestNotes,
    Sampling,
    SandboxExit,
    SandboxSpec,
    Score,
    ServiceRecord,
    Step,
    StepGrade,
    TokenSource,
    ToolCall,
    Tools,
    Turn,
    count_crossings,
)

ATTEMPT_SCHEMA = 2  # since a rollout's tools are written once; attempts of schema 1 are read too
_MOST_ON_WIRE = (1 << 31) - 1  # of numbers sent to a sandbox or an inference server
_REASON_CHARS = 200

# Which fields of a value stand in its line as they are, by the same name.
_OF_PLAN = ("rollout_id", "group", "index", "attempt")
_OF_TASK = ("task_id", "level", "source", "reference")
_OF_MEMBER = ("token_source", "segment")
_SPARSE = ("group_size", "untrained_share")  # missing: not known
_SPECS = ("sampling", "agent", "sandbox", "limits")  # of the plan, below `plan`
_OF_RECORD = ("answer", "started_at", "launch_s", "duration_s", "waiting_s", "cpu_s", "notes")
_WHERE_KNOWN = ("changes", "grade", "branch")
_SEVERAL = ("step_grades", "continued", "crossings", "services")
_TOOL_CALL = [field.name for field in fields(ToolCall)]  # `asdict` would copy the arguments deeply
_TURN = [f.name for f in fields(Turn) if f.name not in ("messages", "completion", "tools")]
_RENAMED = {"tokens_T": "token_ids", "logprobs_T": "logprobs", "spans": "policy_spans"}
_COMPLETION = {f.name: _RENAMED.get(f.name, f.name) for f in fields(Completion)}
_SPARSE_IN_TURN = ("opening", "abandoned", "inherited", "policy_spans", "server_end")  # missing: they say nothing

T = TypeVar("T")
Whole = Annotated[int, Field(ge=0, le=MAX_JSON_INTEGER)]
Real = Annotated[float, Field(allow_inf_nan=False, le=MAX_JSON_INTEGER)]
Ids = tuple[Whole, ...]
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


class _Tokens(TypedDict):
    prompt_tokens: Whole
    completion_tokens: Whole
    inherited: NotRequired[bool]


class _CountedRequest(TypedDict):
    refusal: NotRequired[str]
    source: NotRequired[str]


class _CountedLine(HeadLine):
    completions: tuple[_Tokens, ...]
    crossings: NotRequired[tuple[_CountedRequest, ...]]
    continued: NotRequired[tuple[Continued, ...]]
    refused_requests: NotRequired[tuple[str, ...]]
    branch: NotRequired[Branch]


class _CrossingsLine(TypedDict):
    rollout_id: str
    task_id: str
    crossings: NotRequired[tuple[Crossing, ...]]


class _CallLine(ServedLine):
    sequence: NotRequired[Whole]


# What a recording may lack of a completion's line.
_NO_TURN: Any = {"kind": CompletionKind.ACTION, "closing": "", "started_s": 0.0, "ended_s": 0.0, "retries": 0}


class _EpisodeLine(TypedDict):
    task_id: str
    index: Whole
    rollout_id: NotRequired[str]
    score: Real
    completions: tuple[_CallLine, ...]


class _UnscoredLine(TypedDict):
    score: NotRequired[None]


class _GroupFacts(TypedDict):
    rollout_id: str
    completion_tokens: NotRequired[Whole]
    untrained_share: NotRequired[Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]]


class _GroupHeadLine(TypedDict):
    overrides: tuple[_GroupFacts, ...]
    scores: tuple[Real, ...]


# ---------------------------------------------------------------- one attempt, to and from


@dataclass(frozen=True, slots=True)
class RecordedAttempt:
    """One attempt, read back. Its line holds neither the task nor the trajectory: both are made again."""

    rollout_id: str
    task_id: str
    group: int
    index: int
    attempt: int
    sampling: Sampling
    agent: AgentSpec
    sandbox: SandboxSpec
    limits: Limits
    record: Record
    outcome: Outcome
    ungraded: Ended | None
    score: Score | None
    token_source: TokenSource | None
    level: str | None = None
    source: str = ""
    segment: int | None = None  # the main line; None: not scored, or written by a version that did not name it
    group_size: int | None = None  # None: written by a version that did not say it
    reference: str | None = None  # the task's answer, for people; scoring takes it from the data set
    # How much of what was sampled is not in the main line. None: nothing was sampled, or it is not said.
    untrained_share: float | None = None


def recorded_attempt(result: Member | Attempt) -> RecordedAttempt:
    """What the line of this attempt will say."""
    member = result if isinstance(result, Member) else None
    attempt = result.attempt if isinstance(result, Member) else result
    plan, turns = attempt.plan, attempt.record.turns
    rule = plan.agent.main_line
    main = member.trajectory.segment if member else main_segment(turns, plan.task.question, rule) if turns else 0
    return RecordedAttempt(
        **{name: getattr(plan, name) for name in (*_OF_PLAN, *_SPECS, "group_size")},
        **{name: getattr(plan.task, name) for name in _OF_TASK},
        record=attempt.record,
        outcome=attempt.outcome,
        ungraded=attempt.ungraded,
        score=member.score if member else None,
        token_source=member.trajectory.token_source if member else None,
        segment=main if member else None,
        untrained_share=untrained_share(turns, main) if turns else None,
    )


def attempt_line(result: Member | Attempt) -> dict[str, Any]:
    """One line of rollouts.jsonl."""
    return recorded_line(recorded_attempt(result))


def recorded_line(attempt: RecordedAttempt) -> dict[str, Any]:
    """The inverse of `read_attempt`."""
    record, offers = attempt.record, _Offers()
    completions = [turn_line(turn, offers.reference(turn.tools)) for turn in record.turns]
    outcome, ungraded, score = attempt.outcome, attempt.ungraded, attempt.score
    return {
        "schema": ATTEMPT_SCHEMA,
        **{name: getattr(attempt, name) for name in (*_OF_PLAN, *_OF_TASK, *_OF_MEMBER)},
        **{name: value for name in _SPARSE if (value := getattr(attempt, name)) is not None},
        "outcome": str(outcome.name),
        "reason": outcome.detail if isinstance(outcome, Ended) else outcome.reason,
        "ungraded": {"outcome": str(ungraded.name), "reason": ungraded.detail} if ungraded else None,
        "score": score.value if score else None,
        "score_parts": dict(score.parts) if score else None,
        "score_evidence": dict(score.evidence) if score and score.evidence else None,
        **{name: getattr(record, name) for name in _OF_RECORD},
        "sandbox": {"id": record.sandbox_id, "exit": asdict(record.exit) if record.exit else None},
        "node": record.node or None,
        "plan": {name: asdict(getattr(attempt, name)) for name in _SPECS},
        "tools": offers.sets,
        "completions": completions,
        "tool_calls": [tool_call_line(call) for call in record.tool_calls],
        "steps": [asdict(step) for step in record.steps],
        "output": _output_line(record.output) if record.output else None,
        **{name: asdict(value) for name in _WHERE_KNOWN if (value := getattr(record, name)) is not None},
        **{name: [asdict(one) for one in several] for name in _SEVERAL if (several := getattr(record, name))},
        "unused_fields": list(record.requests.unused_fields),
        "refused_requests": list(record.requests.refusals),
    }


def shorter_line(line: dict[str, Any]) -> dict[str, Any]:
    """The line of an attempt without what no reader needs to score or train it, for one too long to be read again.
    What a sandbox sends is limited before; what a scorer or an endpoint says is not."""
    note = "steps, evidence and tool calls were left out: with them the line would be too long to be read again"
    return {**line, "steps": [], "tool_calls": [], "score_evidence": None, "notes": [*line["notes"], note]}


def read_attempt(text: bytes) -> RecordedAttempt:
    """The inverse of `attempt_line`. Raises ValueError, which says what is wrong and where in the line."""
    line: AttemptLine = read_line(_ATTEMPT, text)
    ungraded, name, reason = line.get("ungraded"), line["outcome"], line["reason"]
    _demand_plan(line["plan"])
    record = Record(
        **_present(line, (*_OF_RECORD, "tool_calls", "steps", *_SEVERAL, *_WHERE_KNOWN)),
        turns=tuple(_turns(line["completions"], line.get("tools", ()))),
        sandbox_id=line["sandbox"]["id"],
        exit=line["sandbox"]["exit"],
        requests=RequestNotes(line.get("unused_fields", ()), line.get("refused_requests", ())),
        output=_output(line.get("output")),
        node=line.get("node") or "",
    )
    return RecordedAttempt(
        **_present(line, (*_OF_PLAN, *_OF_TASK, *_OF_MEMBER, *_SPARSE)),
        **line["plan"],
        record=record,
        outcome=Ended(name, reason) if isinstance(name, EndedName) else Failed(name, reason),
        ungraded=None if ungraded is None else Ended(ungraded["outcome"], ungraded["reason"]),
        score=_score(line),
    )


def _present(line: Any, names: Iterable[str]) -> dict[str, Any]:
    """The fields of these names that the line has."""
    return {name: line[name] for name in names if name in line}


def _score(line: HeadLine) -> Score | None:
    if line["score"] is None:
        return None
    return Score(line["score"], line["score_parts"] or {}, line.get("score_evidence") or {})


def _output_line(output: Output) -> dict[str, Any]:
    """Without the folder: a run directory may be moved, and may be somebody else's."""
    files = [asdict(file) for file in output.files]
    return {"files": files, "left_out": output.left_out, "complete": output.complete}


def _output(line: OutputLine | None) -> Output | None:
    """Raises ValueError for a path that leaves the rollout's folder."""
    if line is None:
        return None
    for file in line["files"]:
        if file.path.startswith("/") or ".." in file.path.split("/") or "\0" in file.path:
            raise ValueError(f"output.files: {file.path!r} is not a path inside the folder")
    return Output(line["files"], line.get("left_out", 0), line.get("complete", True))


class _Offers:
    """The tools of one rollout's prompts, each set once."""

    def __init__(self) -> None:
        self.sets: list[Tools] = []
        self._last: Tools = ()
        self._places: dict[bytes, int] = {}

    def reference(self, tools: Tools) -> dict[str, int]:
        """What a completion with these tools says about them, behind the one before."""
        if tools is self._last:  # nearly always
            return {}
        text, before = text_of(tools), text_of(self._last)
        self._last = tools
        if text == before:
            return {}
        if text not in self._places:
            self._places[text] = len(self.sets)
            self.sets.append(tools)
        return {"tools": self._places[text]}


def tool_call_line(call: ToolCall) -> dict[str, Any]:
    """A ToolCall of a line."""
    return {name: getattr(call, name) for name in _TOOL_CALL}


def turn_line(turn: Turn, offer: Mapping[str, Any]) -> dict[str, Any]:
    """A CompletionLine. `offer`: what it says about its tools."""
    values = {name: getattr(turn, name) for name in _TURN}
    values |= {key: getattr(turn.completion, name) for name, key in _COMPLETION.items()}
    return {
        **{name: value for name, value in values.items() if value or name not in _SPARSE_IN_TURN},
        "messages": [m.entry for m in turn.messages],
        **offer,
        **({"policy_spans": [asdict(span) for span in turn.completion.spans]} if turn.completion.spans else {}),
    }


def _turns(lines: Iterable[CompletionLine], offers: Sequence[Tools]) -> Iterator[Turn]:
    """Raises ValueError for tools that are not there."""
    tools: Tools = ()
    for line in lines:
        turn = turn_of(line, tools, offers)
        tools = turn.tools
        yield turn


def turn_of(line: CompletionLine, tools: Tools, offers: Sequence[Tools] = ()) -> Turn:
    """The inverse of `turn_line`. `tools`: of the completion before; `offers`: those that lines name by their
    place. Raises ValueError for tools that are not there."""
    offer = line.get("tools")
    if isinstance(offer, int):
        if offer >= len(offers):
            raise ValueError(f"completions.tools: {offer} of {len(offers)} sets of tools")
        tools = offers[offer]
    elif offer is not None:
        tools = offer
    return _turn(line, tools)


def _turn(line: Any, tools: Tools) -> Turn:
    """`line`: a CompletionLine, or what a recording has of one."""
    completion = {name: line[key] for name, key in _COMPLETION.items() if key in line}
    return Turn(**_present(line, (*_TURN, "messages")), completion=Completion(**completion), tools=tools)


def _demand_plan(plan: PlanLine) -> None:
    """Raises ValueError for numbers too large for messages and requests: the plan may be carried out again."""
    parts: list[tuple[str, Sampling | AgentSpec | ManagedAgent | Limits, int]] = [
        ("sampling", plan["sampling"], _MOST_ON_WIRE),
        ("agent", plan["agent"], _MOST_ON_WIRE),
        ("limits", plan["limits"], MAX_JSON_INTEGER),
        *(("agent.managed_agents", managed, _MOST_ON_WIRE) for managed in plan["agent"].managed_agents),
    ]
    for name, part, most in parts:
        for one in fields(part):
            value = getattr(part, one.name)
            if isinstance(value, int | float) and not 0 <= value <= most:  # NaN is neither
                raise ValueError(f"plan.{name}.{one.name}: {value} is not from 0 to {most}")


# ---------------------------------------------------------------- the other lines


def bad_task_line(task: BadTask, number: int) -> dict[str, Any]:
    """One line of rollouts.jsonl. `number`: the task's place in the stream, as of a group."""
    return {
        "schema": SCHEMA,
        "rollout_id": f"g{number:06d}",
        "task_id": task.task_id,
        "group": number,
        "outcome": str(FailedName.BAD_TASK),
        "reason": task.reason,
    }


def dropped_line(number: int, task_id: str, reason: str) -> dict[str, Any]:
    """One line of dropped.jsonl. `number`: the group's."""
    return {"schema": SCHEMA, "group": number, "task_id": task_id, "reason": reason}


def result_line(number: int, result: GroupResult, choice: Choice | None) -> dict[str, Any]:
    """One line of curriculum.jsonl. `number`: the group's."""
    line = {"schema": SCHEMA, "group": number, **asdict(result), **(asdict(choice) if choice is not None else {})}
    return {name: value for name, value in line.items() if name != "turn" or value}


def read_result(text: bytes) -> tuple[int, GroupResult]:
    """(number of the group, its result) of a line of curriculum.jsonl. Raises ValueError."""
    line: ResultLine = read_line(_RESULT, text)
    facts = line["task_id"], line["scored"], line["solved"], line["differ"]
    return line["group"], GroupResult(*facts, line.get("turn", 0))


@dataclass(frozen=True, slots=True)
class Counted:
    """The counted facts of an attempt. `score` None: it was not scored, so it may be drawn again. `begun`: the
    first turn of its own, from 1 on. `crossing_counts`: as `count_crossings` counts."""

    rollout_id: str
    task_id: str
    group: int
    index: int
    attempt: int
    outcome: str
    reason: str
    ungraded: bool
    score: Score | None
    prompt_tokens: int
    sampled_tokens: int
    duration_s: float
    cpu_s: float | None
    group_size: int | None = None
    refusals: tuple[str, ...] = ()
    continued: tuple[Continued, ...] = ()
    begun: int = 1
    crossing_counts: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, result: Member | Attempt) -> Counted:
        """The same facts as in its line."""
        attempt = result.attempt if isinstance(result, Member) else result
        plan, record, outcome = attempt.plan, attempt.record, attempt.outcome
        return cls(
            **{name: getattr(plan, name) for name in (*_OF_PLAN, "group_size")},
            task_id=plan.task.task_id,
            outcome=str(outcome.name),
            reason=outcome.detail if isinstance(outcome, Ended) else outcome.reason,
            ungraded=attempt.ungraded is not None,
            score=result.score if isinstance(result, Member) else None,
            prompt_tokens=record.prompt_tokens,
            sampled_tokens=record.sampled_tokens,
            duration_s=record.duration_s,
            cpu_s=record.cpu_s,
            refusals=record.requests.refusals,
            continued=record.continued,
            begun=record.branch.turn if record.branch else 1,
            crossing_counts=record.crossing_counts,
        )


@dataclass(frozen=True, slots=True)
class CountedBadTask:
    """A row that no task could be made of. `rollout_id` holds only the group's number."""

    rollout_id: str
    task_id: str
    reason: str


def read_counted(text: bytes) -> Counted | CountedBadTask:
    """The counted facts of a line of rollouts.jsonl, in a fraction of `read_attempt`'s time. Raises ValueError."""
    value = read_line(_HEAD, text)
    if "index" not in value:
        return CountedBadTask(value["rollout_id"], value["task_id"], value["reason"])
    line: _CountedLine = value
    own = [completion for completion in line["completions"] if not completion.get("inherited")]
    return Counted(
        **_present(line, (*_OF_PLAN, "task_id", "reason", "duration_s", "cpu_s", "group_size", "continued")),
        outcome=str(line["outcome"]),
        ungraded=line.get("ungraded") is not None,
        score=_score(line),
        prompt_tokens=sum(completion["prompt_tokens"] for completion in own),
        sampled_tokens=sum(completion["completion_tokens"] for completion in own),
        refusals=line.get("refused_requests", ()),
        begun=line["branch"].turn if "branch" in line else 1,
        crossing_counts=count_crossings(
            (one.get("refusal"), one.get("source")) for one in line.get("crossings", ())
        ),
    )


@dataclass(frozen=True, slots=True)
class Episode:
    """The completions of a scored attempt; of a recording with fewer fields than an attempt's line, the others are
    empty. `rollout_id` None: the recording was merged from several runs."""

    task_id: str
    index: int
    rollout_id: str | None
    turns: tuple[Turn, ...]


def read_episode(text: bytes) -> Episode | None:
    """A line of rollouts.jsonl, or of a recording with fewer fields. None: it is not scored. Raises ValueError."""
    value = read_line(_EPISODE, text)
    if value.get("score") is None:
        return None
    line: _EpisodeLine = value
    completions: list[Any] = [
        {**_NO_TURN, "sequence": number, **dict(completion)}
        for number, completion in enumerate(line["completions"], 1)
    ]
    turns = tuple(_turn(completion, ()) for completion in completions)
    return Episode(line["task_id"], line["index"], line.get("rollout_id"), turns)


def read_crossings(text: bytes) -> tuple[str, str, tuple[Crossing, ...]]:
    """(rollout id, task id, what it asked of the outside) of a line of rollouts.jsonl. Raises ValueError."""
    line: _CrossingsLine = read_line(_CROSSINGS, text)
    return line["rollout_id"], line["task_id"], line.get("crossings", ())


@dataclass(frozen=True, slots=True)
class WrittenGroup:
    """A line of a groups file, as far as it is counted. `sampled`, `untrained`: tokens of its rollouts, and those
    of them that are in no line of the file."""

    rollout_ids: tuple[str, ...]
    scores: tuple[float, ...]
    sampled: int = 0
    untrained: int = 0


def read_written_group(text: bytes) -> WrittenGroup:
    """The counted facts of a line of a groups file. Raises ValueError."""
    line: _GroupHeadLine = read_line(_GROUP_HEAD, text)
    members = line["overrides"]
    sampled = [facts.get("completion_tokens", 0) for facts in members]
    untrained = [round(n * facts.get("untrained_share", 0.0)) for n, facts in zip(sampled, members, strict=True)]
    ids = tuple(facts["rollout_id"] for facts in members)
    return WrittenGroup(ids, line["scores"], sum(sampled), sum(untrained))


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


_ATTEMPT: TypeAdapter[AttemptLine] = TypeAdapter(AttemptLine)
_CROSSINGS: TypeAdapter[_CrossingsLine] = TypeAdapter(_CrossingsLine)
_RESULT: TypeAdapter[ResultLine] = TypeAdapter(ResultLine)
_HEAD: TypeAdapter[Any] = TypeAdapter(_CountedLine | BadTaskLine)
_EPISODE: TypeAdapter[Any] = TypeAdapter(_EpisodeLine | _UnscoredLine)
_GROUP_HEAD: TypeAdapter[_GroupHeadLine] = TypeAdapter(_GroupHeadLine)
