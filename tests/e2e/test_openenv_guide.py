"""The program that docs/trainers.md names in its section on OpenEnv, checked by mypy and run."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("openenv", reason="needs the extra openenv")

from tests.e2e.endpoint import answers, says, scripted_endpoint
from tests.e2e.test_library_guide import mypy, run
from tests.fakes.runs import ROOT, lines, place
from tests.fakes.tokenizer import tokenizer_folder

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(1200)]

PROGRAM = "openenv_groups.py"
SOURCE = ROOT / "examples" / PROGRAM
SCRIPT = {
    "17 plus 25": [[says("I add.", "print(17 + 25)"), answers("42")], [answers("41")]],
    "6 times 8": [[answers("48")], [answers("54")]],
}


@pytest.mark.docker
def test_the_guides_program_is_typed_and_runs() -> None:
    text = SOURCE.read_text("utf-8")
    with scripted_endpoint(SCRIPT, "--dialect", "vllm") as endpoint, place() as home:
        text = text.replace("http://localhost:9001/v1", endpoint.base_url)
        text = text.replace('"tokenizer_name": "my-model"', f'"tokenizer_name": "{tokenizer_folder()}"')
        (home / PROGRAM).write_text(text.replace("my-model", "scripted"), "utf-8")
        assert mypy(home, PROGRAM) == []
        said = [line.split() for line in run(f"python {PROGRAM}", home).splitlines()]
        run("orchestrator verify runs/openenv", home)
        recorded = lines(home / "runs" / "openenv" / "rollouts.jsonl")
    told = [line for line in said if len(line) == 4]
    assert [line[:2] for line in told] == [
        [step, task] for step in "01" for task in ("sum", "product") for _ in range(4)
    ]
    assert all(int(line[2]) > 0 for line in told)
    assert any(float(line[3]) > 0 for line in told)
    assert [line for line in said if len(line) == 2] == [
        [line["rollout_id"], str(len(line["completions"]))] for line in recorded
    ]
    assert len({line["plan"]["sampling"]["seed"] for line in recorded}) == len(recorded) == 16
    assert all(re.fullmatch(r"g\d{6}-r00-a0", line["rollout_id"]) for line in recorded)
