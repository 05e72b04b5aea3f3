"""What is printed at the end of a rescoring. Names come from the record and are shown as plain text."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.table import Table
from rich.text import Text

from orchestrator.rescoring.changes import Changes
from orchestrator.rescoring.rescore import LeftOut
from orchestrator.rules.text import one_line, printable
from orchestrator.terminal.closing import print_rows, share
from orchestrator.terminal.console import Console, plain_table

SHOWN = 20  # lines that cannot be used, and sources
MAX_LABEL = 60


def print_changes(
    changes: Changes,
    left_out: Sequence[LeftOut],
    dropped: Mapping[int, str | None],
    rows: Sequence[tuple[str, object]],
    stream: TextIO | None = None,
) -> None:
    """Prints what changed by outcome and by source, what has no score, what could not be read, then `rows`."""
    stream = stream or sys.stdout
    for line in left_out[:SHOWN]:
        print(printable(f"left out: {line.place} ({line.size_bytes} bytes): {line.reason}"), file=stream)
    if len(left_out) > SHOWN:
        print(f"left out: {len(left_out) - SHOWN} more lines", file=stream)
    if changes.all.rollouts:
        Console(stream, soft_wrap=True, width=1000).print(_table(changes))
    print_rows((*_counts(changes, left_out, dropped), *rows), stream)


def _table(changes: Changes) -> Table:
    numbers = ("rollouts", "changed", "higher", "lower", "mean then", "now", "solved then", "now")
    table = plain_table(("", *numbers), numbers)
    parts = [("all", changes.all)]
    for name, parts_by_label in (("outcome", changes.by_outcome), ("source", changes.by_source)):
        largest = sorted(parts_by_label.items(), key=lambda part: -part[1].rollouts)
        parts += [(f"{name} {label or '(none)'}", change) for label, change in largest[:SHOWN]]
    for label, change in parts:
        counts = (change.rollouts, change.changed, change.higher, change.lower)
        means = (f"{total / change.rollouts:.3f}" for total in (change.then, change.now))
        solved = (change.solved_then, change.solved_now)
        table.add_row(Text(printable(label)[:MAX_LABEL]), *map(str, counts), *means, *map(str, solved))
    return table


def _counts(
    changes: Changes, left_out: Sequence[LeftOut], dropped: Mapping[int, str | None]
) -> list[tuple[str, str]]:
    everything = changes.all
    part = share(everything.changed, everything.rollouts)
    changed = f"{everything.changed} of {everything.rollouts} changed ({part})"
    rows = [("scores", f"{changed}: {everything.higher} higher, {everything.lower} lower")]
    if changes.gained:
        rows.append(("scored now", f"{changes.gained.total()} that had no score: {_counts_text(changes.gained)}"))
    for name, count in changes.lost.items():
        rows.append((name, f"{count} had a score and have none now, the first: {one_line(changes.reasons[name])}"))
    if changes.blamed:
        first = one_line(next(iter(changes.blamed)))
        rows.append(("not gradable", f"{changes.blamed.total()} scored 0, the first: {first}"))
    if changes.unscored:
        rows.append(("never scored", _counts_text(changes.unscored)))
    if left_out:
        rows.append(("left out", f"{len(left_out)} lines that cannot be used, named above"))
    missing = {number: reason for number, reason in dropped.items() if reason is not None}
    text = f"{len(dropped) - len(missing)} of {len(dropped)} written"
    if missing:
        number, reason = next(iter(missing.items()))
        text += f"; {len(missing)} not, the first: group {number}: {one_line(reason)}"
    return [*rows, ("groups", text)]


def _counts_text(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
