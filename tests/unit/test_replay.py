"""A recorded run as endpoint, and the recording that travels with the package."""

from __future__ import annotations

import json
import lzma
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.completion.base import CompletionRequest, ids_of
from orchestrator.completion.replay import ReplayCompleter
from orchestrator.demo import recording, tokenizer
from orchestrator.errors import EnvironmentUnusable, RecordError
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.requests import AgentRequest
from orchestrator.rules.outcome import Refused
from orchestrator.types import (
    Completion,
    CompletionKind,
    Ended,
    EndedName,
    FailedName,
    Message,
    Sampling,
    Trajectory,
    Turn,
)
from tests.fakes.plans import TALK, a_member, a_plan
from tests.fakes.written import write_run

ANSWER = Message("assistant", "one<code>1</code>")
MORE = (*TALK, ANSWER, Message("user", "Observation: 1"))
EXAMPLES = Path(__file__).parents[2] / "examples"


def a_turn(
    sequence: int, kept: int, messages: tuple[Message, ...], prompt_ids: tuple[int, ...], text: str
) -> Turn:
    ids = (100 + sequence, 200 + sequence)
    completion = Completion(text, text, "stop", ids, (-0.1 * sequence, -0.25), 3, 2, "v1")
    return Turn(sequence, CompletionKind.ACTION, kept, messages, 0, prompt_ids, "", completion, 0.0, 1.0)


def a_run(place: Path, *numbers: int) -> Path:
    """A run of one rollout with two calls of these numbers, token-exact, as `process` writes it."""
    first, second = numbers
    turns = (a_turn(first, 0, TALK, (1, 2, 3), "one"), a_turn(second, 2, MORE[2:], (4,), "two"))
    member = a_member()
    record = replace(member.attempt.record, turns=turns)
    attempt = replace(member.attempt, record=record, outcome=Ended(EndedName.FINISHED))
    line = Trajectory((1, 2, 3), (False, True, True), (1.0, -0.5, -0.1), TALK, "sampled")
    return write_run(place, replace(member, attempt=attempt, trajectory=line))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return a_run(tmp_path / "run", 1, 2)


def a_request(sequence: int = 1, **changes: object) -> CompletionRequest:
    ids = {1: ids_of((1, 2, 3)), 2: ids_of((1, 2, 3, 101, 201, 4))}.get(sequence)
    talk = TALK if sequence == 1 else MORE
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=9, seed=0)
    request = CompletionRequest(talk, ids, (), sampling, "g000000-r00-a0", "task", 0, sequence)
    return replace(request, **changes)  # type: ignore[arg-type]


async def test_each_call_gets_what_the_model_said_then_token_by_token(run: Path) -> None:
    completer = ReplayCompleter.open(run)
    assert completer.takes_ids
    first, second = await completer.sample(a_request(1)), await completer.sample(a_request(2))
    assert (first.tokens_T, first.logprobs_T, first.visible) == ((101, 201), (-0.1, -0.25), "one")
    assert (second.tokens_T, second.policy_version) == ((102, 202), "v1")
    assert (completer.replayed.served, completer.replayed.differing) == (2, 0)
    assert str(completer.replayed) == "2 completions replayed, every prompt as recorded"


async def test_requests_that_were_refused_have_numbers_and_no_completion(tmp_path: Path) -> None:
    completer = ReplayCompleter.open(a_run(tmp_path / "run", 2, 5))
    assert (await completer.sample(a_request(2, messages=TALK, prompt_ids=ids_of((1, 2, 3))))).visible == "one"
    assert (await completer.sample(a_request(5, messages=MORE))).visible == "two"
    assert (completer.replayed.served, completer.replayed.differing) == (2, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": (*MORE[:-1], Message("user", "Observation: 2"))},
        {"messages": MORE[:-1]},
        {"prompt_ids": (1, 2, 3, 101, 201, 5)},
        {"prompt_ids": (1, 2, 3, 4)},
    ],
)
async def test_a_prompt_that_differs_in_words_or_in_ids_is_answered_and_counted(
    run: Path, changes: dict[str, object]
) -> None:
    completer = ReplayCompleter.open(run)
    assert (await completer.sample(a_request(2, **changes))).visible == "two"
    assert str(completer.replayed) == "1 completions replayed, 1 of their prompts differed"


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"sequence": 3}, "ends after 2 calls"), ({"index": 1}, "does not exist"), ({"task_id": "x"}, "'x'")],
)
async def test_a_call_beyond_the_recording_is_named_and_never_invented(
    run: Path, changes: dict[str, object], what: str
) -> None:
    completer = ReplayCompleter.open(run)
    with pytest.raises(RecordError, match=what):
        await completer.sample(replace(a_request(2), **changes))  # type: ignore[arg-type]
    assert (
        str(completer.replayed) == "0 completions replayed, every prompt as recorded; 1 calls beyond the recording"
    )


async def test_a_rollout_that_goes_beyond_its_recording_is_neither_scored_nor_tried_again(run: Path) -> None:
    lease = Lease(a_plan(index=7), ReplayCompleter.open(run), None, {})
    reply = await lease.complete(AgentRequest(1, CompletionKind.ACTION, TALK), b"")
    assert reply.ended == FailedName.RECORD_ERROR
    ended = await lease.ended()
    assert isinstance(ended, Refused)
    assert (ended.name, ended.detail) == (
        "record_error",
        "the recording of task 'task', rollout 7, does not exist",
    )


async def test_a_packed_recording_is_the_same_recording(run: Path) -> None:
    plain = run / "rollouts.jsonl"
    (run / "rollouts.jsonl.xz").write_bytes(lzma.compress(plain.read_bytes()))
    plain.unlink()
    assert (await ReplayCompleter.open(run).sample(a_request(2))).visible == "two"


@pytest.mark.parametrize("packed", [False, True])
async def test_of_a_long_recording_the_last_rollouts_alone_are_held(run: Path, packed: bool) -> None:
    (line,) = (run / "rollouts.jsonl").read_text().splitlines()
    ids = [f"g{number:06d}-r00-a0" for number in range(200)]
    several = "".join(line.replace("g000000-r00-a0", name).replace("two", f"two-{name}") + "\n" for name in ids)
    (run / "rollouts.jsonl").write_text(several)
    if packed:
        (run / "rollouts.jsonl").unlink()
        (run / "rollouts.jsonl.xz").write_bytes(lzma.compress(several.encode()))
    completer = ReplayCompleter.open(run)
    for _ in range(2):
        for name in ids:
            assert (await completer.sample(a_request(2, rollout_id=name))).visible == f"two-{name}"
            assert len(completer._parsed) <= 64
    assert completer.replayed.served == 400


@pytest.mark.parametrize("packed", [False, True])
async def test_what_a_killed_run_left_at_its_end_is_passed_over(run: Path, packed: bool) -> None:
    plain = run / "rollouts.jsonl"
    torn = plain.read_bytes() + b"\n" + plain.read_bytes()[:-400]
    plain.write_bytes(torn)
    if packed:
        (run / "rollouts.jsonl.xz").write_bytes(lzma.compress(torn))
        plain.unlink()
    assert (await ReplayCompleter.open(run).sample(a_request(2))).visible == "two"


async def test_another_rollout_in_a_line_s_place_is_told(run: Path) -> None:
    completer = ReplayCompleter.open(run)
    plain = run / "rollouts.jsonl"
    plain.write_text(plain.read_text().replace('"task_id":"task"', '"task_id":"else"'))
    with pytest.raises(RecordError, match="not the file that it was"):
        await completer.sample(a_request(1))


async def test_a_recording_that_went_meanwhile_ends_the_rollout_by_name(run: Path) -> None:
    completer = ReplayCompleter.open(run)
    (run / "rollouts.jsonl").write_text("{}\n")
    with pytest.raises(RecordError, match="cannot be read any more"):
        await completer.sample(a_request(1))
    (run / "rollouts.jsonl").unlink()
    with pytest.raises(RecordError, match="cannot be read any more"):
        await completer.sample(a_request(1))


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("rollouts.jsonl", b"", "nothing to replay"),
        ("rollouts.jsonl", b'{"score": null}\n', "nothing to replay"),
        ("rollouts.jsonl", b"{torn\n", "rollouts.jsonl:1 is no recorded rollout"),
        ("rollouts.jsonl", b"[]\n", "rollouts.jsonl:1 is no recorded rollout"),
        (
            "rollouts.jsonl",
            b'{"score": 1, "task_id": "t", "index": 0, "completions": [{}]}\n',
            "completions.0.kept",
        ),
        ("rollouts.jsonl.xz", b"no xz", "is damaged"),
        ("rollouts.jsonl.xz", lzma.compress(b'{"score": null}\n')[:-20], "is damaged"),
        ("other", b"", "no recorded run in"),
    ],
)
def test_what_is_no_recording_is_refused_in_one_line(
    tmp_path: Path, name: str, content: bytes, complaint: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(EnvironmentUnusable, match=complaint) as refusal:
        ReplayCompleter.open(tmp_path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("text", 5),
        ("visible", None),
        ("finish_reason", "tired"),
        ("finish_reason", []),
        ("token_ids", [101, -1]),
        ("token_ids", [101, True]),
        ("logprobs", [-0.1, None]),
        ("logprobs", [-0.1, float("nan")]),
        ("prompt_tokens", None),
        ("completion_tokens", 10**30),
        ("policy_version", 3),
        ("messages", [{"role": [], "content": "x"}]),
        ("messages", [{"role": "user", "content": None}]),
    ],
)
def test_an_edited_completion_is_refused_with_its_line_before_anything_is_played(
    run: Path, name: str, value: object
) -> None:
    path = run / "rollouts.jsonl"
    line = json.loads(path.read_text())
    line["completions"][1][name] = value
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(EnvironmentUnusable, match=r"rollouts\.jsonl:1 is no recorded rollout \("):
        ReplayCompleter.open(run)


# ---------------------------------------------------------------- the demo's own recording


def test_the_demo_holds_every_rollout_of_every_task_it_plays() -> None:
    told = recording.Recording.read()
    tasks = [json.loads(line)["task_id"] for line in recording.TASKS.read_text().splitlines()]
    places = [(line["task_id"], line["index"]) for line in recording.lines()]
    assert places == [(task, index) for task in tasks for index in range(told.env["group_size"])]
    assert (told.tasks, told.rollouts) == (len(tasks), len(places))


def test_the_demo_holds_every_rollout_of_its_code_tasks_as_they_are() -> None:
    told = recording.Recording.read(recording.CODE_RECORDING)
    tasks = {task.task_id: task for task in recording.code_tasks()}
    places = [(line["task_id"], line["index"]) for line in recording.lines(recording.CODE_RECORDING)]
    assert places == [(task, index) for task in tasks for index in range(told.env["group_size"])]
    assert (told.tasks, told.rollouts) == (len(tasks), len(places))
    for line in recording.lines(recording.CODE_RECORDING):
        asked = [message["content"] for message in line["completions"][0]["messages"] if message["role"] == "user"]
        assert asked == [tasks[line["task_id"]].question]


@pytest.mark.parametrize("folder", [recording.RECORDING, recording.CODE_RECORDING], ids=lambda path: path.name)
def test_a_recording_of_the_demo_can_be_played_and_has_mixed_scores_within_groups(folder: Path) -> None:
    assert ReplayCompleter.open(folder).takes_ids
    scores: dict[str, set[float]] = {}
    for line in recording.lines(folder):
        scores.setdefault(line["task_id"], set()).add(line["score"])
    assert sum(len(values) > 1 for values in scores.values()) >= len(scores) / 2


def test_the_demo_tasks_are_example_tasks() -> None:
    """Copies, because an installed package has no `examples/`."""
    examples = {
        row["task_id"]: row
        for name in ("tasks.jsonl", "reasoning_gym.jsonl")
        for row in map(json.loads, (EXAMPLES / name).read_text().splitlines())
    }
    rows = [json.loads(line) for line in recording.TASKS.read_text().splitlines()]
    assert rows == [examples[row["task_id"]] for row in rows]
    named = {name for row in rows for name in row["files"]}
    assert {f"files/{path.name}" for path in (recording.ROOT / "files").iterdir()} == named
    for name in named:
        assert (recording.ROOT / name).read_bytes() == (EXAMPLES / name).read_bytes()


def test_a_cache_that_cannot_be_written_is_told_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(EnvironmentUnusable, match="set XDG_CACHE_HOME"):
        tokenizer.unpack(tmp_path / "cache")


async def test_parallel_requests_of_a_program_get_the_answers_to_their_own_prompts(tmp_path: Path) -> None:
    """Which of two requests at a time has which number is chance, and other than in the recording."""
    other = (TALK[0], Message("user", "Another question"))
    turns = (
        a_turn(1, 0, TALK, (1, 2, 3), "one"),
        replace(a_turn(2, 1, other[1:], (1, 9), "two"), segment=1),
    )
    member = a_member()
    attempt = replace(
        member.attempt, record=replace(member.attempt.record, turns=turns), outcome=Ended(EndedName.FINISHED)
    )
    line = Trajectory((1, 2, 3), (False, True, True), (1.0, -0.5, -0.1), TALK, "sampled")
    completer = ReplayCompleter.open(
        write_run(tmp_path / "run", replace(member, attempt=attempt, trajectory=line))
    )
    asked = a_request(1, messages=other, prompt_ids=ids_of((1, 9)))
    assert (await completer.sample(asked)).text == "two"
    assert (await completer.sample(a_request(2, messages=TALK, prompt_ids=ids_of((1, 2, 3))))).text == "one"
    assert completer.replayed.differing == 0
