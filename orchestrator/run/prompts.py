"""How deterministic agent and tasks are: which prompts of a replay were the recorded ones, turn by turn."""

from collections import Counter, defaultdict

from orchestrator.rules.likeness import first_difference, talk_likeness
from orchestrator.run.line import RecordedAttempt
from orchestrator.types import Record, conversations

MAX_EXAMPLES = 5  # of each kind of difference
_COLUMNS = ("prompts", "identical", "harmless", "state", "not reached")


class Prompts:
    """Those compared so far. Later prompts of a rollout repeat its earlier differences."""

    def __init__(self) -> None:
        self._turns: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._harmless: Counter[str] = Counter()  # prompts, by the classes that they differ in
        self._examples: defaultdict[str, list[str]] = defaultdict(list)  # of each rollout the first of its kind

    def compare(self, then: RecordedAttempt, now: Record) -> None:
        """Compares each recorded prompt with the one in its place."""
        live, kinds = list(zip(conversations(now.turns), now.turns, strict=True)), set[str]()
        for number, (old, turn) in enumerate(
            zip(conversations(then.record.turns), then.record.turns, strict=True)
        ):
            if number >= len(live):
                self._turns[number + 1]["not reached"] += 1
                continue
            new, played = live[number]
            names = talk_likeness(old, new)
            ids, others = turn.prompt_ids, played.prompt_ids
            other_ids = old == new and None not in (ids, others) and tuple(ids or ()) != tuple(others or ())
            kind = "state" if names is None or other_ids else "harmless" if names else "identical"
            self._turns[number + 1][kind] += 1
            self._harmless.update(set(names or ()))
            if kind != "identical" and kind not in kinds:
                kinds.add(kind)
                what = "the same text, but other ids" if other_ids else first_difference(old, new)
                self._examples[kind].append(f"{then.rollout_id}  {then.task_id[:28]}  prompt {number + 1}: {what}")

    @property
    def table(self) -> list[str]:
        """For a terminal."""
        lines = ["turn  " + "".join(f"{name:>14}" for name in _COLUMNS)]
        for number, counts in sorted(self._turns.items()):
            lines.append(_row(str(number), counts))
        lines.append(_row("all", sum(self._turns.values(), Counter())))
        if self._harmless:
            classes = ", ".join(f"{name} {count}" for name, count in self._harmless.most_common())
            lines.append(f"harmless: prompts by what differs: {classes}")
        for kind, examples in sorted(self._examples.items()):
            lines.append(f"{kind}: {len(examples)} rollout{'s' * (len(examples) != 1)}, for example")
            lines += [f"  {example}" for example in examples[:MAX_EXAMPLES]]
        return lines


def _row(name: str, counts: Counter[str]) -> str:
    total = counts.total()
    shares = (f"{counts[kind]:>7} {counts[kind] / max(1, total):>6.1%}" for kind in _COLUMNS[1:])
    return f"{name:<6}{total:>14}{''.join(shares)}"
