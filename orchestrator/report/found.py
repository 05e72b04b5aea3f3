"""What groups are searched, filtered and sorted by, as `run.js` computes it where it has all rows. Pure."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from orchestrator.report.totals import Row
from orchestrator.run.lenient import objects, text

MOST_SAID = 256 << 10  # characters of a rollout's transcript that are searched
# Of an attempt: what the panels of the page are drawn from.
_SLIM = (
    "id", "outcome", "score", "solved", "node", "policy", "started_at", "launch_s", "duration_s", "waiting_s",
    "cpu_s", "retries", "tokens", "prompt_tokens", "steps", "calls", "staleness", "waits", "counts",
)  # fmt: skip


def attempts_in_order(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row["index"], row["attempt"]))


def found_row(group: Row, rows: list[Row]) -> tuple[Any, ...]:
    """A group's values for the columns of the table `found`. `rows`: its attempts, in their order."""
    members = [row for row in rows if row["score"] is not None]
    made = [row for row in rows if row["counts"]]
    scores = [row["score"] for row in members]
    mean = _mean(scores)
    outcomes = Counter(row["outcome"] for row in rows)
    costs = [row["cost"] for row in made]
    times = [row["started_at"] for row in rows if row["started_at"] is not None]
    return (
        group["number"],
        group["task"],
        group["level"],
        group["source"],
        ",".join(sorted(map(_number, scores))),
        mean,
        None if mean is None else _mean([(score - mean) ** 2 for score in scores], 0.5),
        ",".join(f"{name},{times}" for name, times in outcomes.most_common()),
        len(made) - len({row["index"] for row in made}),
        _mean([float(row["tokens"]) for row in members]),
        _mean(sorted(row["duration_s"] for row in members if row["duration_s"] is not None)),
        sum(cost or 0.0 for cost in costs) if any(cost is not None for cost in costs) else None,
        "\n".join(["", *outcomes, ""]),
        group["mixed"],
        group["divided"],
        bool(members) and not any(row["solved"] for row in members),
        bool(members) and all(row["solved"] for row in members),
        group["written"],
        bool(group["dropped"]),
        max(times, default=None),
    )


def group_text(group: Row, rows: list[Row]) -> str:
    """What is searched of a group besides its transcripts, in lower case."""
    parts = [group["task"], group["question"], group["dropped"]]
    for row in rows:
        parts += [row["id"], row["answer"] or "", row["reason"], *row["errors"]]
    return "\n".join(parts).lower()


def transcript(line: Row) -> str:
    """What is searched of a line of rollouts.jsonl, in lower case: what the model wrote, what its code and its
    tools said. Not its prompts, which hold all that again."""
    parts = [text(completion.get("text")) for completion in objects(line.get("completions"))]
    wrote = "\n".join(parts)
    for step in objects(line.get("steps")):
        code = text(step.get("code"))
        parts += [code if code not in wrote else "", text(step.get("observations")), text(step.get("error"))]
    for call in objects(line.get("tool_calls")):
        parts += [text(call.get(name)) for name in ("name", "arguments", "output", "error")]
    return "\n".join(filter(None, parts))[:MOST_SAID].lower()


def slim(row: Row) -> Row:
    return {name: row.get(name) for name in _SLIM}


def _number(value: float) -> str:
    """As JavaScript writes it."""
    return str(int(value)) if value == int(value) else repr(value)


def _mean(values: list[float], power: float = 1.0) -> float | None:
    return (sum(values) / len(values)) ** power if values else None
