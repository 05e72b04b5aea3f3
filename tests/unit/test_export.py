"""`orchestrator export`: which rollouts are chosen, what is left out and why, and what the files hold. Trainers
that read them are in tests/integration."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from orchestrator.cli import main
from orchestrator.commands import table
from orchestrator.completion.trajectory import in_lines
from orchestrator.exporting.folder import ParquetRows
from orchestrator.exporting.formats import FORMATS, IDS, TALK
from orchestrator.exporting.harbor import HARBOR
from orchestrator.run.groups import GroupFormat
from orchestrator.run.line import read_attempt
from orchestrator.run.lines import dumps
from orchestrator.run.rows import recorded_rows
from orchestrator.settings.kinds import Choice
from orchestrator.settings.sources import load_config
from tests.fakes.recorded_run import write_recorded_run
from tests.fakes.tokenizer import tokenizer_folder
from tests.fakes.trees import tree
from tests.fakes.written import write_run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recorded_run(tmp_path_factory.mktemp("recorded") / "run")


@pytest.fixture
def copied(recorded: Path, tmp_path: Path) -> Path:
    """A run of its own, to be damaged."""
    folder = tmp_path / "copied"
    folder.mkdir()
    for name in ("run.json", "rollouts.jsonl"):
        (folder / name).write_bytes((recorded / name).read_bytes())
    return folder


def export(run: Path, output: Path, *flags: str) -> int:
    return main(["export", str(run), "--output", str(output), *flags])


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "train.jsonl").read_bytes().splitlines()]


def left_out(folder: Path) -> dict[str, int]:
    told: dict[str, int] = json.loads((folder / "provenance.json").read_text("utf-8"))["left_out"]
    return told


def on_record(run: Path) -> dict[str, Any]:
    """The rows of all scored rollouts, as the library makes them."""
    found = {}
    for text in (run / "rollouts.jsonl").read_bytes().splitlines():
        line = json.loads(text)
        if line.get("score") is not None:
            found[line["rollout_id"]] = recorded_rows(read_attempt(text), GroupFormat())[0]
    return found


def test_the_formats_of_the_command_line_are_all_there_are() -> None:
    (command,) = (command for command in table.COMMANDS if command.name == "export")
    (kind,) = (row.kind for row in command.options if row.name == "format")
    assert isinstance(kind, Choice)
    assert set(kind.words) == {*FORMATS, HARBOR}


def test_sft_has_the_best_rollout_of_each_group_with_the_ids_that_were_sampled(
    recorded: Path, tmp_path: Path
) -> None:
    assert export(recorded, tmp_path / "sft", "--format", "sft", "--threshold", "0.5") == 0
    made = rows(tmp_path / "sft")
    told_rows_of = on_record(recorded)
    assert [row["group"] for row in made] == [0, 1]
    for row in made:
        told = told_rows_of[row["rollout_id"]]
        assert row["score"] == max(other.score for other in told_rows_of.values() if other.group == row["group"])
        assert row["input_ids"] == [*told.prompt_ids, *told.completion_ids]
        behind = row["labels"][len(told.prompt_ids) :]
        assert set(row["labels"][: len(told.prompt_ids)]) == {-100}
        assert [label != -100 for label in behind] == [bool(m) for m in told.env_mask]
        assert all(label in (-100, i) for label, i in zip(row["labels"], row["input_ids"], strict=True))
    assert left_out(tmp_path / "sft") == {
        "below the threshold": 9,
        "without exact token ids": 2,
        "not among the best of the group": 2,
        "without a score": 1,
        "of a task that could not be rolled out": 1,
    }


def test_trl_has_every_rollout_as_the_library_gives_it(recorded: Path, tmp_path: Path) -> None:
    assert export(recorded, tmp_path / "trl", "--format", "trl") == 0
    told = on_record(recorded)
    made = rows(tmp_path / "trl")
    assert len(made) == 11, "two groups of four and one of three"
    for row in made:
        known = told[row["rollout_id"]]
        assert row["score"] == known.score
        for name in ("prompt_ids", "completion_ids", "env_mask", "logprobs"):
            assert row[name] == list(getattr(known, name)), name
        assert [p is None for p in row["logprobs"]] == [not m for m in row["env_mask"]]
        assert row["advantages"] is None


def test_pairs_are_the_best_with_the_worst_and_differ_by_the_margin(recorded: Path, tmp_path: Path) -> None:
    assert export(recorded, tmp_path / "dpo", "--format", "dpo", "--margin", "0.5") == 0
    made = rows(tmp_path / "dpo")
    assert {row["group"] for row in made} == {0, 1, 2}, "the last group's scores are nearly the same"
    used = [row[f"{side}_rollout_id"] for row in made for side in ("chosen", "rejected")]
    assert len(used) == len(set(used))
    for row in made:
        assert row["chosen_score"] - row["rejected_score"] >= 0.5
        assert [message["role"] for message in row["prompt"]] == ["system", "user"]
        for side in ("chosen", "rejected"):
            assert row[side][0]["role"] == row[side][-1]["role"] == "assistant"
            assert len(row[f"{side}_ids"]) == len(row[f"{side}_mask"])
    assert all(row["prompt_ids"] for row in made if row["group"] != 2)
    assert not any(row["prompt_ids"] or row["chosen_ids"] for row in made if row["group"] == 2), (
        "none were sampled"
    )


def test_best_bounds_pairs_and_max_tokens_leaves_long_rollouts_out(recorded: Path, tmp_path: Path) -> None:
    assert export(recorded, tmp_path / "one", "--format", "dpo", "--best", "1", "--margin", "0.5") == 0
    assert len(rows(tmp_path / "one")) == 3
    lengths = sorted(len(row.prompt_ids) + len(row.completion_ids) for row in on_record(recorded).values())
    shortest = str(next(n for n in lengths if n))
    assert export(recorded, tmp_path / "short", "--format", "trl", "--max-tokens", shortest) == 0
    kept = rows(tmp_path / "short")
    assert {len(row["prompt_ids"]) + len(row["completion_ids"]) for row in kept} == {int(shortest)}
    assert left_out(tmp_path / "short")["too long"] == 11 - len(kept)


def scored(run: Path, *scores: float) -> None:
    """Gives the rollouts of the first group these scores, and leaves all others out."""
    lines = [json.loads(line) for line in (run / "rollouts.jsonl").read_bytes().splitlines()[: len(scores)]]
    texts = [
        dumps({**line, "score": score, "score_parts": {}}) + b"\n"
        for line, score in zip(lines, scores, strict=True)
    ]
    (run / "rollouts.jsonl").write_bytes(b"".join(texts))


@pytest.mark.parametrize("margin", [(), ("--margin", "0")])
def test_equal_scores_are_no_preference(copied: Path, tmp_path: Path, margin: Sequence[str]) -> None:
    scored(copied, 1.0, 0.1 + 0.2, 0.3, 0.1)
    assert export(copied, tmp_path / "dpo", "--format", "dpo", *margin) == 0
    assert [(row["chosen_score"], row["rejected_score"]) for row in rows(tmp_path / "dpo")] == [(1.0, 0.1)]
    scored(copied, 0.1 + 0.2, 0.3)
    assert export(copied, tmp_path / "none", "--format", "dpo", *margin) == 1


def test_scores_that_are_as_far_apart_as_was_asked_are_a_pair(copied: Path, tmp_path: Path) -> None:
    scored(copied, 0.95, 0.45)
    assert 0.95 - 0.45 < 0.5, "in binary"
    assert export(copied, tmp_path / "dpo", "--format", "dpo", "--solved", "false") == 0
    scored(copied, 0.1 * 3, 0.8 - 0.5)
    assert export(copied, tmp_path / "trl", "--format", "trl", "--threshold", "0.3") == 0
    assert len(rows(tmp_path / "trl")) == 2


@pytest.mark.parametrize(
    ("flags", "reasons"),
    [
        (("--best", "1", "--solved", "false", "--margin", "0"), {"not among the best of the group": 2}),
        (("--threshold", "0.95"), {"below the threshold": 2}),
        (("--solved", "false"), {"in no pair with the margin": 2}),
        ((), {"in no pair of a solved one and one that is not": 2}),
    ],
)
def test_the_reason_is_told_why_rollouts_are_in_no_pair(
    copied: Path, tmp_path: Path, flags: Sequence[str], reasons: dict[str, int]
) -> None:
    scored(copied, 1.0, 0.9, 0.5, 0.1)
    assert export(copied, tmp_path / "dpo", "--format", "dpo", *flags) == 0
    assert [row["chosen_score"] for row in rows(tmp_path / "dpo")] == [1.0]
    assert left_out(tmp_path / "dpo") == reasons


def test_what_a_program_says_for_the_assistant_is_in_the_prompt_of_a_pair(copied: Path, tmp_path: Path) -> None:
    def with_examples(line: bytes) -> bytes:
        told = json.loads(line)
        first, *later = told["completions"]
        first["messages"][1:1] = [
            {"role": "user", "content": "What is 1 and 1?"},
            {"role": "assistant", "content": "2"},
        ]
        for completion in later:
            completion["kept"] += 2
        return dumps(told) + b"\n"

    for number in range(4):
        damage(copied, number, with_examples)
    assert export(copied, tmp_path / "dpo", "--format", "dpo", "--margin", "0.5") == 0
    first = rows(tmp_path / "dpo")[0]
    assert [message["role"] for message in first["prompt"]] == ["system", "user", "assistant", "user"]
    assert first["chosen"][0]["content"].startswith("Thought: I will read the attached file")
    assert len([i for i, m in zip(first["chosen_ids"], first["chosen_mask"], strict=True) if m]) > 100


def test_ids_stand_beside_a_pair_only_if_both_have_them(copied: Path, tmp_path: Path) -> None:
    def as_text(line: bytes) -> bytes:
        told = json.loads(line)
        for completion in told["completions"]:
            completion |= {"prompt_ids": None, "token_ids": None, "logprobs": None}
        return dumps(told) + b"\n"

    scored(copied, 1.0, 0.1)
    damage(copied, 1, as_text)
    assert export(copied, tmp_path / "dpo", "--format", "dpo") == 0
    (row,) = rows(tmp_path / "dpo")
    assert [row[name] for name in ("prompt_ids", "chosen_ids", "chosen_mask", "rejected_ids")] == [[]] * 4


def test_side_lines_are_told_apart_from_the_main_one_and_need_ids_only_where_ids_are_written(
    copied: Path, tmp_path: Path
) -> None:
    def with_side(line: bytes) -> bytes:
        told = json.loads(line)
        side = {**told["completions"][0], "sequence": 99, "segment": 1, "kept": 0}
        told["completions"] += [
            side,
            {**side, "segment": 2, "prompt_ids": None, "token_ids": None, "logprobs": None},
        ]
        return dumps(told) + b"\n"

    scored(copied, 1.0)
    damage(copied, 0, with_side)
    wanted = ("--env.trained_segments", "all_segments")
    for name, segments in (("sft", [0, 1]), ("messages", [0, 1, 2])):
        assert export(copied, tmp_path / name, "--format", name, *wanted) == 0
        found = rows(tmp_path / name)
        assert [(row["segment"], row["main"]) for row in found] == [(n, n == 0) for n in segments]
        assert {row["score"] for row in found} == {1.0}
        assert sum(row["weight"] for row in found) == pytest.approx(1.0)
    assert left_out(tmp_path / "sft") == {"side lines without exact token ids, or too long": 1}
    assert left_out(tmp_path / "messages") == {}


def test_outcomes_that_the_run_masks_are_left_out(recorded: Path, tmp_path: Path) -> None:
    masked = '--env.untrained_outcomes=["max_steps"]'
    assert export(recorded, tmp_path / "trl", "--format", "trl", masked) == 0
    assert {row["outcome"] for row in rows(tmp_path / "trl")} == {"finished"}
    assert left_out(tmp_path / "trl")["masked by the run's settings"] == 2


def test_the_provenance_names_what_was_read_and_no_place_on_this_machine(recorded: Path, tmp_path: Path) -> None:
    assert export(recorded, tmp_path / "m", "--format", "messages", "--best", "2", "--threshold", "0.5") == 0
    again = "--format messages --solved false --best 2 --threshold 0.5"
    told = json.loads((tmp_path / "m" / "provenance.json").read_text("utf-8"))
    assert told["command"] == f"orchestrator export run {again}"
    assert (told["not_solved"], told["run"]["token_ids"]) == (0, "exact")
    assert told["rows"] == len(rows(tmp_path / "m")) == 6
    for name, facts in told["run"]["files"].items():
        assert facts["sha256"] == hashlib.sha256((recorded / name).read_bytes()).hexdigest()
    assert told["run"]["models"] == ["scripted"]
    for name in ("provenance.json", "README.md"):
        text = (tmp_path / "m" / name).read_text("utf-8")
        assert str(tmp_path.parent) not in text
        assert str(tokenizer_folder()) not in text
    assert told["run"]["tokenizer"] == tokenizer_folder().name
    assert told["settings"] == {
        "group_policy": "backfill",
        "group_size": 4,
        "train_mixed_versions": True,
        "trained_segments": None,
        "untrained_outcomes": [],
        "zero_variance": "keep",
    }


def test_of_a_model_in_a_folder_only_the_last_part_is_handed_on(copied: Path, tmp_path: Path) -> None:
    told = json.loads((copied / "run.json").read_text("utf-8"))
    servers = [{**told["config"]["openai"][0], "model_name": name} for name in ("/srv/mine/qwen", "org/qwen")]
    (copied / "run.json").write_text(json.dumps({**told, "config": {**told["config"], "openai": servers}}))
    assert export(copied, tmp_path / "m") == 0
    text = (tmp_path / "m" / "provenance.json").read_text("utf-8")
    assert json.loads(text)["run"]["models"] == ["qwen", "org/qwen"]
    assert "/srv" not in text + (tmp_path / "m" / "README.md").read_text("utf-8")


def test_messages_are_the_conversation_on_record(recorded: Path, tmp_path: Path) -> None:
    assert export(recorded, tmp_path / "m", "--format", "messages", "--best", "4", "--solved", "false") == 0
    made, told = rows(tmp_path / "m"), on_record(recorded)
    assert {row["rollout_id"] for row in made} == set(told)
    for row in made:
        assert row["messages"] == [
            {"role": m.role, "content": m.content} for m in told[row["rollout_id"]].messages
        ]
        assert [message["role"] for message in row["messages"][:3]] == ["system", "user", "assistant"]


def test_tools_are_beside_the_messages(copied: Path, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    lines = [json.loads(text) for text in (copied / "rollouts.jsonl").read_bytes().splitlines()]
    for line in lines:
        if line.get("completions") and line["index"] != 3:
            line["completions"][0]["tools"] = tools
    (copied / "rollouts.jsonl").write_bytes(b"\n".join(map(dumps, lines)) + b"\n")
    assert export(copied, tmp_path / "m", "--format", "messages", "--best", "4", "--solved", "false") == 0
    offered = {row["index"]: row["tools"] and json.loads(row["tools"]) for row in rows(tmp_path / "m")}
    assert offered == {0: tools, 1: tools, 2: tools, 3: None}
    # What was offered is a part of the prompt.
    assert export(copied, tmp_path / "d", "--format", "dpo", "--best", "2") == 0
    assert {json.loads(row["tools"])[0]["function"]["name"] for row in rows(tmp_path / "d")} == {"add"}
    assert left_out(tmp_path / "d")["in a pair whose prompts differ"] > 0
    assert export(copied, tmp_path / "h", "--format", "hf") == 0
    assert {
        row["tools"] is None for row in pq.read_table(next((tmp_path / "h" / "data").iterdir())).to_pylist()
    } == {
        True,
        False,
    }


def test_long_rows_wait_for_no_others_before_they_are_written(tmp_path: Path) -> None:
    file = ParquetRows(tmp_path / "rows.parquet", {"ids": IDS, "messages": TALK})
    long_ids = {"ids": [7] * 600_000, "messages": []}
    long_talk = {"ids": [7], "messages": [{"role": "user", "content": "x" * 600_000}]}
    file.write([long_ids, long_ids, long_talk, long_talk, *[{"ids": [1], "messages": []}] * 300])
    file.close()
    read = pq.ParquetFile(tmp_path / "rows.parquet").metadata
    assert [read.row_group(n).num_rows for n in range(read.num_row_groups)] == [2, 2, 256, 44]


# ---------------------------------------------------------------- what cannot be read, and what is there already


def damage(run: Path, number: int, change: Callable[[bytes], bytes]) -> None:
    lines = (run / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    lines[number] = change(lines[number])
    (run / "rollouts.jsonl").write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda line: line[:200] + b"\n", "json"),
        (lambda line: line.replace(b'"schema":2', b'"schema":3', 1), "schema"),
        (lambda line: line.replace(b'"prompt_tokens":', b'"prompt_tokenz":'), "prompt_tokens"),
        (lambda line: b"\xff\x00\n", "json"),
        (lambda line: line.replace(b'"token_ids":[', b'"token_ids":[4294967296,', 1), "token_ids.0"),
        (lambda line: dumps({**json.loads(line), "segment": 7}) + b"\n", "no segment 7"),
    ],
    ids=["torn", "another schema", "only wrong when read whole", "no text", "no id", "no such line"],
)
def test_a_damaged_line_is_named_and_costs_no_other(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[bytes], bytes], reason: str
) -> None:
    damage(copied, 0, change)
    assert export(copied, tmp_path / "trl", "--format", "trl") == 1
    named = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out: ")]
    assert len(named) == 1
    assert reason in named[0].lower()
    assert len(rows(tmp_path / "trl")) == 10
    assert left_out(tmp_path / "trl")["of an unreadable line"] == 1


def test_ids_that_do_not_make_the_text_are_named(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As they are if somebody names another tokenizer."""
    damage(copied, 0, lambda line: line.replace(b'"text":"Thought', b'"text":"Another'))
    assert export(copied, tmp_path / "trl", "--format", "trl") == 1
    assert "the sampled ids do not decode to the sampled text" in capsys.readouterr().out
    assert left_out(tmp_path / "trl")["of an unreadable line"] == 1


def test_a_line_that_is_there_twice_counts_once(copied: Path, tmp_path: Path) -> None:
    record = copied / "rollouts.jsonl"
    record.write_bytes(record.read_bytes() + record.read_bytes().splitlines(keepends=True)[0])
    assert export(copied, tmp_path / "trl", "--format", "trl") == 1
    assert len(rows(tmp_path / "trl")) == 11


def test_of_a_run_that_is_going_on_the_finished_lines_are_exported(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = copied / "rollouts.jsonl"
    record.write_bytes(record.read_bytes() + b'{"schema":1,"rollout_id":"g0')
    lock = os.open(copied / "lock", os.O_CREAT | os.O_RDWR)
    try:
        flock(lock, LOCK_EX)
        assert export(copied, tmp_path / "trl", "--format", "trl") == 0
    finally:
        os.close(lock)
    assert "note: copied is still running; its finished rollouts were exported" in capsys.readouterr().out
    assert len(rows(tmp_path / "trl")) == 11


def refused(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is said of a command line that is refused."""
    assert main(["export", *arguments]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.count("\n") == 1
    return said.err


def test_nothing_is_overwritten(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    assert "--output" not in (said := refused([str(recorded), "--output", str(kept)], capsys))
    assert said == f"orchestrator: output: {kept} already exists and is not overwritten; name another one\n"
    assert kept.read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "note"),
    [("none", "the run had no tokenizer"), ("/not/here", "the run's tokenizer is not on this machine")],
)
def test_why_the_ends_of_turns_stay_is_said(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, note: str
) -> None:
    described = json.loads((copied / "run.json").read_text())
    described["config"]["env"]["tokenizer_name"] = name
    (copied / "run.json").write_text(json.dumps(described))
    assert export(copied, tmp_path / "out") == 0
    assert f"note: {note}: messages keep the tokens that end a turn" in capsys.readouterr().out


def test_what_is_no_run_is_refused(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "RUN_DIR: no run in" in refused([str(tmp_path / "nowhere")], capsys)
    (copied / "rollouts.jsonl").rename(copied / "elsewhere.jsonl")
    assert "holds no rollouts.jsonl" in refused([str(copied)], capsys)
    told = json.loads((copied / "run.json").read_text("utf-8"))
    (copied / "run.json").write_text(json.dumps({**told, "schema": 2}))
    assert "has schema 2; this version reads 1" in refused([str(copied)], capsys)
    (copied / "run.json").write_text("[]")
    assert "does not describe a run" in refused([str(copied)], capsys)


def test_a_margin_is_for_pairs_alone(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "only dpo makes pairs" in refused([str(recorded), "--format", "sft", "--margin", "0.1"], capsys)


def test_without_a_single_row_nothing_is_written(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "rollouts.jsonl").write_bytes(b"")
    assert export(copied, tmp_path / "none" / "trl", "--format", "trl") == 1
    assert capsys.readouterr().err == "orchestrator: nothing to export: the record holds no rollout\n"
    assert not list((tmp_path / "none").iterdir())


@pytest.mark.parametrize(
    ("scores", "flags", "said"),
    [
        ((0.0, 0.0), ("--format", "sft"), "2 not solved; --solved false takes them"),
        ((1.0, 0.5), ("--format", "trl", "--max-tokens", "1"), "2 too long; set a higher --max-tokens"),
        ((0.0, 0.5), ("--threshold", "0.9"), "2 below the threshold; set a lower --threshold"),
        (
            (1.0, 1.0, 1.0),
            ("--format", "dpo"),
            "2 in no pair of a solved one and one that is not; --solved false makes pairs by scores alone",
        ),
        (
            (1.0, 1.0),
            ("--format", "dpo", "--solved", "false"),
            "2 in no pair with the margin; set a smaller --margin; equal scores are never a pair",
        ),
    ],
)
def test_what_to_set_is_said_where_nothing_is_chosen(
    copied: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    scores: Sequence[float],
    flags: Sequence[str],
    said: str,
) -> None:
    scored(copied, *scores)
    assert export(copied, tmp_path / "none" / "out", *flags) == 1
    assert capsys.readouterr().err == f"orchestrator: nothing to export: {said}\n"


# ---------------------------------------------------------------- what is right


@pytest.mark.parametrize("name", ["sft", "messages"])
def test_examples_are_of_solved_rollouts_unless_others_are_asked_for(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    scored(copied, 1.0, 0.0, 0.9, 0.9)
    all_of_a_group = ("--format", name, "--best", "4")
    assert export(copied, tmp_path / "right", *all_of_a_group) == 0
    assert [row["score"] for row in rows(tmp_path / "right")] == [1.0]
    assert left_out(tmp_path / "right") == {"not solved": 3}
    assert "not solved     " not in capsys.readouterr().out
    for flags, scores in (
        (("--solved", "false"), [1.0, 0.0, 0.9, 0.9]),
        (("--threshold", "0.5"), [1.0, 0.9, 0.9]),
        (("--threshold", "0.5", "--solved"), [1.0]),
    ):
        output = tmp_path / "-".join(flags)
        assert export(copied, output, *all_of_a_group, *flags) == 0
        assert [row["score"] for row in rows(output)] == scores
        wrong = len(scores) - 1
        assert (f"not solved     {wrong} of the rows\n" in capsys.readouterr().out) == bool(wrong)
        assert json.loads((output / "provenance.json").read_text())["not_solved"] == wrong


def test_solved_is_what_the_scorer_calls_so(copied: Path, tmp_path: Path) -> None:
    """A right answer in a poor form, and a wrong one in a good form, of a judge's score with parts."""
    scored(copied, 0.7, 0.75, 0.1)
    for number, correctness in enumerate((1.0, 0.9, 0.0)):
        parts = {"correctness": correctness, "form": 0.5}
        damage(copied, number, lambda line, parts=parts: dumps({**json.loads(line), "score_parts": parts}) + b"\n")
    assert export(copied, tmp_path / "sft", "--format", "sft", "--best", "4") == 0
    assert [row["score"] for row in rows(tmp_path / "sft")] == [0.7]
    assert export(copied, tmp_path / "dpo", "--format", "dpo") == 0
    (pair,) = rows(tmp_path / "dpo")
    assert (pair["chosen_score"], pair["rejected_score"]) == (0.7, 0.1)


def test_pairs_prefer_what_is_solved_to_what_is_not_unless_others_are_asked_for(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scored(copied, 0.9, 0.8, 0.2, 0.1)
    assert export(copied, tmp_path / "none" / "dpo", "--format", "dpo") == 1
    assert "nothing to export: 4 in no pair of a solved one" in capsys.readouterr().err
    assert export(copied, tmp_path / "dpo", "--format", "dpo", "--solved", "false") == 0
    assert len(rows(tmp_path / "dpo")) == 2
    said = "not solved     2 of the pairs: they are no solved rollout with one that is not\n"
    assert said in capsys.readouterr().out


def test_what_has_no_sampled_ids_is_led_to_the_format_that_needs_none(
    recorded: Path, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(recorded, tmp_path / "sft", "--format", "sft", "--best", "4") == 0
    note = "note: 2 have no sampled ids, as the endpoint gave text: --format messages has them as conversations\n"
    assert note in capsys.readouterr().out
    lines = (copied / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    (copied / "rollouts.jsonl").write_bytes(b"".join(lines[8:10]))  # of an endpoint that gives text
    for name, other in (("sft", "messages"), ("trl", "hf")):
        assert export(copied, tmp_path / "none" / name, "--format", name) == 1
        assert capsys.readouterr().err == (
            "orchestrator: nothing to export: 2 without exact token ids; "
            f"--format {other} has them as conversations\n"
        )
        assert export(copied, tmp_path / other, "--format", other) == 0


def test_what_fails_leaves_nothing(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("orchestrator.exporting.folder.JsonRows.write", full)
    assert export(recorded, tmp_path / "trl", "--format", "trl") == 1
    assert not list(tmp_path.iterdir())


def test_rollouts_that_part_at_a_turn_are_pairs_behind_all_that_they_share(tmp_path: Path) -> None:
    group = tree()
    members = group.members_G
    config = load_config(
        env={"group_size": 4, "tokenizer_name": "none"},
        openai={"base_url": "http://localhost:9/v1", "model_name": "scripted"},
    )
    run = write_run(tmp_path / "run", *members, facts={"version": "0.1.0", "config": config.public()})
    assert export(run, tmp_path / "dpo", "--format", "dpo") == 0
    trunk, second = (member.attempt.plan.rollout_id for member in members[:2])
    (pair,) = rows(tmp_path / "dpo")
    assert (pair["chosen_rollout_id"], pair["rejected_rollout_id"]) == (second, trunk)
    (_, chosen), (_, rejected) = (in_lines(member.attempt.record.turns)[1] for member in (members[1], members[0]))
    assert [m["content"] for m in pair["prompt"]] == [m.content for m in chosen] == [m.content for m in rejected]
    assert [pair[side][0]["content"] for side in ("chosen", "rejected")] == ["r2t2</code>", "r1t2</code>"]
    assert pair["prompt_ids"][-2:] != [110, 111]
    assert {110, 111} <= set(pair["prompt_ids"]), "the trunk's first turn is what both have"
    trained = {
        side: [i for i, m in zip(pair[f"{side}_ids"], pair[f"{side}_mask"], strict=True) if m]
        for side in ("chosen", "rejected")
    }
    assert trained == {"chosen": [220, 221, 230, 231], "rejected": [120, 121, 130, 131]}
    # The other branch shares the task alone with the whole rollout: what it inherited is no answer of its own.
    assert left_out(tmp_path / "dpo") == {"in a pair whose prompts differ": 2}


@pytest.mark.parametrize("trunk", ["trained", "masked"])
def test_a_trunk_is_masked_where_the_run_masks_it_and_its_advantages_are_those_of_the_groups_file(
    tmp_path: Path, trunk: str
) -> None:
    group = tree()
    config = load_config(
        env={"group_size": 6, "tokenizer_name": "none", "branch": f"turns:2,3 width:1 trunk:{trunk}"},
        openai={"base_url": "http://localhost:9/v1", "model_name": "scripted"},
    )
    run = write_run(tmp_path / "run", *group.members_G, facts={"version": "0.1.0", "config": config.public()})
    (written,) = GroupFormat.of(config.env, None).groups(group)
    assert export(run, tmp_path / "trl", "--format", "trl", "--env.group_policy", "partial:1") == 0
    made = rows(tmp_path / "trl")
    for row, mask, advantages in zip(made, written["masks"], written["advantages"], strict=True):
        on = [place for place, m in enumerate(row["env_mask"]) if m]
        trained = [place for place, i in enumerate(mask) if i != -100]
        assert [row["completion_ids"][place] for place in on] == [mask[place] for place in trained]
        assert [row["advantages"][place] for place in on] == [advantages[place] for place in trained]
