"""Whole runs whose sandboxes an OCI runtime makes, without an Engine: the same groups, and the same when things
break as with Docker."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import docker
import pytest
from docker.utils import kwargs_from_env

from orchestrator.launch.names import DEFAULT_IMAGE
from tests.fakes import oci_images
from tests.fakes.archives import file, folder, layer, link, saved
from tests.fakes.inference import Call, ScriptedServer, always
from tests.fakes.runs import (
    answers,
    essence,
    flags,
    lines,
    outcomes,
    place,
    run,
    running,
    until,
    whole_lines,
    write_tasks,
)

_WHY_NOT = oci_images.why_not()
pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(600),
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
]
RIGHT = "Thought.\n<code>\nfinal_answer(1)\n</code>"
ENDLESS = "Thought.\n<code>\nwhile True:\n    pass\n</code>"
NO_ENGINE = {"DOCKER_HOST": "unix:///nowhere/docker.sock"}
TASKS = 6
REFUSED_IMAGES = {"q1": "broken.tar", "q3": "odd.tar", "q4": "bomb.tar.gz", "q5": "linked.tar"}


@pytest.fixture
def home() -> Iterator[Path]:
    oci_images.stored_image()
    with place() as directory:
        yield directory


def environ() -> dict[str, str]:
    """There is no Engine, and the store is this user's."""
    return NO_ENGINE | oci_images.CACHE


def containers(home: Path) -> dict[str, int]:
    """Name and pid 1 of each container of the runs in this place."""
    found = {}
    for bundle in (home / "t").glob("orchestrator-*/bundles/sandbox-*"):
        pid_file = bundle / "pid"
        if pid_file.exists() and (pid := pid_file.read_text()):
            found[bundle.name] = int(pid)
    return found


def keepers(home: Path) -> list[int]:
    """Process ids of the keepers of the runs in this place."""
    parents = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            status = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if b"oci/keeper.py" in command and str(home / "t").encode() in command:
            parents[int(process.name)] = int(status[1])
    # What a keeper starts has its command line until it has become another program.
    return [pid for pid, parent in parents.items() if parent not in parents]


async def test_the_groups_are_those_of_the_other_launchers_and_no_engine_is_needed(home: Path) -> None:
    write_tasks(home / "tasks.jsonl", TASKS)
    (other := home / "other").mkdir()
    write_tasks(other / "tasks.jsonl", TASKS)
    async with ScriptedServer("vllm", answers(TASKS)) as server:
        ended = await run(*flags(home, server.base_url, launcher="oci"), directory=home, environ=environ())
        plain = await run(*flags(other, server.base_url), directory=other)
    assert (ended.code, plain.code) == (0, 0), ended.stderr + plain.stderr
    assert essence(home / "run" / "groups.jsonl") == essence(other / "run" / "groups.jsonl")
    assert list((home / "t").iterdir()) == []
    sandboxes = [line["sandbox"]["id"] for line in lines(home / "run" / "rollouts.jsonl")]
    assert len(set(sandboxes)) == len(sandboxes) == 2 * TASKS
    assert all(line["cpu_s"] > 0 for line in lines(home / "run" / "rollouts.jsonl"))


async def test_a_sandbox_ended_by_somebody_else_costs_no_token_and_one_killed_or_short_of_memory_is_scored(
    home: Path,
) -> None:
    """Of a kill nobody can tell whether the code has earned it."""
    hoard = "Thought.\n<code>\nhoard = b'x' * (2 << 30)\n</code>"
    nap = "Thought.\n<code>\nimport time\ntime.sleep(4)\n</code>"
    asked: Counter[str] = Counter()

    def script(call: Call) -> str:
        task = next((name for name in ("q0", "q1", "q2") if f"of {name}!" in call.task), "a probe")
        asked[task] += 1
        return {"q0": hoard, "q1": RIGHT if call.turn else nap, "q2": ENDLESS}.get(task, RIGHT)

    write_tasks(home / "tasks.jsonl", 3)
    async with ScriptedServer("vllm", script) as server:

        def working(task: str) -> bool:
            return any(f"of {task}!" in s.call.task for s in server.log.completed if s.call)

        limits = {"group_size": 1, "step_timeout": 3600, "rollout_timeout": 3600, "warm_sandboxes": 0}
        given = flags(home, server.base_url, launcher="oci", max_concurrent_sandboxes=1, **limits)
        async with running(*given, directory=home, environ=environ()) as started:
            for task, ending in (("q1", signal.SIGTERM), ("q2", signal.SIGKILL)):
                await until(lambda task=task: working(task), "it works")
                await until(lambda: len(containers(home)) == 1, "the others' containers are removed")
                (pid,) = containers(home).values()
                os.kill(pid, ending)
            ended = await started.ended()
    assert ended.code == 0, ended.stderr
    told = [
        (line["task_id"], line["attempt"], line["outcome"], line["score"] is None)
        for line in lines(home / "run/rollouts.jsonl")
    ]
    assert sorted(told) == [
        ("q0", 0, "out_of_memory", False),
        ("q1", 0, "finished", False),
        ("q2", 0, "sandbox_crashed", False),
    ]
    assert asked["q1"] == 2, "nothing was sampled twice"
    assert all(
        line["score"] <= 0.45 for line in lines(home / "run/rollouts.jsonl") if line["task_id"] in ("q0", "q2")
    )
    assert list((home / "t").iterdir()) == []


@pytest.mark.slow
async def test_a_killed_run_leaves_no_container_and_resumes_to_the_same_groups(home: Path) -> None:
    write_tasks(home / "tasks.jsonl", TASKS)
    (other := home / "other").mkdir()
    write_tasks(other / "tasks.jsonl", TASKS)
    rollouts = home / "run" / "rollouts.jsonl"
    async with ScriptedServer("vllm", answers(TASKS, delay_s=0.2)) as server:
        plain = await run(*flags(other, server.base_url), directory=other)
        assert plain.code == 0, plain.stderr
        given = flags(home, server.base_url, launcher="oci")
        async with running(*given, directory=home, environ=environ()) as first:
            await until(lambda: whole_lines(rollouts) >= TASKS // 2, "it runs")
            first.signal(signal.SIGKILL)
            await first.ended()
        await until(lambda: not keepers(home), "the keeper removes all containers and ends")
        assert list((home / "t").glob("orchestrator-*/state/[!.]*")) == []
        again = await run("--env.resume", "run", "--env.launcher", "oci", directory=home, environ=environ())
    assert again.code == 0, again.stderr
    assert essence(home / "run" / "groups.jsonl") == essence(other / "run" / "groups.jsonl")
    assert outcomes(home / "run") == {"finished": 2 * TASKS}
    assert list((home / "t").iterdir()) == []


async def test_killed_in_endless_steps_with_its_keeper_a_run_leaves_nothing_after_cleanup(home: Path) -> None:
    """The sandboxes end by themselves, as their tether breaks; what the runtime remembers of them is removed."""
    write_tasks(home / "tasks.jsonl", 1)
    limits = {"group_size": 2, "step_timeout": 3600, "rollout_timeout": 3600, "warm_sandboxes": 1}
    async with ScriptedServer("vllm", always(ENDLESS)) as server:
        given = flags(home, server.base_url, launcher="oci", max_concurrent_sandboxes=2, **limits)
        async with running(*given, directory=home, environ=environ()) as killed:
            await until(lambda: len(server.log.completed) == 2 and len(containers(home)) == 3, "all are there")
            pids = list(containers(home).values())
            killed.signal(signal.SIGSTOP)
            (keeper,) = keepers(home)
            os.kill(keeper, signal.SIGKILL)
            killed.signal(signal.SIGKILL)
            await killed.ended()
    await until(lambda: not any(is_running(pid) for pid in pids), "they end by themselves")
    assert len(list((home / "t").glob("orchestrator-*/state/[!.]*"))) == 3
    cleaned = await run("--env.launcher", "oci", directory=home, command="cleanup", environ=environ())
    assert cleaned.code == 0, cleaned.stderr
    assert "removed 3 containers" in cleaned.stdout
    assert list((home / "t").iterdir()) == []


def is_running(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_keeper_killed_in_mid_run_costs_time_and_nothing_else(home: Path) -> None:
    write_tasks(home / "tasks.jsonl", TASKS)
    rollouts = home / "run" / "rollouts.jsonl"
    async with ScriptedServer("vllm", answers(TASKS, delay_s=0.2)) as server:
        given = flags(home, server.base_url, launcher="oci")
        async with running(*given, directory=home, environ=environ()) as started:
            await until(lambda: whole_lines(rollouts) >= 2 and len(containers(home)) >= 2, "it runs")
            (keeper,) = keepers(home)
            os.kill(keeper, signal.SIGKILL)
            ended = await started.ended()
    assert ended.code == 0, ended.stderr
    counts = outcomes(home / "run")
    assert counts["finished"] == 2 * TASKS
    assert set(counts) <= {"finished", "sandbox_lost", "launch_error"}
    assert list((home / "t").iterdir()) == []


async def test_a_run_that_is_stopped_ends_in_order(home: Path) -> None:
    write_tasks(home / "tasks.jsonl", TASKS)
    async with ScriptedServer("vllm", answers(TASKS, delay_s=0.5)) as server:
        given = flags(home, server.base_url, launcher="oci")
        async with running(*given, directory=home, environ=environ()) as started:
            await until(lambda: len(server.log.completed) >= 1, "it runs")
            started.signal(signal.SIGTERM)
            ended = await started.ended()
    assert (ended.code, ended.traceback) == (143, False), ended.stderr
    assert list((home / "t").iterdir()) == []


@pytest.mark.slow
async def test_the_demo_goes_without_an_engine_where_none_answers(home: Path) -> None:
    ended = await run(
        "--env.total_steps=2", "--env.run_dir=run", directory=home, command="demo", environ=environ()
    )
    assert ended.code == 0, ended.stderr
    said = " ".join(ended.stdout.split())
    assert "demo: sandboxes are made by runc itself, as Docker is not running here" in said
    assert len(lines(home / "run" / "groups.jsonl")) == 2
    assert {line["outcome"] for line in lines(home / "run" / "rollouts.jsonl")} <= {"finished", "max_steps"}
    assert list((home / "t").iterdir()) == []


@pytest.mark.slow
async def test_a_task_with_an_image_in_a_file_is_carried_out_in_it_and_a_broken_one_is_a_bad_task(
    home: Path,
) -> None:
    save_own_image(home / "own.tar")
    (home / "broken.tar").write_bytes(b"no image")
    saved(home / "odd.tar", layer(file("a")), config={"config": {"Env": 5}})
    (home / "bomb.tar.gz").write_bytes(gzip.compress(bytes(1 << 20)) * 300)
    (victim := home / "victim").mkdir(mode=0o700)
    then = layer(link("a", str(home)), link("dev", "a/victim"))
    saved(home / "linked.tar", layer(folder("a"), folder("a/victim", 0o755)), then)
    rows = [
        {"task_id": name, "question": f"Whose image is it? (of {name}!)", "answer": "mine", "image": f"./{file}"}
        for name, file in ({"q0": "own.tar"} | REFUSED_IMAGES | {"q2": "own.tar"}).items()
    ]
    (home / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    doctor = ("--env.launcher=oci", "--env.sandbox_image=./own.tar")
    own_store = environ() | {"XDG_CACHE_HOME": str(home / "cache")}
    well = await run(*doctor, directory=home, command="doctor", environ=own_store)
    assert well.code == 0, well.stdout + well.stderr
    assert "./own.tar, unpacked when it is first used" in well.stdout
    assert "confined as it must be" in well.stdout
    look = "Thought.\n<code>\nfinal_answer(open('/opt/packages/whose').read())\n</code>"
    async with ScriptedServer("vllm", always(look)) as server:
        asked = flags(home, server.base_url, launcher="oci", group_size=1, sandbox_image="./own.tar")
        ended = await run(*asked, directory=home, environ=own_store)
    assert (ended.code, ended.traceback) == (0, False), ended.stderr
    told = {line["task_id"]: line for line in lines(home / "run" / "rollouts.jsonl")}
    assert [told[name]["answer"] for name in ("q0", "q2")] == ["mine", "mine"]
    assert outcomes(home / "run") == {"finished": 2, "bad_task": len(REFUSED_IMAGES)}
    reasons = {name: told[name]["reason"] for name in REFUSED_IMAGES}
    assert "neither what `docker save` writes nor an OCI layout" in reasons["q1"]
    assert "a list of texts was expected" in reasons["q3"]
    assert "more than 100 times its size" in reasons["q4"]
    assert "behind a link" in reasons["q5"]
    assert victim.stat().st_mode & 0o777 == 0o700
    store = home / "cache" / "rollout-orchestrator" / "oci"
    assert len(list((store / "images").iterdir())) == 1, "only q0's and q2's"
    assert list((store / "drafts").iterdir()) == []
    assert list((home / "t").iterdir()) == []


def save_own_image(file: Path) -> None:
    """The sandbox image with one more file, as `docker save` writes it."""
    tag = f"orchestrator-test-own:{uuid.uuid4().hex[:8]}"
    recipe = f"FROM {DEFAULT_IMAGE}\nRUN printf mine > /opt/packages/whose\n".encode()
    with closing(docker.APIClient(**kwargs_from_env())) as engine:
        built = engine.build(fileobj=io.BytesIO(recipe), tag=tag, rm=True, decode=True)
        assert not [line for line in built if "error" in line]
        try:
            with file.open("wb") as saved:
                saved.writelines(engine.get_image(tag))
        finally:
            engine.remove_image(tag, force=True)
