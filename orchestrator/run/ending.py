"""How a run ended, in `end.json`: for people and `orchestrator runs`, which need not read the whole record for it.

The file is there only while no process works on the run: a killed run has none.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from orchestrator.run.lenient import count, number, small_object
from orchestrator.run.lines import write_whole
from orchestrator.run.tally import Tally

END_FILE = "end.json"


@contextmanager
def ending(directory: Path, tally: Tally, cut_short: Callable[[], bool]) -> Iterator[None]:
    """Around the work of a run: writes `end.json` on any exit. The state is `ended` unless the block raises or
    `cut_short` says that a signal ended it; a full disk costs only this file."""
    (directory / END_FILE).unlink(missing_ok=True)
    state = "stopped"
    try:
        yield
        state = "stopped" if cut_short() else "ended"
    finally:
        with suppress(OSError):
            write_whole(directory / END_FILE, {"state": state, **counts(tally)}, indent=True)


def read_end(directory: Path) -> dict[str, Any]:
    """The state and the main counts in `end.json`, plain defaults for fields of another type; empty if there is
    none."""
    if not (end := small_object(directory / END_FILE)):
        return {}
    return {
        "state": "stopped" if end.get("state") == "stopped" else "ended",
        **{name: count(end.get(name)) for name in ("groups", "scored", "solved")},
        "cost": number(end.get("cost")),
    }


def counts(tally: Tally) -> dict[str, Any]:
    """What is told of a run in a list of runs. `cost`: None where prices are not known."""
    return {
        "groups": tally.groups,
        "dropped": tally.dropped,
        "outcomes": dict(tally.outcomes.most_common()),
        "scored": len(tally.scores),
        "solved": tally.correct,
        "mean_score": tally.mean_score if tally.scores else None,
        "sampled_tokens": tally.tokens,
        "continued": tally.continued,
        "kept_tokens": tally.kept_tokens,
        "not_continued": dict(tally.not_continued.most_common()),
        "cost": None if tally.prices is None else tally.cost,
    }
