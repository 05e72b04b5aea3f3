"""An Engine that makes sandboxes weaker than asked stops the run, unless the operator waived that measure."""

from __future__ import annotations

import json

import pytest

from tests.e2e.endpoint import answers, scripted_endpoint
from tests.e2e.leftovers import run_cleanly
from tests.fakes.runs import Ended, flags, lines, place
from tests.fakes.weak_engine import WeakEngine

pytestmark = pytest.mark.docker


async def test_a_missing_measure_is_exit_3_by_name_and_can_be_waived_on_record() -> None:
    with place() as home, scripted_endpoint({"": [[answers("42")]]}, "--dialect", "vllm") as endpoint:
        (home / "tasks.jsonl").write_text('{"task_id": "t", "question": "6 times 7?", "answer": "42"}\n')
        async with WeakEngine(home / "weak.sock", {"CapAdd": ["SETUID", "SETGID", "SYS_PTRACE"]}) as weak:
            environ = {"DOCKER_HOST": weak.url}

            async def run(directory: str, **env: object) -> Ended:
                command = flags(
                    home,
                    endpoint.base_url,
                    launcher="docker",
                    group_size=1,
                    max_concurrent_sandboxes=1,
                    run_dir=home / directory,
                    **env,
                )
                return await run_cleanly(*command, directory=home, environ=environ)

            refused = await run("refused")
            assert refused.code == 3
            assert "capabilities is" in refused.stderr
            assert "--env.waive_hardening" in refused.stderr
            assert endpoint.completions() == []  # it was never used
            waived = await run("waived", waive_hardening='["capabilities"]', allow_localhost_tcp=True)
            assert waived.code == 0, waived
        assert [line["outcome"] for line in lines(home / "waived" / "rollouts.jsonl")] == ["finished"]
        told = json.loads((home / "waived" / "run.json").read_text())
        assert told["config"]["env"]["waive_hardening"] == ["capabilities"]
        assert told["config"]["env"]["allow_localhost_tcp"] is True
        assert "not demanded of sandboxes, as you asked: capabilities" in waived.stdout + waived.stderr
