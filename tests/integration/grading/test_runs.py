"""Whole runs whose tasks have graders: what the agent left is graded in another sandbox, and the score is its."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import oci_images
from tests.fakes.inference import Call, ScriptedServer
from tests.fakes.runs import flags, lines, outcomes, place, run, running, until

_WHY_NOT = oci_images.why_not()
pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(600),
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
]
RIGHT = "print(int(input()) + int(input()))"
WRONG = "print(5)"
TEST_SH = """#!/bin/sh
echo "in $PWD as $(id -u), $GREETING"
r=0
test "$(printf '2\\n3\\n' | python3 add.py)" = 5 && test "$(printf '20\\n3\\n' | python3 add.py)" = 23 && r=1
printf '{"reward": %s, "speed": 0.25}' $r > /logs/verifier/reward.json
"""
CHECK = "import subprocess as s; assert s.check_output(['python3', 'add.py'], input=b'4\\n4\\n') == b'8\\n'"
CASES = [{"stdin": "2\n3\n", "expected": "5"}, {"stdin": "40\n2\n", "expected": "42\n"}]
GRADERS: dict[str, dict[str, Any]] = {
    "q0": {"kind": "harbor", "tests": "tests", "env": {"GREETING": "hello"}},
    "q1": {"kind": "command", "command": ["python3", "-c", CHECK]},
    "q2": {"kind": "io", "command": "python3 add.py", "cases": CASES},
}


@pytest.fixture
def home() -> Iterator[Path]:
    oci_images.stored_image()
    with place() as directory:
        (directory / "tests").mkdir()
        (directory / "tests" / "test.sh").write_text(TEST_SH)
        yield directory


def write(home: Path, graders: dict[str, dict[str, Any]]) -> None:
    rows = [
        {"task_id": name, "question": f"Write add.py (of {name}!).", "grader": grader}
        for name, grader in graders.items()
    ]
    (home / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def wrote(program: str, answer: str = "final_answer('done')") -> str:
    return f"Thought.\n<code>\nopen('add.py', 'w').write({program!r})\n{answer}\n</code>"


def right_and_wrong() -> Callable[[Call], str]:
    """Of each task, the first rollout that asks is right, the next one wrong, and so on."""
    asked: Counter[str] = Counter()

    def script(call: Call) -> str:
        name = next((name for name in GRADERS if f"of {name}!" in call.task), "a probe")
        asked[name] += 1
        return wrote(RIGHT if asked[name] % 2 else WRONG)

    return script


def graded(home: Path) -> dict[str, list[dict[str, Any]]]:
    """The attempts by their task."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in lines(home / "run" / "rollouts.jsonl"):
        found.setdefault(line["task_id"], []).append(line)
    return found


async def test_each_kind_of_grader_scores_what_the_agent_left(home: Path) -> None:
    script = right_and_wrong()
    write(home, GRADERS)
    async with ScriptedServer("vllm", script) as server:
        given = flags(home, server.base_url, launcher="oci", scoring_strategy="grader", max_concurrent_sandboxes=2)
        ended = await run(*given, directory=home, environ=oci_images.CACHE)
    assert ended.code == 0, ended.stderr
    assert "2 sandboxes and 1 to grade on top, 3 in all" in ended.stderr
    for attempts in graded(home).values():
        assert sorted(attempt["score"] for attempt in attempts) == [0.0, 1.0], [a["grade"] for a in attempts]
        for attempt in attempts:
            grade = attempt["grade"]
            assert grade["fault"] == ""
            assert grade["rewards"]["reward"] == attempt["score"]
            assert grade["scope"] == "whole"
            assert 0 < grade["cpu_s"] < 10
    harbor = graded(home)["q0"][0]
    assert harbor["grade"]["source"] == "reward.json"
    assert harbor["grade"]["stdout"] == "in /workspace as 0, hello\n"
    assert harbor["score_parts"]["speed"] == 0.25
    right = next(a for a in graded(home)["q2"] if a["score"] == 1)
    assert [test["outcome"] for test in right["grade"]["tests"]] == ["passed", "passed"]
    assert list((home / "t").iterdir()) == []
    # Scored again, the grades are kept: the sandboxes are gone.
    again = await run(
        *("run", "--env.run_dir=again", "--env.scoring_strategy=grader", "--env.reward_key=speed"),
        directory=home,
        command="rescore",
        environ=oci_images.CACHE,
    )
    rescored = {line["rollout_id"]: line for line in lines(home / "again" / "rollouts.jsonl")}
    for name, attempts in graded(home).items():
        for attempt in attempts:
            line = rescored[attempt["rollout_id"]]
            assert line["grade"] == attempt["grade"]
            assert (line["score"], line["outcome"] == "scorer_error") == (
                (0.25, False) if name == "q0" else (None, True)
            ), again.stderr


def graders(home: Path) -> list[Path]:
    """The sandboxes in which something is graded now."""
    return [place.parents[1] for place in (home / "t").glob("orchestrator-*/bundles/sandbox-*/request/go")]


SLOW = {"q0": {"kind": "command", "command": "sleep 300"}}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_run_that_ends_while_it_grades_leaves_nothing(home: Path, number: signal.Signals) -> None:
    write(home, SLOW)
    async with ScriptedServer("vllm", right_and_wrong()) as server:
        given = flags(home, server.base_url, launcher="oci", scoring_strategy="grader", drain_timeout=0.5)
        async with running(*given, directory=home, environ=oci_images.CACHE) as started:
            await until(lambda: len(graders(home)) == 1, "it grades, one at a time")
            started.signal(number)
            ended = await started.ended()
    assert ended.code == (-9 if number == signal.SIGKILL else 143), ended.stderr
    await until(lambda: not list((home / "t").glob("orchestrator-*/state/[!.]*")), "no container is left")
    if number == signal.SIGTERM:
        assert outcomes(home / "run") == {"cancelled": 2}
        assert list((home / "t").iterdir()) == []


async def test_a_task_whose_grader_cannot_be_had_is_a_bad_task_with_the_reason(home: Path) -> None:
    write(home, {"q0": GRADERS["q1"], "q1": {"kind": "odd"}, "q2": {**GRADERS["q0"], "tests": "nowhere"}})
    async with ScriptedServer("vllm", right_and_wrong()) as server:
        given = flags(home, server.base_url, launcher="docker", scoring_strategy="grader")
        ended = await run(*given, directory=home)
    assert ended.code != 0
    reasons = {line["task_id"]: line["reason"] for line in lines(home / "run" / "rollouts.jsonl")}
    assert reasons == {
        "q0": "its grader needs a root that can be written to: --env.launcher oci",
        "q1": "grader.kind 'odd' is unknown; valid are command, io, harbor",
        "q2": "grader.tests 'nowhere' is not beside the dataset",
    }
