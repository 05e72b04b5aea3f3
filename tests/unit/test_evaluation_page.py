"""The page of an evaluation: its figures are those of metrics.json, and it can be shared without the answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import main
from orchestrator.evaluation.measured import Evaluation
from orchestrator.types import Failed, FailedName, Group, Task
from tests.fakes.odd_run import an_attempt_line
from tests.fakes.plans import a_member, an_attempt
from tests.unit.test_report import Elements

SECRET = "Zanzibar-4711"
# Of each task's samples: right, wrong, or broke.
TASKS: list[tuple[str, list[bool | None]]] = [
    ("1", [True, True, False, False]),
    ("1", [False, False, False, False]),
    ("2", [True, None, True, True]),
    ("2", [None, None, None, None]),
    ("3", [True, True, True, True]),
]


def write_evaluation(directory: Path, **more: Any) -> Path:
    directory.mkdir()
    rows: list[dict[str, Any]] = []
    for group, (level, samples) in enumerate(TASKS):
        for index, right in enumerate(samples):
            end: dict[str, Any] = {
                "outcome": "finished",
                "score": float(right or 0),
                "answer": SECRET if right else "no",
            }
            if right is None:
                end = {"outcome": "llm_error", "score": None, "reason": f"refused: {SECRET}"}
            name = f"g{group:06d}-r{index:02d}-a0"
            place = {"group": group, "index": index, "task_id": f"t{group}", "level": level}
            rows.append(an_attempt_line(rollout_id=name, **place, **end, **more))
    rows.append({"rollout_id": "g5", "group": 5, "task_id": "x", "outcome": "bad_task", "reason": f"odd {SECRET}"})
    (directory / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"env": {"group_size": 4}, "openai": [{"model_name": "m"}]}
    (directory / "run.json").write_text(json.dumps({"command": "evaluate", "config": config}))
    return directory


def counted() -> dict[str, float]:
    evaluation = Evaluation(4)
    for number, (level, samples) in enumerate(TASKS):
        broken = Failed(FailedName.LLM_ERROR, "HTTP 500")
        members = tuple(a_member(index, float(right)) for index, right in enumerate(samples) if right is not None)
        lost = [an_attempt(broken, index) for index, right in enumerate(samples) if right is None]
        attempts = (*(member.attempt for member in members), *lost)
        evaluation.take(Group(number, Task(f"t{number}", "What?", "4", level=level), members, attempts))
    return evaluation.metrics()


def test_the_page_says_what_the_metrics_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_evaluation(tmp_path / "run")
    assert main(["view", str(run)]) == 0
    said = capsys.readouterr().out
    assert "written" not in said, "an evaluation has no groups to write"
    assert sorted(path.name for path in run.iterdir()) == ["evaluation.html", "rollouts.jsonl", "run.json"]
    page = Elements((run / "evaluation.html").read_text()).block("run")
    measured, metrics = page["evaluation"], counted()
    assert (measured["tasks"], measured["missing"]) == (metrics["eval/tasks"], metrics["eval/samples_missing"])
    everything = measured["parts"][0]
    for k, estimate in zip(measured["sizes"], everything["estimates"], strict=True):
        names = [f"eval/pass@{k}{end}" for end in ("", "_low", "_high")]
        assert estimate[:3] == pytest.approx([metrics[name] for name in names])
    assert everything["score"] == pytest.approx(metrics["eval/score_mean"])
    assert f"{metrics['eval/accuracy']:.1%}" in said
    for part in measured["parts"][1:]:
        level = part["label"].removeprefix("level ")
        assert part["estimates"][0][0] == pytest.approx(metrics[f"eval/accuracy_level_{level}"])
    assert measured["hardest"] == [[1, "t1", 0, 4], [0, "t0", 2, 4]], "those all right are not hard"
    assert measured["unsolved"] == 1
    assert {group["number"] for group in page["groups"] if group["written"]} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("command", ["evaluate", "process"])
def test_a_page_for_sharing_has_the_answer_nowhere(tmp_path: Path, command: str) -> None:
    everywhere = {
        "reference": SECRET,
        "completions": [{"kind": "action", "text": SECRET, "messages": [{"role": "user", "content": "What?"}]}],
        "steps": [{"error_type": "AgentExecutionError", "error": f"KeyError: {SECRET}", "observations": SECRET}],
        "tool_calls": [{"name": "web_search", "arguments": SECRET, "output": SECRET}],
        "score_evidence": {"judge": {"prompt": SECRET, "answer": SECRET}, "failure": SECRET},
        "grade": {"rewards": {"reward": 1.0}, "tests": [{"name": "t", "detail": SECRET}], "stdout": SECRET},
        "changes": {"changes": [{"path": "/a", "kind": "added", "diff": SECRET}]},
        "notes": [SECRET],
        "sandbox": {"exit": {"reason": SECRET}},
    }
    run = write_evaluation(tmp_path / "run", **everywhere)
    description = json.loads((run / "run.json").read_text()) | {"command": command}
    (run / "run.json").write_text(json.dumps(description))
    ids = [f"g{group:06d}-r00-a0" for group in (0, 4)]
    member = [{"rollout_id": name, "answer": SECRET} for name in ids]
    (run / "groups.jsonl").write_text(
        json.dumps({"overrides": member, "scores": [1.0, 1.0], "messages": [SECRET]})
    )
    (run / "dropped.jsonl").write_text(json.dumps({"group": 3, "reason": SECRET}) + "\n")
    html = tmp_path / "shared.html"
    assert main(["view", str(run), "--output", str(html)]) == 0
    assert html.read_bytes().count(SECRET.encode()) > 50
    assert main(["view", str(run), "--output", str(html), "--no-answers"]) == 0
    assert SECRET.encode() not in html.read_bytes()
    page = Elements(html.read_text()).block("run")
    assert page["shared"]
    assert "What?" in page["groups"][0]["question"]
    assert page["totals"]["solved"] == 9
    assert {row["detail"] for row in page["rollouts"]} == {None}
    one = ("--rollout", ids[0], "--no-answers")
    assert main(["view", str(run), "--output", str(html), *one]) == 0
    assert SECRET.encode() not in html.read_bytes()
