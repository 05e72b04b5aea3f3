"""OpenEnv's validator as a second oracle beside `orchestrator verify`: over a real model's tokens in live
sandboxes, and over the recording they come from. With each planted fault it is said who of the two finds it."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openenv", reason="needs the extra openenv")

from openenv.core.harness import TrainingTrace
from openenv.core.harness.capture.graph import RolloutGraph, TrainingSequence, TurnNode
from openenv.core.harness.capture.validate import check_sequence

from orchestrator import ConfigError, SyncOrchestrator, load_config
from orchestrator.demo import recording
from orchestrator.demo.tokenizer import unpack
from orchestrator.run.excerpts import read_episode
from orchestrator.run.groups import MASKED, GroupFormat
from orchestrator.run.line import RecordedAttempt, recorded_attempt
from orchestrator.run.lines import dumps
from orchestrator.run.verify import Findings, check_group
from orchestrator.trainers.openenv import traces, training_trace
from orchestrator.types import Score
from tests.fakes.plans import a_member, a_turn
from tests.fakes.runs import COMMAND, DEADLINE_S, ROOT, lines, place

pytestmark = pytest.mark.trainers

TASKS = 4


@pytest.fixture(scope="module")
def run() -> Iterator[Path]:
    """A run directory: what a real model once said, in live containers of now."""
    tasks = [task for task in recording.tasks() if not task.attachments][:TASKS]
    told = recording.Recording.read()
    with place() as home, pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(home))
        env = {
            **told.env,
            "launcher": "docker",
            "token_source": "exact",
            "tokenizer_name": str(unpack()),
            "run_dir": str(home / "run"),
        }
        replayed = {"base_url": f"replay:{recording.RECORDING}", "model_name": told.model}
        with SyncOrchestrator(load_config(env=env, openai=replayed)) as orchestrator:
            orchestrator.rollouts(tasks)
        yield home / "run"


def recorded() -> Iterator[tuple[dict[str, Any], RecordedAttempt]]:
    """(line, rollout) of the demo's recording, which keeps only what was asked and said."""
    for line in recording.lines():
        episode = read_episode(dumps(line))
        assert episode is not None
        turns = tuple(
            replace(
                a_turn(sequence=number, completion=served.completion),
                kept=served.kept,
                messages=served.messages,
                segment=served.segment,
                prompt_ids=served.prompt_ids,
            )
            for number, served in enumerate(episode.turns, 1)
        )
        told = recorded_attempt(a_member(episode.index))
        whole = replace(told.record, turns=turns)
        yield line, replace(told, record=whole, score=Score(line["score"]), segment=None)


def flattened(turns: list[dict[str, Any]]) -> list[TrainingSequence]:
    """As OpenEnv's capture links turns, by their prompts alone, and flattens each line."""
    graph = RolloutGraph()
    for turn in turns:
        ids = (turn["node_id"], turn["prompt_token_ids"], turn["completion_token_ids"], turn["per_token_logps"])
        graph.add_turn(TurnNode(*copy.deepcopy(ids)))
    return graph.sequences()


def row(group: dict[str, Any], index: int) -> tuple[list[int], list[int], list[float]]:
    """A member of a line of the groups file: tokens, masks as 0 and 1, log-probs with 0.0 where masked."""
    mask = [int(m != MASKED) for m in group["masks"][index]]
    logprobs = [p if m else 0.0 for p, m in zip(group["inference_logprobs"][index], mask, strict=True)]
    return group["tokens"][index], mask, logprobs


def in_groups_file(run: Path) -> dict[str, tuple[dict[str, Any], int]]:
    """Rollout → its group's line, and its place there."""
    return {
        facts["rollout_id"]: (group, index)
        for group in lines(run / "groups.jsonl")
        for index, facts in enumerate(group["overrides"])
    }


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    return subprocess.run(
        [*COMMAND, *arguments], env=environ, capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False
    )


def passes_alike(run: Path) -> int:
    """Checks that both oracles pass all rollouts of a run, and that both mean the same tokens, masks and
    log-probs, bit by bit. Gives the number of turns."""
    turns, groups = 0, in_groups_file(run)
    for rollout_id, trace in traces(run):
        (sequence,) = flattened([turn.model_dump() for turn in trace.turns])
        assert check_sequence(sequence).ok
        assert (sequence.input_ids, sequence.loss_mask, sequence.logprobs) == row(*groups.pop(rollout_id))
        assert sequence.n_turns == len(trace.turns)
        turns += len(trace.turns)
    assert groups == {}
    verified = command("verify", str(run))
    assert verified.returncode == 0, verified.stdout + verified.stderr
    return turns


# ---------------------------------------------------------------- what is right passes


@pytest.mark.docker
def test_every_rollout_of_live_sandboxes_passes_both_oracles(run: Path) -> None:
    assert len(in_groups_file(run)) == 4 * TASKS
    assert passes_alike(run) > 4 * TASKS


@pytest.mark.docker
def test_the_whole_demo_passes_both_oracles() -> None:
    with place() as home:
        played = command("demo", f"--env.run_dir={home / 'run'}")
        assert played.returncode == 0, played.stderr
        assert passes_alike(home / "run") == sum(len(line["completions"]) for line in recording.lines())


def test_the_recording_passes_openenvs_validator() -> None:
    rollouts = turns = 0
    for line, told in recorded():
        trace = training_trace(told, GroupFormat())
        (sequence,) = flattened([turn.model_dump() for turn in trace.turns])
        assert check_sequence(sequence).ok
        said = [token for completion in line["completions"] for token in completion["token_ids"]]
        logprobs = [p for completion in line["completions"] for p in completion["logprobs"]]
        trained = [place for place, learn in enumerate(sequence.loss_mask) if learn]
        assert [sequence.input_ids[place] for place in trained] == said
        assert [sequence.logprobs[place] for place in trained] == logprobs
        assert [turn.request["messages"][-1]["role"] for turn in trace.turns] == ["user"] * len(trace.turns)
        rollouts, turns = rollouts + 1, turns + len(trace.turns)
    assert (rollouts, turns) == (132, 391)


# ---------------------------------------------------------------- what is wrong is found


@dataclass(frozen=True)
class Plant:
    """A fault, as it is in a trace's turns and in a member of the groups file. The member's lists are changed at
    `first`, where the first sample begins, `second`, where the second one does, and `last`.

    `validator`: whether `TrainingTrace` refuses it; `graph`: whether OpenEnv's capture graph and its checks of the
    flattened line do. `verify` finds all of them.
    """

    turns: Callable[[list[dict[str, Any]]], object]
    member: Callable[[Member], object]
    validator: bool = False
    graph: bool = False


@dataclass(frozen=True)
class Member:
    tokens: list[int]
    masks: list[int]
    logprobs: list[float]
    first: int
    second: int
    last: int

    @property
    def columns(self) -> tuple[list[Any], list[Any], list[Any]]:
        return self.tokens, self.masks, self.logprobs

    def lose(self, place: int) -> None:
        for column in self.columns:
            del column[place]

    def turned(self, column: list[Any], begin: int) -> None:
        """The values of the sample that begins there, each in the place of the one before."""
        end = begin + 1
        while end < len(self.masks) and self.masks[end] != MASKED:
            end += 1
        column[begin:end] = turned(column[begin:end])


def turned(values: list[Any]) -> list[Any]:
    return [*values[1:], values[0]]


def lose_token(turn: dict[str, Any]) -> None:
    """With its log-prob and its mask."""
    del turn["completion_token_ids"][0]
    del turn["per_token_logps"][0]
    del turn["loss_mask"][-1]


PLANTS = {
    "a log-prob is missing": Plant(
        lambda turns: turns[0]["per_token_logps"].pop(0), lambda m: m.logprobs.pop(m.first), validator=True
    ),
    "a log-prob is positive": Plant(
        lambda turns: turns[0]["per_token_logps"].__setitem__(0, 0.5),
        lambda m: m.logprobs.__setitem__(m.first, 0.5),
        validator=True,
        graph=True,
    ),
    "a log-prob is no number": Plant(
        lambda turns: turns[0]["per_token_logps"].__setitem__(0, float("nan")),
        lambda m: m.logprobs.__setitem__(m.first, float("nan")),
        validator=True,
        graph=True,
    ),
    "a sampled token is missing": Plant(
        lambda turns: turns[0]["completion_token_ids"].pop(0),
        lambda m: m.tokens.pop(m.first),
        validator=True,
        graph=True,
    ),
    "an observation is trained on": Plant(
        lambda turns: turns[1]["loss_mask"].__setitem__(len(turns[1]["prompt_token_ids"]) - 1, 1),
        lambda m: (
            m.masks.__setitem__(m.second - 1, m.tokens[m.second - 1]),
            m.logprobs.__setitem__(m.second - 1, -1.0),
        ),
        validator=True,
    ),
    "a mask is no 0 and no 1": Plant(
        lambda turns: turns[0]["loss_mask"].__setitem__(-1, 2),
        lambda m: m.masks.__setitem__(m.first, m.tokens[m.first] + 1),
        validator=True,
    ),
    "the first turn is there twice": Plant(
        lambda turns: turns.insert(1, copy.deepcopy(turns[0])),
        lambda m: [column.__setitem__(slice(0, 0), column[: m.second]) for column in m.columns],
        validator=True,
    ),
    "a prompt does not continue": Plant(
        lambda turns: turns[1]["prompt_token_ids"].__setitem__(0, turns[1]["prompt_token_ids"][0] + 1),
        lambda m: m.tokens.__setitem__(0, m.tokens[0] + 1),
        graph=True,
    ),
    "a token is missing with its log-prob, and the next prompt has it": Plant(
        lambda turns: lose_token(turns[0]), lambda m: m.lose(m.first), graph=True
    ),
    "a token of the last sample is missing with its log-prob": Plant(
        lambda turns: lose_token(turns[-1]), lambda m: m.lose(m.last)
    ),
    "log-probs are shifted by one": Plant(
        lambda turns: turns[0].update(per_token_logps=turned(turns[0]["per_token_logps"])),
        lambda m: m.turned(m.logprobs, m.first),
    ),
    "tokens of the last sample are shifted by one": Plant(
        lambda turns: turns[-1].update(completion_token_ids=turned(turns[-1]["completion_token_ids"])),
        lambda m: (m.turned(m.tokens, m.last), m.masks.__setitem__(slice(m.last, None), m.tokens[m.last :])),
    ),
    "the last observation is another": Plant(
        lambda turns: turns[-1]["prompt_token_ids"].__setitem__(-1, turns[-1]["prompt_token_ids"][-1] + 1),
        lambda m: m.tokens.__setitem__(m.last - 1, m.tokens[m.last - 1] + 1),
    ),
    "a sampled token is masked": Plant(
        lambda turns: turns[0]["loss_mask"].__setitem__(-1, 0),
        lambda m: (m.masks.__setitem__(m.first, MASKED), m.logprobs.__setitem__(m.first, 1.0)),
    ),
}


def refused(turns: list[dict[str, Any]]) -> bool:
    try:
        TrainingTrace.model_validate({"turns": turns})
    except ValueError:
        return True
    return False


def unlinked(turns: list[dict[str, Any]]) -> bool:
    """Whether the turns of one line do not become one line that passes."""
    sequences = flattened(turns)
    return len(sequences) != 1 or not all(check_sequence(sequence).ok for sequence in sequences)


def violations(group: dict[str, Any], record: dict[str, bytes]) -> int:
    """As `orchestrator verify` counts them."""
    findings = Findings()
    check_group(group, "groups.jsonl:1", findings, record)
    return findings.violations


def of_two_turns(trace: TrainingTrace) -> bool:
    return len(trace.turns) >= 2 and all(len(turn.completion_token_ids) > 2 for turn in trace.turns)


@pytest.mark.docker
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_of_a_live_run_is_found(name: str, run: Path) -> None:
    plant, groups = PLANTS[name], in_groups_file(run)
    record = {line["rollout_id"]: dumps(line) for line in lines(run / "rollouts.jsonl")}
    planted = 0
    for rollout_id, trace in traces(run):
        if not of_two_turns(trace):
            continue
        turns = [turn.model_dump() for turn in trace.turns]
        plant.turns(turns)
        assert (refused(turns), unlinked(turns)) == (plant.validator, plant.graph)

        group, index = copy.deepcopy(groups[rollout_id])
        assert violations(group, record) == 0
        starts = [len(turn.prompt_token_ids) for turn in trace.turns]
        columns = [group[column][index] for column in ("tokens", "masks", "inference_logprobs")]
        plant.member(Member(*columns, starts[0], starts[1], starts[-1]))
        assert violations(group, record) > 0
        planted += 1
    assert planted >= TASKS


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_of_the_recording_is_found(name: str) -> None:
    plant, planted = PLANTS[name], 0
    for _, told in recorded():
        trace = training_trace(told, GroupFormat())
        if not of_two_turns(trace):
            continue
        turns = [turn.model_dump() for turn in trace.turns]
        plant.turns(turns)
        assert (refused(turns), unlinked(turns)) == (plant.validator, plant.graph)
        planted += 1
        if planted == 20:
            return
    pytest.fail(f"only {planted} rollouts to plant a fault in")


# ---------------------------------------------------------------- what is no run, or has no ids


@pytest.mark.docker
def test_a_damaged_record_is_named_by_its_line(run: Path, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes((run / "run.json").read_bytes())
    with pytest.raises(ConfigError, match=r"holds no rollouts\.jsonl"):
        next(traces(tmp_path))
    first, second, *_ = (run / "rollouts.jsonl").read_text().splitlines()
    damaged = json.loads(second)
    damaged["completions"][0]["logprobs"].pop()
    (tmp_path / "rollouts.jsonl").write_text(f"{first}\n{json.dumps(damaged)}\n")
    read = traces(tmp_path)
    next(read)
    with pytest.raises(ValueError, match=r"rollouts\.jsonl:2: .*token.* log-probs"):
        next(read)
    damaged["completions"][0].update(token_ids=None, logprobs=None, prompt_ids=None)
    (tmp_path / "rollouts.jsonl").write_text(f"{json.dumps(damaged)}\n")
    with pytest.raises(ValueError, match=r"completion 1 has no sampled ids or no log-probs"):
        next(traces(tmp_path))
    with pytest.raises(ConfigError, match="run_dir: no run in"):
        next(traces(tmp_path / "nowhere"))
