"""`orchestrator download-gaia`: GAIA's folder, fetched, checked and counted."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.table import Table

from orchestrator.tasks.gaia.download import ANNOTATED, RAW, Wanted, download_gaia, in_mb
from orchestrator.tasks.gaia.folder import LEVELS, YEAR, SplitAccount, take_account
from orchestrator.terminal.console import Console

SHOWN = 5  # problems printed


def run(output_dir: Path, use_raw: bool, level: str | None, revision: str | None) -> int:
    """0: every row is usable; 1: some are not, or there is no split. Raises as `download_gaia` does."""
    levels = tuple(sorted(set((level or "").replace(" ", "").split(",")) - {""}))
    wanted = Wanted(RAW if use_raw else ANNOTATED, revision, levels)
    with _stopped_at_once():
        manifest = download_gaia(output_dir, wanted, lambda text: print(text, flush=True))
    accounts = take_account(output_dir)
    _print(accounts)
    print(f"{output_dir}: {len(manifest.files)} files, {in_mb(sum(manifest.files.values()))}")
    print(f"use it: orchestrator process --env.dataset gaia --env.dataset_path {output_dir}")
    print(f'or:     datasets.load_dataset("{output_dir}", "{YEAR}_all", split="validation")')
    problems = [problem for account in accounts.values() for problem in account.problems]
    for problem in problems[:SHOWN]:
        print(f"unusable: {problem}")
    if len(problems) > SHOWN:
        print(f"unusable: {len(problems) - SHOWN} more")
    return 1 if problems or not accounts else 0


@contextmanager
def _stopped_at_once() -> Iterator[None]:
    """A signal ends the process at once: Python would wait for the hub client's threads, a minute each on a dead
    network. Nothing is lost: fetched files stay in the staging area, and placing them can be done again.
    """

    def stop(number: int, _: object) -> None:
        print("\nstopped; run the command again, it goes on where it stopped", flush=True)
        os._exit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # Python takes no signal handlers there
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print(accounts: Mapping[str, SplitAccount]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("split", "rows", *(f"level {level}" for level in LEVELS), "with a file", "their size"):
        table.add_column(column, justify="left" if column == "split" else "right")
    for split, account in accounts.items():
        rows = [str(account.rows[level]) for level in LEVELS]
        files = (str(account.attachments), in_mb(account.attachment_bytes))
        table.add_row(split, str(account.rows.total()), *rows, *files)
    Console(sys.stdout, soft_wrap=True).print(table)
