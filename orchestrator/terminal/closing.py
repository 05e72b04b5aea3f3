"""The closing table of a run, and the texts of its rows."""

import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

from orchestrator.rules.text import one_line, printable
from orchestrator.run.tally import Tally
from orchestrator.types import Failed, Group, last_attempts

LABEL_WIDTH = 15


def dropped_text(tally: Tally, way_on: str) -> str:
    """How many groups were dropped and why. `way_on`: the command that retries groups with broken rollouts."""
    why = ", ".join(f"{n} {reason}" for reason, n in tally.dropped_for.most_common())
    text = f"{tally.dropped} group{'s' * (tally.dropped != 1)}: {why}"
    return f"{text}; the last, {tally.last_drop}; tried again by `{way_on}`" if tally.last_drop else text


def outcomes_text(outcomes: Counter[str]) -> str:
    """Each outcome with its count and share, the commonest first."""
    total = outcomes.total()
    return ", ".join(f"{name} {n} ({share(n, total)})" for name, n in outcomes.most_common()) or "none"


def scores_text(tally: Tally) -> str:
    """The mean score, and how many of the scored rollouts are correct."""
    scored = len(tally.scores)
    return f"mean {tally.mean_score:.3f}, {tally.correct} of {scored} correct ({share(tally.correct, scored)})"


def begun_text(begun: Mapping[int, int]) -> str:
    """At which turn rollouts were begun, the later first."""
    return ", ".join(f"turn {turn}: {count}" for turn, count in sorted(begun.items(), reverse=True))


def cost_text(cost: float, groups: int, trained: int) -> str:
    """What all completions cost, those of broken and dropped rollouts included; and for each of the written
    groups, and of their rollouts."""
    each = f"; {cost / groups:.4f} a written group, {cost / trained:.5f} a trained rollout" if trained else ""
    return f"{cost:.4f}{each}"


def untrained_text(tally: Tally) -> str:
    """How much of what written rollouts sampled is not trained."""
    total = tally.trained_tokens + tally.untrained_tokens
    part = share(tally.untrained_tokens, total)
    return f"{part} of the {total} tokens sampled in written groups, in lines that the groups file leaves out"


def draws_text(tally: Tally) -> str:
    """How often rollouts were drawn again, by outcome, and whether most draws were in one group."""
    each = ", ".join(f"{name} {n}" for name, n in tally.draws.most_common())
    (group, most), *_ = tally.drawn.most_common(1)
    groups = len(tally.drawn)
    return f"{each}; in {groups} group{'' if groups == 1 else 's'}, at most {most} in one (group {group})"


def continued_text(tally: Tally) -> str:
    """How often rollouts went on after their sandbox was lost, and why others could not."""
    text = f"{tally.continued}, tokens kept {tally.kept_tokens:,}"
    causes = ", ".join(f"{printable(name)} {n}" for name, n in tally.not_continued.most_common())
    return f"{text}; not behind their last turn {tally.not_continued.total()}: {causes}" if causes else text


def requests_text(tally: Tally) -> str:
    """How many requests sandboxes made of the outside, and what became of them."""
    counts = tally.crossing_counts
    parts = [(counts["refused"], "refused"), (counts["cached"], "from the cache")]
    of_them = ", ".join(f"{number:,} {what}" for number, what in parts if number)
    return f"{counts['requests']:,}" + (f" ({of_them})" if of_them else "")


def share(part: int, total: int) -> str:
    """A percentage, rounded; but 0% only for none and 100% only for all."""
    percent = 100 * part / total if total else 0.0
    rounded = round(percent)
    if part and not rounded:
        return "<1%"
    return ">99%" if part < total and rounded == 100 else f"{rounded}%"


def lost(group: Group) -> str:
    """For a group kept without some of its rollouts: how many broke, and the first reason."""
    broken = [a.outcome for a in last_attempts(group.attempts) if isinstance(a.outcome, Failed)]
    return f" and {len(broken)} {broken[0].name}: {one_line(broken[0].reason)}" if broken else ""


def reason_rows(tally: Tally) -> list[tuple[str, str]]:
    """Why rollouts were not scored, or scored 0 because grading failed: the first reason of each kind. And how
    often rollouts went on in another sandbox, or were drawn again."""
    rows = [(outcome, f"{tally.outcomes[outcome]}, the first: {why}") for outcome, why in tally.reasons.items()]
    if tally.unscorable:
        rows.append(("not gradable", f"{tally.unscorable} scored 0, the first: {tally.unscorable_first}"))
    if tally.refused:
        rollouts = f"in {tally.refused} rollout{'' if tally.refused == 1 else 's'} after a completion"
        rows.append(("refused", f"requests {rollouts}, the first: {tally.refused_first}"))
    if tally.continued or tally.not_continued:
        rows.append(("continued", continued_text(tally)))
    if tally.draws:
        rows.append(("drawn again", draws_text(tally)))
    return rows


def closing_table(
    tally: Tally, rows: Sequence[tuple[str, object]], stream: TextIO | None = None, wanted: int | None = None
) -> None:
    """Prints counts, scores and times, then `rows`."""
    of = f" of {wanted}" if wanted else ""
    table: list[tuple[str, object]] = [
        ("groups", f"{tally.groups}{of} written, {tally.mixed} with mixed scores, {tally.dropped} dropped"),
        ("outcomes", outcomes_text(tally.outcomes)),
    ]
    if tally.scores:
        table.append(("scores", scores_text(tally)))
    if set(tally.first_turns) - {1}:
        table.append(("begun at", begun_text(tally.first_turns)))
    table += reason_rows(tally)
    if tally.crossing_counts:
        table.append(("requests", requests_text(tally)))
    if tally.untrained_tokens:
        table.append(("untrained", untrained_text(tally)))
    table += [("tokens", f"{tally.tokens} sampled"), ("time", f"{tally.wall_s:.1f} s{_per_rollout(tally)}")]
    if tally.prices is not None:
        table.append(("cost", cost_text(tally.cost, tally.groups, tally.trained)))
    stream = stream or sys.stdout
    if stream.isatty():
        print(file=stream)
    print_rows((*table, *rows), stream)


def print_rows(rows: Iterable[tuple[str, object]], stream: TextIO) -> None:
    """Prints labels and texts in two columns."""
    for label, text in rows:
        print_wrapped(f"{label:<{LABEL_WIDTH}}{text}", stream, indent=LABEL_WIDTH)


def print_wrapped(text: str, stream: TextIO, *, indent: int = 0) -> None:
    """Prints one printable line; on a terminal it is wrapped between words."""
    text = printable(text)
    if stream.isatty():
        text = wrapped(text, shutil.get_terminal_size().columns, indent=indent)
    print(text, file=stream, flush=True)


def wrapped(text: str, width: int, *, indent: int = 0) -> str:
    """`text` wrapped between words only, so that paths can be copied."""
    return textwrap.fill(
        text,
        max(width, 2 * indent + 1),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _per_rollout(tally: Tally) -> str:
    if not tally.attempts:
        return ""
    text = f"; per rollout {tally.rollout_s / tally.attempts:.2f} s from its assignment"
    return f"{text}, {tally.cpu_s / tally.cpu_known:.2f} s of CPU in its sandbox" if tally.cpu_known else text
