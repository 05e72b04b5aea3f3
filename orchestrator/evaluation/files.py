"""The files of an evaluation: a run directory, and metrics.json with samples.jsonl as Atropos writes them.

    RUN_DIR/run.json, rollouts.jsonl    written under way, as by any run; enough to continue it
    metrics.json, samples.jsonl         written at the end, each whole or not at all; they replace earlier ones

metrics.json has the shape of atroposlib's `BaseEnv.evaluate_log`: config_general, and results by task and for
all. No key and no reference answer is in any of them.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError, OutputError, os_error_as
from orchestrator.evaluation.measured import Evaluation, spent
from orchestrator.rules.waits import uninterrupted
from orchestrator.run.earlier import Earlier, read_earlier
from orchestrator.run.ending import read_end
from orchestrator.run.excerpts import Counted, CountedBadTask
from orchestrator.run.files import EVALUATE, is_going_on, read_description, read_run
from orchestrator.run.groups import check_writable
from orchestrator.run.lenient import mapping, numbers, small_object
from orchestrator.run.lines import JsonLines, write_whole
from orchestrator.run.output import open_directory
from orchestrator.run.prices import Prices
from orchestrator.settings.output import OutputSettings
from orchestrator.types import Attempt, Ended, Group, Member, Sampling, last_attempts

NAME = "smolagents_eval"
METRICS, SAMPLES = "metrics.json", "samples.jsonl"


class EvaluationFiles:
    """The files of one evaluation. With `resume` it continues the one in `directory`, and `counted` gets every
    line that is on record there. `target`: where metrics.json and samples.jsonl go; None: `directory`.

    Raises ConfigError, RunLocked.
    """

    about: Mapping[str, object] = {"command": EVALUATE}

    def __init__(
        self,
        directory: Path,
        output: OutputSettings,
        target: Path | None,
        *,
        resume: bool,
        counted: Callable[[Counted | CountedBadTask], None] = lambda line: None,
    ) -> None:
        self.path = directory
        self.target = target or directory
        check_writable(self.target)
        if resume and read_run(directory).get("command") != EVALUATE:
            raise ConfigError(f"env.resume: {directory} holds no evaluation; is it one of `orchestrator process`?")
        self._messages = output.include_messages
        self.run = open_directory(output, directory, resume=resume)
        try:
            # An evaluation has no groups file: recorded attempts are counted again, and none is made again.
            groups = directory / "groups.jsonl"
            self.earlier = read_earlier(self.run.rollouts, groups, counted) if resume else Earlier()
            self.target.mkdir(parents=True, exist_ok=True)
            self._draft = directory / f"{SAMPLES}.part"
            self._draft.unlink(missing_ok=True)
            self._samples = JsonLines(self._draft)
        except OSError as error:
            self.run.close()
            raise ConfigError(f"cannot write evaluations to {self.target}: {error.strerror}") from error
        except BaseException:
            self.run.close()
            raise

    async def take(self, group: Group) -> None:
        """Writes a task's samples, one line each."""

        def lines() -> list[dict[str, Any]]:
            members = {member.attempt.plan.index: member for member in group.members_G}
            return [
                sample_line(members.get(attempt.plan.index, attempt), messages=self._messages)
                for attempt in last_attempts(group.attempts)
            ]

        await self._samples.append(lines)

    async def finish(self, evaluation: Evaluation, model: str, sampling: Sampling) -> None:
        """Writes metrics.json and samples.jsonl to their place. Raises OutputError."""
        ended = time.time()
        metrics = evaluation.metrics()
        result = {
            "config_general": {
                "model_name": model,
                "total_evaluation_time_seconds": str(ended - evaluation.started),
                "generation_parameters": {
                    "max_new_tokens": sampling.max_tokens,
                    "temperature": sampling.temperature,
                    "top_p": sampling.top_p,
                    "samples_per_task": evaluation.samples_per_task,
                },
            },
            "results": {f"atropos|{NAME}|0": metrics, "all": metrics},
        }
        with os_error_as(OutputError, f"cannot write evaluations to {self.target}"):
            await uninterrupted(asyncio.to_thread(self._replace, result))

    def _replace(self, result: dict[str, Any]) -> None:
        self._samples.close()
        fresh = self.target / f"{SAMPLES}.new"
        shutil.copyfile(self._draft, fresh)
        fresh.replace(self.target / SAMPLES)
        write_whole(self.target / METRICS, result, indent=True)
        self._draft.unlink()

    def close(self) -> None:
        """Idempotent."""
        self._samples.close()
        self.run.close()


def finished_metrics(directory: Path, target: Path | None, prices: Prices | None, tasks: int) -> dict[str, Any]:
    """The metrics of the evaluation in `directory`; empty unless it ended with every sample of so many tasks, at
    these prices. The numbers are for display: whoever wrote the folder wrote them. `target`: as above."""
    if read_end(directory).get("state") != "ended" or is_going_on(directory):
        return {}
    description, target = read_description(directory), target or directory
    metrics = numbers(mapping(mapping(small_object(target / METRICS).get("results")).get("all")))
    finished = metrics.get("eval/tasks") == tasks and metrics.get("eval/samples_missing") == 0
    same = description.get("command") == EVALUATE and Prices.recorded(description) == prices
    return metrics if finished and same and (target / SAMPLES).is_file() else {}


def sample_line(result: Member | Attempt, *, messages: bool) -> dict[str, Any]:
    """One line of samples.jsonl. `correct` and `score` are null for a missing sample, and `reason` says why; for
    other samples it is the detail of their outcome, else why the scorer failed."""
    member = result if isinstance(result, Member) else None
    attempt = result.attempt if isinstance(result, Member) else result
    plan, record, outcome = attempt.plan, attempt.record, attempt.outcome
    return {
        "task_id": plan.task.task_id,
        "level": plan.task.level,
        "source": plan.task.source,
        "sample": plan.index,
        "rollout_id": plan.rollout_id,
        "correct": None if member is None else member.score.solved,
        "score": None if member is None else member.score.value,
        "outcome": str(outcome.name),
        "reason": (outcome.detail if isinstance(outcome, Ended) else outcome.reason)
        or (member.score.failure if member is not None else ""),
        "answer": record.answer,
        **spent(attempt),
        "tool_calls": len(record.tool_calls),
        "seed": plan.sampling.seed,
        "messages": [{"role": m.role, "content": m.content} for m in member.trajectory.messages]
        if member is not None and messages
        else None,
    }
