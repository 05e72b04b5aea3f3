"""`orchestrator evaluate` as its users run it: real containers, and a scripted endpoint in another process."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.tasks.selection import held_out
from tests.e2e.endpoint import answers, says, scripted_endpoint
from tests.e2e.leftovers import run_cleanly
from tests.fakes.runs import flags, lines, outcomes, place, run, running, until, whole_lines
from tests.unit.test_report import Elements

pytestmark = pytest.mark.docker

KEY = "sk-canary-0123456789abcdef"
NAMES = [f"task-{n}" for n in range(8, 16)]
HELD = [name for name in NAMES if held_out(name, 0.25)]
# Of each task's samples the first is right, the second wrong; of one task none is ever given.
SCRIPT = {
    "number": [[says("I look.", "x = 40 + 2\nprint(x)"), answers("x")], [answers("41")]],
}
BROKEN = HELD[-1]


@pytest.fixture
def home() -> Iterator[Path]:
    with place() as directory:
        rows = [
            {"task_id": n, "question": f"What is the number of {n}?", "answer": 42, "level": i % 2 + 1}
            for i, n in enumerate(NAMES)
        ]
        (directory / "tasks.jsonl").write_text("{torn\n" + "".join(f"{json.dumps(row)}\n" for row in rows))
        yield directory


def evaluating(home: Path, base_url: str, run_dir: str, **env: object) -> list[str]:
    given: dict[str, object] = {
        "launcher": "docker",
        "group_size": None,
        "run_dir": home / run_dir,
        "eval_split": "hash:0.25",
        "eval_samples": 2,
        **env,
    }
    return flags(home, base_url, **given)


async def test_the_held_out_tasks_are_measured_and_never_trained_on(home: Path) -> None:
    assert len(HELD) == 3
    faults = [{"kind": "400", "pattern": f"number of {BROKEN}?"}]
    with scripted_endpoint(SCRIPT, "--dialect", "vllm", "--api-key", KEY, faults=faults) as endpoint:
        ended = await run_cleanly(
            *evaluating(home, endpoint.base_url, "live", eval_temperature=0.5, max_retries=0),
            "--openai.prompt_price=1",
            "--openai.completion_price=1000",
            directory=home,
            environ={"OPENAI_API_KEY": KEY},
            command="evaluate",
        )
        assert {served["call"]["seed"] is not None for served in endpoint.completions()} == {True}
        asked = len(endpoint.completions())
        trained = await run_cleanly(
            *flags(home, endpoint.base_url, launcher="docker", eval_split="hash:0.25", group_size=1),
            directory=home,
            environ={"OPENAI_API_KEY": KEY},
        )
    assert ended.code == 1, ended.stderr  # two samples are missing
    assert trained.code == 0, trained.stderr
    groups = lines(home / "run" / "groups.jsonl")
    assert sorted(g["overrides"][0]["task_id"] for g in groups) == sorted(set(NAMES) - set(HELD))

    told = json.loads((home / "live" / "metrics.json").read_text())
    metrics = told["results"]["all"]
    assert told["config_general"]["model_name"] == "scripted"
    assert told["config_general"]["generation_parameters"]["temperature"] == 0.5
    assert (metrics["eval/tasks"], metrics["eval/samples"], metrics["eval/samples_missing"]) == (3, 4, 2)
    assert (metrics["eval/accuracy"], metrics["eval/pass@2"], metrics["eval/bad_tasks"]) == (0.5, 1.0, 1)
    assert (metrics["eval/outcome_finished"], metrics["eval/outcome_llm_error"]) == (4, 2)
    assert metrics["eval/steps"] == 1.5
    assert asked >= 6 + 2  # what was refused may have been asked again
    records = lines(home / "live" / "rollouts.jsonl")
    completions = [c for line in records for c in line.get("completions", ())]
    spent = sum(c["prompt_tokens"] + 1000 * c["completion_tokens"] for c in completions) / 1e6
    assert metrics["eval/cost"] == pytest.approx(spent)
    assert {line["plan"]["sampling"]["temperature"] for line in records if "plan" in line} == {0.5}
    samples = lines(home / "live" / "samples.jsonl")
    assert sorted({s["task_id"] for s in samples}) == sorted(HELD)
    assert [s["correct"] for s in samples if s["task_id"] == BROKEN] == [None, None]
    assert sorted(s["correct"] for s in samples if s["task_id"] != BROKEN) == [False, False, True, True]
    assert all(s["messages"][0]["role"] == "system" for s in samples if s["correct"] is not None)
    found = outcomes(home / "live")
    assert set(found) == {"finished", "llm_error", "bad_task"}
    assert (found["finished"], found["bad_task"]) == (4, 1)
    page = Elements((home / "live" / "evaluation.html").read_text()).block("run")
    assert [part["label"] for part in page["evaluation"]["parts"]] == ["all", "level 1", "level 2"]
    first, second = page["evaluation"]["parts"][0]["estimates"]
    assert (first[0], second[0]) == (metrics["eval/accuracy"], metrics["eval/pass@2"])
    assert (page["evaluation"]["tasks"], page["evaluation"]["missing"]) == (3, 2)
    assert page["totals"]["cost"] == pytest.approx(spent)
    for word in ("pass@1", "pass@2", "evaluation.html", "50.0% (", "missing", "cost", "metrics.json"):
        assert word in ended.stdout
    for file in (home / "live").iterdir():
        assert KEY.encode() not in file.read_bytes(), file
    assert KEY not in ended.stdout + ended.stderr

    again = await run_cleanly(
        *evaluating(home, f"replay:{home / 'live'}", "again", data_dir_to_save_evals=home / "evals"),
        "--no-answers",
        directory=home,
        command="evaluate",
    )
    assert again.code == 1, again.stderr
    assert "every prompt as recorded" in again.stdout
    same = json.loads((home / "evals" / "metrics.json").read_text())["results"]["all"]
    for name in ("eval/accuracy", "eval/pass@2", "eval/samples", "eval/steps", "eval/completion_tokens"):
        assert same[name] == metrics[name]
    assert len(lines(home / "evals" / "samples.jsonl")) == 6
    shared = Elements((home / "evals" / "evaluation.html").read_text()).block("run")
    assert (
        {row["answer"] for row in shared["rollouts"]}
        == {group["reference"] for group in shared["groups"]}
        == {None}
    )


@pytest.mark.long
async def test_an_evaluation_that_was_stopped_goes_on_where_it_was(home: Path) -> None:
    with scripted_endpoint(SCRIPT, "--dialect", "vllm", "--delay", "0.5") as endpoint:
        how = {"launcher": "process", "eval_split": None, "max_concurrent_sandboxes": 1, "drain_timeout": 0}
        arguments = evaluating(home, endpoint.base_url, "run", **how)
        async with running(*arguments, directory=home, command="evaluate") as started:
            await until(lambda: whole_lines(home / "run" / "rollouts.jsonl") >= 3, "some samples are on record")
            started.signal(signal.SIGTERM)
            ended = await started.ended()
        assert ended.code == 143, ended.stderr
        assert not ended.traceback, ended.stderr
        assert "orchestrator evaluate --env.resume" in ended.stderr
        assert not (home / "run" / "metrics.json").exists()
        done = outcomes(home / "run")["finished"]
        assert 1 <= done < 16

        refused = await run(f"--env.resume={home / 'run'}", directory=home)
        assert refused.code == 2, refused.stderr
        quicker = "--env.max_concurrent_sandboxes=4"
        resumed = await run(f"--env.resume={home / 'run'}", quicker, directory=home, command="evaluate")
    assert resumed.code == 0, resumed.stderr
    assert outcomes(home / "run")["finished"] == 16
    metrics = json.loads((home / "run" / "metrics.json").read_text())["results"]["all"]
    assert (metrics["eval/tasks"], metrics["eval/samples"], metrics["eval/bad_tasks"]) == (8, 16, 1)
    assert metrics["eval/accuracy_level_1"] + metrics["eval/accuracy_level_2"] == 2 * metrics["eval/accuracy"]
    assert len(lines(home / "run" / "samples.jsonl")) == 16
