"""`orchestrator download-gaia`: GAIA's folder, fetched, checked and counted."""

import os
import signal
import threading
from functools import partial
from pathlib import Path

from orchestrator.rules.text import printable
from orchestrator.tasks.gaia.download import ANNOTATED, RAW, download_gaia
from orchestrator.tasks.gaia.folder import take_account
from orchestrator.tasks.gaia.source import LEVELS, YEAR

SHOWN = 5  # problems printed
COLUMNS = ("rows", *(f"level {level}" for level in LEVELS), "files", "bytes")


def run(output_dir: Path, use_raw: bool, level: str | None, revision: str | None) -> int:
    """0: every row is usable; 1: some are not, the others can be used. Raises as `download_gaia` does."""
    levels = sorted(set((level or "").replace(" ", "").split(",")) - {""})
    if threading.current_thread() is threading.main_thread():  # no other one may set handlers
        signal.signal(signal.SIGINT, _stop)
        signal.signal(signal.SIGTERM, _stop)
    done = download_gaia(output_dir, RAW if use_raw else ANNOTATED, revision, levels, partial(print, flush=True))
    counts, problems = take_account(output_dir)
    print(f"{'split':<10}", *(f"{column:>11}" for column in COLUMNS))
    for split, count in counts.items():
        print(f"{split:<10}", *(f"{count[column]:>11,}" for column in COLUMNS))
    print(f"{output_dir}: {len(done.files)} files, {sum(done.files.values()) / 1e6:,.1f} MB")
    print(f"use it: orchestrator process --env.dataset gaia --env.dataset_path {output_dir}")
    print(f'or:     datasets.load_dataset("{output_dir}", "{YEAR}_all", split="validation")')
    for problem in problems[:SHOWN]:
        print(printable(f"unusable: {problem}"))
    if len(problems) > SHOWN:
        print(f"unusable: {len(problems) - SHOWN} more")
    return 1 if problems else 0


def _stop(number: int, _: object) -> None:
    """Ends the process. The client's threads would be waited for, a minute each on a dead network."""
    print("\nstopped; run the command again, it goes on where it stopped", flush=True)
    os._exit(128 + number)
