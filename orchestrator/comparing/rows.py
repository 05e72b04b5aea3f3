"""The comparison as rows of text, for the terminal and for a page."""

from collections.abc import Callable, Sequence

from orchestrator.comparing.comparison import ComparedRun, Difference
from orchestrator.rules.estimates import Estimate
from orchestrator.rules.measured import PARTS
from orchestrator.terminal.closing import share

Row = tuple[str, tuple[str, ...]]  # label, a cell for each run


def rows(runs: Sequence[ComparedRun], differences: Sequence[Difference]) -> list[Row]:
    """What is shown of all runs, in order. What no run has is left out."""

    def row(label: str, cell: Callable[[ComparedRun], str]) -> Row:
        return label, tuple(map(cell, runs))

    scored = any(run.scores_say_more for run in runs)
    outcomes = dict.fromkeys(name for run in runs for name, _ in run.outcomes.most_common())
    shown = [
        row("model", lambda run: run.model),
        row("tasks", lambda run: str(len(run.tasks))),
        row("scored rollouts", lambda run: f"{run.rollouts} of {run.attempts} attempts"),
        *(row(f"  {name}", lambda run, name=name: _count(run, name)) for name in outcomes),  # type: ignore[misc]
        row("solved", lambda run: percent(run.solved())),
    ]
    for part in PARTS:
        shown += _by(part, runs)
    shown += [
        *([row("score", lambda run: plain(run.score()))] if scored else []),
        row("sampled tokens", lambda run: _each(run, run.sampled_tokens, ",.0f")),
        row("prompt tokens", lambda run: _each(run, run.prompt_tokens, ",.0f")),
        row("rollout seconds", lambda run: _each(run, run.duration_s, ",.2f")),
    ]
    if any(run.cost is not None for run in runs):
        shown.append(row("cost", lambda run: "" if run.cost is None else _each(run, run.cost, ",.4f")))
    cells_by_run = [_against(difference) for difference in differences]
    names = ("tasks in both", "solved, difference", "score, difference", "tasks that changed")
    by_name = [(name, ("", *(cells[i] for cells in cells_by_run))) for i, name in enumerate(names)]
    shown += [(name, cells) for name, cells in by_name if scored or name != "score, difference"]
    return [(label, cells) for label, cells in shown if any(cells)]


def _by(part: str, runs: Sequence[ComparedRun]) -> list[Row]:
    """Solved tasks by level or source, a row for each that a run has; none where all have the same one."""
    parts = [run.by(part) for run in runs]
    labels = sorted({label for tasks in parts for label in tasks})
    return [
        (
            f"  {part} {label}",
            tuple(percent(run.solved(tasks.get(label, ()))) for run, tasks in zip(runs, parts, strict=True)),
        )
        for label in (labels if len(labels) > 1 else ())
    ]


def _against(difference: Difference) -> tuple[str, ...]:
    return (
        str(difference.tasks),
        signed(difference.solved, "%"),
        signed(difference.score),
        f"{difference.better} better, {difference.worse} worse",
    )


def _count(run: ComparedRun, name: str) -> str:
    count = run.outcomes[name]
    return f"{count} ({share(count, sum(run.outcomes.values()))})" if count else ""


def _each(run: ComparedRun, total: float, form: str) -> str:
    """All of it, and for each scored rollout."""
    each = f"; {total / run.rollouts:{form}} each" if run.rollouts else ""
    return f"{total:{form}}{each}"


def percent(estimate: Estimate | None) -> str:
    """With its interval."""
    return "" if estimate is None else f"{estimate.value:.1%} ({100 * estimate.low:.1f}–{estimate.high:.1%})"


def plain(estimate: Estimate | None) -> str:
    return "" if estimate is None else f"{estimate.value:.3f} ({estimate.low:.3f}–{estimate.high:.3f})"


def signed(estimate: Estimate | None, unit: str = "") -> str:
    """A difference with its interval; a mark where the interval has a width and leaves out zero."""
    if estimate is None:
        return "too few tasks to tell"
    form = "+.1%" if unit else "+.3f"
    text = f"{estimate.value:{form}} ({estimate.low:{form}} to {estimate.high:{form}})"
    sure = estimate.low < estimate.high and (estimate.low > 0 or estimate.high < 0)
    return f"{text} *" if sure else text
