"""`orchestrator init DIR`: a folder to begin with, whose commands run at once against the demo's recording."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from orchestrator.demo.recording import RECORDING, ROOT, TASKS, Recording
from orchestrator.demo.tokenizer import unpack
from orchestrator.run.new_folder import new_folder

TASK_IDS = ("example-csv-sum", "example-json-tallest", "gcd/20260/0")  # of the recording, each solved now and then
_NOT_OURS = ("scoring_strategy",)
_SCORER = '''\
"""Full marks for the right answer, a tenth for any answer."""

from orchestrator.types import Ended, Record, RolloutPlan, Score


def score(plan: RolloutPlan, record: Record, ended: Ended) -> Score:
    answer, reference = (record.answer or "").strip(), (plan.task.answer or "").strip()
    right = answer.casefold() == reference.casefold()
    return Score(1.0 if right else 0.1 if answer else 0.0, {"correctness": float(right)})
'''
_SETTINGS = """\
# For `orchestrator process|evaluate|serve --config run.yaml`; `orchestrator serve --help all` shows all settings.
env:
  dataset: jsonl:tasks.jsonl
  scoring_strategy: python:scorer:score
  # As in the recording, so that prompts are the recorded ones; yours to choose with a model of yours.
{recorded}
  tokenizer_name: {tokenizer}  # of the recorded model
openai:
  # A recorded run answers in place of a model. Yours: http://localhost:9001/v1, its name, its tokenizer.
  base_url: {replay}
  model_name: {model}
"""
_README = """\
# Begin here

Three tasks, a scorer and the settings of a run. A recorded run of {model} answers in place of a model,
so no model, key or GPU is needed; containers, code, scores and groups are live. In this folder:

```sh
orchestrator image build
orchestrator process --config run.yaml --env.run_dir runs/first
orchestrator verify runs/first
orchestrator evaluate --config run.yaml --env.eval_samples 4 --env.run_dir runs/measured
orchestrator runs
```

These build the sandbox image (minutes, once), make three groups of four rollouts, check what was written,
measure, and list both runs. A trainer reads `runs/first/groups.jsonl`; `runs/first/groups.html` is the report.

Then change something: `scorer.py`, and score the same rollouts again by
`orchestrator rescore runs/first --config run.yaml`; `openai` in `run.yaml`, for a model of yours; `tasks.jsonl`,
once it is there: the recording knows these three tasks only.

Without Docker, build with `--oci`, and add `launcher: oci` below `env:`. If something refuses, ask
`orchestrator doctor --config run.yaml`.
"""


def run(folder: Path) -> int:
    """0: the folder is made. Raises ConfigError where there is something already, OutputError."""
    recording = Recording.read()
    rows = [row for row in map(json.loads, TASKS.read_text("utf-8").splitlines()) if row["task_id"] in TASK_IDS]
    files = {
        "run.yaml": _settings(recording),
        "tasks.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "scorer.py": _SCORER,
        "README.md": _README.format(model=recording.model),
    }
    with new_folder(folder, "FOLDER") as draft:
        for name, content in files.items():
            (draft / name).write_text(content, "utf-8")
        for name in (name for row in rows for name in row["files"]):
            (draft / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(ROOT / name, draft / name)
    print(f"{folder} has {', '.join(files)}; go on with its README.md")
    return 0


def _settings(recording: Recording) -> str:
    env: dict[str, Any] = {name: value for name, value in recording.env.items() if name not in _NOT_OURS}
    return _SETTINGS.format(
        recorded="\n".join(f"  {name}: {json.dumps(value)}" for name, value in env.items()),
        tokenizer=json.dumps(str(unpack())),
        replay=json.dumps(f"replay:{RECORDING}"),
        model=recording.model,
    )
