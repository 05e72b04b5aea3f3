"""`orchestrator init DIR`: a folder to begin with, whose commands run at once against the demo's recording."""

import json
import shutil
from pathlib import Path
from string import Template

from orchestrator.demo.recording import RECORDING, ROOT, TASKS, Recording
from orchestrator.demo.tokenizer import unpack
from orchestrator.run.new_folder import new_folder

TASK_IDS = ("example-csv-sum", "example-json-tallest", "gcd/20260/0")  # of the recording, each solved now and then
_TEMPLATES = ROOT / "start"


def run(folder: Path) -> int:
    """0: the folder is made. Raises ConfigError where there is something already, OutputError."""
    recording = Recording.read()
    env = {name: value for name, value in recording.env.items() if name != "scoring_strategy"}
    values = {
        "model": recording.model,
        "recorded": "\n".join(f"  {name}: {json.dumps(value)}" for name, value in env.items()),
        "replay": json.dumps(f"replay:{RECORDING}"),
        "tokenizer": json.dumps(str(unpack())),
    }
    rows = [row for row in map(json.loads, TASKS.read_text("utf-8").splitlines()) if row["task_id"] in TASK_IDS]
    with new_folder(folder, "FOLDER") as draft:
        for name in ("run.yaml", "scorer.py", "README.md"):
            text = Template((_TEMPLATES / name).read_text("utf-8")).substitute(values)
            (draft / name).write_text(text, "utf-8")
        (draft / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        for name in (name for row in rows for name in row["files"]):
            (draft / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(ROOT / name, draft / name)
    print(f"{folder} has settings, three tasks and a scorer; go on with {folder / 'README.md'}")
    return 0
