"""What checks of tasks found: a table for people, and JSON whose ids are those of RFC 008 of OpenEnv.

Each of these checks has a measured value: `semantic.oracle_max` the least that the task's own solution got,
`semantic.floor_gap` that less the most that doing nothing got, `semantic.verifier_determinism` the widest
difference between tries of the same, `statistical.adversarial_floor` the most that a policy of the panel got, and
`statistical.gameability_gap` the most that any cheat got beyond doing nothing, delivered code included that writes
the reward while it is tested.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Any, TextIO

from rich.text import Text

from orchestrator.rules.text import printable
from orchestrator.terminal.closing import print_rows, print_wrapped
from orchestrator.terminal.console import Console, plain_table
from orchestrator.types import TaskCheck

Found = Mapping[str, TaskCheck | str]
_COLUMNS = ("task", "check", "solution", "nothing", "cheats", "reward", "scope", "time")
_MAX_SCOPE = 40


def print_checks(found: Found, earlier: int, file: Path | None, stream: TextIO) -> None:
    """The table, why tasks did not pass, and how many did. `earlier`: how many were checked before."""
    table = plain_table(_COLUMNS, ("cheats", "time"))
    lines = []
    for name, check in found.items():
        table.add_row(*(Text(printable(cell)) for cell in (name, *_cells(check))))
        reasons = (check,) if isinstance(check, str) else check.failures
        lines += [f"{name}: {reason}" for reason in reasons]
        lines += [f"{name}: {warning}" for warning in (() if isinstance(check, str) else check.warnings)]
    Console(stream, soft_wrap=True, width=1000).print(table)
    for line in lines:
        print_wrapped(line, stream, indent=2)
    counts = Counter(_state(check) for check in found.values())
    text = ", ".join(f"{counts[state]} {words}" for state, words in _STATES.items() if counts[state])
    rows: list[tuple[str, object]] = [("tasks", f"{len(found)}: {text}")]
    if earlier:
        rows.append(("earlier", f"{earlier} of them were checked before; --again checks all anew"))
    print_rows([*rows, *([("kept in", file)] if file is not None else [])], stream)


_STATES = {"ok": "passed", "FAIL": "failed", "-": "could not be checked"}


def _state(check: TaskCheck | str) -> str:
    return "-" if isinstance(check, str) else "FAIL" if check.failures else "ok"


def _cells(check: TaskCheck | str) -> list[str]:
    if isinstance(check, str):
        return [_state(check), *[""] * (len(_COLUMNS) - 2)]
    checked = check.checked
    scope = "whole" if checked.scope is None else " ".join(checked.scope)
    return [
        _state(check),
        _rewards(check.solution),
        _rewards(check.no_op),
        f"{len(check.winners)} of {len(check.panel)}" if check.panel else "",
        checked.source,
        scope[: _MAX_SCOPE - 1] + "…" if len(scope) > _MAX_SCOPE else scope,
        f"{check.duration_s:.1f} s",
    ]


def _rewards(rewards: tuple[float | None, ...]) -> str:
    counts = Counter("none" if reward is None else f"{reward:g}" for reward in rewards)
    return ", ".join(f"{reward} ×{count}" if count > 1 else reward for reward, count in counts.items())


def print_json(source: str, found: Found, file: Path | None) -> None:
    """One object on stdout."""
    states = Counter(_state(check) for check in found.values())
    answer = {
        "source": source,
        "passed": states["ok"],
        "failed": states["FAIL"],
        "unchecked": states["-"],
        "file": None if file is None else str(file),
        "tasks": [_task(name, check) for name, check in found.items()],
    }
    print(dumps(answer, indent=2))


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
