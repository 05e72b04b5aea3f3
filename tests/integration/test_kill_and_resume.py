"""A run that is killed at any instant and resumed gives what an undisturbed one gives: nothing lost, nothing
doubled, nothing torn, nothing left behind."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from orchestrator.launch.names import LABEL_OWNER
from tests.e2e.leftovers import engine
from tests.fakes.inference import ScriptedServer, always
from tests.fakes.runs import (
    answers,
    cleaning,
    essence,
    flags,
    lines,
    outcomes,
    place,
    printed_outcomes,
    run,
    running,
    until,
    whole_lines,
    write_tasks,
)

TASKS, GROUP = 8, 2
ROLLOUTS = TASKS * GROUP
BAD_PLACE = 3
INSTANTS = 5
LEFT_S = 120.0


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    async def run_it(directory: Path) -> list[str]:
        write_tasks(directory / "tasks.jsonl", TASKS, bad=BAD_PLACE)
        async with ScriptedServer("vllm", answers(TASKS)) as server:
            ended = await run(*flags(directory, server.base_url), directory=directory)
        assert ended.code == 0, ended.stderr
        assert printed_outcomes(ended) == {"finished": ROLLOUTS, "bad_task": 1}
        return essence(directory / "run" / "groups.jsonl")

    with place() as directory:
        return asyncio.run(run_it(directory))


@pytest.mark.long
@pytest.mark.parametrize("instant", range(INSTANTS))
async def test_killed_run_resumes_to_the_same_groups(home: Path, undisturbed: list[str], instant: int) -> None:
    draw = random.Random()
    begun = int((instant + draw.random()) / INSTANTS * ROLLOUTS)
    write_tasks(home / "tasks.jsonl", TASKS, bad=BAD_PLACE)
    rollouts, groups = home / "run" / "rollouts.jsonl", home / "run" / "groups.jsonl"
    async with ScriptedServer("vllm", answers(TASKS, delay_s=0.05)) as server:
        async with running(*flags(home, server.base_url), directory=home) as first:
            await until(lambda: whole_lines(rollouts) >= begun and (home / "run" / "run.json").exists(), "run")
            await asyncio.sleep(draw.uniform(0, 0.3))
            first.signal(signal.SIGKILL)
            await first.ended()
            before = whole_lines(rollouts)
        again = await run("--env.resume", "run", directory=home)
    assert again.code == 0, again.stderr
    assert essence(groups) == undisturbed
    ids = Counter(line["rollout_id"] for line in lines(rollouts))
    assert max(ids.values()) == 1
    # Nothing that was on record has been run again.
    assert outcomes(home / "run") == {"finished": ROLLOUTS, "bad_task": 1}
    assert len(lines(rollouts)) == ROLLOUTS + 1 >= before
    assert printed_outcomes(again) == outcomes(home / "run")
    await _nothing_left(home)


@pytest.mark.long
@pytest.mark.docker
async def test_killed_run_with_containers_resumes_and_removes_them(home: Path, undisturbed: list[str]) -> None:
    write_tasks(home / "tasks.jsonl", TASKS, bad=BAD_PLACE)
    rollouts = home / "run" / "rollouts.jsonl"
    async with ScriptedServer("vllm", answers(TASKS, delay_s=0.2)) as server:
        async with running(*flags(home, server.base_url, launcher="docker"), directory=home) as first:
            pid = first.process.pid
            await until(lambda: whole_lines(rollouts) >= ROLLOUTS // 3, "it runs")
            first.signal(signal.SIGKILL)
            await first.ended()
        again = await run("--env.resume", "run", directory=home)
    assert again.code == 0, again.stderr
    assert essence(home / "run" / "groups.jsonl") == undisturbed
    assert outcomes(home / "run") == {"finished": ROLLOUTS, "bad_task": 1}
    assert states_of(pid) == []
    await _nothing_left(home)


@pytest.mark.long
@pytest.mark.docker
async def test_containers_end_with_their_orchestrator_and_only_those_of_the_dead_are_removed(home: Path) -> None:
    """Killed in the middle of steps without end, which nothing inside the containers would ever leave."""
    (home / "live").mkdir()
    script = always("Thought.\n<code>\nwhile True:\n    pass\n</code>")
    endless = {
        "launcher": "docker",
        "step_timeout": 3600,
        "rollout_timeout": 3600,
        "group_size": 1,
        "drain_timeout": 0,
        "warm_sandboxes": 0,
    }
    async with ScriptedServer("vllm", script) as server:
        given = []
        for directory in (home, home / "live"):
            write_tasks(directory / "tasks.jsonl", 1)
            given.append(flags(directory, server.base_url, **endless))
        async with (
            running(*given[0], directory=home) as killed,
            running(*given[1], directory=home / "live") as live,
        ):
            both = [killed.process.pid, live.process.pid]
            await until(lambda: len(server.log.completed) == 2, "both are in a step")
            killed.signal(signal.SIGKILL)
            await killed.ended()
            await until(lambda: "running" not in states_of(both[0]), "it ends by itself")
            assert states_of(both[1]) == ["running"]
            with cleaning():
                cleaned = await run(directory=home, command="cleanup")
            assert cleaned.code == 0, cleaned.stderr
            assert [states_of(pid) for pid in both] == [[], ["running"]]
            assert not any((home / "t").glob("orchestrator-*"))
            assert any((home / "live" / "t").glob("orchestrator-*"))
            live.signal(signal.SIGTERM)
            await live.ended()
        assert states_of(both[1]) == []


def states_of(pid: int) -> list[str]:
    """Of the containers an orchestrator with this pid made."""
    with engine() as client:
        labelled = client.containers(all=True, filters={"label": LABEL_OWNER})
    return [c["State"] for c in labelled if f":{pid}:" in c["Labels"][LABEL_OWNER]]


@pytest.mark.long
async def test_torn_ends_are_set_aside_and_never_parsed(home: Path, undisturbed: list[str]) -> None:
    write_tasks(home / "tasks.jsonl", TASKS, bad=BAD_PLACE)
    rollouts, groups = home / "run" / "rollouts.jsonl", home / "run" / "groups.jsonl"
    async with ScriptedServer("vllm", answers(TASKS)) as server:
        assert (await run(*flags(home, server.base_url), directory=home)).code == 0
        *kept, last = groups.read_bytes().splitlines(keepends=True)
        groups.write_bytes(b"".join(kept) + last[: len(last) // 2])
        *kept, last = rollouts.read_bytes().splitlines(keepends=True)
        rollouts.write_bytes(b"".join(kept) + last[: len(last) // 2])
        again = await run("--env.resume", "run", directory=home)
    assert again.code == 0, again.stderr
    assert essence(groups) == undisturbed
    assert len(lines(rollouts)) == ROLLOUTS + 1
    assert last.startswith(Path(f"{rollouts}.torn").read_bytes().rstrip(b"\n"))
    assert Path(f"{groups}.torn").read_bytes().strip()


@pytest.mark.long
async def test_half_done_groups_are_completed_under_the_old_seeds(home: Path, undisturbed: list[str]) -> None:
    """A record without its end: groups lost, every second rollout lost."""
    write_tasks(home / "tasks.jsonl", TASKS, bad=BAD_PLACE)
    rollouts, groups = home / "run" / "rollouts.jsonl", home / "run" / "groups.jsonl"
    async with ScriptedServer("vllm", answers(TASKS)) as server:
        assert (await run(*flags(home, server.base_url), directory=home)).code == 0
        groups.unlink()
        kept = [line for line in lines(rollouts) if line.get("index") != 1]
        texts = rollouts.read_bytes().splitlines(keepends=True)
        rollouts.write_bytes(b"".join(t for t in texts if b'"index":1,' not in t))
        asked = len(server.log.completions)
        again = await run("--env.resume", "run", directory=home)
        assert again.code == 0, again.stderr
        run_again = {line["rollout_id"] for line in lines(rollouts)[len(kept) :]}
        assert len(run_again) == TASKS
        served = sum(len(line["completions"]) for line in lines(rollouts)[len(kept) :])
        assert len(server.log.completions) - asked == served
    assert essence(groups) == undisturbed


@pytest.mark.long
async def test_a_resumed_run_takes_over_its_settings_and_refuses_others(home: Path) -> None:
    write_tasks(home / "tasks.jsonl", 2)
    async with ScriptedServer("vllm", answers(2)) as server:
        assert (await run(*flags(home, server.base_url, seed=None), directory=home)).code == 0
        before = (home / "run" / "groups.jsonl").read_bytes()
        for flag, name in (
            ("--env.group_size=4", "--env.group_size"),
            ("--env.temperature=0.5", "--env.temperature"),
            ("--env.seed=8", "--env.seed"),
            ("--openai.model_name=other", "openai.model_name"),
            ("--env.run_dir=elsewhere", "env.run_dir"),
        ):
            refused = await run("--env.resume", "run", flag, directory=home)
            assert refused.code == 2, refused.stderr
            assert name in refused.stderr
            assert not refused.traceback
        # The very command of the first start, and free settings, are welcome.
        same = await run(*flags(home, server.base_url, seed=None, resume="run"), directory=home)
        assert same.code == 0, same.stderr
        more = await run("--env.resume", "run", "--env.total_steps", "3", directory=home)
        assert more.code == 0, more.stderr
    text = (home / "run" / "groups.jsonl").read_bytes()
    assert text.startswith(before)
    assert len(text.splitlines()) == 3


@pytest.mark.long
async def test_a_changed_dataset_is_refused(home: Path) -> None:
    write_tasks(home / "tasks.jsonl", 2)
    async with ScriptedServer("vllm", answers(9)) as server:
        assert (await run(*flags(home, server.base_url), directory=home)).code == 0
        (home / "run" / "groups.jsonl").write_bytes(b"")
        (home / "tasks.jsonl").write_text('{"task_id": "q8", "question": "of q8!", "answer": "8"}\n')
        again = await run("--env.resume", "run", directory=home)
    assert again.code == 2
    assert "the dataset has changed" in again.stderr
    assert not again.traceback


@pytest.mark.long
async def test_nothing_to_resume_is_one_line(home: Path) -> None:
    (home / "empty").mkdir()
    refused = await run("--env.resume", "empty", directory=home)
    assert refused.code == 2
    assert len(refused.stderr.strip().splitlines()) == 1


@pytest.mark.long
async def test_second_orchestrator_is_kept_out_as_long_as_the_first_lives(home: Path) -> None:
    write_tasks(home / "tasks.jsonl", 2)
    async with (
        ScriptedServer("vllm", answers(2, delay_s=10_000.0)) as server,
        running(*flags(home, server.base_url), directory=home) as first,
    ):
        await until((home / "run" / "run.json").exists, "the first one began")
        for second in (flags(home, server.base_url), ["--env.resume", "run"]):
            refused = await run(*second, directory=home)
            assert refused.code == 1, refused.stderr
            assert "another orchestrator" in refused.stderr
            assert not refused.traceback
        first.signal(signal.SIGKILL)
        await first.ended()
    async with ScriptedServer("vllm", answers(2)) as server:
        again = await run("--env.resume", "run", f"--openai.base_url={server.base_url}", directory=home)
    assert again.code == 0, again.stderr


async def test_a_used_directory_is_not_mixed_with_another_run(home: Path) -> None:
    write_tasks(home / "tasks.jsonl", 2)
    async with ScriptedServer("vllm", answers(2)) as server:
        assert (await run(*flags(home, server.base_url), directory=home)).code == 0
        mixed = await run(*flags(home, server.base_url), directory=home)
    assert mixed.code == 2
    assert "--env.resume" in mixed.stderr
    assert len(lines(home / "run" / "groups.jsonl")) == 2


async def _nothing_left(directory: Path) -> None:
    """No directory of ours; processes of the killed run end by themselves."""

    def gone() -> bool:
        return not any((directory / "t").glob("orchestrator-*")) and not _processes_of(directory)

    async with asyncio.timeout(LEFT_S):
        await until(gone, "nothing is left")


def _processes_of(directory: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode("utf-8", "replace")
        except OSError:
            continue
        if "sandbox" in command and str(directory) in command:
            found.append(command)
    return found
