"""The rollout worker of TRL's experimental AsyncGRPOTrainer (1.16 or a later 1.x).

worker = RolloutWorker(SyncOrchestrator(config), tasks, args)
trainer = AsyncGRPOTrainer(model, args=args, train_dataset=dataset(tasks), rollout_worker=worker)

It rolls the tasks out again and again, from `start` to `stop`, and puts what may be trained on into the queue that
the trainer reads: one sample for each line of ids, so side lines can be trained on too (env.trained_segments).
"""

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from statistics import fmean, pstdev
from typing import Any

from orchestrator.completion.endpoints import endpoint
from orchestrator.completion.http import HttpClient
from orchestrator.engine.sync import SyncOrchestrator
from orchestrator.errors import ConfigError, RecordError, RunUnhealthy
from orchestrator.host.setup import completion_needs
from orchestrator.run.rows import Row
from orchestrator.trainers.trl import LogprobsMode, Prompts, demand_agreement, demand_ids, trained_score
from orchestrator.types import BadTask, Group, Message, Task

ADAPTER = "trl-policy-v{}"  # TRL's name for a LoRA adapter on the server, each version by a name of its own
ASK_S = 60.0
BEAT_S = 1.0
ROUNDING = 1e-8  # TRL's, behind the standard deviation


class RolloutBuffer(queue.Queue[Any]):
    """Samples for the trainer. Those in it and the rollouts under way are at most `most`, or one group; 0: any
    number. So what the trainer takes is as new as can be, however slow it is."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._ahead = 0
        self._closed = False
        self._room = threading.Condition(self.mutex)

    def begin(self, rollouts: int) -> bool:
        """Waits until a group of so many may begin. False: the buffer was closed, and none may."""
        with self.mutex:
            self._room.wait_for(lambda: self._closed or self._fits(rollouts))
            self._ahead += rollouts
            return not self._closed

    def deliver(self, samples: Sequence[Any], begun: int) -> None:
        """A group that began with so many rollouts has ended with these samples."""
        with self.mutex:
            self._ahead += len(samples) - begun
            self._room.notify_all()
        for sample in samples:
            sample.enqueued_at = time.time()
            self.put(sample)

    def close(self) -> None:
        """No group begins any more. What is in the buffer stays."""
        with self.mutex:
            self._closed = True
            self._room.notify_all()

    def _fits(self, rollouts: int) -> bool:
        return self._most <= 0 or self._ahead == 0 or self._ahead + rollouts <= self._most

    def _get(self) -> Any:  # called with the mutex held
        self._ahead -= 1
        self._room.notify_all()
        return super()._get()


class RolloutWorker:
    """What AsyncGRPOTrainer takes as `rollout_worker`.

    `args`: the trainer's AsyncGRPOConfig. `logprobs_mode` as of `rollout_func`. Raises ConfigError where both
    sides are set differently. A rollout without a score, a masked one and a dropped group give no sample.
    """

    def __init__(
        self,
        orchestrator: SyncOrchestrator,
        tasks: Iterable[Task | BadTask],
        args: Any,
        *,
        logprobs_mode: LogprobsMode = "raw",
    ) -> None:
        config = orchestrator.config
        if config.env.total_steps >= 0:
            raise ConfigError("env.total_steps: the trainer says when it has enough; leave it at -1")
        if config.env.curriculum != "none":
            raise ConfigError("env.curriculum: the worker goes through its tasks in turn; leave this out")
        if len(config.openai) != 1:
            raise ConfigError("openai: TRL updates one server; name that one alone")
        demand_agreement(config.env.group_size, config.env, args, logprobs_mode, uses_logprobs=True)
        self.rollout_buffer = RolloutBuffer(args.queue_maxsize)
        self.metrics_queue: queue.Queue[dict[str, float | tuple[float, float]]] = queue.Queue()
        self._tasks = list(tasks)
        Prompts(self._tasks)  # refuses ids that are not unique
        self._orchestrator = orchestrator
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._error: BaseException | None = None
        self._beat_s = time.monotonic()

    def start(self) -> None:
        """Raises what opening the orchestrator raises, and ConfigError for an endpoint without token ids."""
        if self._thread is not None:
            raise RuntimeError("the worker was started before: make a new one")
        self._orchestrator.open()
        demand_ids(self._orchestrator)
        self._beat_s = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Cancels the rollouts under way and closes the orchestrator. Idempotent."""
        self._stopped = True
        self.rollout_buffer.close()
        self._orchestrator.close()
        if self._thread is not None:
            self._thread.join()

    def update_model_version(self, model_version: int) -> None:
        """The endpoint has these weights from now on: under the name of their adapter, if TRL published one."""
        self._orchestrator.run(lambda: self._update(model_version))

    def check_health(self, stale_after_s: float) -> None:
        """Raises RuntimeError when the rollouts have ended, or their event loop has hung for so long. A rollout
        that takes long is no failure: env.rollout_deadline ends it."""
        if self._error is not None:
            raise RuntimeError(f"the rollouts have ended: {self._error}") from self._error
        age_s = time.monotonic() - self._beat_s
        if self._thread is not None and age_s > stale_after_s:
            raise RuntimeError(f"the orchestrator's event loop has hung for {age_s:.0f} s")

    async def _update(self, version: int) -> None:
        config, policy = self._orchestrator.config, self._orchestrator.orchestrator.policy
        if policy.served.model is None:  # at once, as TRL lets the server go on before it says so
            await policy.serve(str(version))
        # A server with adapters that is asked by the base model's name serves the base, and nobody would notice.
        client = HttpClient(endpoint(completion_needs(config), config.openai[0]))
        try:
            listed = await client.get("/v1/models", timeout_s=ASK_S)
        finally:
            await client.aclose()
        adapter = ADAPTER.format(version)
        models = listed.get("data") if isinstance(listed, dict) else None
        published = any(isinstance(model, dict) and model.get("id") == adapter for model in models or ())
        await policy.serve(str(version), adapter if published else None)

    def _work(self) -> None:
        try:
            self._orchestrator.run(self._roll)
        except BaseException as error:
            if not self._stopped:
                self._error = error

    async def _roll(self) -> None:
        engine, size = self._orchestrator.orchestrator, self._orchestrator.config.env.group_size
        beating = asyncio.create_task(self._beat(), name="heartbeat")
        try:
            async with aclosing(engine.groups(self._endless())) as groups:
                async for group in groups:
                    self.rollout_buffer.deliver(self._samples(group), size)
        finally:
            self.rollout_buffer.close()
            beating.cancel()
        if engine.stopping:
            raise RunUnhealthy("the orchestrator was drained while the trainer still wanted samples")
        raise ConfigError("none of the tasks can be rolled out; the record says why (env.run_dir)")

    def _endless(self) -> Iterator[Task | BadTask]:
        """All tasks once, so that bad ones are reported; then those that can be rolled out, again and again."""
        size = self._orchestrator.config.env.group_size
        good = [task for task in self._tasks if self._fits(task)]
        names = {task.task_id for task in good}
        for task in itertools.chain(self._tasks, itertools.cycle(good)):
            if task.task_id in names and not self.rollout_buffer.begin(size):
                return
            yield task

    def _fits(self, task: Task | BadTask) -> bool:
        """Whether the task can be rolled out. Blocks until its image is there."""
        engine = self._orchestrator.orchestrator
        task = engine.maker.fitting(task)
        if isinstance(task, Task) and task.has_own_sandbox:
            task = engine.shared.built(task).result()
        return isinstance(task, Task)

    async def _beat(self) -> None:
        while True:
            self._beat_s = time.monotonic()
            await asyncio.sleep(BEAT_S)

    def _samples(self, group: Group) -> list[Any]:
        """The group's samples. What else there is to say of it goes to the trainer's log."""
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        rows = self._orchestrator.orchestrator.rows(group)
        self.metrics_queue.put(metrics(rows))
        return [RolloutSample(**sample) for sample in samples(rows)]


def samples(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """TRL's samples of a group, as the fields of a RolloutSample: one for each line that is trained on, with the
    advantage of its rollout. TRL's loss is a mean over tokens, so a line counts for its tokens as it is, and
    `Row.weight` has no use here.

    Raises RecordError where the policy version that sampled a row is not one of the trainer's.
    """
    import numpy as np

    scores = {row.rollout_id: score for row in rows if row.main and (score := trained_score(row)) is not None}
    advantage_of = advantages(scores)
    spread = pstdev(scores.values()) if scores else float("nan")
    fields = []
    for row in rows:
        if row.rollout_id not in scores or not any(row.env_mask):
            continue
        if row.logprobs is None:
            raise RecordError(f"{row.rollout_id}: the endpoint gives no log-probs, which TRL divides by")
        prompt, completion = _split_messages(row.messages)
        before = len(row.prompt_ids)
        fields.append(
            {
                "prompt": prompt,
                "completion": completion,
                "input_ids": np.asarray([*row.prompt_ids, *row.completion_ids], dtype=np.int64),
                "completion_mask": np.asarray([0] * before + list(row.env_mask), dtype=np.int64),
                "old_log_probs": np.asarray([0.0] * before + [p or 0.0 for p in row.logprobs], dtype=np.float32),
                "advantage": advantage_of[row.rollout_id],
                "model_version": oldest_version(row),
                "group_id": row.group,
                "metrics": {
                    "reward": scores[row.rollout_id],
                    "reward_std": spread,
                    "rewards/score": scores[row.rollout_id],
                },
            }
        )
    return fields


def advantages(scores: Mapping[str, float]) -> dict[str, float]:
    """By rollout: its score less the mean, by the standard deviation, of those that have a score. As TRL does."""
    if not scores:
        return {}
    mean, spread = fmean(scores.values()), pstdev(scores.values())
    return {rollout: (score - mean) / (spread + ROUNDING) for rollout, score in scores.items()}


def oldest_version(row: Row) -> int:
    """The trainer's number of the oldest policy that sampled some of the row. Raises RecordError if it is unknown
    or no number."""
    ends = [version for span in row.policy_spans for version in (span.oldest, span.newest)]
    if not ends or not all(version is not None and version.isdecimal() for version in ends):
        names = ", ".join(sorted({str(version) for version in ends})) or "unknown"
        raise RecordError(f"{row.rollout_id}: sampled by the policy {names}, which is no version of the trainer's")
    return min(int(version) for version in ends if version is not None)


def metrics(rows: Sequence[Row]) -> dict[str, float | tuple[float, float]]:
    """What TRL's log shows of a group: pairs are (sum, count)."""
    main = [row for row in rows if row.main]
    lengths = [sum(row.env_mask) for row in main]
    return {
        "completions/mean_length": (float(sum(lengths)), float(len(main))),
        "completions/max_length": float(max(lengths, default=0)),
        "completions/clipped_ratio": (float(sum(row.finish_reason == "length" for row in main)), float(len(main))),
        "rollout/unscored_total": float(sum(row.score is None for row in main)),
        "rollout/groups_dropped_total": float(any(row.dropped is not None for row in main)),
    }


def _split_messages(messages: Sequence[Message]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(the messages before the first answer, the others), for display."""
    first = next((n for n, message in enumerate(messages) if message.role == "assistant"), len(messages))
    shown = [{"role": str(message.role), "content": message.content} for message in messages]
    return shown[:first], shown[first:]
