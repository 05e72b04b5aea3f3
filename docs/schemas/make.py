"""Writes the JSON Schemas of a run's files beside itself: `python docs/schemas/make.py`.

The lines of rollouts.jsonl are those of `orchestrator/run/schema.py`, which the codec reads. Groups and run.json
are written by plain dictionaries, so their shapes are stated here; tests hold real files against them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from orchestrator.run.schema import AttemptLine, BadTaskLine, DroppedLine, Ids, Real, ResultLine, Whole
from orchestrator.types import EndedName, Message, PolicySpan, TokenSource

DIALECT = "https://json-schema.org/draft/2020-12/schema"
Score = Annotated[float, Field(ge=0, le=1)]


class OtherSegment(TypedDict):
    """Another segment of the rollout. `asked`: the beginning of the last message of its first prompt."""

    segment: Whole
    kind: Literal["action", "plan", "final"]
    agent: str
    asked: str
    completions: Whole
    completion_tokens: Whole


class Overrides(TypedDict):
    """The facts of one rollout of a group. Times in seconds."""

    rollout_id: str
    parent: str | None
    turn: Whole | None
    task_id: str
    outcome: EndedName
    agent: Literal["code", "tool_calling", "shell", "program"]
    shared_identity: bool
    answer: str | None
    score_parts: dict[str, float]
    steps: Whole
    token_source: TokenSource
    duration_s: Real
    waiting_s: Real
    tool_calls: Whole
    prompt_tokens: Whole
    completion_tokens: Whole
    policy_version: str | None
    mixed_policy_versions: bool
    policy_spans: tuple[PolicySpan, ...]
    staleness: Whole | None
    segment: Whole
    main_segment: Whole
    segments: Whole
    weight: Score
    untrained_share: Score
    untrained_completions: Whole
    abandoned_completions: Whole
    unused_fields: tuple[str, ...]
    refused_requests: tuple[str, ...]
    other_segments: tuple[OtherSegment, ...]
    node: str | None


class GenerationParams(TypedDict):
    """Sampling parameters of the group."""

    temperature: Real
    top_p: Real
    max_tokens: Whole
    n: Literal[1]


class GroupOverrides(TypedDict):
    """Facts of the group."""

    group_size: Whole


class GroupLine(TypedDict):
    """One group, as a line of a groups file: Atropos' ScoredDataGroup, one entry per rollout in each list."""

    tokens: tuple[Ids, ...]
    masks: tuple[tuple[int, ...], ...]
    scores: tuple[Score, ...]
    inference_logprobs: tuple[tuple[float, ...], ...] | None
    messages: tuple[tuple[Message, ...], ...] | None
    advantages: tuple[tuple[float, ...], ...] | None
    ref_logprobs: None
    generation_params: GenerationParams
    overrides: tuple[Overrides, ...]
    group_overrides: GroupOverrides


class ConfigFile(TypedDict):
    """All settings, by the names of their flags, without keys."""

    env: dict[str, Any]
    openai: tuple[dict[str, Any], ...]


class PricesOfServer(TypedDict):
    """Of a million tokens of one server, its share of the rollouts, and the price of a request to the outside."""

    prompt: float
    completion: float
    weight: float
    request: NotRequired[float]


class CurriculumFacts(TypedDict):
    """`lag`: a round, or where a group begins, is decided by the results of all groups but so many before it."""

    lag: Whole


class RunFile(TypedDict):
    """run.json: what ran. `token_ids`: whether ids are those sampled or made from text; `why_text`: why from text.
    `groups_file`: relative to the run directory, or absolute. `of`, `rollout`, `turn`, `say`: what a command looks
    at, or branches from; `held_out`: of an evaluation's tasks. `starts`: digest of where `env.start_at` may
    begin."""

    schema: Literal[1]
    version: str
    config: ConfigFile
    seed: int
    tasks: str
    token_ids: Literal["exact", "from text"]
    why_text: NotRequired[str]
    prices: NotRequired[tuple[PricesOfServer, ...]]
    tokenizer: str | None
    tokenizer_digest: NotRequired[str | None]
    agent: dict[str, Any]
    sandbox: dict[str, str]
    command: NotRequired[str]
    of: NotRequired[str]
    rollout: NotRequired[str]
    turn: NotRequired[Whole]
    say: NotRequired[str]
    held_out: NotRequired[bool]
    starts: NotRequired[str]
    groups_file: NotRequired[str]
    curriculum: NotRequired[CurriculumFacts]
    notes: NotRequired[tuple[str, ...]]
    proof: NotRequired[str]


FILES: dict[str, tuple[Any, str]] = {
    "rollouts.jsonl": (AttemptLine | BadTaskLine, "a line of rollouts.jsonl"),
    "groups.jsonl": (GroupLine, "a line of a groups file"),
    "dropped.jsonl": (DroppedLine, "a line of dropped.jsonl"),
    "curriculum.jsonl": (ResultLine, "a line of curriculum.jsonl"),
    "run.json": (RunFile, "run.json"),
}


def schema(file: str) -> dict[str, Any]:
    """The JSON Schema of one line of the file, or of the file."""
    kind, title = FILES[file]
    return {"$schema": DIALECT, "title": title, **TypeAdapter(kind).json_schema()}


def write(folder: Path) -> None:
    """Writes all schemas, each as `<file>.schema.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in FILES:
        (folder / f"{file}.schema.json").write_text(json.dumps(schema(file), indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    write(Path(__file__).parent)
