"""Which of Harbor's tasks are not run here, and what they have in common."""

from collections import Counter
from collections.abc import Mapping

from orchestrator.tasks.base import BadRow

UNREADABLE = ""  # what a task needs that is merely wrong


class Refusal(BadRow):
    """A task that is well-formed and is not run here. `need`: what such tasks need, like `compose`."""

    def __init__(self, need: str, reason: str) -> None:
        super().__init__(reason)
        self.need = need


def told(total: int, needs: Mapping[str, int], *, at_least: bool = False) -> str:
    """`of 89 tasks 61 can run: 20 need compose, 8 need a GPU`. `at_least`: there are more than were looked at."""
    counts = [f"{count} need{'s' * (count == 1)} {need}" for need, count in Counter(needs).most_common() if need]
    if wrong := needs.get(UNREADABLE):
        counts.append(f"{wrong} cannot be read")
    first = "of the first" if at_least else "of"
    fit = total - sum(needs.values())
    return f"{first} {total} tasks {fit} can run{': ' * bool(counts)}{', '.join(counts)}"
