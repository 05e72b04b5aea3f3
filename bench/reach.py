"""Brings sandboxes to every turn of a run's rollouts: how many get there as recorded, and what that takes.

    python -m bench.reach RUN_DIR [--most 20]

Each of them samples its turn from a scripted endpoint that answers at once. `--most`: only so many rollouts,
chosen evenly. The steps' own time is the record's: until its first prompt, and between a completion and the next
prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from bench.numbers import p50
from orchestrator.commands.table import COMMANDS
from orchestrator.engine.orchestrator import Orchestrator
from orchestrator.engine.same_ids import same_ids
from orchestrator.engine.shared import Shared
from orchestrator.rules.observer import Listener, Observer
from orchestrator.run.files import read_description, read_recorded, saved_env
from orchestrator.run.line import RecordedAttempt, read_attempt
from orchestrator.run.lines import texts
from orchestrator.run.parent import digest_in
from orchestrator.settings.config import Config
from orchestrator.settings.flags import parse
from orchestrator.settings.sources import resolve
from orchestrator.tasks.split import tasks_of
from orchestrator.types import Attempt, BadTask, Failed, Member, Prefix, RolloutPlan, Task
from orchestrator.types.prefix import branching
from tests.fakes.inference import Call, Model, ScriptedServer

ANSWER = "Thought: enough.\n<code>\nfinal_answer(0)\n</code>"
_HARMLESS = re.compile(r"harmless differences: (.*)")


@dataclass(slots=True)
class Reached(Listener):
    """`classes`: how many branches got to their turn, by the differences on the way; `taken`: (seconds that it
    took, the steps' own seconds) of each that got there."""

    classes: Counter[str] = field(default_factory=Counter)
    refused: list[str] = field(default_factory=list)
    taken: list[tuple[float, float]] = field(default_factory=list)
    identical: int = 0  # whose prompt has the recorded ids
    asked: dict[int, float] = field(default_factory=dict)  # when the first request came, by the rollout's seed
    _begun: dict[str, float] = field(default_factory=dict)
    _own: dict[int, tuple[float, tuple[int, ...]]] = field(default_factory=dict)

    def expect(self, group: int, attempt: RecordedAttempt, turn: int) -> None:
        """The group brings a sandbox to this turn."""
        turns = attempt.record.turns[:turn]
        steps = sum(following.started_s - one.ended_s for one, following in pairwise(turns))
        self._own[group] = turns[0].started_s + steps, tuple(turns[-1].prompt_ids or ())

    def begun(self, plan: RolloutPlan, node: str) -> None:
        self._begun[plan.rollout_id] = time.perf_counter()

    def answer(self, call: Call) -> str:
        """What the endpoint says; it is asked for the first time where the sandbox got."""
        if call.seed is not None:
            self.asked.setdefault(call.seed, time.perf_counter())
        return ANSWER

    def attempt(self, result: Member | Attempt) -> None:
        attempt = result.attempt if isinstance(result, Member) else result
        plan, record, outcome = attempt.plan, attempt.record, attempt.outcome
        if isinstance(outcome, Failed):
            self.refused.append(f"{plan.task.task_id}: {outcome.reason}")
            self.classes[str(outcome.name)] += 1
            return
        harmless = next(filter(None, map(_HARMLESS.search, record.notes)), None)
        self.classes[f"harmless: {re.sub(r' [(][0-9]+[)]', '', harmless[1])}" if harmless else "none"] += 1
        assert plan.prefix is not None
        assert plan.prefix.branch is not None
        own_s, ids = self._own[plan.group]
        turn = record.turns[plan.prefix.branch.turn - 1]
        self.identical += tuple(turn.prompt_ids or ()) == ids
        asked = self.asked.get(plan.sampling.seed + turn.sequence)
        if asked is not None:
            self.taken.append((asked - self._begun[plan.rollout_id] - record.launch_s, own_s))

    def bad_task(self, task: BadTask) -> None:
        self.classes["bad_task"] += 1
        self.refused.append(f"{task.task_id}: {task.reason}")

    @property
    def branches(self) -> int:
        return self.classes.total()

    @property
    def over_ms(self) -> list[float]:
        """Milliseconds over 1.2 times the steps' own time, of each."""
        return [1000 * (took - 1.2 * own) for took, own in self.taken]

    def __str__(self) -> str:
        each = ", ".join(f"{name} {count}" for name, count in self.classes.most_common())
        counts = f"{self.branches} branches by difference: {each}; the recorded ids: {self.identical}"
        if not self.taken:
            return counts
        return (
            f"{counts}\nmedian: {1000 * p50([took for took, _ in self.taken]):.0f} ms, steps' own "
            f"{1000 * p50([own for _, own in self.taken]):.0f} ms; over 1.2 x own: {p50(self.over_ms):.0f} ms"
        )


async def reach(run_dir: Path, most: int | None = None, **env: object) -> Reached:
    """`env`: settings in place of the run's."""
    described, path = read_recorded(run_dir, "RUN_DIR")
    attempts = _attempts(path, most)
    found, name = Reached(), str(described["tokenizer"])
    async with ScriptedServer("vllm", found.answer, model=Model(Path(name))) as server:
        config = _config(run_dir, base_url=server.base_url, tokenizer=name, **env)
        tasks = tasks_of(config.env, described).named({attempt.task_id for attempt in attempts})
        places = [
            (attempt, turn)
            for attempt in attempts
            if isinstance(tasks.get(attempt.task_id), Task)
            for turn in range(1, len(attempt.record.turns) + 1)
        ]

        async def begin(shared: Shared, task: Task, number: int) -> Prefix:
            attempt, turn = places[number]
            found.expect(number, attempt, turn)
            same = same_ids(attempt.record.turns[: turn - 1], digest_in(described), shared.open_now.hosts)
            return branching(attempt.rollout_id, attempt.record, turn, same_ids=same)

        async with Orchestrator(config, Observer(listeners=[found])) as engine:
            engine.maker.begin = begin
            async with aclosing(engine.groups([tasks[attempt.task_id] for attempt, _ in places])) as groups:
                async for _ in groups:
                    pass
    return found


def _attempts(path: Path, most: int | None) -> list[RecordedAttempt]:
    attempts = []
    for line in texts(path):
        try:
            attempt = read_attempt(line.text)
        except ValueError:
            continue  # a bad task
        if attempt.score is not None and attempt.record.turns:
            attempts.append(attempt)
    count = min(most or len(attempts), len(attempts))
    return [attempts[n * len(attempts) // count] for n in range(count)]


def _config(run_dir: Path, *, base_url: str, tokenizer: str, **env: object) -> Config:
    (command,) = (command for command in COMMANDS if command.name == "branch")
    saved = saved_env(read_description(run_dir))  # no command takes these from a run
    given = {"tokenizer_name": tokenizer, "sandbox_root": saved["sandbox_root"], **env}
    if bases := saved.get("base_images"):
        given["base_images"] = json.dumps(bases)
    words = [f"--env.{name}={value}" for name, value in given.items()]
    server = [f"--openai.base_url={base_url}", "--openai.model_name=scripted"]
    flags = parse([*words, *server], command.flags())
    config = resolve(flags, run=run_dir, command="branch")
    return replace(config, env=replace(config.env, group_size=1, group_policy="partial:1"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.reach", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--most", type=int, help="only so many rollouts")
    parser.add_argument("--launcher", default="oci")
    parser.add_argument("--sandboxes", type=int, default=2)
    given = parser.parse_args(arguments)
    settings = {"launcher": given.launcher, "max_concurrent_sandboxes": given.sandboxes}
    found = asyncio.run(reach(given.run_dir, given.most, **settings))
    print(found)
    print("\n".join(found.refused))


if __name__ == "__main__":
    main()
