"""Attempts as Harbor's job folder, for its viewer: `harbor view DIR`.

DIR/JOB/config.json, result.json
DIR/JOB/ROLLOUT_ID/config.json, result.json
                  /agent/trajectory.json             what the agent did (`atif`)
                  /verifier/reward.json              the score, as the reward; only where there is one
                  /verifier/test-stdout.txt, test-stderr.txt, ctrf.json    what the grader printed, and its tests
                  /artifacts/changes.json, changes.diff, manifest.json     what the agent changed of its root

A rollout that failed has no reward, but its outcome as an exception. Whole files of the sandbox's root are not on
record, so that they are not here.
"""

import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.exporting.atif import agent_name, atif, moment
from orchestrator.rules.text import printable
from orchestrator.run.line import RecordedAttempt
from orchestrator.run.lines import dumps, write_whole
from orchestrator.types import Change, Difference, Failed, Grade, Record

HARBOR = "harbor"
_REWARD = "reward"  # Harbor's viewer shows the one of this name first
_FOLDER_NAME = re.compile(r"[A-Za-z0-9][\w-]{0,99}", re.ASCII)  # no name of a file of the job
_CTRF = {"passed": "passed", "failed": "failed", "skipped": "skipped", "error": "failed"}
_BEGINNING = "1970-01-01T00:00:00+00:00"  # of a run whose record has no time that is one


@dataclass(slots=True)
class _Ends:
    """The names of an agent's trials, by their scores and by the outcomes without one."""

    scores: dict[float, list[str]] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)

    def statistics(self) -> dict[str, Any]:
        """What Harbor keeps of them. The mean is that of rollouts with a score."""
        count = sum(map(len, self.scores.values()))
        total = sum(score * len(trials) for score, trials in self.scores.items())
        return {
            "n_trials": count,
            "n_errors": sum(map(len, self.failures.values())),
            "metrics": [{"mean": total / count}] if count else [],
            "reward_stats": {_REWARD: {repr(score): trials for score, trials in self.scores.items()}},
            "exception_stats": self.failures,
        }


@dataclass(slots=True)
class HarborJob:
    """Writes trials into the folder of a job, and at the end what is known of all of them.

    `folder`: its name is the job's. `version`: of what made the record. `model`: None if the run had several.
    """

    folder: Path
    version: str
    model: str | None
    trials: int = 0
    _ends: dict[str, "_Ends"] = field(default_factory=dict)  # by agent
    _tasks: set[str] = field(default_factory=set)
    _tokens: list[int] = field(default_factory=lambda: [0, 0])
    _moments: set[str] = field(default_factory=set)

    def write(self, attempt: RecordedAttempt) -> None:
        """Writes one attempt as a trial. Raises OSError, ValueError for an id that is no name of a folder."""
        if not _FOLDER_NAME.fullmatch(attempt.rollout_id):
            raise ValueError(f"rollout_id: {attempt.rollout_id[:40]!a} cannot be the name of a folder")
        folder = self.folder / attempt.rollout_id
        folder.mkdir(parents=True)
        config, result = self._config(attempt), self._result(attempt)
        write_whole(folder / "config.json", config, indent=True)
        trajectory = atif(attempt, self.version, self.model)
        if trajectory is not None:
            _write(folder / "agent" / "trajectory.json", trajectory)
        if result["verifier_result"] is not None:
            _write(folder / "verifier" / "reward.json", result["verifier_result"]["rewards"])
        if attempt.record.grade is not None:
            _write_grade(folder / "verifier", attempt.record.grade)
        for name, own in _step_folders(attempt.record):
            _write_grade(folder / "steps" / name / "verifier", own)
            _write(folder / "steps" / name / "verifier" / "reward.json", dict(own.rewards))
        if attempt.record.changes is not None:
            _write_changes(folder / "artifacts", attempt.record.changes)
        write_whole(folder / "result.json", result, indent=True)
        self._count(attempt, result)

    def close(self) -> None:
        """Writes the job's own files. Raises OSError."""
        agents = [{"name": name, **self._model()} for name in sorted(self._ends)]
        tasks = [{"path": _task_path(task)} for task in sorted(self._tasks)]
        config = {"job_name": self.folder.name, "agents": agents, "tasks": tasks}
        write_whole(self.folder / "config.json", config, indent=True)
        evals = {
            "__".join([name, *self._model().values(), "adhoc"]): ends.statistics()
            for name, ends in self._ends.items()
        }
        result = {
            "id": self._id(),
            "started_at": min(self._moments, default=_BEGINNING),
            "finished_at": max(self._moments, default=_BEGINNING),
            "n_total_trials": self.trials,
            "stats": {
                "n_completed_trials": self.trials,
                "n_errored_trials": sum(one["n_errors"] for one in evals.values()),
                "n_input_tokens": self._tokens[0],
                "n_output_tokens": self._tokens[1],
                "evals": evals,
            },
        }
        write_whole(self.folder / "result.json", result, indent=True)

    def _model(self) -> dict[str, str]:
        return {"model_name": self.model} if self.model else {}

    def _id(self, rollout_id: str = "") -> str:
        """The same for the same run, so that two exports are alike."""
        return str(uuid.uuid5(uuid.NAMESPACE_URL, f"rollout-orchestrator:{self.folder.name}/{rollout_id}"))

    def _config(self, attempt: RecordedAttempt) -> dict[str, Any]:
        return {
            "task": {"path": _task_path(attempt.task_id)},
            "trial_name": attempt.rollout_id,
            "agent": {"name": agent_name(attempt), **self._model()},
            "job_id": self._id(),
        }

    def _result(self, attempt: RecordedAttempt) -> dict[str, Any]:
        record, outcome, score = attempt.record, attempt.outcome, attempt.score
        seconds = max([record.duration_s, *(turn.ended_s for turn in record.own_turns)])
        timing = {"started_at": moment(record.started_at), "finished_at": moment(record.started_at + seconds)}
        failure = None
        if isinstance(outcome, Failed):
            failure = {
                "exception_type": str(outcome.name),
                "exception_message": outcome.headline,
                "exception_traceback": outcome.reason,
                "occurred_at": timing["finished_at"] or _BEGINNING,
                # Harbor takes failures that it does not know for rewards of the policy.
                "policy_override": {"has_valid_reward": False},
            }
        rewards = None
        if score is not None:
            named = record.grade.rewards if record.grade is not None else {}
            rewards = {**named, _REWARD: score.value}  # what the run trains on, whatever else the grader calls so
        return {
            "id": self._id(attempt.rollout_id),
            "task_name": attempt.task_id,
            "trial_name": attempt.rollout_id,
            "trial_uri": f"{self.folder.name}/{attempt.rollout_id}",
            "task_id": {"path": _task_path(attempt.task_id)},
            "task_checksum": "",  # the record does not hold the task
            "config": self._config(attempt),
            "agent_info": {
                "name": agent_name(attempt),
                "version": self.version,
                "model_info": {"name": self.model} if self.model else None,
            },
            "agent_result": {
                "n_input_tokens": record.prompt_tokens,
                "n_output_tokens": record.sampled_tokens,
                "metadata": _metadata(attempt),
            },
            "verifier_result": None if rewards is None else {"rewards": rewards},
            **_step_results(record),
            "exception_info": failure,
            **timing,
            "agent_execution": timing,
        }

    def _count(self, attempt: RecordedAttempt, result: Mapping[str, Any]) -> None:
        self.trials += 1
        self._tasks.add(attempt.task_id)
        self._tokens[0] += attempt.record.prompt_tokens
        self._tokens[1] += attempt.record.sampled_tokens
        self._moments |= {at for at in (result["started_at"], result["finished_at"]) if at is not None}
        ends = self._ends.setdefault(agent_name(attempt), _Ends())
        if attempt.score is not None:
            ends.scores.setdefault(attempt.score.value, []).append(attempt.rollout_id)
        if isinstance(attempt.outcome, Failed):
            ends.failures.setdefault(str(attempt.outcome.name), []).append(attempt.rollout_id)


def _metadata(attempt: RecordedAttempt) -> dict[str, Any]:
    """What Harbor has no field for."""
    record, score = attempt.record, attempt.score
    facts: dict[str, Any] = {
        "outcome": str(attempt.outcome.name),
        "group": attempt.group,
        "index": attempt.index,
        "attempt": attempt.attempt,
        "token_source": attempt.token_source,
        "policy_versions": record.policy_versions,
        "answer": record.answer,
        "score_parts": dict(score.parts) if score else None,
        "notes": record.notes,
    }
    if record.grade is not None:
        shown = asdict(record.grade)
        facts["grade"] = {name: shown[name] for name in shown if name not in ("stdout", "stderr", "tests")}
    return facts


def _step_folders(record: Record) -> list[tuple[str, Grade]]:
    """Names of steps' folders: their own, unless a record is somebody else's work."""
    named = [(_task_path(one.name), one.grade) for one in record.step_grades]
    return [(f"{number}-{name}", grade) for number, (name, grade) in enumerate(named, 1)]


def _step_results(record: Record) -> dict[str, Any]:
    steps = zip(_step_folders(record), record.step_grades, strict=True)
    results = [{"step_name": name, "verifier_result": {"rewards": one.grade.rewards}} for (name, _), one in steps]
    return {"step_results": results} if results else {}


def _task_path(task_id: str) -> str:
    """A relative path that leads nowhere: the viewer opens what a task's path names, and an id may be anything."""
    return re.sub(r"[^\w.-]", "_", task_id, flags=re.ASCII).lstrip(".")[:100] or "task"


def _write_grade(folder: Path, grade: Grade) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("test-stdout.txt", grade.stdout), ("test-stderr.txt", grade.stderr)):
        if text:
            (folder / name).write_bytes(text.encode(errors="replace"))
    if grade.tests:
        tests = [
            {
                "name": t.name,
                "status": _CTRF[t.outcome],
                "duration": 0,
                **({"message": t.detail} if t.detail else {}),
            }
            for t in grade.tests
        ]
        counts = {status: sum(t["status"] == status for t in tests) for status in ("passed", "failed", "skipped")}
        summary = {"tests": len(tests), **counts, "pending": 0, "other": 0, "start": 0, "stop": 0}
        report = {"tool": {"name": "rollout-orchestrator"}, "summary": summary, "tests": tests}
        _write(folder / "ctrf.json", {"results": report})


def _write_changes(folder: Path, difference: Difference) -> None:
    _write(folder / "changes.json", asdict(difference))
    names = ["changes.json"]
    if diffs := [_diff(change) for change in difference.changes if change.diff is not None]:
        (folder / "changes.diff").write_bytes("".join(diffs).encode(errors="replace"))
        names.append("changes.diff")
    _write(folder / "manifest.json", [_entry(name) for name in names])


def _diff(change: Change) -> str:
    """With the names of the files before and after, as `patch` wants them."""
    path = printable(change.path)
    before = "/dev/null" if change.kind == "added" else f"a{path}"
    return f"--- {before}\n+++ b{path}\n{change.diff}\n"


def _entry(name: str) -> dict[str, str]:
    """As Harbor lists what it fetched out of a sandbox."""
    return {"source": "/", "destination": f"artifacts/{name}", "type": "file", "status": "ok"}


def _write(path: Path, value: Mapping[str, Any] | Iterable[Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(dumps(value) + b"\n")
