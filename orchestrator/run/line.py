"""The codec of a run's record: converts attempts to lines of the run's files, and back.

`schema` says what lines hold; `excerpts` reads only what is counted or played again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from pydantic import TypeAdapter

from orchestrator.calls.declared import text_of
from orchestrator.completion.trajectory import main_segment, untrained_share
from orchestrator.rules.pools import Choice, GroupResult
from orchestrator.rules.text import MAX_JSON_INTEGER
from orchestrator.run.files import SCHEMA
from orchestrator.run.schema import (
    AttemptLine,
    CompletionLine,
    HeadLine,
    OutputLine,
    PlanLine,
    ResultLine,
    read_line,
)
from orchestrator.types import (
    AgentSpec,
    Attempt,
    BadTask,
    Completion,
    Ended,
    EndedName,
    Failed,
    FailedName,
    Limits,
    ManagedAgent,
    Member,
    Outcome,
    Output,
    Record,
    RequestNotes,
    Sampling,
    SandboxSpec,
    Score,
    TokenSource,
    ToolCall,
    Tools,
    Turn,
)

ATTEMPT_SCHEMA = 2  # since a rollout's tools are written once; attempts of schema 1 are read too
_MOST_ON_WIRE = (1 << 31) - 1  # of numbers sent to a sandbox or an inference server

# Which fields of a value stand in its line as they are, by the same name.
OF_PLAN = ("rollout_id", "group", "index", "attempt")
_OF_TASK = ("task_id", "level", "source", "reference")
_OF_MEMBER = ("token_source", "segment")
_SPARSE = ("group_size", "untrained_share")  # missing: not known
_SPECS = ("sampling", "agent", "sandbox", "limits")  # of the plan, below `plan`
_OF_RECORD = ("answer", "started_at", "launch_s", "duration_s", "waiting_s", "cpu_s", "notes")
_WHERE_KNOWN = ("changes", "grade", "branch")
_SEVERAL = ("step_grades", "continued", "crossings", "services")
_TOOL_CALL = [field.name for field in fields(ToolCall)]  # `asdict` would copy the arguments deeply
_GROUP_RESULT, _CHOICE = ([field.name for field in fields(kind)] for kind in (GroupResult, Choice))
_TURN = [f.name for f in fields(Turn) if f.name not in ("messages", "completion", "tools")]
_RENAMED = {"tokens_T": "token_ids", "logprobs_T": "logprobs", "spans": "policy_spans"}
_COMPLETION = {f.name: _RENAMED.get(f.name, f.name) for f in fields(Completion)}
_SPARSE_IN_TURN = ("opening", "abandoned", "inherited", "policy_spans", "server_end")  # missing: they say nothing


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
        **{name: getattr(plan, name) for name in (*OF_PLAN, *_SPECS, "group_size")},
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
        **{name: getattr(attempt, name) for name in (*OF_PLAN, *_OF_TASK, *_OF_MEMBER)},
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
        **present(line, (*_OF_RECORD, "tool_calls", "steps", *_SEVERAL, *_WHERE_KNOWN)),
        turns=tuple(_turns(line["completions"], line.get("tools", ()))),
        sandbox_id=line["sandbox"]["id"],
        exit=line["sandbox"]["exit"],
        requests=RequestNotes(line.get("unused_fields", ()), line.get("refused_requests", ())),
        output=_output(line.get("output")),
        node=line.get("node") or "",
    )
    return RecordedAttempt(
        **present(line, (*OF_PLAN, *_OF_TASK, *_OF_MEMBER, *_SPARSE)),
        **line["plan"],
        record=record,
        outcome=Ended(name, reason) if isinstance(name, EndedName) else Failed(name, reason),
        ungraded=None if ungraded is None else Ended(ungraded["outcome"], ungraded["reason"]),
        score=score_of(line),
    )


def present(line: Any, names: Iterable[str]) -> dict[str, Any]:
    """The fields of these names that the line has."""
    return {name: line[name] for name in names if name in line}


def score_of(line: HeadLine) -> Score | None:
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
    return Turn(**present(line, (*_TURN, "messages")), completion=Completion(**completion), tools=tools)


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
    line: dict[str, Any] = {"schema": SCHEMA, "group": number}
    line |= {name: getattr(result, name) for name in _GROUP_RESULT if name != "turn" or result.turn}
    return line | {name: getattr(choice, name) for name in (_CHOICE if choice is not None else ())}


def read_result(text: bytes) -> tuple[int, GroupResult]:
    """(number of the group, its result) of a line of curriculum.jsonl. Raises ValueError."""
    line: ResultLine = read_line(_RESULT, text)
    facts = line["task_id"], line["scored"], line["solved"], line["differ"]
    return line["group"], GroupResult(*facts, line.get("turn", 0))


_ATTEMPT: TypeAdapter[AttemptLine] = TypeAdapter(AttemptLine)
_RESULT: TypeAdapter[ResultLine] = TypeAdapter(ResultLine)
