"""Whatever is asked beside a program's own work, by the program or by code in its box: every line is trained, each
sampled token once, and nothing takes the place of the work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.completion.tokenizer import load_tokenizer
from orchestrator.run.groups import MASKED, GroupFormat
from orchestrator.run.line import read_attempt
from orchestrator.run.rows import Row, recorded_rows
from tests.fakes.inference import Call, ScriptedServer
from tests.fakes.runs import Ended, flags, lines, place, run
from tests.fakes.tokenizer import tokenizer_folder

QUESTION = "What is 6 times 7 ({})?"
STEPS = ["I look at the task and write down its numbers.", "I multiply them, one by one.", "So it is 42 then."]
LONG = "I say this again and again, because I am paid for it. " * 20
# It quotes the question, so no request of its own has it word for word. `aside` is what the others do.
PROGRAM = """\
import json, os, sys, urllib.request

def ask(talk):
    body = json.dumps({"model": "any", "messages": [{"role": r, "content": c} for r, c in talk]}).encode()
    address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

def aside(step):
    ASIDE

question = sys.stdin.read()
talk = [("system", "You work."), ("user", "WORK on " + json.dumps({"task": question + "\\n"}, indent=1))]
aside(0)
for step in range(1, 4):
    said = ask(talk)
    talk += [("assistant", said), ("user", f"Observation {step}: go on.")]
    aside(step)
open(os.environ["ANSWER_FILE"], "w").write("42")
"""
ASIDE = {
    "nothing": "pass",
    "a title first": "step == 0 and ask([('user', 'ASIDE: a title, please, for: ' + question)])",
    "the question first": "step == 0 and ask([('user', question)])",
    "the question later": "step == 1 and ask([('user', question)])",
    "going on with the work's line": "step == 1 and ask([*talk[:-1], ('user', 'ASIDE: own words')])",
    "the work with other tails": "[ask([*talk, ('user', f'ASIDE {n}')]) for n in range(3) if step]",
    "many short ones": "step == 1 and [ask([('user', f'ASIDE {n}')]) for n in range(40)]",
    "a long one": "step == 1 and ask([('user', 'ASIDE: LONG')])",
}
# Where a rollout has one line, the work is not trained, or a part of it, as SECURITY.md says.
TAKES_THE_LINE = {"going on with the work's line", "the work with other tails", "a long one"}


def script(call: Call) -> str:
    said = [message.content for message in call.messages]
    if "LONG" in said[-1]:
        return LONG
    works = any(content.startswith("WORK on") for content in said) and "ASIDE" not in said[-1]
    return STEPS[sum(message.role == "assistant" for message in call.messages)] if works else "Aside."


def untrained(ended: Ended) -> list[str]:
    return [line for line in ended.stdout.splitlines() if line.startswith("untrained")]


def rolled(home: Path, asides: list[str], dialect: str = "vllm", *, resumes: bool = False, **env: object) -> Ended:
    """A verified run of one task for each of these. `resumes`: it is resumed when nothing is left to do."""

    async def ended() -> Ended:
        async with ScriptedServer(dialect, script) as server:
            given = {"agent": "program:program.py", "max_completions": 60, "max_steps": 60, **env}
            first = await run(*flags(home, server.base_url, **given), directory=home)
            again = await run("--env.resume", str(home / "run"), directory=home) if resumes else first
        checked = await run(str(home / "run"), directory=home, command="verify")
        assert checked.code == 0, checked.stdout
        assert untrained(again) == untrained(first)
        return first

    tasks = [{"task_id": name, "question": QUESTION.format(name), "answer": "42"} for name in asides]
    (home / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    chosen = "\n    ".join(f"if {f'({name})'!r} in question: {ASIDE[name]}" for name in asides)
    (home / "program.py").write_text(PROGRAM.replace("ASIDE\n\n", f"{chosen}\n\n", 1))
    made = asyncio.run(ended())
    assert made.code == 0, made.stderr
    return made


@pytest.fixture(scope="module", params=["vllm", "openai"])
def home(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The folder of a run of all of them, which was resumed afterwards and said the same."""
    with place() as directory:
        (told,) = untrained(rolled(directory, list(ASIDE), request.param, resumes=True))
        assert "sampled in written groups, in lines that the groups file leaves out" in told
        (directory / "dialect").write_text(request.param)
        yield directory


def trained(row: Row) -> list[int]:
    return [token for token, learns in zip(row.completion_ids, row.env_mask, strict=True) if learns]


@pytest.mark.slow
@pytest.mark.parametrize("aside", ASIDE)
def test_every_line_is_trained_once_whatever_is_asked_aside(home: Path, aside: str) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder()))
    group = by_task(home / "run")[aside]
    records = [read_attempt(line) for line in (home / "run" / "rollouts.jsonl").read_bytes().splitlines()]
    records = sorted((told for told in records if told.task_id == aside), key=lambda told: told.index)
    assert len(records) == 2
    for told, facts, mask in zip(records, group["overrides"], group["masks"], strict=True):
        rows = recorded_rows(told, GroupFormat(tokenizer=tokenizer))
        assert told.score is not None
        assert {row.score for row in rows} == {told.score.value}
        tokens = {row.segment: len(trained(row)) for row in rows}
        assert [row.weight for row in rows] == pytest.approx([n / sum(tokens.values()) for n in tokens.values()])
        assert sum(row.weight for row in rows) == pytest.approx(1.0)
        said = "".join(tokenizer.decode(tuple(trained(row))) for row in rows)
        assert [said.count(step) for step in STEPS] == [1, 1, 1]
        if (home / "dialect").read_text() == "vllm":
            sampled: dict[int, list[int]] = {}
            for turn in told.record.turns:
                sampled.setdefault(turn.segment, []).extend(turn.completion.tokens_T or ())
            assert {row.segment: trained(row) for row in rows} == sampled
        # One line for each rollout: the longest one, and what is left out is told.
        (main,) = [row for row in rows if row.main]
        assert (facts["segment"], facts["main_segment"], facts["weight"]) == (main.segment, main.segment, 1.0)
        assert sum(m != MASKED for m in mask) == tokens[main.segment] == max(tokens.values())
        assert facts["untrained_share"] == told.untrained_share == pytest.approx(left_out(told.record.turns, main))
        assert (facts["untrained_share"] > 0) == (len(rows) > 1) == (aside != "nothing")
        work = "".join(STEPS) in tokenizer.decode(tuple(trained(main))).replace("<|im_end|>", "")
        assert work == (aside not in TAKES_THE_LINE)


def left_out(turns: Any, main: Row) -> float:
    tokens = [(turn.segment == main.segment, turn.completion.sampled_tokens) for turn in turns]
    return sum(n for here, n in tokens if not here) / sum(n for _, n in tokens)


@pytest.mark.slow
def test_the_report_and_a_run_that_is_scored_again_say_what_is_left_out_too(home: Path) -> None:
    async def again() -> tuple[Ended, ...]:
        viewed = await run(str(home / "run"), directory=home, command="view")
        return viewed, await run(
            str(home / "run"), f"--env.run_dir={home / 'again'}", directory=home, command="rescore"
        )

    viewed, rescored = asyncio.run(again())
    assert "of the tokens sampled in written groups are untrained here" in viewed.stdout
    assert rescored.code == 0, rescored.stdout
    assert by_task(home / "again") == by_task(home / "run")


def by_task(run_dir: Path) -> dict[str, Any]:
    return {group["overrides"][0]["task_id"]: group for group in lines(run_dir / "groups.jsonl")}


def test_the_run_s_rule_finds_the_main_line() -> None:
    """`first`: a title, asked for first; the work, where something else came later."""
    with place() as home:
        rolled(home, ["a title first", "a long one"], main_line="first")
        groups = by_task(home / "run")
    said = {name: {talk[-1]["content"] for talk in group["messages"]} for name, group in groups.items()}
    assert said == {"a title first": {"Aside."}, "a long one": {STEPS[2]}}


def test_side_lines_in_a_groups_file_have_weights() -> None:
    with place() as home:
        rolled(home, ["the work with other tails"], trained_segments="all_segments")
        facts = [one for group in lines(home / "run" / "groups.jsonl") for one in group["overrides"]]
    for rollout in {one["rollout_id"] for one in facts}:
        mine = [one for one in facts if one["rollout_id"] == rollout]
        assert len(mine) > 1
        assert sum(one["weight"] for one in mine) == pytest.approx(1.0)
        assert {one["untrained_share"] for one in mine} == {0.0}
