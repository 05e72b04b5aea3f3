"""The comparison as an HTML file of its own: tables, and a line with each run's interval. No script."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from orchestrator.comparing.comparison import ComparedRun, Difference
from orchestrator.comparing.rows import rows
from orchestrator.report.page import policy
from orchestrator.rules.estimates import Estimate
from orchestrator.rules.text import printable

_STYLE = """
table { border-collapse: collapse; width: 100%; background: var(--panel); border: 1px solid var(--line); }
th, td { text-align: left; padding: 6px 12px; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; } thead th { background: var(--sunk); overflow-wrap: anywhere; }
tbody th { white-space: pre; color: var(--faint); font-weight: 400; }
section { margin: 0 0 24px; } svg { display: block; width: 100%; height: 26px; }
.up { color: var(--good); } .down { color: var(--bad); }
"""


def comparison_page(runs: Sequence[ComparedRun], differences: Sequence[Difference]) -> str:
    """The whole file."""
    style = files("orchestrator.report").joinpath("page.css").read_text("utf-8") + _STYLE
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(style, "")}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>Runs side by side</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
    )
    names = [run.name for run in runs]
    body = [
        "<header><h1>Runs side by side</h1>"
        "<p>95 % intervals over tasks; * the interval excludes zero</p></header>",
        _section(
            "Solved", _table(["run", "0 % to 100 %"], [(run.name, [_interval(run.solved())]) for run in runs])
        ),
        _section(
            "All figures",
            _table(
                ["", *names],
                [(label, [_text(cell) for cell in cells]) for label, cells in rows(runs, differences)],
            ),
        ),
    ]
    for run, difference in zip(runs[1:], differences, strict=True):
        if difference.changed:
            changed = [(task, [_change(before, now)]) for task, before, now in difference.changed]
            body.append(_section(f"Tasks that changed most: {run.name}", _table(["task", "solved"], changed)))
    return head + "\n".join(body) + "\n</main>\n</body>\n</html>\n"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{content}</section>"


def _table(head: Iterable[str], lines: Iterable[tuple[str, Iterable[str]]]) -> str:
    """`head` and the labels are texts, cells are HTML."""
    top = "".join(f'<th scope="col">{_text(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{_text(label)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for label, cells in lines
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _interval(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    value, low, high = (round(100 * part, 2) for part in (estimate.value, estimate.low, estimate.high))
    label = f"{value:.1f} % ({low:.1f} to {high:.1f}), {estimate.tasks} tasks"
    return (
        f'<svg viewBox="0 0 100 4" preserveAspectRatio="none" role="img" aria-label="{label}">'
        '<rect x="0" y="1.8" width="100" height=".4" fill="var(--line)"/>'
        f'<rect x="{low}" y="1.2" width="{max(0.2, high - low)}" height="1.6" fill="var(--accent)" opacity=".35"/>'
        f'<rect x="{max(0.0, value - 0.2)}" y=".6" width=".4" height="2.8" fill="var(--accent)"/></svg>'
        f"<small>{label}</small>"
    )


def _change(before: float, now: float) -> str:
    way = "up" if now > before else "down"
    return f'{before:.0%} → <span class="{way}">{now:.0%}</span>'


def _text(value: str) -> str:
    return escape(printable(value))
