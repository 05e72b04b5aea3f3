"""The comparison as an HTML file of its own: tables, and a line with each run's interval. No script.

Links lead to the reports of the runs, relative to where the page is written.
"""

import os
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

from orchestrator.comparing.comparison import ComparedRun, Difference
from orchestrator.comparing.rows import rows
from orchestrator.report.page import policy
from orchestrator.rules.estimates import Estimate
from orchestrator.rules.text import printable

_STYLE = """
table { background: var(--panel); border: 1px solid var(--line); font-size: 15px; }
th, td { padding: 6px 12px; vertical-align: top; } td { min-width: 8em; }
th { font-size: inherit; white-space: normal; } thead > tr > * { background: var(--sunk); color: var(--ink); }
tbody th { white-space: pre-wrap; color: var(--faint); font-weight: 400; }
section { margin: 0 0 24px; } summary { color: var(--accent); padding: 6px 0; }
tbody th { min-width: 6.5em; } .line { width: 75%; min-width: 190px; }
.line svg { display: block; width: 100%; height: 26px; }
.axis { display: flex; justify-content: space-between; color: var(--faint); font-size: 12px; }
.axis span { width: 0; display: flex; justify-content: center; white-space: nowrap; }
.axis span:first-child { justify-content: start; } .axis span:last-child { justify-content: end; }
@media (max-width: 560px) {
  .axis span:nth-child(even) { visibility: hidden; }
  th, td { padding: 6px; font-size: 13.5px; } td { min-width: 6.5em; } tbody th { min-width: 5.5em; }
}
.up { color: var(--good); } .down { color: var(--bad); }
"""
_TICKS = (0, 25, 50, 75, 100)


def comparison_page(runs: Sequence[ComparedRun], differences: Sequence[Difference], folder: Path) -> str:
    """The whole file, for a page in `folder`."""
    style = files("orchestrator.report").joinpath("page.css").read_text("utf-8") + _STYLE
    names = [run.name for run in runs]
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(style, "")}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(' and '.join(names))}, side by side</title>\n<style>{style}</style>\n</head>\n"
        "<body>\n<main>\n"
    )
    places = {run.name: _place(run, folder) for run in runs}
    axis = f'<div class="axis">{"".join(f"<span>{tick} %</span>" for tick in _TICKS)}</div>'
    body = [
        "<header><h1>Runs side by side</h1>"
        "<p>95 % intervals over tasks; * the interval excludes zero</p></header>",
        _section(
            "Solved",
            _table(
                "solved",
                ["run", axis],
                [(_link(run.name, places[run.name]), _interval(run.solved())) for run in runs],
            ),
        ),
        _section(
            "All figures",
            _table(
                "all figures",
                ["", *map(_text, names)],
                [
                    (_text(label), [f"<td>{_text(cell)}</td>" for cell in cells])
                    for label, cells in rows(runs, differences)
                ],
            ),
        ),
    ]
    for run, difference in zip(runs[1:], differences, strict=True):
        if difference.changed:
            pair = (runs[0], run)
            lines = [_task(name, pair, places) for name, _, _ in difference.changed]
            title = f"Tasks that changed most: {run.name}"
            body.append(_section(title, _table(title, ["task", "before", "now"], lines)))
    tasks = dict.fromkeys(name for run in runs for name in run.tasks)
    every = _table("all tasks", ["task", *map(_text, names)], [_task(name, runs, places) for name in tasks])
    body.append(f"<details><summary>All {len(tasks)} tasks</summary>{every}</details>")
    if missing := [run.name for run in runs if run.report is None]:
        told = ", ".join(missing)
        body.append(f"<p>Not linked, as it has no report: {_text(told)}. `orchestrator view` writes one.</p>")
    return head + "\n".join(body) + "\n</main>\n</body>\n</html>\n"


def _place(run: ComparedRun, folder: Path) -> str:
    """The address of its report; empty: it has none."""
    return "" if run.report is None else quote(Path(os.path.relpath(run.report, folder)).as_posix())


def _section(title: str, content: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{content}</section>"


def _table(label: str, head: Iterable[str], lines: Iterable[tuple[str, Iterable[str]]]) -> str:
    """Of HTML: what the columns and the rows are called, and each row's cells. Keys can move it if it is wide."""
    top = "".join(f'<th scope="col">{name}</th>' if name else "<td></td>" for name in head)
    body = "".join(f'<tr><th scope="row">{label}</th>{"".join(cells)}</tr>' for label, cells in lines)
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(label)}">{table}</div>'


def _task(name: str, runs: Iterable[ComparedRun], places: dict[str, str]) -> tuple[str, list[str]]:
    """A row: how much of the task each run solved, with links to its rollouts. Worse and better than the first."""
    cells, first = [], None
    for run in runs:
        if (task := run.tasks.get(name)) is None:
            cells.append("<td>–</td>")
            continue
        first = task.share if first is None else first
        way = "up" if task.share > first else "down" if task.share < first else ""
        place = places[run.name] and f"{places[run.name]}#group-{task.group}"
        cells.append(f'<td class="{way}">{_link(f"{task.share:.0%}", place)} of {task.samples}</td>')
    return _text(name), cells


def _link(text: str, place: str) -> str:
    return f'<a href="{escape(place)}">{_text(text)}</a>' if place else _text(text)


def _interval(estimate: Estimate | None) -> list[str]:
    """A cell: a line from 0 to 100 % with ticks, and the text."""
    if estimate is None:
        return ["<td>–</td>"]
    value, low, high = (round(100 * part, 2) for part in (estimate.value, estimate.low, estimate.high))
    ticks = "".join(
        f'<rect x="{tick * 0.998}" y=".4" width=".2" height="3.2" fill="var(--line)"/>' for tick in _TICKS
    )
    return [
        '<td class="line"><svg viewBox="0 0 100 4" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect x="0" y="1.8" width="100" height=".4" fill="var(--line)"/>{ticks}'
        f'<rect x="{low}" y="1.2" width="{max(0.2, high - low)}" height="1.6" fill="var(--accent)" opacity=".35"/>'
        f'<rect x="{max(0.0, value - 0.2)}" y=".6" width=".4" height="2.8" fill="var(--accent)"/></svg>'
        f"{value:.1f} % ({low:.1f} to {high:.1f}), {estimate.tasks} tasks</td>",
    ]


def _text(value: str) -> str:
    return escape(printable(value))
