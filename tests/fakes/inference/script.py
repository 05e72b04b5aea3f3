"""What a scripted server says to whom.

A script is any callable from a `Call` to a text or `Reply`. `by_task` makes the usual ones, and
`load_script` reads them from JSON:

    {"tasks": [{"task": "how many cats", "rollouts": [["first turn", "second turn"], ["other first turn"]]}],
     "default": "I do not know.", "by": "order", "delay_s": 0.0,
     "faults": [{"kind": "429", "calls": [0, 3], "retry_after_s": 0.1}]}

Of the `rollouts` of a task those that agree with the conversation so far are left, and one of them is
taken, by order of arrival or by the request's seed: so the rollouts of a group end differently.
A turn is a text or {"text", "length", "delay_s", "fault"}; past the last one it is said again.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tests.fakes.inference.faults import Fault, FaultPlan
from tests.fakes.inference.model import ChatMessage

TASK_MARK = "New task:"


@dataclass(frozen=True, slots=True)
class Call:
    """One request for a completion, as a script sees it.

    number: how many completions were asked for before, probes not counted; None for a probe.
    turn: assistant messages since the task. observations: messages `Observation:` since the task.
    same: how many others came before with this very conversation: 0, 1 … for the rollouts of a group.
        A request with the seed of an earlier one (a retry) is that one again.
    """

    number: int | None
    messages: tuple[ChatMessage, ...]
    task: str
    turn: int
    observations: int
    same: int
    seed: int | None
    max_tokens: int
    stop: tuple[str, ...]

    @property
    def said(self) -> tuple[str, ...]:
        """The assistant's messages since the task."""
        return tuple(m.content for m in _since_task(self.messages) if m.role == "assistant")


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model means to say. `length`: cut off for length behind the text; no end token."""

    text: str
    length: bool = False
    delay_s: float = 0.0
    fault: Fault | None = None


Script = Callable[[Call], Reply | str]
Turns = Sequence[Reply | str]


class CallReader:
    """Turns requests into calls; counts them. One per server."""

    def __init__(self) -> None:
        self._number = 0
        self._seen: Counter[int] = Counter()
        self._place: dict[tuple[int, int], int] = {}

    def read(
        self,
        messages: tuple[ChatMessage, ...],
        *,
        probe: bool,
        seed: int | None,
        max_tokens: int,
        stop: tuple[str, ...],
    ) -> Call:
        since = _since_task(messages)
        key = hash(messages)
        same = self._seen[key] if seed is None else self._place.get((key, seed), self._seen[key])
        call = Call(
            number=None if probe else self._number,
            messages=messages,
            task=since[0].content if since else "",
            turn=sum(m.role == "assistant" for m in since),
            observations=sum(m.content.startswith("Observation:") for m in since),
            same=same,
            seed=seed,
            max_tokens=max_tokens,
            stop=stop,
        )
        if not probe:
            self._number += 1
            self._seen[key] += same == self._seen[key]
            if seed is not None:
                self._place[key, seed] = same
        return call


def by_task(
    tasks: Mapping[str, Sequence[Turns]],
    default: Reply | str = "I do not know.",
    by: Literal["order", "seed"] = "order",
) -> Script:
    """A script that finds the task by a part of its text; of its rollouts as the module says."""

    def script(call: Call) -> Reply | str:
        for part, rollouts in tasks.items():
            if part in call.task:
                return _turn(call, rollouts, by) or default
        return default

    return script


def always(*turns: Reply | str) -> Script:
    """The same turns for every task."""
    return by_task({"": [turns]})


def load_script(source: str) -> tuple[Script, FaultPlan]:
    """`module:function`, or the path of a JSON file. Raises ValueError on keys it does not know."""
    if not source.endswith(".json"):
        module, _, name = source.partition(":")
        script: Script = getattr(importlib.import_module(module), name)
        return script, FaultPlan()
    return read_script(json.loads(Path(source).read_text("utf-8")))


def read_script(raw: Mapping[str, Any]) -> tuple[Script, FaultPlan]:
    """The script and the faults of a JSON object."""
    _known(raw, "tasks", "default", "by", "delay_s", "faults", "seed")
    delay_s = float(raw.get("delay_s", 0.0))
    tasks = {}
    for entry in raw.get("tasks", ()):
        _known(entry, "task", "rollouts")
        tasks[entry["task"]] = [[_reply(turn, delay_s) for turn in turns] for turns in entry["rollouts"]]
    script = by_task(tasks, _reply(raw.get("default", "I do not know."), delay_s), raw.get("by", "order"))
    return script, FaultPlan(tuple(Fault(**fault) for fault in raw.get("faults", ())), raw.get("seed", 0))


def _reply(raw: Any, delay_s: float) -> Reply:
    if isinstance(raw, str):
        return Reply(raw, delay_s=delay_s)
    _known(raw, "text", "length", "delay_s", "fault")
    reply = Reply(raw["text"], raw.get("length", False), raw.get("delay_s", delay_s))
    return replace(reply, fault=Fault(**raw["fault"])) if "fault" in raw else reply


def _known(raw: Mapping[str, Any], *names: str) -> None:
    if unknown := set(raw) - set(names):
        raise ValueError(f"a script has no {sorted(unknown)}; it has {sorted(names)}")


def _turn(call: Call, rollouts: Sequence[Turns], by: str) -> Reply | str | None:
    left = [turns for turns in rollouts if _agrees(turns, call.said)]
    if not left:
        return None
    number = call.seed if by == "seed" and call.seed is not None else call.same
    turns = left[number % len(left)]
    return turns[min(call.turn, len(turns) - 1)]


def _agrees(turns: Turns, said: Sequence[str]) -> bool:
    """Whether a conversation may come from these turns; what was said may have been cut short."""
    for index, message in enumerate(said):
        turn = turns[min(index, len(turns) - 1)]
        text = turn.text if isinstance(turn, Reply) else turn
        if not text.strip().startswith(message.strip().removesuffix("</code>").strip()):
            return False
    return True


def _since_task(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """From the last message that states a task (else from the first of the user's)."""
    users = [n for n, m in enumerate(messages) if m.role == "user"]
    stated = [n for n in users if messages[n].content.startswith(TASK_MARK)]
    start = stated[-1] if stated else users[0] if users else len(messages)
    return messages[start:]
