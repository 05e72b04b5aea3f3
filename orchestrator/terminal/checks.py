"""The table of what check-tasks found. Names and reasons come from data sets and are shown as plain text."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from rich.text import Text

from orchestrator.rules.text import printable
from orchestrator.terminal.closing import print_rows, print_wrapped
from orchestrator.terminal.console import Console, plain_table
from orchestrator.types import TaskCheck

_COLUMNS = ("task", "check", "solution", "nothing", "cheats", "reward", "scope", "time")
_MAX_SCOPE = 40
_STATES = {"ok": "passed", "FAIL": "failed", "-": "could not be checked"}


def print_checks(found: Mapping[str, TaskCheck | str], earlier: int, file: Path | None, stream: TextIO) -> None:
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
    checks = [check for check in found.values() if isinstance(check, TaskCheck)]
    if unseen := sum(len(check.unseen) for check in checks):
        cheats = sum(len(check.panel) for check in checks)
        rows.append(("cheats", f"{unseen} of {cheats} left nothing that is graded, and count as nothing does"))
    rows += _layers(checks)
    print_rows([*rows, *([("kept in", file)] if file is not None else [])], stream)


def _layers(checks: list[TaskCheck]) -> list[tuple[str, object]]:
    """What tests fetched in their dry runs, and from where."""
    done = [check.dry_run for check in checks if check.dry_run is not None and check.dry_run.layer is not None]
    if not done:
        return []
    hosts = ", ".join(dict.fromkeys(printable(host) for one in done for host in one.reached)) or "nowhere"
    size = sum({one.layer: one.size_bytes for one in done}.values()) / 1e6
    return [("layers", f"{len(done)} of tasks whose tests have fetched {size:.1f} MB from {hosts}")]


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
