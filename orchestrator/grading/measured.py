"""What checks of tasks found, for programs: with the ids that RFC 008 of OpenEnv has for such reports.

Each of these checks has a measured value: `semantic.oracle_max` the least that the task's own solution got,
`semantic.floor_gap` that less the most that doing nothing got, `semantic.verifier_determinism` the widest
difference between tries of the same, `statistical.adversarial_floor` the most that a policy of the panel got, and
`statistical.gameability_gap` the most that any cheat got beyond doing nothing, delivered code included that writes
the reward while it is tested.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestrator.types import TaskCheck


def checks_answer(source: str, found: Mapping[str, TaskCheck | str], file: Path | None) -> dict[str, Any]:
    """As JSON. `found`: by task id; a text: why it could not be checked."""
    checks = [check for check in found.values() if isinstance(check, TaskCheck)]
    passed = sum(not check.failures for check in checks)
    return {
        "source": source,
        "passed": passed,
        "failed": len(checks) - passed,
        "unchecked": len(found) - len(checks),
        "file": None if file is None else str(file),
        "tasks": [_task(name, check) for name, check in found.items()],
    }


def _task(name: str, check: TaskCheck | str) -> dict[str, Any]:
    if isinstance(check, str):
        return {"task_id": name, "passed": None, "reason": check}
    return {"task_id": name, "passed": not check.failures, **asdict(check), "checks": measured(check)}


def measured(check: TaskCheck) -> dict[str, dict[str, Any]]:
    """RFC 008's id of a check → status and measured value. `skip`: what it depends on has failed."""
    solved = min((reward or 0.0 for reward in check.solution), default=None)
    no_op = check.floor if check.no_op else None
    tries = [[reward for reward in rewards if reward is not None] for rewards in (check.solution, check.no_op)]
    spread = max((max(rewards) - min(rewards) for rewards in tries if rewards), default=None)
    cheats = [reward for reward in check.panel.values() if reward is not None]
    most = max(cheats, default=None)
    gap = None if most is None else max(most, check.delivered or 0.0) - check.floor
    return {
        "semantic.oracle_max": _measured(solved, ok=solved == 1),
        "semantic.floor_gap": _measured(
            None if no_op is None or solved is None else solved - no_op, ok=no_op == 0 and solved == 1
        ),
        "semantic.verifier_determinism": _measured(spread, ok=spread == 0),
        "statistical.adversarial_floor": _measured(most, ok=not check.winners and len(cheats) == len(check.panel)),
        "statistical.gameability_gap": _measured(gap, ok=gap == 0, bad="warn"),
    }


def _measured(value: float | None, *, ok: bool, bad: str = "fail") -> dict[str, Any]:
    return {"status": "skip" if value is None else "pass" if ok else bad, "measured": value}
