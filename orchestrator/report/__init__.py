"""The report of a run: one HTML file that needs no network, made from the run directory.

Everything read is untrusted (models, sandboxes and data sets wrote it) and lines may be torn; everything is shown
as text. The report of a large run has its last attempts, and the details of some of them only; its figures are of
all of it.
"""

import asyncio
from operator import itemgetter
from pathlib import Path
from typing import Any

from orchestrator.completion.base import Tokenizer
from orchestrator.errors import ConfigError
from orchestrator.report.details import TokenTable, rollout_details
from orchestrator.report.page import Page, as_block
from orchestrator.report.reader import read_run
from orchestrator.report.summary import Run, Wanted
from orchestrator.run.files import record_of
from orchestrator.run.lenient import read_at
from orchestrator.run.prices import NO_PRICES, PriceList

MAX_DETAILED = 200
MAX_DETAIL_BYTES = 30_000_000


def write_report(
    run_directory: Path,
    groups_file: Path,
    html: Path,
    *,
    tokenizer: Tokenizer | None = None,
    wanted: Wanted | None = None,
    price_list: PriceList = NO_PRICES,
    answers: bool = True,
    named: tuple[str, str] | None = None,
) -> Run:
    """Writes `html`, completely or not at all, and returns its content. Blocks: seconds for a large run.
    Without `answers` it has neither reference answers nor anything that may tell them: no answer, no step.
    `named`: the run's name and directory, where those of `run_directory` will not last; see `Run`.

    Raises OSError on writing; ConfigError if nothing is there that is `wanted`. Unusable lines are counted in the
    page. Without `tokenizer` tokens are shown as ids.
    """
    run = read_run(run_directory, groups_file, wanted=wanted, price_list=price_list)
    if named is not None:
        run.name, run.directory = named
    if wanted is not None and not run.rollouts:
        raise ConfigError(f"{run.directory or run.name} has nothing of {wanted}")
    if not answers:
        run.leave_out_answers()
    with Page(html) as page:
        table = TokenTable(tokenizer)
        left_out = _write_details(page, run, record_of(run_directory), groups_file, table) if answers else 0
        page.data("token-table", as_block(table.entries))
        page.data(
            "run",
            as_block(
                {
                    **run.overview(),
                    "groups": sorted(run.groups.values(), key=itemgetter("number")),
                    "rollouts": sorted(
                        ({"detail": None, **row} for row in run.rollouts.values()),
                        key=lambda r: (r["group"], r["index"], r["attempt"]),
                    ),
                    "bad_tasks": run.bad_tasks,
                    "left_out": left_out,
                    "only": str(wanted or ""),
                    "most": None,
                }
            ),
        )
    return run


async def leave_report(run_directory: Path, groups_file: Path, html: Path, **how: Any) -> object:
    """Writes the report of a run that has come to its end, of whatever is there, as `write_report` does. What the
    closing table says of it: the data are written, and a failing report must not fail the run."""
    try:
        await asyncio.to_thread(write_report, run_directory, groups_file, html, **how)
    except Exception as error:
        return f"none, it could not be written: {type(error).__name__}: {error}"
    return html


def _write_details(page: Page, run: Run, rollouts: Path | None, groups_file: Path, table: TokenTable) -> int:
    """Writes the details of the most telling rollouts, up to a number and a size. Returns how many it left out."""
    room, detailed, left_out = MAX_DETAIL_BYTES, 0, 0
    group_at, group = -1, dict[str, Any]()
    for row in run.most_telling():
        row["detail"] = None
        if detailed >= MAX_DETAILED:
            left_out += 1
            continue
        details = rollout_details(read_at(rollouts, run.places[row["id"]]) if rollouts is not None else {})
        offset, place = run.written.get(row["id"], (-1, 0))
        if offset != group_at:
            group_at, group = offset, read_at(groups_file, offset) if offset >= 0 else {}
        block = as_block({**details, "tokens": table.member(group, place)})
        if len(block) > room:
            left_out += 1
            continue
        room -= len(block)
        row["detail"] = detailed
        page.data(f"detail-{detailed}", block)
        detailed += 1
    return left_out
