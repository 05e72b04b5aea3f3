"""The codec of a run's record: what is written is read back as it was, and is as its published schema says."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from docs.schemas.make import FILES, schema, write
from orchestrator.rules.text import MAX_JSON_INTEGER
from orchestrator.run import lenient
from orchestrator.run.excerpts import read_counted, read_episode, read_written_group
from orchestrator.run.line import attempt_line, read_attempt
from orchestrator.run.lines import dumps
from orchestrator.run.repair import set_torn_end_aside
from orchestrator.run.schema import AttemptLine
from orchestrator.types import (
    Attempt,
    Branch,
    Change,
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
    Member,
    Message,
    Output,
    OutputFile,
    Record,
    SandboxExit,
    Score,
    ServiceRecord,
    Step,
    StepGrade,
    ToolCall,
    Tools,
    Turn,
    Word,
)
from tests.fakes.plans import a_member, a_plan, a_record, a_turn, an_attempt
from tests.fakes.synthetic_run import write_synthetic_run
from tests.fakes.written import demand_as_published

MOST = (1 << 31) - 1  # of an int32
PUBLISHED = Path(__file__).parents[2] / "docs" / "schemas"

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SECONDS = st.floats(0, 1e9)
COUNTS = st.integers(0, 1 << 31)
IDS = st.integers(0, 2**31 - 1)  # of tokens
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 53), 1 << 53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.builds(Message, st.sampled_from(["system", "user", "assistant", "tool"]), TEXTS)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    tokens = draw(st.none() | st.lists(st.integers(0, 1 << 20), max_size=4).map(tuple))
    known = tokens is not None and draw(st.booleans())
    logprobs = tuple(draw(st.floats(-100, 0)) for _ in tokens or ()) if known else None
    return Completion(
        text=draw(TEXTS),
        visible=draw(TEXTS),
        finish_reason=draw(st.sampled_from(["stop", "length", "content_filter"])),
        tokens_T=tokens,
        logprobs_T=logprobs,
        prompt_tokens=draw(COUNTS),
        completion_tokens=draw(COUNTS),
        policy_version=draw(st.none() | TEXTS),
        retries=draw(COUNTS),
    )


TURNS = st.builds(
    Turn,
    sequence=COUNTS,
    kind=st.sampled_from(CompletionKind),
    kept=st.integers(0, 3),
    messages=st.lists(MESSAGES, max_size=3).map(tuple),
    segment=COUNTS,
    prompt_ids=st.none() | st.lists(IDS, max_size=3).map(tuple),
    closing=TEXTS,
    completion=completions(),
    started_s=SECONDS,
    ended_s=SECONDS,
    agent=TEXTS,
    abandoned=st.booleans(),
)
# As a sandbox's files are received: none leaves its folder.
PATHS = st.lists(
    st.text("ab\u00e9 .", min_size=1, max_size=5).filter(lambda part: part not in (".", "..")), min_size=1
)
PATHS = PATHS.map("/".join)
RECORDS = st.builds(
    Record,
    started_at=SECONDS,
    turns=st.lists(TURNS, max_size=3).map(tuple),
    tool_calls=st.lists(
        st.builds(
            ToolCall,
            COUNTS,
            TEXTS,
            st.dictionaries(TEXTS, JSON, max_size=2),
            st.none() | TEXTS,
            st.none() | TEXTS,
            SECONDS,
            SECONDS,
        ),
        max_size=2,
    ).map(tuple),
    crossings=st.lists(
        st.builds(
            Crossing,
            *(
                COUNTS,
                SECONDS,
                SECONDS,
                TEXTS,
                TEXTS,
                TEXTS,
                COUNTS,
                TEXTS,
                st.none() | COUNTS,
                TEXTS,
                COUNTS,
                COUNTS,
            ),
            *(st.none() | TEXTS, st.none() | TEXTS, st.booleans()),
            st.lists(st.tuples(TEXTS, TEXTS), max_size=2).map(tuple),
            st.sampled_from(["network", "cache", "record", "border"]),
            *(COUNTS, COUNTS),
        ),
        max_size=2,
    ).map(tuple),
    steps=st.lists(
        st.builds(Step, COUNTS, TEXTS, TEXTS, TEXTS, TEXTS, TEXTS, st.booleans(), SECONDS, TEXTS), max_size=2
    ).map(tuple),
    answer=st.none() | TEXTS,
    sandbox_id=TEXTS,
    exit=st.none() | st.builds(SandboxExit, st.none() | st.integers(0, 255), st.booleans(), TEXTS),
    launch_s=SECONDS,
    duration_s=SECONDS,
    waiting_s=SECONDS,
    cpu_s=st.none() | SECONDS,
    notes=st.lists(TEXTS, max_size=2).map(tuple),
    output=st.none()
    | st.builds(
        Output, st.lists(st.builds(OutputFile, PATHS, COUNTS), max_size=2).map(tuple), COUNTS, st.booleans()
    ),
    changes=st.none()
    | st.builds(
        Difference,
        st.lists(
            st.builds(
                Change, TEXTS, st.sampled_from(["added", "changed", "removed"]), COUNTS, COUNTS, st.none() | TEXTS
            ),
            max_size=2,
        ).map(tuple),
        COUNTS,
        COUNTS,
        st.dictionaries(st.sampled_from(["device", "name", "more"]), COUNTS, max_size=2),
    ),
)
ENDED = st.builds(Ended, st.sampled_from(EndedName), TEXTS)
FAILED = st.builds(Failed, st.sampled_from(FailedName), TEXTS)
SCORES = st.builds(
    Score,
    st.floats(0, 1),
    st.dictionaries(TEXTS, st.floats(0, 1), max_size=2),
    st.dictionaries(TEXTS, JSON, min_size=1, max_size=2) | st.just({}),
)


@st.composite
def results(draw: st.DrawFn) -> Member | Attempt:
    record = draw(RECORDS)
    if draw(st.booleans()):
        member = a_member()
        attempt = replace(member.attempt, record=record, outcome=draw(ENDED))
        return replace(member, attempt=attempt, score=draw(SCORES))
    return Attempt(a_plan(), record, draw(ENDED | FAILED), draw(st.none() | ENDED))


@given(results())
def test_a_record_is_read_back_as_it_was_written(result: Member | Attempt) -> None:
    attempt = result.attempt if isinstance(result, Member) else result
    score = result.score if isinstance(result, Member) else None
    text = dumps(attempt_line(result))
    read = read_attempt(text)
    assert (read.record, read.outcome, read.ungraded) == (attempt.record, attempt.outcome, attempt.ungraded)
    assert read.score == score
    assert (read.rollout_id, read.sampling, read.agent) == (
        attempt.plan.rollout_id,
        attempt.plan.sampling,
        attempt.plan.agent,
    )
    counted = read_counted(text)
    assert counted.sampled_tokens == attempt.record.sampled_tokens  # type: ignore[union-attr]
    episode = read_episode(text)
    assert (episode is None) == (score is None)
    if episode is not None:
        assert [replace(turn.completion, retries=0) for turn in episode.turns] == [
            replace(turn.completion, retries=0) for turn in attempt.record.turns
        ]


@given(results())
def test_a_line_is_written_again_as_it_was_read(result: Member | Attempt) -> None:
    text = dumps(attempt_line(result))
    read = read_attempt(text)
    plan = replace(a_plan(), sampling=read.sampling, agent=read.agent, sandbox=read.sandbox, limits=read.limits)
    attempt = Attempt(plan, read.record, read.outcome, read.ungraded)
    again: Member | Attempt = attempt
    if read.score is not None and isinstance(result, Member):
        again = Member(attempt, result.trajectory, read.score)
    assert dumps(attempt_line(again)) == text


@given(results(), st.data())
def test_no_change_of_a_line_makes_a_reader_raise_anything_but_a_plain_refusal(
    result: Member | Attempt, data: st.DataObject
) -> None:
    line = json.loads(dumps(attempt_line(result)))
    place, key = line, data.draw(st.sampled_from(sorted(line)))
    while isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    place[key] = data.draw(JSON)
    text = dumps(line)
    for strict in (read_attempt, read_counted, read_episode):
        with suppress(ValueError):
            strict(text)
    value = lenient.parse(text)
    assert value is not None
    for field in value.values():
        for read in (lenient.text, lenient.number, lenient.count, lenient.objects, lenient.texts, lenient.numbers):
            read(field)


@pytest.mark.parametrize("file", FILES)
def test_the_published_schema_is_the_code_s(file: str, tmp_path: Path) -> None:
    write(tmp_path)
    name = f"{file}.schema.json"
    now, published = (tmp_path / name).read_text(), (PUBLISHED / name).read_text()
    assert published == now, "run `python docs/schemas/make.py`"
    Draft202012Validator.check_schema(json.loads(published))


def test_what_a_run_leaves_is_as_published_and_nothing_more(tmp_path: Path) -> None:
    write_synthetic_run(tmp_path, plain=1)
    set_torn_end_aside(tmp_path / "rollouts.jsonl")
    demand_as_published(tmp_path)


def test_tools_stand_once_on_a_line_and_are_those_of_each_completion() -> None:
    def tool(name: str) -> Tools:  # another object each time, as requests bring them
        return ({"type": "function", "function": {"name": name, "parameters": {}}},)

    offered = (tool("a"), tool("a"), tool("b"), (), tool("a"))
    turns = tuple(replace(a_turn(sequence=n + 1), tools=one) for n, one in enumerate(offered))
    line = attempt_line(replace(an_attempt(), record=replace(a_record(), turns=turns)))
    assert dumps(line).count(b'"parameters"') == 2
    assert [turn.tools for turn in read_attempt(dumps(line)).record.turns] == list(offered)


def test_a_schema_refuses_what_the_strict_reader_refuses() -> None:
    line = json.loads(dumps(attempt_line(a_member())))
    validator = Draft202012Validator(schema("rollouts.jsonl"))
    assert validator.is_valid(line)
    for key, wrong in (("score", 1.5), ("outcome", "won"), ("completions", None), ("group", -1), ("schema", 3)):
        odd = {**line, key: wrong}
        assert not validator.is_valid(odd)
        with pytest.raises(ValueError, match=key):
            read_attempt(dumps(odd))


def test_a_line_names_no_tools_that_it_does_not_have() -> None:
    line = json.loads(dumps(attempt_line(an_attempt())))
    line["completions"][0]["tools"] = 0
    with pytest.raises(ValueError, match=r"completions\.tools: 0 of 0 sets of tools"):
        read_attempt(dumps(line))


@pytest.mark.parametrize(
    ("part", "field", "most"),
    [
        ("limits", "prompt_tokens", MAX_JSON_INTEGER),
        ("agent", "max_steps", MOST),
        ("sampling", "max_tokens", MOST),
    ],
)
def test_a_plan_has_no_number_that_a_message_cannot_hold(part: str, field: str, most: int) -> None:
    line = json.loads(dumps(attempt_line(an_attempt())))
    line["plan"][part][field] = most
    read_attempt(dumps(line))
    for wrong in (most + 1, -1):
        line["plan"][part][field] = wrong
        with pytest.raises(ValueError, match=rf"plan\.{part}\.{field}: {wrong} is not from 0 to {most}"):
            read_attempt(dumps(line))


def test_untrained_tokens_are_whole_whatever_their_share_is_as_a_float() -> None:
    facts = {"rollout_id": "a", "completion_tokens": 100, "untrained_share": 0.29}  # of which 100 are 28.999...
    assert read_written_group(dumps({"overrides": [facts], "scores": [1.0]})).untrained == 29


@pytest.mark.parametrize("turn", [0, -1, 1 << 60])
@pytest.mark.parametrize("name", ["branch", "continued"])
def test_a_forged_place_in_a_record_is_refused(name: str, turn: int) -> None:
    record = a_record(branch=Branch("g000000-r00-a0", 2), continued=(Continued(1, 7, "sandbox_lost"),))
    line = json.loads(dumps(attempt_line(replace(an_attempt(), record=record))))
    place, field = (line["branch"], "turn") if name == "branch" else (line["continued"][0], "tokens")
    place[field] = turn if name == "branch" else min(turn, turn - 1)
    with pytest.raises(ValueError, match=rf"{name}.*: Value error, {field} is not from"):
        read_attempt(dumps(line))


@pytest.mark.parametrize(
    "parent", ["", "../../run", "g000000-r00-a0\n", "<b>", "g000000", "g٠٠٠٠٠٠-r00-a0", "g000000-r00-a" + "0" * 99]
)
def test_a_forged_parent_in_a_record_is_refused(parent: str) -> None:
    record = a_record(branch=Branch("g000000-r00-a0", 2))
    line = json.loads(dumps(attempt_line(replace(an_attempt(), record=record))))
    line["branch"]["parent"] = parent
    with pytest.raises(ValueError, match="parent is not the id of a rollout"):
        read_attempt(dumps(line))


def test_every_field_of_a_line_is_written() -> None:
    member = a_member()
    sized = replace(member, attempt=replace(member.attempt, plan=replace(member.attempt.plan, group_size=4)))
    graded = (StepGrade("a", Grade()),)
    record = a_record(
        changes=Difference(),
        grade=Grade(),
        step_grades=graded,
        branch=Branch("g000000-r00-a0", 2, (Word(2, "please"),)),
        continued=(Continued(1, 7, "sandbox_lost"),),
        crossings=(Crossing(1, 0.0, 1.0, "GET", "https", "a.example", 443, "/", 200, headers=(("A", "b"),)),),
        services=(ServiceRecord("db", "postgres:17", 0.5, 1.5, "", "ready"),),
    )
    line = attempt_line(replace(sized, attempt=replace(sized.attempt, record=record)))
    assert set(line) == set(AttemptLine.__annotations__) | _inherited()
    assert read_attempt(dumps(line)).record.branch == record.branch
    assert read_attempt(dumps(line)).group_size == read_counted(dumps(line)).group_size == 4  # type: ignore[union-attr]
    del line["group_size"]
    assert read_attempt(dumps(line)).group_size is None, "as earlier versions wrote it"


def _inherited() -> set[str]:
    return {name for base in AttemptLine.__orig_bases__ for name in base.__annotations__}  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "a/..", "a\0b"])
def test_a_file_that_leaves_its_folder_is_none(path: str) -> None:
    """A scorer that scores a record again may open what it names."""
    line = attempt_line(a_member())
    line["output"] = {"files": [{"path": path, "size_bytes": 1}], "left_out": 0, "complete": True}
    with pytest.raises(ValueError, match="not a path inside the folder"):
        read_attempt(dumps(line))
