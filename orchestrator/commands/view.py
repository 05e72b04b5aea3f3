"""`orchestrator view PATH`: the report of a run, made anew from its files, finished or not; or served."""

import asyncio
import re
import sqlite3
import sys
import tempfile
import time
import webbrowser
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from orchestrator.completion.base import Tokenizer
from orchestrator.completion.tokenizer import load_tokenizer, tokenizer_here
from orchestrator.errors import ConfigError, OutputError, os_error_as
from orchestrator.report import write_report
from orchestrator.report.from_groups import write_rollouts
from orchestrator.report.live import LiveReport
from orchestrator.report.summary import Run, Wanted
from orchestrator.report.totals import outcome_counts
from orchestrator.run.files import (
    RUN_FILE,
    RunFiles,
    find_run,
    is_going_on,
    read_description,
    record_of,
    report_of,
    saved_tokenizer,
)
from orchestrator.run.prices import PriceList
from orchestrator.telemetry.live_page import served
from orchestrator.terminal.closing import cost_text, outcomes_text, print_rows
from orchestrator.terminal.signals import Stopped, stoppable

TELL_S = 5.0
INTERRUPTED = 130


def run(
    path: Path,
    output: Path | None,
    tokenizer: str | None,
    browser: bool,
    rollout: str | None,
    group: int | None,
    outcome: str | None,
    no_answers: bool,
    serve: bool,
    port: str | None,
    prompt_price: float | None,
    completion_price: float | None,
    price_table: Path | None,
    request_price: float | None,
) -> int:
    """0: the report is written, or was served. Raises ConfigError for files that are no run or lack what is
    wanted."""
    files, price_list = find_run(path), PriceList.read(prompt_price, completion_price, price_table, request_price)
    given = rollout, group, outcome
    if serve:
        if files.directory is None or output is not None or given != (None, None, None):
            raise ConfigError("--serve takes a run directory and shows all of it: leave --output and the like out")
        return _serve(files.directory, _tokenizer(files, tokenizer), price_list, port or "0", browser)
    if port is not None:
        raise ConfigError("--port is for --serve: give both")
    wanted = None if given == (None, None, None) else Wanted(*given)
    html = output or _beside(files, wanted)
    with os_error_as(OutputError, f"cannot write the report {html}", "; set --output to another place"):
        how = {"wanted": wanted, "price_list": price_list, "answers": not no_answers}
        summary = _write(files, html, tokenizer=_tokenizer(files, tokenizer), **how)
    empty = not summary.totals.attempts and not summary.bad_tasks
    if empty and (summary.skipped.rollout_lines or summary.skipped.group_lines):
        raise ConfigError(f"{path} holds lines, but no rollout: is it a groups file or a run directory?")
    _print(files, summary, html)
    if browser and not webbrowser.open(html.absolute().as_uri()):
        print("no browser could be opened here", file=sys.stderr)
    return 0


def _serve(directory: Path, tokenizer: Tokenizer | None, price_list: PriceList, port: str, browser: bool) -> int:
    """Until it is interrupted. Raises ConfigError, EnvironmentUnusable."""
    failed = f"cannot keep an index of {directory}"
    try:
        with os_error_as(OutputError, failed), ExitStack() as stack:
            report = LiveReport(directory, lambda: tokenizer, price_list)
            stack.callback(report.close)
            report.read(_tell_share())
            stack.pop_all()
    except sqlite3.Error as error:
        raise OutputError(f"{failed}: {error}") from error

    async def shown() -> None:
        async with served(lambda: report, port, "--port") as url:
            print(f"report: {url}", flush=True)
            print("Whoever has this address can read the run. Ctrl-C ends it.", file=sys.stderr)
            if browser and not await asyncio.to_thread(webbrowser.open, url):
                print("no browser could be opened here", file=sys.stderr)
            await asyncio.Event().wait()

    try:
        asyncio.run(stoppable(shown(), drain=lambda: None, drain_timeout_s=0))
    except Stopped as stopped:
        return 0 if stopped.exit_code == INTERRUPTED else stopped.exit_code
    return 0


def _tell_share() -> Callable[[float], None]:
    """Tells how much of a long record was read, every so often."""
    told = time.monotonic()

    def tell(share: float) -> None:
        nonlocal told
        if time.monotonic() > told + TELL_S:
            told = time.monotonic()
            print(f"index: {100 * share:.0f} % of the record", file=sys.stderr, flush=True)

    return tell


def _beside(files: RunFiles, wanted: Wanted | None) -> Path:
    """Where the report goes: into the run directory or beside the groups file that was named."""
    html = report_of(files)
    part = "" if wanted is None else "-" + re.sub(r"[^\w-]+", "-", str(wanted).removeprefix("the "))[:80]
    return html.with_stem(html.stem + part)


def _write(files: RunFiles, html: Path, **how: Any) -> Run:
    """`how`: as of `write_report`. Without a record, the rollouts are made from the groups file."""
    directory, groups = files.directory, files.groups
    if directory is not None and (groups is None or record_of(directory) is not None):
        return write_report(directory, groups or directory / "groups.jsonl", html, **how)
    assert groups is not None
    with tempfile.TemporaryDirectory(prefix="view-") as folder:
        write_rollouts(groups, Path(folder) / "rollouts.jsonl")
        if directory is not None:
            (Path(folder) / RUN_FILE).symlink_to((directory / RUN_FILE).absolute())
        return write_report(Path(folder), groups, html, named=(files.name.absolute().name, ""), **how)


def _tokenizer(files: RunFiles, name: str | None) -> Tokenizer | None:
    """The tokenizer asked for, else the run's own where it is on this machine. It makes ids readable."""
    if name is not None:
        return None if name.lower() == "none" else load_tokenizer(name)
    return tokenizer_here(*saved_tokenizer(read_description(files.directory))) if files.directory else None


def _print(files: RunFiles, run: Run, html: Path) -> None:
    totals = run.totals
    outcomes = outcome_counts(totals)
    rows: list[tuple[str, object]] = [("run", files.name)]
    if files.directory is not None and is_going_on(files.directory):
        rows.append(("state", "still running; these are the figures of now"))
    if run.measured is None:
        mixed = f"{totals.mixed} with mixed scores"
        rows.append(("groups", f"{totals.groups}, {totals.written} of them written, {mixed}"))
    elif (accuracy := run.measured.accuracy()) is not None:
        rows.append(("tasks", len(run.measured.tasks)))
        low, high = accuracy.low, accuracy.high
        rows.append(("accuracy", f"{accuracy.value:.1%} ({low:.1%} to {high:.1%})"))
    rows.append(("outcomes", outcomes_text(outcomes) if outcomes else "none yet"))
    if totals.scored:
        mean = totals.score / totals.scored
        rows.append(("scores", f"mean {mean:.3f}, {totals.solved} of {totals.scored} correct"))
    rows.append(("tokens", f"{totals.tokens} sampled"))
    if totals.cost is not None:
        rows.append(("cost", cost_text(totals.cost, totals.written, totals.trained)))
    rows += [("note", warning) for warning in run.warnings]
    if unread := run.skipped.rollout_lines + run.skipped.group_lines:
        rows.append(("unreadable", f"{unread} lines, skipped"))
    rows.append(("report", html))
    print_rows(rows, sys.stdout)
