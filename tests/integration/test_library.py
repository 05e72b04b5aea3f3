"""The orchestrator inside a program, with and without an event loop: real sockets and sandboxes, a scripted
endpoint."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator import (
    BadTask,
    ConfigError,
    EnvironmentUnusable,
    Listener,
    Observer,
    Orchestrator,
    Row,
    RunUnhealthy,
    SyncOrchestrator,
    Task,
    load_config,
)
from orchestrator.engine.health import LEAST
from orchestrator.errors import RunLocked
from orchestrator.run.groups import MASKED, GroupFormat
from orchestrator.run.line import read_attempt
from orchestrator.run.rows import recorded_rows
from orchestrator.types import Attempt, Member
from tests.e2e.endpoint import ScriptedEndpoint, answers, says, scripted_endpoint
from tests.fakes.runs import DEADLINE_S, ROOT, place
from tests.fakes.tokenizer import tokenizer_folder

TASKS = [Task(f"q{n}", f"What is number {n} (of q{n}!)?", str(n)) for n in range(3)]
SCRIPT = {
    f"of q{n}!": [
        [says("Look.", f"x = {n}\nprint(x)"), answers("x")],
        [answers("-1")],
    ]
    for n in range(3)
}


def settings(endpoint: ScriptedEndpoint, **env: Any) -> dict[str, Any]:
    return {
        "env": {
            "launcher": "process",
            "group_size": 2,
            "max_concurrent_sandboxes": 4,
            "tokenizer_name": str(tokenizer_folder()),
            "token_source": "exact",
            "seed": 7,
            **env,
        },
        "openai": {"base_url": endpoint.base_url, "model_name": "scripted"},
    }


@pytest.fixture(scope="module")
def endpoint() -> Iterator[ScriptedEndpoint]:
    with scripted_endpoint(SCRIPT, "--dialect", "vllm") as scripted:
        yield scripted


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with place() as home:
        monkeypatch.setattr("tempfile.tempdir", str(home))
        yield home


def recorded(run: Path) -> dict[tuple[str, int], Row]:
    """The rows of a run directory, by rollout and segment."""
    lines = (run / "rollouts.jsonl").read_bytes().splitlines()
    rows = [
        row for line in lines if b'"index"' in line for row in recorded_rows(read_attempt(line), GroupFormat())
    ]
    return {(row.rollout_id, row.segment): row for row in rows}


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "orchestrator"]


# ---------------------------------------------------------------- a program without a loop


@pytest.mark.slow
def test_rows_come_back_in_order_and_are_the_record(endpoint: ScriptedEndpoint, home: Path) -> None:
    config = load_config(**settings(endpoint, run_dir=str(home / "run")))
    with SyncOrchestrator(config) as orchestrator:
        first = orchestrator.rollouts([*TASKS, BadTask("torn", "no question")])
        again = orchestrator.rollouts(TASKS[:1], group_size=3)
    assert threads() == []
    order = [("q0", 0), ("q0", 1), ("q1", 0), ("q1", 1), ("q2", 0), ("q2", 1), ("torn", 0), ("torn", 1)]
    assert [(row.task_id, row.index) for row in first] == order
    assert [(row.task_id, row.index) for row in again] == [("q0", n) for n in range(3)]
    for n in range(3):
        assert sorted(row.score is not None and row.score > 0.5 for row in first[2 * n : 2 * n + 2]) == [
            False,
            True,
        ]
    assert [(row.outcome, row.score) for row in first[6:]] == [("bad_task", None)] * 2
    found = recorded(home / "run")
    scored = [row for row in (*first, *again) if row.outcome != "bad_task"]
    assert len({row.rollout_id for row in scored}) == len(found) == 9
    for row in scored:
        assert row == found[row.rollout_id, row.segment]
        assert row.token_source == "sampled"
        assert row.logprobs is not None
        assert [p is None for p in row.logprobs] == [not m for m in row.env_mask]
    lines = [json.loads(line) for line in (home / "run" / "groups.jsonl").read_text().splitlines()]
    in_groups = {
        o["rollout_id"]: (t, m)
        for g in lines
        for o, t, m in zip(g["overrides"], g["tokens"], g["masks"], strict=True)
    }
    assert len(lines) == 4
    for row in scored:
        masks = [t if m else MASKED for t, m in zip(row.completion_ids, row.env_mask, strict=True)]
        told = [MASKED] * len(row.prompt_ids) + masks
        assert in_groups[row.rollout_id] == ([*row.prompt_ids, *row.completion_ids], told)


def test_a_run_of_a_program_is_verified_like_any_other(endpoint: ScriptedEndpoint, home: Path) -> None:
    """Also if its groups have other sizes than the settings say."""
    with SyncOrchestrator(load_config(**settings(endpoint, run_dir=str(home / "run")))) as orchestrator:
        orchestrator.rollouts(TASKS[:1])
        orchestrator.rollouts(TASKS[1:2], group_size=1)
        orchestrator.rollouts(TASKS[2:], group_size=3)
    program = "import sys; from orchestrator.cli import main; sys.exit(main())"
    ended = subprocess.run(
        [sys.executable, "-c", program, "verify", str(home / "run")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads((home / "run" / "run.json").read_text())
    assert told["tasks"] == "tasks of a program"


def test_errors_are_raised_where_the_call_was_made(endpoint: ScriptedEndpoint, home: Path) -> None:
    there = {"base_url": "http://127.0.0.1:9/v1", "model_name": "m", "startup_timeout": 0}
    nobody = load_config(**{**settings(endpoint), "openai": there})
    orchestrator = SyncOrchestrator(nobody)
    for _ in range(2):  # a failed opening leaves nothing behind
        with pytest.raises(EnvironmentUnusable, match="does not serve: connection failed"):
            orchestrator.rollouts(TASKS)
        assert threads() == []


def test_what_is_closed_or_in_use_says_so(endpoint: ScriptedEndpoint, home: Path) -> None:
    config = load_config(**settings(endpoint, run_dir=str(home / "run")))
    with SyncOrchestrator(config) as orchestrator:
        with pytest.raises(RunLocked, match=r"set --env\.run_dir to a new one"):
            SyncOrchestrator(config).open()
        orchestrator.rollouts(TASKS[:1])
    orchestrator.close()
    with pytest.raises(RuntimeError, match="closed: make a new one"):
        orchestrator.rollouts(TASKS)
    with pytest.raises(ConfigError, match=r"env\.run_dir: .* holds a run"):
        SyncOrchestrator(config).open()
    assert threads() == []


def test_an_error_of_an_observer_reaches_the_caller(endpoint: ScriptedEndpoint, home: Path) -> None:
    class Failing(Listener):
        def attempt(self, result: Member | Attempt) -> None:
            raise ZeroDivisionError("in a listener")

    with SyncOrchestrator(load_config(**settings(endpoint)), Observer(listeners=[Failing()])) as orchestrator:
        with pytest.raises(ZeroDivisionError, match="in a listener"):
            orchestrator.rollouts(TASKS)


@pytest.mark.slow
def test_a_sick_endpoint_is_noticed_over_calls_that_are_small(home: Path) -> None:
    """Each call alone has too few groups for a verdict. Afterwards the program may go on."""
    refusing = {"text": "", "fault": {"kind": "400"}}
    script = {"of q0!": [[answers("0")]], "of sick!": [[refusing]]}
    sick, few = Task("sick", "What is it (of sick!)?", "0"), {"group_size": 1, "max_retries": 0}
    with (
        scripted_endpoint(script, "--dialect", "vllm") as endpoint,
        SyncOrchestrator(load_config(**settings(endpoint, **few, group_policy="drop"))) as orchestrator,
    ):

        def rolled(task: Task) -> tuple[str, float | None]:
            (row,) = orchestrator.rollouts([task])
            return row.outcome, row.score

        assert [rolled(sick) for _ in range(LEAST - 1)] == [("llm_error", None)] * (LEAST - 1)
        with pytest.raises(RunUnhealthy, match=f"{LEAST} of the last {LEAST} rollouts broke"):
            rolled(sick)
        assert rolled(TASKS[0])[0] == "finished"
        assert rolled(sick) == ("llm_error", None)


def test_several_threads_share_one_orchestrator(endpoint: ScriptedEndpoint, home: Path) -> None:
    results: dict[int, list[Row]] = {}
    with SyncOrchestrator(load_config(**settings(endpoint))) as orchestrator:

        def call(n: int) -> None:
            results[n] = orchestrator.rollouts([TASKS[n]])

        callers = [threading.Thread(target=call, args=(n,)) for n in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(DEADLINE_S)
    assert {n: [row.task_id for row in rows] for n, rows in results.items()} == {
        n: [f"q{n}"] * 2 for n in range(3)
    }
    assert len({row.rollout_id for rows in results.values() for row in rows}) == 6


@pytest.mark.parametrize("end", ["drain", "close"])
def test_an_opening_that_waits_for_its_endpoint_can_be_ended(end: str, home: Path) -> None:
    waits = threading.Event()
    observer = Observer(say=lambda text: waits.set() if text.startswith("waiting for the endpoint") else None)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
    env = {"launcher": "process", "tokenizer_name": str(tokenizer_folder())}
    openai = {"base_url": address, "model_name": "m", "startup_timeout": DEADLINE_S}
    orchestrator = SyncOrchestrator(load_config(env=env, openai=openai), observer)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(orchestrator.rollouts, TASKS)
        assert waits.wait(DEADLINE_S)
        getattr(orchestrator, end)()
        with pytest.raises(RuntimeError, match="was closed during the call, or drained before it was open"):
            opening.result()
    assert threads() == []


# ---------------------------------------------------------------- how a program ends

PROGRAM = """
import json, os, sys, threading, time
from orchestrator import Observer, Listener, SyncOrchestrator, Task, load_config

class Says(Listener):
    def begun(self, plan, node):
        print("begun", flush=True)

config = load_config(**json.loads(sys.argv[1]))
orchestrator = SyncOrchestrator(config, Observer(listeners=[Says()]))
tasks = [Task("q0", "What is number 0 (of q0!)?", "0")]
"""


@contextmanager
def program(text: str, endpoint: ScriptedEndpoint, home: Path, **env: Any) -> Iterator[subprocess.Popen[str]]:
    """A program of its own, whose TMPDIR is `home`."""
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "TMPDIR": str(home)}
    arguments = json.dumps(settings(endpoint, **env))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM + text, arguments],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Where the tests themselves run in the background of a script, the program would inherit a deaf ear.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def left_in(home: Path) -> list[str]:
    return [path.name for path in home.glob("orchestrator-*")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "print(len(orchestrator.rollouts(tasks)))",
        "orchestrator.open(); print(2)",
        "orchestrator.rollouts(tasks); print(2); os.fork() or sys.exit(0)",
    ],
    ids=["after a call", "unused", "forked"],
)
def test_the_end_of_the_interpreter_closes_it(text: str, endpoint: ScriptedEndpoint, home: Path) -> None:
    with program(text, endpoint, home) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == "2"
    assert "Traceback" not in err
    assert left_in(home) == []


@pytest.mark.slow
def test_a_forked_process_is_told_and_does_not_wait(endpoint: ScriptedEndpoint, home: Path) -> None:
    text = """
orchestrator.rollouts(tasks)
child = os.fork()
if child:
    sys.exit(os.waitpid(child, 0)[1])
try:
    orchestrator.rollouts(tasks)
except RuntimeError as error:
    print(error, flush=True)
"""
    with program(text, endpoint, home) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == "opened before this process was forked: make an orchestrator in here"


@pytest.mark.slow
@pytest.mark.docker
def test_the_end_of_the_interpreter_removes_the_containers(endpoint: ScriptedEndpoint, home: Path) -> None:
    from tests.e2e.leftovers import containers_of

    with program("print(len(orchestrator.rollouts(tasks)))", endpoint, home, launcher="docker") as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == "2"
    assert containers_of(process.pid) == []


@pytest.mark.slow
def test_an_interrupted_call_cancels_its_rollouts_and_the_next_one_works(home: Path) -> None:
    slow = {
        "of q0!": [[says("Wait.", "import time\ntime.sleep(9_000)"), answers("0")]],
        "of q1!": [[answers("1")]],
    }
    text = """
try:
    orchestrator.rollouts(tasks)
except KeyboardInterrupt:
    print("interrupted", flush=True)
rows = orchestrator.rollouts([Task("q1", "What is number 1 (of q1!)?", "1")])
print([row.outcome for row in rows], flush=True)
"""
    long = {"step_timeout": 9_000, "rollout_timeout": 9_000, "rollout_deadline": 9_000}
    with (
        scripted_endpoint(slow, "--dialect", "vllm") as endpoint,
        program(text, endpoint, home, **long) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert "interrupted" in out
    assert out.splitlines()[-1] == "['finished', 'finished']"
    assert left_in(home) == []


# ---------------------------------------------------------------- a program with a loop


async def test_groups_are_recorded_where_a_run_directory_is_named(endpoint: ScriptedEndpoint, home: Path) -> None:
    config = load_config(
        **settings(endpoint, run_dir=str(home / "run"), data_path_to_save_groups=str(home / "g.jsonl"))
    )
    async with Orchestrator(config) as orchestrator:
        rows = [row async for group in orchestrator.groups(TASKS) for row in orchestrator.rows(group)]
    assert {(row.rollout_id, row.segment): row for row in rows} == recorded(home / "run")
    assert len((home / "g.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("env", "refusal"),
    [
        ({"data_path_to_save_groups": "g.jsonl"}, r"env\.data_path_to_save_groups: .* set env\.run_dir too"),
        ({"resume": "run"}, r"env\.resume: "),
    ],
)
async def test_what_a_program_cannot_have_is_refused(
    env: dict[str, Any], refusal: str, endpoint: ScriptedEndpoint, home: Path
) -> None:
    if "resume" in env:
        with SyncOrchestrator(load_config(**settings(endpoint, run_dir=str(home / "run")))) as orchestrator:
            orchestrator.rollouts(TASKS[:1])
        env = {"resume": str(home / "run")}
    with pytest.raises(ConfigError, match=refusal):
        async with Orchestrator(load_config(**settings(endpoint, **env))):
            pass
