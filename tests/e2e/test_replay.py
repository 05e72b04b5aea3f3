"""`orchestrator replay` of a real run: what is the same, what differs and where; and `view` of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.endpoint import answers, says, scripted_endpoint
from tests.e2e.leftovers import run_cleanly
from tests.fakes.runs import flags, lines, place, run

pytestmark = pytest.mark.docker

# One task's rollouts go the same way every time; the other's see another number each time.
SCRIPT = {
    "steady": [[says("I add.", "x = 40 + 2\nprint(x)"), answers("x")], [answers("41")]],
    "moody": [[says("I look.", "import os\nprint(os.urandom(8).hex())"), answers("42")]],
}


def tasks(home: Path, answer: int) -> None:
    rows = [
        {"task_id": name, "question": f"The {name} one: what is it?", "answer": answer}
        for name in ("steady", "moody")
    ]
    (home / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.mark.slow
async def test_a_run_is_played_again_and_compared() -> None:
    with place() as home:
        tasks(home, 42)
        with scripted_endpoint(SCRIPT, "--dialect", "vllm") as endpoint:
            made = await run_cleanly(*flags(home, endpoint.base_url, launcher="docker"), directory=home)
        assert made.code == 0, made.stderr
        recorded = {line["rollout_id"]: line for line in lines(home / "run" / "rollouts.jsonl")}
        assert len(recorded) == 4

        again = await run_cleanly(
            str(home / "run"), f"--env.run_dir={home}/again", directory=home, command="replay"
        )
        said = {line.split()[0]: line for line in again.stdout.splitlines() if line.startswith("g0")}
        assert again.code == 1, again.stderr
        assert set(said) == set(recorded)
        for rollout_id, line in recorded.items():
            if line["task_id"] == "steady":
                assert said[rollout_id].endswith("same, finished"), said[rollout_id]
            else:
                assert "differs: prompt 2: message" in said[rollout_id]
        assert "2 of 4 rollouts as recorded, 2 different, 0 broken" in again.stdout
        played = {line["rollout_id"]: line for line in lines(home / "again" / "rollouts.jsonl")}
        for rollout_id, line in recorded.items():
            for name in ("outcome", "answer", "score", "score_parts"):
                assert played[rollout_id][name] == line[name]
            for then, now in zip(line["completions"], played[rollout_id]["completions"], strict=True):
                assert (now["token_ids"], now["logprobs"]) == (then["token_ids"], then["logprobs"])

        # With another reference answer the score is what differs, and of one rollout alone only that.
        tasks(home, 43)
        right = next(i for i, line in recorded.items() if line["task_id"] == "steady" and line["answer"] == "42")
        one = await run_cleanly(
            str(home / "run"), f"--rollout={right}", f"--env.run_dir={home}/one", directory=home, command="replay"
        )
        assert one.code == 1, one.stderr
        assert "differs: score " in one.stdout
        assert "correctness 1.0 then, 0.0 now" in one.stdout
        assert "0 of 1 rollouts as recorded, 1 different" in one.stdout
        assert len(lines(home / "one" / "rollouts.jsonl")) == 1

        for directory, html in (("run", "groups.html"), ("again", "report.html")):
            shown = await run(str(home / directory), directory=home, command="view")
            assert shown.code == 0, shown.stderr
            assert "finished 4 (100%)" in shown.stdout
            assert (home / directory / html).stat().st_size > 1000
