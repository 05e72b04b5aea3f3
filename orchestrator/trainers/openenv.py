"""OpenEnv: a factory of sessions, each of which is one rollout, and a run's record as OpenEnv's training traces.

with RolloutSessionFactory(config, load_tasks(config)) as factory:
    session = factory.create("task-1", seed=step, episode_id="task-1/0")
    session.wait_for_completion()
    trace, verdict = session.fetch_training_trace(), session.verify([])

The agent in the sandbox owns its loop: a session gives no tools and takes no step. `TrainingTrace` checks itself.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from orchestrator.completion.trajectory import in_lines
from orchestrator.engine.orchestrator import Orchestrator
from orchestrator.engine.sync import Call, SyncOrchestrator
from orchestrator.errors import ConfigError, EnvironmentUnusable
from orchestrator.rules.advantages import last_forks
from orchestrator.rules.observer import Observer
from orchestrator.run.excerpts import CountedBadTask, read_counted
from orchestrator.run.files import ROLLOUTS_FILE, read_run, record_of, saved_env
from orchestrator.run.frames import UNCLOSED
from orchestrator.run.groups import GroupFormat
from orchestrator.run.line import RecordedAttempt, read_attempt, recorded_attempt
from orchestrator.run.lines import texts
from orchestrator.run.rows import recorded_rows
from orchestrator.run.trees import own_from
from orchestrator.settings.config import Config
from orchestrator.settings.table import EnvSettings
from orchestrator.types import (
    BadTask,
    Ended,
    Failed,
    FailedName,
    Group,
    Message,
    Task,
    Turn,
    last_attempts,
)

try:
    from openenv.core.harness import (
        ResourceSession,
        ResourceSessionFactory,
        ToolResult,
        TrainingTrace,
        TrainingTurn,
        VerifyResult,
    )
except ImportError as error:
    raise EnvironmentUnusable(
        "OpenEnv is not installed: run `pip install 'rollout-orchestrator[openenv]'`"
    ) from error

SHOWN_CHARS = 80


# ---------------------------------------------------------------- sessions


class RolloutSessionFactory(ResourceSessionFactory["RolloutSession"]):
    """Makes sessions, from any thread, several at a time; as many as there are sandboxes are under way.

    `tasks`: those that `create` finds by id or question. `sampling`: how the trainer samples, as TRL's
    `HarnessRolloutWorker` says it; refused if the run's settings differ. `observer` as for `Orchestrator`.
    It opens on entry or with the first session, and is closed on exit, by `close`, or when the interpreter ends.
    Raises ConfigError for settings under which a trace would not be what OpenEnv says it is.
    """

    def __init__(
        self,
        config: Config,
        tasks: Iterable[Task | BadTask] = (),
        *,
        sampling: Mapping[str, Any] | None = None,
        observer: Observer | None = None,
    ) -> None:
        _demand(config.env, sampling or {})
        self.orchestrator = SyncOrchestrator(config, observer)
        self._tasks = _by_name(tasks)

    def __enter__(self) -> RolloutSessionFactory:
        """Raises EnvironmentUnusable, ConfigError."""
        self.orchestrator.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> RolloutSession:
        """Begins one rollout and returns at once.

        `task`: a Task; or the id or the question of one of `tasks`, alone or as the last message of a
        conversation. The sampling seed follows from `env.seed`, the task's id, `seed` and `episode_id`, so the
        same ones sample the same again, and rollouts of a group need ids or seeds that differ. With neither, the
        sampling seed is one that no session had. Raises ConfigError for an unknown task.
        """
        match = self._task(task)
        call = self.orchestrator.begin(
            lambda: _rolled_out(self.orchestrator.orchestrator, match, seed, episode_id)
        )
        return RolloutSession(self.orchestrator.orchestrator, match, call)

    def close(self) -> None:
        """Cancels the sessions under way, removes the sandboxes. Idempotent."""
        self.orchestrator.close()

    def _task(self, task: Any) -> Task | BadTask:
        if isinstance(task, Task | BadTask):
            return task
        name = _name_in(task)
        if name is None:
            raise ConfigError(
                f"task: a {type(task).__name__} names no task; give a Task, a task's id or question, or a "
                "conversation that ends with one of them"
            )
        match = self._tasks.get(name.strip())
        if match is None:
            why = "several tasks have" if name.strip() in self._tasks else "no task of the factory has"
            raise ConfigError(
                f"task: {why} the id or question {name.strip()[:SHOWN_CHARS]!r}; give a Task or its id"
            )
        return match


class RolloutSession(ResourceSession):
    """One rollout, under way since it was made. Its methods may be called from any thread."""

    def __init__(self, orchestrator: Orchestrator, task: Task | BadTask, call: Call[Group | None]) -> None:
        self._orchestrator = orchestrator
        self._task = task
        self._call = call
        self._closed = False

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """Waits until the rollout is over, with its score: 0 if the policy ended it, 1 if it broke.

        Raises TimeoutError after `timeout_s`, and the rollout goes on; RuntimeError if the session is closed;
        RunUnhealthy and EnvironmentUnusable if no rollout can be made any more. A rollout's own limits of time
        are settings, and no error: it ends with the outcome `timeout`.
        """
        attempt = _attempt_of(self._group(timeout_s))
        return 0 if attempt is not None and isinstance(attempt.outcome, Ended) else 1

    def fetch_training_trace(self) -> TrainingTrace:
        """What was sampled, turn by turn; without a turn if the rollout has none. Raises RuntimeError before the
        rollout is over."""
        group = self._over()
        attempt, form = _attempt_of(group), GroupFormat.of(self._orchestrator.config.env, None)
        if group is None or attempt is None:
            return TrainingTrace(turns=[])
        return training_trace(attempt, form, question=group.task.question, dropped=group.dropped)

    def verify(self, transcript: list[dict[str, Any]], final_state: Any | None = None) -> VerifyResult:
        """The score. `env_reward` is None where there is none: the rollout broke, or is no training data.

        The verdict is the orchestrator's, from its own record; the arguments are not looked at. `metrics`: the
        parts of the score. `artifacts`: what became of the rollout. Raises RuntimeError before it is over.
        """
        group = self._over()
        attempt = _attempt_of(group)
        if group is None or attempt is None:
            name = FailedName.CANCELLED if isinstance(self._task, Task) else FailedName.BAD_TASK
            reason = (
                self._task.reason if isinstance(self._task, BadTask) else "the run was stopped before it ended"
            )
            return VerifyResult(artifacts={"task_id": self._task.task_id, "outcome": str(name), "reason": reason})
        outcome, score = attempt.outcome, attempt.score
        artifacts = {
            "rollout_id": attempt.rollout_id,
            "task_id": attempt.task_id,
            "outcome": str(outcome.name),
            "reason": group.dropped or (outcome.detail if isinstance(outcome, Ended) else outcome.reason),
            "answer": attempt.record.answer,
            "policy_versions": list(attempt.record.policy_versions),
        }
        return VerifyResult(
            env_reward=None if score is None or group.dropped is not None else score.value,
            done=isinstance(outcome, Ended),
            metrics=dict(score.parts) if score is not None else {},
            artifacts=artifacts,
        )

    def close(self) -> None:
        """Cancels the rollout, if it is not over. When this returns it is on record, and its sandbox is being
        removed. Idempotent."""
        self._closed = True
        self._call.cancel()

    def initial_messages(self) -> list[dict[str, Any]]:
        """The question, as the user's message."""
        return [{"role": "user", "content": self._task.question}] if isinstance(self._task, Task) else []

    def list_tools(self) -> list[Any]:
        """None: the agent has its tools in the sandbox."""
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Raises KeyError."""
        raise KeyError(f"no tool {name!r}: the agent in the sandbox calls its tools itself")

    def _over(self) -> Group | None:
        try:
            return self._group(0.0)
        except TimeoutError:
            raise RuntimeError("the rollout is not over: call wait_for_completion first") from None

    def _group(self, timeout_s: float | None) -> Group | None:
        try:
            return self._call.result(timeout_s)
        except RuntimeError as error:
            if self._closed:
                raise RuntimeError("the session was closed before its rollout was over") from error
            raise


async def _rolled_out(
    orchestrator: Orchestrator, task: Task | BadTask, seed: int | None, episode_id: str | None
) -> Group | None:
    """The group of the one rollout. None: the task is bad, or the run was stopped."""
    async with aclosing(orchestrator.groups([task], epoch=epoch_of(seed, episode_id))) as groups:
        results = [group async for group in groups]
    return results[0] if results else None


def epoch_of(seed: int | None, episode_id: str | None) -> int | None:
    """The epoch that stands for these two, in 62 bits. None, for neither: one that no call has had."""
    if seed is None and episode_id is None:
        return None
    text = repr((seed, episode_id)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 2


def _attempt_of(group: Group | None) -> RecordedAttempt | None:
    """The rollout's result: its member, else its last attempt."""
    if group is None:
        return None
    return recorded_attempt(group.members_G[0] if group.members_G else last_attempts(group.attempts)[0])


def _demand(env: EnvSettings, sampling: Mapping[str, Any]) -> None:
    wrong = {
        "group_size": (env.group_size, 1, "a session is one rollout, and the trainer makes the groups"),
        "total_steps": (env.total_steps, -1, "the trainer decides how many rollouts there are"),
        "curriculum": (env.curriculum, "none", "the trainer chooses the tasks"),
        "zero_variance": (env.zero_variance, "keep", "the trainer makes the groups"),
        "token_source": (env.token_source, "exact", "a training trace holds the sampled ids"),
        # Ours are of the model's distribution; OpenEnv's consumers take them for those of the sampled one.
        "temperature": (env.temperature, 1.0, "only there are the log-probs those of the sampled distribution"),
        "top_p": (env.top_p, 1.0, "only there are the log-probs those of the sampled distribution"),
    }
    for name, (value, wanted, why) in wrong.items():
        if value != wanted:
            raise ConfigError(f"env.{name}: it is {value}, OpenEnv's sessions need {wanted}: {why}")
    for name in ("temperature", "top_p"):
        if sampling.get(name, 1.0) != 1.0:
            raise ConfigError(
                f"sampling: the trainer's {name} is {sampling[name]}, the sandboxes' 1.0; set it to 1.0"
            )


def _by_name(tasks: Iterable[Task | BadTask]) -> dict[str, Task | BadTask | None]:
    """Tasks by id and by question; None where several have it. An id goes before a question."""
    listed = list(tasks)
    ids = Counter(task.task_id.strip() for task in listed)
    named: dict[str, Task | BadTask | None] = {}
    for task in listed:
        if isinstance(task, Task):
            question = task.question.strip()
            named[question] = None if question in named else task
    return named | {task.task_id.strip(): task if ids[task.task_id.strip()] == 1 else None for task in listed}


def _name_in(task: Any) -> str | None:
    """The text that names the task: the whole, or the last message of a conversation."""
    if isinstance(task, list | tuple) and task and isinstance(task[-1], Mapping):
        task = task[-1].get("content")
    return task if isinstance(task, str) else None


# ---------------------------------------------------------------- traces


def training_trace(
    attempt: RecordedAttempt, form: GroupFormat, *, question: str = "", dropped: str | None = None
) -> TrainingTrace:
    """One attempt on record as a trace: each completion that somebody got with its whole prompt, line by line, the
    main one last.

    The mask is 1 where `Row.env_mask` is: at sampled tokens of the lines that `form` trains on, of a rollout with
    a score. A completion without a token has no turn. `question` as for `recorded_rows`. Raises
    ValueError for a record without sampled ids and log-probs.
    """
    broken = isinstance(attempt.outcome, Failed) and attempt.outcome.name is FailedName.RECORD_ERROR
    if broken:
        return TrainingTrace(turns=[])
    rows = recorded_rows(attempt, form, question=question, dropped=dropped)
    main, learns = rows[0].segment, {row.segment: any(row.env_mask) for row in rows}
    ids: dict[int, list[int]] = {}
    made: list[tuple[bool, int, TrainingTurn]] = []
    for turn, talk in in_lines(attempt.record.turns):
        completion, line = turn.completion, ids.setdefault(turn.segment, [])
        if turn.prompt_ids is None or completion.tokens_T is None or completion.logprobs_T is None:
            raise ValueError(
                f"{attempt.rollout_id}: completion {turn.sequence} has no sampled ids or no log-probs; OpenEnv's "
                "traces need an endpoint that gives both (env.token_source exact)"
            )
        line += turn.prompt_ids
        if completion.tokens_T:
            trace = _turn(attempt, turn, talk, list(line), learns.get(turn.segment, False) and not turn.inherited)
            made.append((turn.segment == main, turn.segment, trace))
        line += completion.tokens_T
    return TrainingTrace(turns=[turn for *_, turn in sorted(made, key=lambda one: one[:2])])


def _turn(
    attempt: RecordedAttempt, turn: Turn, talk: Sequence[Message], prompt: list[int], learns: bool
) -> TrainingTurn:
    completion = turn.completion
    tokens = list(completion.tokens_T or ())
    answer = {"role": "assistant", "content": completion.visible}
    return TrainingTurn(
        node_id=f"{attempt.rollout_id}-c{turn.sequence}",
        prompt_token_ids=prompt,
        completion_token_ids=tokens,
        per_token_logps=list(completion.logprobs_T or ()),
        loss_mask=[0] * len(prompt) + [int(learns)] * len(tokens),
        request={"messages": [m.entry for m in talk], "tools": None},
        response={"choices": [{"message": answer, "finish_reason": completion.finish_reason}]},
        metadata={
            "rollout_id": attempt.rollout_id,
            "task_id": attempt.task_id,
            "outcome": str(attempt.outcome.name),
            "sequence": turn.sequence,
            "kind": str(turn.kind),
            "agent": turn.agent,
            "segment": turn.segment,
            "policy_version": completion.policy_version,
            "policy_spans": list(map(asdict, completion.sampled_by)),
            "sampling_params": {"temperature": attempt.sampling.temperature, "top_p": attempt.sampling.top_p},
        },
    )


def traces(run_dir: Path) -> Iterator[tuple[str, TrainingTrace]]:
    """(rollout id, trace) of every attempt on a run's record, whatever became of it; OpenEnv has checked each.

    Masks are as the run's settings say. That a group was dropped is not on record there. Raises ConfigError for
    what is no run, and ValueError for a line that is no rollout, has no sampled ids, or does not pass the check.
    """
    form, record = _form(run_dir), record_of(run_dir)
    if record is None:
        raise ConfigError(f"{run_dir} holds no {ROLLOUTS_FILE}")
    forks: Mapping[str, int] = {}
    if form.trunk_masked:
        forks = last_forks(_fork(attempt) for _, attempt in _attempts(record) if attempt.score is not None)
    for place, attempt in _attempts(record):
        own = own_from(attempt.record, forks.get(attempt.rollout_id, 1))
        try:
            trace = training_trace(replace(attempt, record=own), form)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        yield attempt.rollout_id, trace


def _attempts(record: Path) -> Iterator[tuple[str, RecordedAttempt]]:
    """With the place of each. Raises ValueError."""
    for line in texts(record):
        if line.text == UNCLOSED:  # a run that goes on, or was killed
            continue
        try:
            if isinstance(read_counted(line.text), CountedBadTask):
                continue
            attempt = read_attempt(line.text)
        except ValueError as error:
            raise ValueError(f"{line.place}: {error}") from error
        yield line.place, attempt


def _fork(attempt: RecordedAttempt) -> tuple[str | None, int | None]:
    """(the rollout of this run that it branched from, at which turn)."""
    branch = attempt.record.branch
    return (None, None) if branch is None or branch.run else (branch.parent, branch.turn)


def _form(run_dir: Path) -> GroupFormat:
    try:
        return GroupFormat.recorded(saved_env(dict(read_run(run_dir, "run_dir"))))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{run_dir}: its run.json is not as this version writes it ({error!r})") from error
