"""The view on a terminal: finished groups scroll by; below them the counts are redrawn in place."""

from __future__ import annotations

from collections import Counter
from typing import TextIO

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestrator.rules.text import one_line, printable
from orchestrator.run.tally import Tally
from orchestrator.terminal.bar import span
from orchestrator.terminal.closing import lost, outcomes_text, scores_text, wrapped
from orchestrator.terminal.console import Console
from orchestrator.terminal.progress import PlainProgress
from orchestrator.types import Attempt, Group, Member, RolloutPlan

FRAMES_PER_S = 4
NODES = 8  # of a cluster, shown by name


class LiveProgress(PlainProgress):
    """The counts stay at the bottom until the closing table takes their place."""

    def __init__(self, wanted: int | None, tally: Tally, stream: TextIO) -> None:
        super().__init__(wanted, tally, stream)
        self._running: dict[str, str] = {}  # rollouts, and the node of each
        self._away: dict[str, str | None] = {}  # nodes of a cluster, and why rollouts cannot go there
        self._sampled = 0  # tokens of this process; the tally has those of earlier ones too
        self._console = Console(stream)
        self._live = Live(
            console=self._console, get_renderable=self._view, refresh_per_second=FRAMES_PER_S, transient=True
        )

    def __enter__(self) -> LiveProgress:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._console.print(wrapped(printable(text), self._console.width), markup=False, soft_wrap=True)

    def begun(self, plan: RolloutPlan, node: str) -> None:
        super().begun(plan, node)
        self._running[plan.rollout_id] = node

    def node(self, name: str, away: str | None) -> None:
        self._away[name] = away

    def attempt(self, result: Member | Attempt) -> None:
        attempt = result.attempt if isinstance(result, Member) else result
        self._running.pop(attempt.plan.rollout_id, None)
        self._sampled += attempt.record.sampled_tokens

    def group(self, group: Group) -> None:
        if group.dropped is not None:
            what = Text(f"dropped, {one_line(group.dropped)}", style="yellow")
        else:
            what = Text(" ").join(_score(m) for m in group.members_G).append(lost(group), style="yellow")
        self._console.print(Text(f"{self.heading(group)}  "), what, sep="", soft_wrap=True)

    def _view(self) -> RenderableType:
        tally = self.tally
        done = tally.groups + tally.dropped
        counts = Table.grid(padding=(0, 2, 0, 0))
        counts.add_column(style="bold", no_wrap=True)
        counts.add_column(overflow="fold")
        counts.add_row("groups", self._groups(done))
        counts.add_row("sandboxes", f"{len(self._running)} running, {_clock(tally.wall_s)} so far")
        if self._away:
            counts.add_row("nodes", self._nodes())
        counts.add_row(
            "outcomes", outcomes_text(tally.outcomes) if tally.outcomes else Text("none yet", style="dim")
        )
        if tally.scores:
            mixed = f"{tally.mixed} group{'' if tally.mixed == 1 else 's'} mixed"
            counts.add_row("scores", f"{scores_text(tally)}, {mixed}")
        rate = self._sampled / max(tally.wall_s, 1e-3)
        counts.add_row("tokens", f"{tally.tokens} sampled, {rate:.0f}/s")
        return Stack("", counts)

    def _nodes(self) -> Text:
        """Rollouts of the busiest nodes, and which nodes are away."""
        busy = Counter({name: 0 for name, away in self._away.items() if away is None})
        busy.update(node for node in self._running.values() if node)
        names = ", ".join(f"{printable(name)} {count}" for name, count in busy.most_common(NODES))
        text = Text(names + f" and {len(busy) - NODES} more" * (len(busy) > NODES))
        for name, why in [(name, why) for name, why in self._away.items() if why is not None][:NODES]:
            text.append(f"; away: {one_line(f'{name}: {why}')}", style="yellow")
        return text

    def _groups(self, done: int) -> RenderableType:
        if self.wanted is None:
            return f"{done} done"
        row = Table.grid(padding=(0, 2, 0, 0))
        row.add_column(no_wrap=True)
        row.add_column(width=30)
        left = self.left_s()
        row.add_column(style="dim", no_wrap=True)
        row.add_row(
            f"{done} of {self.wanted}",
            ProgressBar(self.wanted, done, width=30),
            "" if left is None else f"{span(left)} left",
        )
        return row


def _score(member: Member) -> Text:
    value = member.score.value
    return Text(f"{value:.2f}", style="green" if member.score.solved else "" if value else "dim")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
