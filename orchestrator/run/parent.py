"""A recorded rollout from which others branch, read from its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.run.files import read_recorded
from orchestrator.run.lenient import json_lines
from orchestrator.run.line import RecordedAttempt, read_attempt
from orchestrator.run.lines import text_at
from orchestrator.settings.row import nearest


@dataclass(frozen=True, slots=True)
class Parent:
    """`described`: the run.json of its run."""

    run_dir: Path
    described: Mapping[str, Any]
    attempt: RecordedAttempt

    def turn(self, number: int) -> int:
        """The turn of this number, from 1 on, or from the end where it is negative. Raises ConfigError."""
        count = len(self.attempt.record.turns)
        turn = number + count + 1 if number < 0 else number
        if not 1 <= turn <= count:
            raise ConfigError(
                f"--turn: rollout {self.attempt.rollout_id} has the turns 1 to {count} (-1: the last), no {number}"
            )
        return turn


def digest_in(described: Mapping[str, Any]) -> str | None:
    """Of the tokenizer that made a run's ids, by its run.json; None: that does not say it."""
    digest = described.get("tokenizer_digest")
    return digest if isinstance(digest, str) else None


def read_parent(run_dir: Path, rollout_id: str) -> Parent:
    """Raises ConfigError."""
    described, path = read_recorded(run_dir, "RUN_DIR")
    scored: list[str] = []
    for offset, line in json_lines(path):
        if line is None or not isinstance(name := line.get("rollout_id"), str):
            continue
        if name != rollout_id:
            scored += [name] if line.get("score") is not None else []
            continue
        if line.get("score") is None:
            raise ConfigError(f"--rollout: {rollout_id} was not scored ({line.get('outcome')}): name one that was")
        try:
            attempt = read_attempt(text_at(path, offset))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--rollout: {rollout_id} cannot be read back: {error}") from error
        if not attempt.record.turns:
            raise ConfigError(f"--rollout: {rollout_id} has no turn to branch at")
        return Parent(run_dir, described, attempt)
    near = nearest(rollout_id, scored) or (f"; the first is {scored[0]}" if scored else "; it has no scored one")
    raise ConfigError(f"--rollout: {run_dir} has no rollout {rollout_id[:80]}{near}")
