"""`orchestrator runs [DIR]`: which runs there are, and how far each is.

Quick however large the runs are: of a run that has end, `end.json` is read. Of another one the groups are
counted, and its record is read if it is short.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from json import dumps
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError, os_error_as
from orchestrator.report.totals import is_aside
from orchestrator.rules.text import printable
from orchestrator.run.ending import counts, read_end
from orchestrator.run.files import (
    RUN_FILE,
    groups_file_of,
    groups_in,
    is_going_on,
    read_description,
    record_of,
    saved_env,
)
from orchestrator.run.frames import is_compressed
from orchestrator.run.lenient import json_lines, lines_from, mapping, objects, text
from orchestrator.run.prices import PriceList, Prices
from orchestrator.run.tally import Tally
from orchestrator.settings.tasks import DEMO_TASKS
from orchestrator.terminal.closing import share
from orchestrator.terminal.console import Console, plain_table

RECORD_BYTES = 8 << 20  # of a record that is read; that takes some 0.1 s
GROUPS_BYTES = 1 << 30  # of a groups file whose lines are counted; that takes some 0.5 s
_POSITION_FILE = "position.json"  # of `serve`
_CHUNK_BYTES = 1 << 20
_SAY_THEIR_END = ("demo", "process", "serve", "evaluate")
_COLUMNS = ("run", "started", "command", "model", "groups", "solved", "cost", "state")


def run(
    folder: Path,
    json: bool,
    prompt_price: float | None,
    completion_price: float | None,
    price_table: Path | None,
    request_price: float | None,
) -> int:
    """0: the runs are listed, the newest last. Raises ConfigError for a folder or prices that cannot be read."""
    prices = PriceList.read(prompt_price, completion_price, price_table, request_price)
    found = [_described(directory, prices) for directory in _directories(folder)]
    runs = sorted(found, key=lambda it: (it["started_at"] or 0, it["run"]))
    if json:
        print(dumps({"folder": str(folder), "runs": runs}, indent=2))
        return 0
    table = plain_table(_COLUMNS, ("groups", "solved", "cost"), no_wrap=True)
    for one in runs:
        table.add_row(*(printable(cell) for cell in _cells(one)))
    console = Console(sys.stdout, soft_wrap=True, width=1000)
    console.print(table if runs else printable(f"no run in {folder}"), markup=False)
    if any(one["groups"] is None or one["scored"] is None for one in runs):
        console.print(
            "-: not counted, as that would take long or there is no groups file; "
            "`orchestrator view RUN` counts all of a run"
        )
    return 0


def _directories(folder: Path) -> Iterator[Path]:
    """`folder` itself if it is a run, and the runs in it. Links are not followed."""
    with os_error_as(ConfigError, f"{folder} cannot be read", "; name a folder that holds runs"):
        inside = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    yield from (path for path in (folder, *inside) if (path / RUN_FILE).is_file())


def _described(directory: Path, price_list: PriceList) -> dict[str, Any]:
    description = read_description(directory)
    end = read_end(directory)
    going_on = is_going_on(directory)
    prices = None
    with suppress(ConfigError):  # a table need not have the models of all runs
        prices = price_list.of(description)
    counted = end if end and not going_on else _counted(directory, description, prices)
    unpriced = counted.get("cost") is None or prices != Prices.recorded(description)
    if prices is not None and unpriced:  # it ended without them
        counted |= {"cost": _counted_record(directory, prices).get("cost")}
    command = _command(directory, description)
    unsaid = "broken off" if command in _SAY_THEIR_END else "over"
    servers = objects(mapping(description.get("config")).get("openai"))
    return {
        "run": str(directory),
        "started_at": _started_at(directory),
        "command": command,
        "model": ", ".join(dict.fromkeys(text(server.get("model_name"), 80) for server in servers)),
        **{name: counted.get(name) for name in ("groups", "scored", "solved", "cost")},
        "state": "running" if going_on else counted.get("state", unsaid),
    }


def _started_at(directory: Path) -> float | None:
    """Unix seconds: when the lock was made, which nothing writes to; without it, when run.json was written."""
    for name in ("lock", RUN_FILE):
        try:
            return (directory / name).stat().st_mtime
        except OSError:
            continue
    return None


def _command(directory: Path, description: dict[str, Any]) -> str:
    """The command of a run, from what it leaves; an evaluation, a replay and rescored groups name theirs."""
    if isinstance(named := description.get("command"), str):
        return text(named, 20)
    if (directory / _POSITION_FILE).exists():
        return "serve"
    of_tasks = dict.fromkeys(DEMO_TASKS.values(), "demo") | {"tasks of a program": "library"}
    return of_tasks.get(str(description.get("tasks")), "process")


def _counted(directory: Path, description: dict[str, Any], prices: Prices | None) -> dict[str, Any]:
    """Counts of a run that goes on, was killed, or is of an earlier version; without what would take long."""
    groups = groups_in(directory, groups_file_of(description))
    sides = saved_env(description).get("trained_segments") == "all_segments"
    number = None if groups is None else _group_count(groups, with_sides=sides)
    return {**_counted_record(directory, prices), "groups": number}


def _counted_record(directory: Path, prices: Prices | None) -> dict[str, Any]:
    """Empty: there is none, or it is long."""
    record = record_of(directory)
    if record is None or record.stat().st_size > RECORD_BYTES:
        return {}
    return counts(Tally.read(record, prices))


def _group_count(path: Path, *, with_sides: bool) -> int | None:
    """`with_sides`: a group may have several lines."""
    size = path.stat().st_size
    if with_sides:
        groups = (objects((line or {}).get("overrides")) for _, line in json_lines(path))
        return sum(not all(map(is_aside, members)) for members in groups) if size <= RECORD_BYTES else None
    if is_compressed(path):
        return sum(line.is_whole for line in lines_from(path)) if size <= RECORD_BYTES else None
    if size > GROUPS_BYTES:
        return None
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""))


def _cells(one: dict[str, Any]) -> Iterator[str]:
    started, scored, cost = one["started_at"], one["scored"], one["cost"]
    yield one["run"]
    yield "-" if started is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(started))
    yield one["command"]
    yield one["model"]
    yield "-" if one["groups"] is None else str(one["groups"])
    yield "-" if scored is None else f"{one['solved']} of {scored} ({share(one['solved'], scored)})"
    yield "" if cost is None else f"{cost:.4f}"
    yield one["state"]
