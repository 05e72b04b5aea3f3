"""When a run ends early: nearly every rollout breaks, or the agent never gets to a completion."""

import re
from collections import Counter, deque
from collections.abc import Callable

from orchestrator.errors import AgentUnusable, RunUnhealthy
from orchestrator.rules.text import one_line
from orchestrator.types import Attempt, Failed, FailedName, Group

WINDOW = 32
LEAST = 16
GROUPS = 12  # this many broken tasks in a row are no accident; ten may be one
UNHEALTHY = 0.75
GROUPS_WITHOUT_COMPLETION = 3  # in a row: by then it is neither the task nor chance
MAX_KINDS = 8  # of refused requests
_PARTICULARS = re.compile(r"\d+|'[^']*'|\"[^\"]*\"")  # of one request: numbers, and what it said
_OTHERS_FAULT = frozenset((FailedName.BAD_TASK, FailedName.CANCELLED))


class HealthGate:
    """Ends a run in which most of the last rollouts broke for good, for reasons that are not the policy's.

    Each rollout counts once, by its last attempt. Some tasks always break, and may come in a row: so the failures
    must come from at least `groups` groups, and groups that broke in an earlier process of the run do not count.
    `window`: how many rollouts are window back at; no verdict before there were `least` of them. After a verdict
    it counts anew.
    """

    def __init__(self, *, window: int = WINDOW, least: int = LEAST, groups: int = GROUPS) -> None:
        self._last: deque[tuple[int, Failed | None]] = deque(maxlen=max(window, least))
        self._least = least
        self._groups = groups
        self._broke_before: set[int] = set()

    def broke_before(self, group: int, failure: Failed) -> None:
        """A rollout of this group broke in an earlier process: further failures of the group are not counted."""
        if failure.name not in _OTHERS_FAULT:
            self._broke_before.add(group)

    def count(self, group: int, failure: Failed | None) -> None:
        """Counts one rollout; None: it did not break. Raises RunUnhealthy, naming the commonest cause."""
        if failure is not None and group in self._broke_before:
            return
        self._last.append((group, None if failure is None or failure.name in _OTHERS_FAULT else failure))
        failures = [failed for _, failed in self._last if failed is not None]
        if len(self._last) < self._least or len(failures) < UNHEALTHY * len(self._last):
            return
        groups = len({group for group, failed in self._last if failed is not None})
        if groups < self._groups:
            return
        (name, count), *_ = Counter(failed.name for failed in failures).most_common(1)
        reason = next(failed.reason for failed in reversed(failures) if failed.name is name)
        window = len(self._last)
        self._last.clear()  # a program may go on when the cause is mended
        raise RunUnhealthy(
            f"{len(failures)} of the last {window} rollouts broke, {count} of them by {name}, "
            f"in {groups} groups, the last one with: {reason}"
        )


class AgentGate:
    """Ends a run whose agent never gets to a completion. `say` gets the reason at the first such rollout. It also
    gets each kind of request that was refused after a program's first completion: such a rollout is scored.

    A group counts if it is dropped, a rollout of it ended as `agent_error` and none sampled anything. A rollout of
    any group that has sampled begins the count anew.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said = False
        self._refusals: set[str] = set()  # the kinds that were reported
        self._in_a_row = 0

    def attempt(self, attempt: Attempt) -> None:
        """One attempt is over."""
        for text in attempt.record.requests.refusals:
            kind = _PARTICULARS.sub("", text)
            if kind not in self._refusals and len(self._refusals) < MAX_KINDS:
                self._refusals.add(kind)
                self._say(f"a request was refused after a completion, the rollout is scored: {one_line(text)}")
        if attempt.record.turns:
            self._in_a_row = 0
        elif (error := _agent_error(attempt)) is not None and not self._said:
            self._said = True
            self._say(f"{error.name}, the first: {error.headline}")
            for line in error.reason.split("\n")[1:]:
                self._say(f"  | {line}")

    def group(self, group: Group) -> None:
        """One group is over. Raises AgentUnusable."""
        errors = [error for attempt in group.attempts if (error := _agent_error(attempt)) is not None]
        sampled = any(attempt.record.turns for attempt in group.attempts)
        if group.dropped is None or sampled or not errors:
            return
        self._in_a_row += 1
        if self._in_a_row < GROUPS_WITHOUT_COMPLETION:
            return
        groups, self._in_a_row = self._in_a_row, 0  # a program may go on when the cause is mended
        raise AgentUnusable(
            f"env.agent: no rollout of {groups} groups in a row got a completion; the last one ended with: "
            f"{errors[-1].headline}"
        )


def _agent_error(attempt: Attempt) -> Failed | None:
    failed = attempt.outcome
    return failed if isinstance(failed, Failed) and failed.name is FailedName.AGENT_ERROR else None
