"""Makes the data of the package's demo from finished runs.

    python -m bench.recording questions RUN_DIR TASKS_JSONL TOKENIZER_FOLDER
    python -m bench.recording code RUN_DIR...

keeps what a replay needs of the runs, the tasks of which every rollout was recorded, and the tokenizer without
the vocabulary that follows from its merges. Tasks of an earlier recording with the same model and settings stay
(if TASKS_JSONL has them), so a recording can be made in pieces. Nothing of the machine it was made on is kept.
"""

from __future__ import annotations

import json
import lzma
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.demo.recording import CODE_RECORDING, RECORDING, ROLLOUTS, ROOT, TASKS, Recording, lines
from orchestrator.demo.tokenizer import PACKED, original
from orchestrator.settings.table import EnvSettings

_ROLLOUT = ("schema", "task_id", "index", "outcome", "answer", "score")
_COMPLETION = (
    "kept", "messages", "segment", "prompt_ids", "text", "visible", "finish_reason", "token_ids", "logprobs",
    "prompt_tokens", "completion_tokens", "policy_version",
)  # fmt: skip


def make_questions(run: Path, tasks_file: Path, tokenizer_folder: Path) -> Recording:
    """Writes the package data anew. Raises ValueError for a run that is not token-exact."""
    model, env, by_task = _read(RECORDING, [run])
    rows = [json.loads(line) for line in tasks_file.read_text("utf-8").splitlines()]
    rows = [row for row in rows if row["task_id"] in by_task]
    _write(RECORDING, model, env, [by_task[row["task_id"]] for row in rows])
    _copy_tasks(rows, tasks_file.parent)
    pack(tokenizer_folder)
    return Recording.read(RECORDING)


def make_code(*runs: Path) -> Recording:
    """Writes the recording of code tasks anew. Raises ValueError for a run that is not token-exact."""
    model, env, by_task = _read(CODE_RECORDING, runs)
    _write(CODE_RECORDING, model, env, [by_task[task] for task in sorted(by_task)])
    return Recording.read(CODE_RECORDING)


Rollouts = list[dict[str, Any]]


def _read(folder: Path, runs: Sequence[Path]) -> tuple[str, dict[str, Any], dict[str, Rollouts]]:
    """(the model, the settings, task -> its rollouts) of the runs, which have one model and the same settings, and
    of the recording in the folder."""
    told = [json.loads((run / "run.json").read_text("utf-8")) for run in runs]
    if any(facts["token_ids"] != "exact" for facts in told):
        raise ValueError("not recorded with exact token ids")
    table = EnvSettings.rows().items()
    names = [name for name, row in table if "demo" in row.from_run]
    made = [
        (facts["config"]["openai"][0]["model_name"], {n: facts["config"]["env"][n] for n in names})
        for facts in told
    ]
    model, env = made[0]
    if any(other != made[0] for other in made):
        raise ValueError("the runs have other models or settings")
    by_task = _earlier(folder, model, env)
    for run in runs:
        by_task |= _scored(run, env["group_size"])
    return model, env, by_task


def _write(folder: Path, model: str, env: dict[str, Any], groups: list[Rollouts]) -> None:
    folder.mkdir(exist_ok=True)
    kept = [line for group in groups for line in group]
    with lzma.open(folder / ROLLOUTS, "wt", preset=9 | lzma.PRESET_EXTREME, encoding="utf-8") as file:
        file.writelines(_dumps(line) + "\n" for line in kept)
    counts = {"tasks": len(groups), "rollouts": len(kept)}
    facts = {"schema": 1, "model": model, **counts, "token_ids": "exact", "env": env}
    (folder / "run.json").write_text(json.dumps(facts, indent=2) + "\n", "utf-8")


def _earlier(folder: Path, model: str, env: dict[str, Any]) -> dict[str, Rollouts]:
    """Task → its rollouts, of the package's recording if it has the same model and settings."""
    if not (folder / "run.json").exists():
        return {}
    before = Recording.read(folder)
    by_task: dict[str, Rollouts] = {}
    if (before.model, before.env) == (model, env):
        for line in lines(folder):
            by_task.setdefault(line["task_id"], []).append(line)
    return by_task


def _scored(run: Path, group_size: int) -> dict[str, Rollouts]:
    """Task → its rollouts by index, for tasks of which every rollout was scored."""
    by_task: dict[str, Rollouts] = {}
    with (run / "rollouts.jsonl").open(encoding="utf-8") as file:
        for line in map(json.loads, file):
            if line.get("score") is not None:
                completions = [{name: c[name] for name in _COMPLETION} for c in line["completions"]]
                kept = {**{name: line[name] for name in _ROLLOUT}, "completions": completions}
                by_task.setdefault(line["task_id"], []).append(kept)
    return {
        task: sorted(rollouts, key=lambda line: line["index"])
        for task, rollouts in by_task.items()
        if len(rollouts) == group_size
    }


def _copy_tasks(rows: list[dict[str, Any]], root: Path) -> None:
    shutil.rmtree(ROOT / "files", ignore_errors=True)
    for name in {name for row in rows for name in row.get("files", ())}:
        target = ROOT / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, target)
    TASKS.write_text("".join(_dumps(row, spaced=True) + "\n" for row in rows), "utf-8")


def _dumps(value: object, *, spaced: bool = False) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=None if spaced else (",", ":"))


def pack(folder: Path) -> None:
    """Writes the packed form of a tokenizer folder. Raises ValueError where merges do not give the vocabulary."""
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    model = content["model"]
    vocabulary: dict[str, int] = model.pop("vocab")
    by_id = sorted(vocabulary, key=lambda token: vocabulary[token])
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in model.pop("merges")]
    packed = {
        "bytes": by_id[:256],
        "merges": "\n".join(" ".join(merge) for merge in merges),
        "rest": by_id[256 + len(merges) :],
        "tokenizer": content,
        "config": json.loads((folder / "tokenizer_config.json").read_text("utf-8")),
    }
    if original(packed)["model"]["vocab"] != vocabulary:
        raise ValueError(f"{folder} is not a byte-level BPE with its vocabulary in the order of its merges")
    text = json.dumps(packed, ensure_ascii=False, separators=(",", ":")).encode()
    PACKED.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    what, *given = sys.argv[1:]
    paths = [Path(name) for name in given]
    print(make_code(*paths) if what == "code" else make_questions(*paths))
