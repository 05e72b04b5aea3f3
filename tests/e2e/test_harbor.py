"""What a run says of Harbor's tasks before it begins."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.endpoint import answers, scripted_endpoint
from tests.fakes.harbor import a_task
from tests.fakes.runs import flags, lines, run


async def test_tasks_that_cannot_be_run_are_counted_before_the_run_and_in_its_record(tmp_path: Path) -> None:
    a_task(tmp_path / "tasks" / "one")
    a_task(tmp_path / "tasks" / "two", "[environment]\ngpus = 1\n")
    with scripted_endpoint({"": [[answers("42")]]}, "--dialect", "vllm") as endpoint:
        ended = await run(
            *flags(tmp_path, endpoint.base_url, dataset=f"harbor:{tmp_path}/tasks"), directory=tmp_path
        )
    counted = "of 2 tasks 1 can run: 1 needs a GPU"
    assert f"note: {counted}" in ended.stdout + ended.stderr, ended
    assert counted in json.loads((tmp_path / "run" / "run.json").read_bytes())["notes"]
    reasons = [line["reason"] for line in lines(tmp_path / "run" / "rollouts.jsonl")]
    assert reasons == [
        "it has tests in the place of an answer: --env.scoring_strategy grader runs them",
        "environment needs 1 GPUs, and a sandbox has none",
    ]
