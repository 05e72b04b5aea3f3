"""`orchestrator compare RUN RUN ...`: runs side by side, and which tasks changed."""

import sys
from dataclasses import asdict
from json import dumps
from pathlib import Path

from orchestrator.comparing.comparison import ComparedRun, Difference, as_json
from orchestrator.comparing.page import comparison_page
from orchestrator.comparing.rows import rows
from orchestrator.errors import OutputError, os_error_as
from orchestrator.rules.text import printable
from orchestrator.run.prices import PriceList
from orchestrator.terminal.console import Console, plain_table

SHOWN = 5  # tasks that changed, for each run


def run(
    runs: tuple[Path, ...],
    json: bool,
    html: Path | None,
    prompt_price: float | None,
    completion_price: float | None,
    price_table: Path | None,
    request_price: float | None,
) -> int:
    """0: it is shown. Raises ConfigError for what is no run, OutputError."""
    price_list = PriceList.read(prompt_price, completion_price, price_table, request_price)
    compared = [ComparedRun.read(path, price_list) for path in runs]
    differences = [Difference.of(compared[0], other) for other in compared[1:]]
    if html is not None:
        with os_error_as(OutputError, f"cannot write {html}"):
            html.write_text(comparison_page(compared, differences, html.parent), "utf-8")
    if json:
        print(dumps(as_json(compared, differences), indent=2, default=asdict))
    else:
        _print(compared, differences)
    if html is not None:
        print(f"page: {html}", file=sys.stderr if json else sys.stdout)
    return 0


def _print(compared: list[ComparedRun], differences: list[Difference]) -> None:
    console = Console(sys.stdout, soft_wrap=True)
    table = plain_table(("", *(printable(run.name) for run in compared)), overflow="fold")
    for label, cells in rows(compared, differences):
        table.add_row(printable(label), *map(printable, cells))
    console.print(table, markup=False)
    for run, difference in zip(compared[1:], differences, strict=True):
        for task, before, now in difference.changed[:SHOWN]:
            console.print(printable(f"{run.name}: {task}: solved {before:.0%}, now {now:.0%}"), markup=False)
    console.print(
        "95 % intervals over tasks; differences from the first run, on the tasks that both have; * excludes zero"
    )
