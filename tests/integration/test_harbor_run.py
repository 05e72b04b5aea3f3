"""Harbor's tasks in a run: where and as whom the agent works, what is told of those that cannot be run."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.launch.image.build import ensure_image
from tests.e2e.endpoint import says, scripted_endpoint
from tests.fakes import oci_images
from tests.fakes.harbor import a_task
from tests.fakes.runs import flags, lines, place, run

_WHY_NOT = oci_images.why_not() or ("needs root" if os.geteuid() else None)
pytestmark = [
    pytest.mark.docker,
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
]
LOOK = """
import os, json
place = [os.getcwd(), os.getuid(), os.environ.get("HINT"), os.path.exists("/tests"), os.listdir(".")]
final_answer(json.dumps(place))
"""
SCORER = "def score(plan, record, ended):\n    return float(plan.task.grader.kind == 'harbor')\n"


@pytest.fixture(scope="module")
def base() -> str:
    return asyncio.run(ensure_image(progress=print)).tag


@pytest.fixture
def home() -> Iterator[Path]:
    oci_images.stored_image()
    with place() as directory:
        (directory / "own.py").write_text(SCORER)
        yield directory


async def test_tasks_are_run_where_they_say_and_the_others_are_counted(home: Path, base: str) -> None:
    built = "FROM far.example/base:1@sha256:" + "0" * 64 + "\nRUN mkdir -p /srv/app && touch /srv/app/here\n"
    a_task(
        home / "tasks" / "built",
        '[environment]\nmemory_mb = 512\ncpus = 0.5\nenv = {HINT = "${HOME:-seven}"}\n'
        "[agent]\ntimeout_sec = 100\n",
        environment__Dockerfile=f"{built}WORKDIR /srv/app\nUSER 1234:50\n",
    )
    a_task(
        home / "tasks" / "named",
        '[environment]\ndocker_image = "far.example/base:1"\nworkdir = "/made"\nnetwork_mode = "no-network"\n'
        "[agent]\nuser = 0\n",
    )
    a_task(home / "tasks" / "away", '[environment]\ndocker_image = "127.0.0.1:9/away:1"\n')
    a_task(home / "tasks" / "gpu", "[environment]\ngpus = 1\ncolour = 3\n")
    with scripted_endpoint({"": [[says("look", LOOK)]]}, "--dialect", "vllm") as endpoint:
        command = flags(
            home,
            endpoint.base_url,
            dataset=f"harbor:{home / 'tasks'}",
            launcher="auto",
            base_images=f"far.example/base:1={base}",
            scoring_strategy="python:own:score",
        )
        ended = await run(*command, directory=home)
    assert ended.code == 0, ended
    notes = (
        "of 4 tasks 3 can run: 1 needs a GPU",
        "2 of these tasks ask for a network: they have what env.egress gives",
        "keys of task.toml that are not read: environment.colour (1 tasks)",
    )
    told = json.loads((home / "run" / "run.json").read_bytes())["notes"]
    assert [note for note in told if note in notes] == list(notes)
    assert all(f"note: {note}" in ended.stdout + ended.stderr for note in notes)
    records = lines(home / "run" / "rollouts.jsonl")
    reasons = {line["task_id"]: line["reason"] for line in records if line["outcome"] == "bad_task"}
    assert reasons.pop("gpu") == "environment needs 1 GPUs, and a sandbox has none"
    assert "127.0.0.1:9/away:1, which is not here and cannot be pulled" in reasons.pop("away")
    assert reasons == {}
    good = [line for line in records if line["outcome"] == "finished"]
    answers = {line["task_id"]: json.loads(line["answer"]) for line in good}
    assert answers["built"] == ["/srv/app", 1234, "seven", False, ["here"]]
    assert answers["named"] == ["/made", 0, None, False, []]
    plans = {line["task_id"]: line["plan"] for line in good}
    sandbox = plans["built"]["sandbox"]
    assert (sandbox["memory_bytes"], sandbox["cpus"], sandbox["root"]) == (512 << 20, 0.5, "writable")
    limits = plans["built"]["limits"]
    assert (limits["deadline_s"], limits["rollout_timeout_s"]) == (100.0, 100.0)
    notes_of = {line["task_id"]: line["notes"] for line in good}
    assert notes_of == {
        "built": ["its task asks for a network (public): it had what env.egress gave it"],
        "named": [],
    }
