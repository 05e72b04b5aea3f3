"""`learn.html`: what the runs in a folder learned. One file that loads nothing."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

from examples.learn.batches import write_whole
from examples.learn.measured import CHANCE, Measured, Share, by_chance, learned, read_lines
from examples.learn.rounds import PLAN
from examples.learn.tasks import same_words

COLOURS = ("#2563eb", "#059669", "#c2410c", "#7c3aed", "#0e7490", "#be185d")
CONTROL = "#6b7280"
EXAMPLES = 3
CHARS = 1200  # of a text that is shown


class Shown:
    """One run, as its folder tells it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name, self.colour = folder, folder.name, CONTROL
        self.plan: dict[str, Any] = json.loads((folder / PLAN).read_text("utf-8"))

    @cached_property
    def measured(self) -> dict[int, Measured]:
        """Each evaluation, by the rounds before it; the base model's first."""
        places = {number: self.folder / f"eval-{number}" for number in range(self.plan["rounds"] + 1)}
        return {number: Measured(place) for number, place in places.items() if (place / "metrics.json").exists()}

    @property
    def last(self) -> int:
        """The rounds before the last evaluation."""
        return max(self.measured)

    @cached_property
    def steps(self) -> list[Mapping[str, Any]]:
        """What the trainer told of each round."""
        return [json.loads(path.read_text("utf-8")) for path in self._each("policy/step-{}.json", 1)]

    @cached_property
    def batches(self) -> list[list[list[Mapping[str, Any]]]]:
        """What was trained on, step by step: the facts of each group's rollouts."""
        paths = [path for path, _ in zip(self._each("policy/batch-{}.json", 0), self.steps, strict=False)]
        return [[group["overrides"] for group in json.loads(path.read_text("utf-8"))] for path in paths]

    @cached_property
    def trained(self) -> Counter[str]:
        """How many groups of each task were trained on."""
        return Counter(facts_R[0]["task_id"] for batch in self.batches for facts_R in batch)

    def solved(self, level: str | None = None) -> dict[int, Share]:
        """Of all held-out tasks, or of one set, by the rounds before."""
        return {number: measured.share(level) for number, measured in self.measured.items()}

    @cached_property
    def tasks(self) -> dict[str, Mapping[str, Any]]:
        """By id, held-out ones too."""
        return {told["task_id"]: told for told in read_lines(self.folder / "tasks.jsonl")}

    def leaked(self) -> int:
        """Trained tasks that are held out, or ask in the words of one that is."""
        measured = self.measured[0].first()
        asked = [self.tasks[name]["question"] for name in measured]
        return sum(
            name in measured or bool(same_words([self.tasks[name]["question"]], asked)) for name in self.trained
        )

    def _each(self, place: str, first: int) -> Iterator[Path]:
        number = first
        while (path := self.folder / place.format(number)).exists():
            yield path
            number += 1


def write_page(folder: Path) -> Path:
    """The page of all runs in `folder`."""
    runs = [Shown(path.parent) for path in sorted(folder.glob(f"*/{PLAN}"))]
    runs = [run for run in runs if run.measured]
    for run, colour in zip((run for run in runs if not run.plan["control"]), cycle(COLOURS), strict=False):
        run.colour = colour
    write_whole(path := folder / "learn.html", _page(runs))
    return path


def _page(runs: Sequence[Shown]) -> str:
    if not runs:
        return _document("<p>Nothing was measured yet.</p>")
    models = ", ".join(sorted({f"{run.plan['model']} by {run.plan['algorithm']}" for run in runs}))
    sets = list(dict.fromkeys(name for run in runs for name in run.plan["sets"]))
    parts = [
        f"<p>{escape(models)}. A task is solved if the agent's answer is right; bars are 95 % intervals.</p>",
        _chart("All held-out tasks", [(run, run.solved()) for run in runs], 640, 300),
        _legend(runs),
        _verdicts(runs),
        '<h2>By task set</h2><div class="small">',
        *(
            _chart(name, [(run, run.solved(name)) for run in runs if name in run.plan["sets"]], 310, 180)
            for name in sets
        ),
        "</div>",
    ]
    for run in runs:
        parts += [f"<h2>{escape(run.name)}</h2>", _rounds(run), _held_out(run), _before_and_after(run)]
    return _document("\n".join(parts))


# ------------------------------------------------------------------- what was learned


def _verdicts(runs: Sequence[Shown]) -> str:
    rows = []
    for run in runs:
        shares, sets = run.solved(), list(run.plan["sets"])
        before, after = run.measured[0], run.measured[run.last]
        rose = learned(before, after, sets)
        flat = [name for name in sets if name not in rose]
        rows.append(
            f"<tr><td>{escape(run.name)}<td>{shares[0]}<td>{shares[run.last]}<td>{run.last}"
            f"<td>{by_chance(before, after):.2g}"
            f"<td>{escape(', '.join(rose) or 'none')}<td>{escape(', '.join(flat) or 'none')}"
        )
    head = (
        "<tr><th>run<th>before<th>after<th>rounds<th>p, all tasks<th>sets that were learned"
        "<th>sets that were not, or not surely"
    )
    said = (
        "The last evaluation is compared with the first one, task by task: p is the chance that so many of the"
        " tasks that changed became right, if right and wrong were equally likely (exact one-sided sign test). A"
        f" set counts as learned if its p is at most {CHANCE} divided by the number of the run's sets."
    )
    return f"<table>{head}{''.join(rows)}</table><p>{said}</p>"


def _rounds(run: Shown) -> str:
    head = (
        "<tr><th>round<th>held-out tasks solved<th>reward in training<th>groups that teach<th>outcomes<th>policy"
        "<th>staleness<th>loss<th>clipped<th>log-probs, trainer to record: mean (k3)<th>seconds of training"
    )
    rows = [f"<tr><td>0<td>{run.solved()[0]}<td colspan=9>"]
    for number, (step, groups) in enumerate(zip(run.steps, run.batches, strict=False), 1):
        shares, batch = run.solved(), [facts for facts_R in groups for facts in facts_R]
        outcomes = ", ".join(f"{name} {n}" for name, n in Counter(f["outcome"] for f in batch).most_common())
        versions = sorted({Path(f["policy_version"]).name if f["policy_version"] else "not told" for f in batch})
        stale = [facts["staleness"] for facts in batch]
        most = "not known" if None in stale else max(stale)
        losses, check = step["losses"], step["check"]
        loss = f"{losses[0]:+.4f} to {losses[-1]:+.4f}" if losses else "nothing to learn from"
        rows.append(
            f"<tr><td>{number}<td>{shares.get(number, '')}<td>{step['reward']:.3f}"
            f"<td>{step['groups_learned_from']} of {step['groups']}<td>{escape(outcomes)}"
            f"<td>{escape(', '.join(versions))}"
            f"<td>{most}<td>{loss}<td>{step['clipped']:.1%}"
            f"<td>{check['mean']:.4f} ({check['k3']:.5f}) of {check['tokens']} tokens<td>{step['seconds']:.0f}"
        )
    return f"<table>{head}{''.join(rows)}</table>"


def _held_out(run: Shown) -> str:
    leaked = run.leaked()
    said = "none is held out or has a held-out task's words" if not leaked else f"{leaked} ARE HELD OUT"
    again = sum(count > 1 for count in run.trained.values())
    missing = [f"{m.missing} of {len(m.samples)} after round {n}" for n, m in run.measured.items() if m.missing]
    broke = f" Samples that broke count as wrong: {', '.join(missing)}." if missing else ""
    return (
        f"<p>{len(run.trained)} different tasks were trained on, {again} of them more than once; {said}. "
        f"Held out are {len(run.measured[0].first())}.{broke}</p>"
    )


def _before_and_after(run: Shown) -> str:
    """Held-out tasks of different sets, those first that were not solved before and are now."""
    last = run.last
    before, after = run.measured[0].first(), run.measured[last].first()
    both = [name for name in before if name in after]
    both.sort(key=lambda name: (bool(before[name]["correct"]), not after[name]["correct"]))
    taken: dict[str, str] = {}
    for name in both:
        taken.setdefault(run.tasks[name]["level"], name)
    parts = ["<p>Examples, chosen: tasks that became right come first, so they do not show how many did.</p>"]
    for name in list(taken.values())[:EXAMPLES]:
        sides = "".join(
            f"<td><b>{title}: {'right' if told['correct'] else 'wrong'}</b>"
            f"<pre>{escape(_written(told))}</pre>answer: {escape(str(told['answer'])[:CHARS])}"
            for title, told in (("before", before[name]), (f"after round {last}", after[name]))
        )
        question = f"{run.tasks[name]['question']}  [{run.tasks[name]['answer']}]"
        parts.append(f'<table class="pair"><tr><td colspan=2>{escape(question)}<tr>{sides}</table>')
    return "".join(parts)


def _written(told: Mapping[str, Any]) -> str:
    """What the model wrote."""
    said = [message["content"] for message in told["messages"] or () if message["role"] == "assistant"]
    return str(said[0] if said else "")[:CHARS]


# ------------------------------------------------------------------- drawing


def _chart(title: str, curves: Sequence[tuple[Shown, Mapping[int, Share]]], width: int, height: int) -> str:
    """Solved tasks by round, from 0 to 100 %."""
    left, bottom, top, right = 40, 24, 26, 12
    rounds = max(1, *(max(shares) for _, shares in curves))

    def x(number: int, run: int) -> float:  # bars of several runs stand side by side
        return left + (width - left - right) * number / rounds + 3.0 * (run - (len(curves) - 1) / 2)

    def y(share: float) -> float:
        return top + (height - top - bottom) * (1 - share)

    parts = [f'<text x="{left}" y="16" class="title">{escape(title)}</text>']
    for tenth in range(0, 11, 2):
        level = y(tenth / 10)
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{level:.1f}" y2="{level:.1f}" class="grid"/>')
        parts.append(f'<text x="{left - 6}" y="{level + 4:.1f}" class="end">{tenth * 10} %</text>')
    for number in range(0, rounds + 1, math.ceil(rounds / 10)):
        middle = x(number, 0) - 3.0 * (0 - (len(curves) - 1) / 2)
        parts.append(f'<text x="{middle:.1f}" y="{height - 6}" class="mid">{number}</text>')
    for at, (run, shares) in enumerate(curves):
        colour = run.colour
        dashed = ' stroke-dasharray="5 4"' if run.plan["control"] else ""
        points = " ".join(f"{x(n, at):.1f},{y(share.value):.1f}" for n, share in shares.items())
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>')
        for n, share in shares.items():
            where = f'x1="{x(n, at):.1f}" x2="{x(n, at):.1f}" y1="{y(share.low):.1f}" y2="{y(share.high):.1f}"'
            parts.append(f'<line {where} stroke="{colour}" opacity=".45"/>')
            parts.append(
                f'<circle cx="{x(n, at):.1f}" cy="{y(share.value):.1f}" r="3" fill="{colour}">'
                f"<title>{escape(run.name)}, round {n}: {share}</title></circle>"
            )
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}">{"".join(parts)}</svg>'


def _legend(runs: Sequence[Shown]) -> str:
    names = []
    for run in runs:
        what = " (scores shuffled: it must not learn)" if run.plan["control"] else ""
        names.append(f'<span style="color:{run.colour}">■</span> {escape(run.name)}{what}')
    return f"<p>{' &nbsp; '.join(names)}</p>"


def _document(body: str) -> str:
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>What was learned</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; }}
table {{ border-collapse: collapse; margin: 1em 0; font-size: 13px; display: block; overflow-x: auto; }}
th, td {{ border-bottom: 1px solid #e5e7eb; padding: 4px 8px; text-align: left; vertical-align: top; }}
.pair td {{ width: 50%; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; background: #f3f4f6; padding: 6px; margin: 4px 0; }}
svg text {{ font-size: 11px; fill: #4b5563; }} svg .title {{ font-size: 13px; font-weight: 600; fill: #111827; }}
svg .end {{ text-anchor: end; }} svg .mid {{ text-anchor: middle; }} svg .grid {{ stroke: #e5e7eb; }}
.small {{ display: flex; flex-wrap: wrap; gap: 8px; }} svg {{ max-width: 100%; height: auto; }}
</style>
<h1>What was learned</h1>
{body}
</html>
"""
