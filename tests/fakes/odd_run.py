"""A run directory of well-formed JSON in which hardly a field is what it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.run import lines as jsonl


def an_attempt_line(**changes: Any) -> dict[str, Any]:
    """The least a line of rollouts.jsonl can be."""
    line = {"rollout_id": "g000000-r00-a0", "group": 0, "index": 0, "outcome": "finished", "plan": {}}
    return {**line, "task_id": "t", "score": 1.0, "completions": [], **changes}


def write_odd_run(directory: Path) -> int:
    """A run whose fields have every type but the right one. Gives the number of attempts in it."""
    odd: list[Any] = [None, True, -1, 1e308, 1e14, "text", [], [None, 1, "x", [], {}], {"a": {"b": None}}]
    fields: tuple[str, ...] = (
        "task_id",
        "level",
        "index",
        "reason",
        "answer",
        "score",
        "score_parts",
        "started_at",
    )
    fields += (
        "duration_s",
        "sandbox",
        "plan",
        "completions",
        "tool_calls",
        "steps",
        "notes",
        "token_source",
        "crossings",
        "services",
    )
    rows = [an_attempt_line(rollout_id=f"{f}{n}", **{f: v}) for n, v in enumerate(odd) for f in fields]
    for n, value in enumerate(odd):
        completion = ("kind", "messages", "text", "completion_tokens", "started_s", "segment")
        inner = an_attempt_line(
            rollout_id=f"inner{n}",
            completions=[dict.fromkeys(completion, value)] * 2,
            tool_calls=[dict.fromkeys(("name", "arguments", "output", "error", "started_s"), value)],
            steps=[dict.fromkeys(("step_number", "observations", "error", "is_final_answer"), value)] * 3,
            crossings=[
                dict.fromkeys(("method", "host", "port", "target", "status", "refusal", "started_s"), value)
            ],
            services=[dict.fromkeys(("name", "image", "healthy_s", "ended", "log"), value)],
            sandbox={"exit": {"exit_code": value, "oom_killed": value, "reason": value}},
            plan={"agent": {"code_tags": value}, "sampling": value},
        )
        rows.append(inner)
    groups = [{"overrides": [{"rollout_id": f"inner{n}"}], "tokens": v, "masks": [v]} for n, v in enumerate(odd)]
    for name, values in (("rollouts.jsonl", rows), ("groups.jsonl", groups)):
        (directory / name).write_bytes(b"".join(jsonl.dumps(value) + b"\n" for value in values))
    (directory / "run.json").write_text('{"config": {"openai": [3, {"base_url": "http://[::bad"}], "env": 1}}')
    return len(rows)
