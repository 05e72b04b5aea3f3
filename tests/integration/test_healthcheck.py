"""A task's healthcheck is run until it succeeds, before the agent gets anything; what it starts goes on."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from rollout_api.v1 import sandbox_pb2 as pb

from tests.fakes.sandbox_process import Places, run
from tests.fakes.scripted_orchestrator import Script, action

PROGRAM = {"__main__.py": b"import os\nopen(os.environ['ANSWER_FILE'], 'w').write(str(os.path.exists('ready')))\n"}


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


def a_check(
    command: str,
    *,
    retries: int = 3,
    interval_s: float = 0.05,
    timeout_s: float = 20.0,
    start_period_s: float = 0.0,
    start_interval_s: float = 0.05,
) -> pb.Healthcheck:
    return pb.Healthcheck(
        command=command,
        interval=seconds(interval_s),
        timeout=seconds(timeout_s),
        start_period=seconds(start_period_s),
        start_interval=seconds(start_interval_s),
        retries=retries,
    )


def seconds(value: float) -> Duration:
    duration = Duration()
    duration.FromTimedelta(timedelta(seconds=value))
    return duration


@pytest.mark.parametrize("kind", ["code", "program"])
async def test_it_is_run_where_the_agent_works_and_before_it(places: Places, kind: str) -> None:
    script = Script(
        [action("import os\nfinal_answer(os.path.exists('ready'))")],
        cwd=str(places.root / "app"),
        environment={"WORD": "héllo"},
        healthcheck=a_check('[ "$WORD" = "héllo" ] && [ "$PWD" = "$(pwd)" ] && touch ready'),
        kind=kind,
        program=PROGRAM if kind == "program" else {},
    )
    end = await run(places, script)
    assert (places.root / "app" / "ready").exists(), end
    assert end.served.healthy_after == [0]
    if kind == "code":
        assert end.served.answer == b"True"


async def test_failures_are_tried_again_and_the_last_words_are_said(places: Places) -> None:
    count = "echo x >> runs; echo of run $(wc -l < runs)"
    tried = Script(
        [action("final_answer(open('runs').read())")], healthcheck=a_check(f"{count}; [ $(wc -l < runs) -ge 3 ]")
    )
    end = await run(places, tried)
    assert end.served.answer == b"x\nx\nx\n"


async def test_one_that_never_succeeds_ends_the_task(places: Places) -> None:
    script = Script(
        [action("final_answer(1)")],
        healthcheck=a_check("echo x >> runs; echo no database; echo at all >&2; exit 7", retries=2),
    )
    end = await run(places, script)
    (result,) = end.served.results
    assert (end.served.completions, end.served.healthy_after) == ([], [])
    assert result.stop_reason == pb.STOP_REASON_BAD_TASK
    words = "its healthcheck failed, 2 of 2 times; the last time it ended with 7 and printed: no database at all"
    assert result.detail == words
    assert (places.workspace / "runs").read_text() == "x\nx\n"


async def test_failures_of_the_start_period_do_not_count(places: Places) -> None:
    count = "echo x >> runs; [ $(wc -l < runs) -ge 5 ]"
    script = Script(
        [action("final_answer(1)")], healthcheck=a_check(count, retries=1, start_period_s=3600, start_interval_s=0)
    )
    end = await run(places, script)
    assert end.served.answer == b"1"


async def test_one_that_takes_too_long_is_killed_with_its_children(places: Places) -> None:
    script = Script(
        [action("final_answer(1)")], healthcheck=a_check("sleep 600 & sleep 600", retries=1, timeout_s=0.5)
    )
    end = await run(places, script)
    (result,) = end.served.results
    words = "its healthcheck failed, 1 of 1 times; the last time it took over 0.5 s and printed nothing"
    assert result.detail == words


async def test_a_flood_of_output_costs_nothing(places: Places) -> None:
    script = Script([action("final_answer(1)")], healthcheck=a_check("yes | head -c 50000000; exit 1", retries=1))
    end = await run(places, script)
    (result,) = end.served.results
    assert len(result.detail) < 1200
    assert result.detail.endswith("y y")


async def test_services_go_on_and_may_print(places: Places) -> None:
    """A service whose output nobody read would block, or die, when it prints for the first time."""
    serve = "import time\nwhile True:\n    print('x' * 5000, flush=True)\n    open('beat', 'a').write('.')\n"
    serve += "    time.sleep(0.001)\n"
    (places.workspace / "serve.py").write_text(serve)
    counts = "import os, time\nbefore = os.path.getsize('beat')\n"
    counts += "while os.path.getsize('beat') < before + 100:\n    time.sleep(0.01)\nfinal_answer('alive')"
    script = Script(
        [action(counts)],
        healthcheck=a_check(f"[ -e beat ] || {{ {sys.executable} serve.py & exit 1; }}", retries=90),
    )
    end = await run(places, script)
    assert end.served.answer == b"alive"
