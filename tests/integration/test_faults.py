"""What goes wrong around a rollout never becomes a reward: one test per fault, outcome counts add up in each."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestrator.types import EndedName
from tests.e2e.leftovers import containers_of, engine
from tests.fakes.engine_proxy import NO_FUSE, Door, EngineProxy
from tests.fakes.inference import Call, Fault, Reply, ScriptedServer, always, by_task
from tests.fakes.runs import (
    Ended,
    answers,
    flags,
    lines,
    outcome_seen,
    outcomes,
    printed_outcomes,
    run,
    running,
    until,
    whole_lines,
    write_tasks,
)
from tests.fakes.stepped_clock import DAY_S, STEPPED_CLOCK

SCORED = {str(name) for name in EndedName}
RIGHT = "Thought.\n<code>\nfinal_answer(1)\n</code>"
KEY = "sk-canary-31d7"


@dataclass(slots=True)
class Finished:
    """A run that ended, checked for what holds whatever the fault was."""

    ended: Ended
    counts: Counter[str]
    groups: list[dict[str, Any]]
    server: ScriptedServer


async def faulty(home: Path, server: ScriptedServer, tasks: int = 2, **env: object) -> Finished:
    write_tasks(home / "tasks.jsonl", tasks)
    async with server:
        ended = await run(*flags(home, server.base_url, **env), directory=home)
    return checked(home, ended, server)


def checked(home: Path, ended: Ended, server: ScriptedServer) -> Finished:
    assert not ended.traceback, ended.stderr
    counts = outcomes(home / "run")
    assert printed_outcomes(ended) == counts
    rollouts = lines(home / "run" / "rollouts.jsonl")
    assert all((line.get("score") is not None) == (line["outcome"] in SCORED) for line in rollouts)
    groups = lines(home / "run" / "groups.jsonl")
    assert {facts["outcome"] for group in groups for facts in group["overrides"]} <= SCORED
    assert not list((home / "t").glob("orchestrator-*"))
    return Finished(ended, counts, groups, server)


# ---------------------------------------------------------------- the endpoint


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [
        Fault("429", times=2),
        Fault("500", times=2),
        Fault("502", times=2),
        Fault("503", times=2, retry_after_s=0.2),
        Fault("reset", times=2),
        Fault("cut_off", times=2),
        Fault("garbage", times=2),
        Fault("empty_choices", times=2),
        Fault("missing_logprobs", times=2),
        Fault("fewer_logprobs", times=2),
        Fault("foreign_ids", times=2),
        Fault("wrong_count", times=2),
        Fault("slow", times=2, after_s=0.5),
    ],
    ids=lambda fault: fault.kind,
)
async def test_passing_fault_of_the_endpoint_is_retried_and_leaves_no_trace_in_the_data(
    home: Path, fault: Fault
) -> None:
    done = await faulty(home, ScriptedServer("vllm", answers(2), faults=(fault,)))
    assert done.ended.code == 0, done.ended.stderr
    assert done.counts == {"finished": 4}
    # Every token that is trained on was given in an answer without a fault.
    given = Counter(tuple(s.sampled_ids) for s in done.server.log.completed)
    trained = Counter(
        tuple(c["token_ids"]) for line in lines(home / "run/rollouts.jsonl") for c in line["completions"]
    )
    assert trained == given


@pytest.mark.long
@pytest.mark.parametrize("dialect", ["vllm", "openai"])
async def test_when_one_call_is_asked_to_wait_all_calls_wait(home: Path, dialect: str) -> None:
    pause_s = 3.0
    fault = Fault("429", times=1, retry_after_s=pause_s)
    script = by_task({"": [[f"Thought {n}.\n<code>\nprint({n})\n</code>", RIGHT] for n in range(8)]}, by="order")
    done = await faulty(home, ScriptedServer(dialect, script, faults=(fault,)), tasks=4)
    assert done.ended.code == 0, done.ended.stderr
    (refused,) = [s for s in done.server.log.completions if s.fault == "429"]
    assert refused.ended_s is not None
    asked_for = [s.started_s - refused.ended_s for s in done.server.log.completions if s is not refused]
    # Of each other sandbox a call that is under way may arrive, and one begun before the refusal was read.
    assert len([after_s for after_s in asked_for if 0 < after_s < pause_s]) <= 2 * 3


async def test_lasting_fault_of_one_task_costs_that_group_only(home: Path) -> None:
    fault = Fault("500", pattern="of q0!")
    done = await faulty(
        home, ScriptedServer("vllm", answers(3), faults=(fault,)), tasks=3, max_retries=1, group_policy="drop"
    )
    assert done.ended.code == 1
    assert done.counts == {"finished": 4, "llm_error": 4}
    assert {facts["task_id"] for group in done.groups for facts in group["overrides"]} == {"q1", "q2"}
    assert "launching pauses" not in done.ended.stderr


@pytest.mark.long
async def test_partial_group_is_written_without_its_broken_rollout(home: Path) -> None:
    broken = [Reply(RIGHT, fault=Fault("500"))]  # before anything was sampled: nobody's choice
    done = await faulty(
        home,
        ScriptedServer("vllm", by_task({"": [broken, [RIGHT]]}, by="order")),
        tasks=1,
        max_retries=0,
        group_policy="partial:1",
        max_concurrent_sandboxes=2,
    )
    assert done.ended.code == 0, done.ended.stderr
    assert done.counts == {"finished": 1, "llm_error": 1}
    (group,) = done.groups
    assert group["group_overrides"] == {"group_size": 1}


async def test_hung_completion_is_an_infrastructure_failure_and_retried(home: Path) -> None:
    write_tasks(home / "tasks.jsonl", 1)
    async with ScriptedServer("vllm", answers(1), faults=(Fault("hang", times=1),)) as server:
        given = [*flags(home, server.base_url), "--openai.timeout=3"]
        done = checked(home, await run(*given, directory=home), server)
    assert done.ended.code == 0, done.ended.stderr
    assert done.counts == {"finished": 2, "llm_error": 1}


@pytest.mark.long
async def test_prompt_that_is_too_long_is_the_policys_own_end(home: Path) -> None:
    script = always("Thought.\n<code>\nprint(1)\n</code>", Reply(RIGHT, fault=Fault("context_length")))
    done = await faulty(home, ScriptedServer("vllm", script), tasks=1)
    assert done.ended.code == 0, done.ended.stderr
    assert done.counts == {"context_length": 2}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["401", "403"])
async def test_refused_key_in_mid_run_stops_it_with_one_line_and_keeps_what_is_finished(
    home: Path, kind: str
) -> None:
    write_tasks(home / "tasks.jsonl", 6)
    async with ScriptedServer("vllm", answers(6), faults=(Fault(kind, calls=range(6, 1000)),)) as server:  # type: ignore[arg-type]
        given = flags(home, server.base_url, max_concurrent_sandboxes=2)
        ended = await run(*given, directory=home, environ={"OPENAI_API_KEY": KEY})
    done = checked(home, ended, server)
    assert ended.code == 3
    refusals = [line for line in ended.stderr.splitlines() if f"HTTP {kind}" in line]
    assert len(refusals) == 1
    assert KEY not in ended.stderr + ended.stdout
    assert KEY.encode() not in b"".join(p.read_bytes() for p in (home / "run").rglob("*") if p.is_file())
    assert done.counts["finished"] >= 2
    assert set(done.counts) == {"finished", "cancelled"}
    async with ScriptedServer("vllm", answers(6)) as server:
        again = await run("--env.resume", "run", f"--openai.base_url={server.base_url}", directory=home)
    assert again.code == 0, again.stderr
    assert outcomes(home / "run")["finished"] == 12


@pytest.mark.long
async def test_endpoint_that_goes_and_comes_back_costs_time_and_nothing_else(home: Path) -> None:
    tasks = 6
    write_tasks(home / "tasks.jsonl", tasks)
    server = ScriptedServer("vllm", answers(tasks, delay_s=0.1))
    async with server:
        async with running(*flags(home, server.base_url), directory=home) as started:
            await until(lambda: whole_lines(home / "run/rollouts.jsonl") >= 2, "it runs")
            await server.__aexit__()
            await until(lambda: outcome_seen(home / "run", "llm_error"), "it is missed")
            await asyncio.sleep(3)
            await server.__aenter__()
            ended = await started.ended()
        done = checked(home, ended, server)
    assert ended.code == 0, ended.stderr
    assert done.counts["finished"] == 2 * tasks
    assert set(done.counts) == {"finished", "llm_error"}
    assert ended.stderr.count("launching pauses") == ended.stderr.count("launching goes on") == 1


@pytest.mark.long
async def test_run_in_which_nearly_everything_breaks_ends_and_names_the_cause(home: Path) -> None:
    done = await faulty(
        home,
        ScriptedServer("vllm", answers(40), faults=(Fault("400"),)),
        tasks=40,
        max_concurrent_sandboxes=4,
        max_retries=0,
        group_policy="drop",
    )
    assert done.ended.code == 1
    assert done.counts["llm_error"] >= 16
    assert sum(done.counts.values()) < 40
    last = done.ended.stderr.strip().splitlines()[-1]
    assert "broke" in last
    assert "llm_error" in last
    assert "HTTP 400" in last


# ---------------------------------------------------------------- sandboxes


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        # Without isolation model-written code reaches its parent, the sandbox' first process, which may take a
        # while to die on a busy machine.
        ("import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(30)", "sandbox_crashed"),
        ("import os\nos._exit(0)", "finished"),
        ("while True:\n    pass", "timeout"),
    ],
    ids=["killed", "worker exits", "hangs"],
)
async def test_sandbox_that_breaks_by_model_written_code_is_scored_and_harms_no_neighbour(
    home: Path, code: str, outcome: str
) -> None:
    script = by_task({"of q0!": [[f"Thought.\n<code>\n{code}\n</code>", RIGHT]], "of q1!": [[RIGHT]]})
    done = await faulty(home, ScriptedServer("vllm", script), rollout_timeout=6, step_timeout=60)
    assert done.ended.code == 0, done.ended.stderr
    by_name = {line["task_id"]: line["outcome"] for line in lines(home / "run/rollouts.jsonl")}
    assert by_name == {"q0": outcome, "q1": "finished"}
    assert sum(done.counts.values()) == 4


# ---------------------------------------------------------------- the Engine


@asynccontextmanager
async def engine_behind_a_door(home: Path) -> AsyncIterator[EngineProxy]:
    async with EngineProxy(home / "engine.sock") as proxy:
        yield proxy


@pytest.mark.long
@pytest.mark.docker
async def test_container_killed_by_somebody_else_costs_no_token_and_one_short_of_memory_is_scored(
    home: Path,
) -> None:
    """Only what the policy did itself is its own fault."""
    hoard = "Thought.\n<code>\nhoard = b'x' * (2 << 30)\n</code>"
    nap = "Thought.\n<code>\nimport time\ntime.sleep(12)\n</code>"
    asked: list[Call] = []

    def script(call: Call) -> str:
        if "of q1!" not in call.task:
            return hoard
        asked.append(call)
        return RIGHT if call.turn else nap

    write_tasks(home / "tasks.jsonl", 2)
    async with ScriptedServer("vllm", script) as server:
        limits = {"group_size": 1, "step_timeout": 3600, "rollout_timeout": 3600, "warm_sandboxes": 0}
        given = flags(home, server.base_url, launcher="docker", **limits)
        async with running(*given, directory=home) as started:
            await until(lambda: outcome_seen(home / "run", "out_of_memory"), "the hoarder has ended")
            pid = started.process.pid
            await until(lambda: bool(asked), "it works")
            seen: list[str] = []

            async def next_one() -> str:
                """One more may have been made ahead, which is removed."""
                before: list[str] = []
                async with asyncio.timeout(60):
                    while True:
                        now = containers_of(pid)
                        if len(now) == 1 and now == before and now[0] not in seen:
                            return now[0]
                        before = now
                        await asyncio.sleep(1)

            for number in (1, 2):
                seen.append(await next_one())
                name = seen[-1].removeprefix("/")
                with engine() as client:
                    # The second time pid 1 is asked, and what runs in there sees it go.
                    client.kill(name) if number == 1 else client.stop(name, timeout=60)
            done = checked(home, await started.ended(), server)
    assert done.ended.code == 0, done.ended.stderr
    assert done.counts == {"out_of_memory": 1, "finished": 1}
    hoarder, *others = sorted(lines(home / "run/rollouts.jsonl"), key=lambda line: line["rollout_id"])
    assert hoarder["outcome"] == "out_of_memory"
    assert 0 <= hoarder["score"] <= 0.45, "a wrong answer's share at most"
    assert [(line["attempt"], line["outcome"]) for line in others] == [(0, "finished")]
    assert [(one["turn"], one["refused"]) for one in others[0]["continued"]] == [(1, "")], (
        "the second had not got further"
    )
    assert [call.turn for call in asked].count(0) == 1, "what was answered is not sampled again"
    assert "continued      1, tokens kept " in done.ended.stdout


@pytest.mark.long
@pytest.mark.docker
@pytest.mark.parametrize("door", [Door.REFUSE, Door.HANG, Door.FULL])
async def test_engine_that_goes_and_comes_back_costs_time_and_nothing_else(home: Path, door: Door) -> None:
    tasks = 6
    write_tasks(home / "tasks.jsonl", tasks)
    async with ScriptedServer("vllm", answers(tasks)) as server, engine_behind_a_door(home) as proxy:
        given = flags(home, server.base_url, launcher="docker", max_retries=1)
        async with running(*given, directory=home, environ={"DOCKER_HOST": proxy.url}) as started:
            await until(lambda: whole_lines(home / "run/rollouts.jsonl") >= 2, "it runs")
            proxy.door = door
            proxy.drop()
            await until(
                lambda: outcome_seen(home / "run", "docker_error") or outcome_seen(home / "run", "launch_error"),
                "the Engine is missed",
            )
            proxy.door = Door.OPEN
            proxy.drop()
            ended = await started.ended()
        done = checked(home, ended, server)
    assert ended.code == 0, ended.stderr
    assert done.counts["finished"] == 2 * tasks
    assert set(done.counts) <= {"finished", "docker_error", "launch_error", "sandbox_lost"}
    assert ended.stderr.count("Docker is away, launching pauses") == ended.stderr.count("launching goes on")
    assert ended.stderr.count("Docker makes no sandboxes") == ended.stderr.count("makes sandboxes again")


@pytest.mark.long
@pytest.mark.docker
async def test_engine_whose_storage_fails_for_good_ends_the_run_at_once_and_by_name(home: Path) -> None:
    tasks = 40
    write_tasks(home / "tasks.jsonl", tasks)
    async with ScriptedServer("vllm", answers(tasks)) as server, engine_behind_a_door(home) as proxy:
        proxy.refusal, environ = NO_FUSE, {"DOCKER_HOST": proxy.url}
        given = flags(home, server.base_url, launcher="docker")
        async with running(*given, directory=home, environ=environ) as started:
            await until(lambda: whole_lines(home / "run/rollouts.jsonl") >= 2, "it runs")
            proxy.door = Door.FULL
            ended = await started.ended()
        assert (ended.code, ended.traceback) == (1, False), ended.stderr
        assert "waiting does not help: Docker's storage fails: " in ended.stderr
        assert "/dev/fuse" in ended.stderr
        assert "is away" not in ended.stderr
        again = await run("--env.resume", "run", directory=home, environ=environ)
        assert again.code == 3, again.stderr
        assert again.stderr.splitlines()[-1].startswith("orchestrator: Docker's storage fails: ")
        assert len(server.log.completions) < tasks * 2


@pytest.mark.long
@pytest.mark.docker
async def test_run_stopped_while_the_engine_has_no_space_accounts_for_every_group(
    home: Path,
) -> None:
    tasks = 8
    names = {f"q{n}" for n in range(tasks)}
    rollouts, groups = home / "run" / "rollouts.jsonl", home / "run" / "groups.jsonl"
    write_tasks(home / "tasks.jsonl", tasks)
    async with ScriptedServer("vllm", answers(tasks)) as server, engine_behind_a_door(home) as proxy:
        given = flags(home, server.base_url, launcher="docker", max_retries=0, group_policy="drop")
        environ = {"DOCKER_HOST": proxy.url}
        async with running(*given, directory=home, environ=environ) as started:
            await until(lambda: whole_lines(groups) >= 1, "a group is written")
            proxy.door = Door.FULL
            await until(lambda: outcome_seen(home / "run", "launch_error"), "there is no space")
            started.signal(signal.SIGTERM)
            ended = await started.ended()
        first = checked(home, ended, server)
        assert ended.code == 143
        assert "no space left where Docker keeps its images" in ended.stderr
        before, texts = lines(rollouts), (rollouts.read_bytes(), groups.read_bytes())
        finished = [line["rollout_id"] for line in before if line["outcome"] == "finished"]
        places = Counter(line["task_id"] for line in before if line["outcome"] == "finished")
        # Whole on disk, half, not begun: nothing else, and all together.
        whole = {task for task, count in places.items() if count == 2}
        half = {task for task, count in places.items() if count == 1}
        assert [task_of(group) for group in first.groups] == [t for t in map(task_of, first.groups) if t in whole]
        assert {task_of(group) for group in first.groups} == whole
        assert len(first.groups) == len(whole) < tasks
        proxy.door = Door.OPEN
        again = checked(home, await run("--env.resume", "run", directory=home, environ=environ), server)
    assert again.ended.code == 0, again.ended.stderr
    assert rollouts.read_bytes().startswith(texts[0])
    assert groups.read_bytes().startswith(texts[1])
    assert Counter(map(task_of, again.groups)) == dict.fromkeys(names, 1)
    assert again.counts["finished"] == 2 * tasks
    assert again.counts - first.counts == {"finished": 2 * tasks - len(finished)}
    kept = {facts["rollout_id"] for group in again.groups for facts in group["overrides"]}
    assert set(finished) < kept, f"lost, of {len(half)} groups that were half done"
    assert len(kept) == 2 * tasks


def task_of(group: dict[str, Any]) -> str:
    """Of all its members."""
    (name,) = {facts["task_id"] for facts in group["overrides"]}
    return str(name)


# ---------------------------------------------------------------- disk and data


def may_mount() -> bool:
    """Whether a small file system of a test's own can be had."""
    mount = ("unshare", "--mount", "sh", "-c", "mount -t tmpfs none /mnt")
    return shutil.which("unshare") is not None and subprocess.run(mount, capture_output=True).returncode == 0


@pytest.mark.long
async def test_full_disk_ends_the_run_loudly_without_half_a_line_and_it_resumes(home: Path) -> None:
    tasks = 6
    write_tasks(home / "tasks.jsonl", tasks)
    async with ScriptedServer("vllm", answers(tasks)) as server:
        given = flags(home, server.base_url)
        # No file may grow any further: the same error for whoever writes.
        ended = await run(*given, directory=home, wrapper=("prlimit", "--fsize=60000"))
        assert ended.code == 1, ended.stderr
        assert not ended.traceback, ended.stderr
        assert "cannot write" in ended.stderr.strip().splitlines()[-1]
        before = lines(home / "run" / "rollouts.jsonl")
        assert 0 < len(before) < 2 * tasks
        assert printed_outcomes(ended) == outcomes(home / "run")
        again = await run("--env.resume", "run", directory=home)
    assert again.code == 0, again.stderr
    done = checked(home, again, server)
    assert done.counts["finished"] == 2 * tasks
    assert lines(home / "run" / "rollouts.jsonl")[: len(before)] == before


FULL_TMPDIR = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o nr_inodes=8 none "$TMPDIR" && exec "$@"', "sh")


@pytest.mark.long
@pytest.mark.skipif(not may_mount(), reason="mounting a small file system needs root and unshare")
async def test_full_temporary_directory_is_a_launch_error_and_the_run_resumes(home: Path) -> None:
    """There is room for the run's own directory and for no sandbox' files."""
    tasks = 3
    write_tasks(home / "tasks.jsonl", tasks)
    async with ScriptedServer("vllm", answers(tasks)) as server:
        given = flags(home, server.base_url, max_retries=0, group_policy="drop")
        full = checked(home, await run(*given, directory=home, wrapper=FULL_TMPDIR), server)
        assert full.ended.code == 1, full.ended.stderr
        assert full.counts == {"launch_error": 2 * tasks}
        assert full.groups == []
        assert "No space left on device" in full.ended.stderr
        again = checked(home, await run("--env.resume", "run", directory=home), server)
    assert again.ended.code == 0, again.ended.stderr
    assert again.counts - full.counts == {"finished": 2 * tasks}
    assert len(again.groups) == tasks


@pytest.mark.long
async def test_steps_of_the_wall_clock_change_no_limit_and_no_duration(home: Path) -> None:
    write_tasks(home / "tasks.jsonl", 4)
    fault = Fault("429", times=2, retry_after_s=0.2)
    async with ScriptedServer("vllm", answers(4), faults=(fault,)) as server:
        given = flags(home, server.base_url)
        done = checked(home, await run(*given, directory=home, program=STEPPED_CLOCK), server)
    assert done.ended.code == 0, done.ended.stderr
    assert done.counts == {"finished": 8}
    rollouts = lines(home / "run/rollouts.jsonl")
    begun = [line["started_at"] for line in rollouts]
    assert max(begun) - min(begun) > DAY_S, "the clock did step"
    for line in rollouts:
        assert 0 <= line["waiting_s"] <= line["duration_s"] < DAY_S
        assert 0 <= line["launch_s"] < DAY_S


@pytest.mark.long
async def test_run_outlives_whoever_listened_to_it(home: Path) -> None:
    """A terminal that was closed, a pipe without a reader, a log on a full disk."""
    write_tasks(home / "tasks.jsonl", 2)
    deaf = ("sh", "-c", 'exec "$@" 2>/dev/full >&-', "sh")
    async with ScriptedServer("vllm", answers(2)) as server:
        ended = await run(*flags(home, server.base_url), directory=home, wrapper=deaf)
    assert ended.code == 0
    assert outcomes(home / "run") == {"finished": 4}
    assert len(lines(home / "run" / "groups.jsonl")) == 2


@pytest.mark.long
async def test_malformed_tasks_are_reported_and_the_run_goes_on(home: Path) -> None:
    rows = [
        '{"task_id": "blank", "question": "  ", "answer": "1"}',
        '{"task_id": "none", "answer": "1"}',
        '{"task_id": "nan", "question": "x", "answer": NaN}',
        '{"task_id": ["list"], "question": "x", "answer": "1"}',
        '{"task_id": "up", "question": "x", "answer": "1", "files": ["../../etc/passwd"]}',
        "[]",
        "{",
    ]
    write_tasks(home / "tasks.jsonl", 2)
    with (home / "tasks.jsonl").open("a") as file:
        file.write("\n".join(rows) + "\n")
    async with ScriptedServer("vllm", answers(2)) as server:
        done = checked(home, await run(*flags(home, server.base_url), directory=home), server)
    assert done.ended.code == 0, done.ended.stderr
    assert done.counts == {"finished": 4, "bad_task": len(rows)}
    assert len(done.groups) == 2
