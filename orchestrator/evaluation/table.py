"""The table at the end of an evaluation. Labels come from data sets and are shown as plain text."""

from collections.abc import Sequence
from typing import TextIO

from rich.table import Table
from rich.text import Text

from orchestrator.evaluation.measured import Evaluation
from orchestrator.rules.estimates import Estimate
from orchestrator.rules.measured import parts_of
from orchestrator.rules.text import printable
from orchestrator.run.tally import Tally
from orchestrator.terminal.closing import outcomes_text, print_rows, reason_rows
from orchestrator.terminal.console import Console, plain_table

MAX_LABEL = 60


def print_evaluation(
    evaluation: Evaluation, tally: Tally, rows: Sequence[tuple[str, object]], stream: TextIO
) -> None:
    """Prints accuracy by level and source with 95 % intervals and mean scores, then the other counts, then
    `rows`."""
    # Wide enough for every row: a terminal wraps lines, and a file need not.
    Console(stream, soft_wrap=True, width=1000).print(_accuracies(evaluation))
    print_rows((*_counts(evaluation, tally), *rows), stream)


def _accuracies(evaluation: Evaluation) -> Table:
    k = evaluation.samples_per_task
    ways = ["pass@1", *([f"pass@{k}"] if k > 1 else [])]
    numbers = ("tasks", "samples", "correct", "mean score")
    table = plain_table(("", *numbers, *ways), numbers)
    for label, tasks in parts_of(evaluation.tasks):
        shown = [str(len(tasks)), str(sum(t.samples for t in tasks)), str(sum(t.correct for t in tasks))]
        mean = evaluation.mean_score(tasks)
        shown.append("-" if mean is None else f"{mean:.3f}")
        estimates = [evaluation.pass_at(1, tasks)] + ([evaluation.pass_at(k, tasks)] if k > 1 else [])
        table.add_row(Text(printable(label)[:MAX_LABEL]), *shown, *map(_interval, estimates))
    return table


def _interval(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    return f"{estimate.value:.1%} ({estimate.low:.1%} to {estimate.high:.1%})"


def _counts(evaluation: Evaluation, tally: Tally) -> list[tuple[str, str]]:
    rows = [("outcomes", outcomes_text(evaluation.outcomes))]
    if evaluation.missing:
        counted = f"counted as wrong, pass@1 were {evaluation.least_accuracy:.1%}"
        rows.append(("missing", f"{evaluation.missing} samples broke; they are in outcomes alone; {counted}"))
    rows += reason_rows(tally)
    if evaluation.bad_tasks:
        rows.append(("bad tasks", str(evaluation.bad_tasks)))
    rows.append(("per sample", _per_sample(evaluation)))
    retries = f", {evaluation.retries} retries" if evaluation.retries else ""
    rows.append(("time", f"{tally.wall_s:.1f} s{retries}"))
    if tally.prices is not None:
        rows.append(("cost", f"{tally.cost:.4f}, attempts that broke included"))
    return rows


def _per_sample(evaluation: Evaluation) -> str:
    mean = evaluation.mean
    return (
        f"{mean('steps'):.1f} steps, {mean('prompt_tokens'):.0f} prompt and {mean('completion_tokens'):.0f} "
        f"sampled tokens, {mean('duration_s'):.2f} s of which {mean('waiting_s'):.2f} s waiting"
    )
