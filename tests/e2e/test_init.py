"""The five commands of the README that `orchestrator init` writes, run in the folder it makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.cli import main
from tests.e2e.guide import follow, run


def files_of(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Each file and folder with its time and content, the folder's own time too."""
    paths = [folder, *folder.rglob("*")]
    return {path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in paths}


@pytest.mark.slow
@pytest.mark.docker
def test_the_five_commands_run_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "start"
    assert main(["init", str(folder)]) == 0
    with follow((folder / "README.md").read_text(), folder) as followed:
        assert len(followed.said) == 5
    first, measured = folder / "runs" / "first", folder / "runs" / "measured"
    assert len((first / "groups.jsonl").read_text().splitlines()) == 3
    assert json.loads((first / "end.json").read_text())["state"] == "ended"
    assert json.loads((measured / "metrics.json").read_text())["results"]["all"]["eval/tasks"] == 3
    said = followed.said["orchestrator process --config run.yaml --env.run_dir runs/first"]
    assert "every prompt as recorded" in said
    assert (measured / "evaluation.html").exists()
    before = files_of(measured)
    again = "orchestrator evaluate --config run.yaml --env.eval_samples 4 --env.resume runs/measured"
    assert "is finished: 3 tasks, accuracy 41.7%; nothing was left to do" in run(again, folder)
    answer = json.loads(run(f"{again} --json 2>/dev/null", folder))
    assert set(answer) == {"run", "complete", "metrics"}
    assert (answer["complete"], answer["metrics"]["eval/tasks"]) == (True, 3)
    assert files_of(measured) == before
    fresh = json.loads(
        run(
            "orchestrator evaluate --config run.yaml --env.max_tasks 1 --env.run_dir runs/one --json 2>err", folder
        )
    )
    assert (fresh["run"], fresh["metrics"]["eval/tasks"]) == ("runs/one", 1)
    assert "pass@1" in (folder / "err").read_text()
    listed = followed.said["orchestrator runs"]
    assert listed.count("5 of 12 (42%)") == 2
    assert listed.count("ended") == 2
