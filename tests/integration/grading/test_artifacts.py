"""Artifacts of Harbor's tasks whose verifier sees all: graded alone where the task's solution needs no more."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.launch.image.build import ensure_image
from tests.fakes import oci_images
from tests.fakes.harbor import a_task
from tests.fakes.runs import place, run

_WHY_NOT = oci_images.why_not() or ("needs root" if os.geteuid() else None)
pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(900),
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
]
TOML = '[environment]\ndocker_image = "far.example/base:1"\nworkdir = "/srv"\n'
SOLVE = "#!/bin/sh\necho right > answer; echo seen > notes\n"
TEST = '#!/bin/sh\n[ "$(cat answer)" = right ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n'


@pytest.fixture
def home() -> Iterator[Path]:
    oci_images.stored_image()
    with place() as directory:
        yield directory


@pytest.mark.slow
async def test_artifacts_are_the_scope_if_the_solution_needs_no_more(home: Path) -> None:
    base = (await ensure_image(progress=print)).tag
    for name, artifacts in {"enough": '"/srv/answer"', "too little": '"/srv/notes"', "none": ""}.items():
        a_task(
            home / "tasks" / name,
            f"artifacts = [{artifacts}]\n{TOML}",
            solution__solve_sh=SOLVE,
            tests__test_sh=TEST,
        )
    ended = await run(
        f"harbor:{home / 'tasks'}",
        "--json",
        f"--env.base_images=far.example/base:1={base}",
        directory=home,
        environ=oci_images.CACHE,
        command="check-tasks",
    )
    assert ended.code == 0, ended
    tasks = {task["task_id"]: task for task in json.loads(ended.stdout)["tasks"]}
    assert {name: task["checked"]["named_suffice"] for name, task in tasks.items()} == {
        "enough": True,
        "too little": False,
        "none": False,
    }
    assert {name: task["solution"] for name, task in tasks.items()} == {name: [1, 1, 1] for name in tasks}
    warning = "its artifacts are not all of its work: its solution needs more to be graded"
    assert {name for name, task in tasks.items() if warning in task["warnings"]} == {"too little"}
