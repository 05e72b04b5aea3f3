"""Settings of evaluations."""

from dataclasses import dataclass
from pathlib import Path

from orchestrator.settings.kinds import File, Integer, Number
from orchestrator.settings.row import EVALUATION, Resume, row
from orchestrator.settings.section import Settings


@dataclass(frozen=True, kw_only=True, repr=False)
class EvaluationSettings(Settings, group=EVALUATION, resume=Resume.DATA, commands=("evaluate", "serve")):
    """How a model is measured."""

    eval_samples: int = row(1, Integer(1, 1024), "rollouts per task: the k of pass@k", first_run=("evaluate",))
    eval_temperature: float | None = row(
        None, Number(at_least=0), "of sampling in evaluations", unset="none: env.temperature"
    )
    data_dir_to_save_evals: Path | None = row(
        None,
        File(),
        "where metrics.json and samples.jsonl go; older ones are replaced",
        resume=Resume.FREE,
        unset="RUN_DIR",
    )
