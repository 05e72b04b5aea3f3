"""Somebody else's run directory, continued: it decides about data, and about nothing else."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.inference import ScriptedServer
from tests.fakes.runs import Ended, answers, flags, lines, run, write_tasks

KEY = "sk-canary-0123456789abcdef"
WORK = 2


@asynccontextmanager
async def somebodys_run(home: Path, **env: object) -> AsyncIterator[ScriptedServer]:
    """A run in home/run that another user made, sampling at their server, of which a part is left to do."""
    write_tasks(home / "tasks.jsonl", WORK)
    elsewhere = home / "somebody"
    elsewhere.mkdir()
    async with ScriptedServer("vllm", answers(WORK)) as server:
        arguments = flags(home, server.base_url, total_steps=1, **env)
        made = await run(*arguments, directory=home, environ={"HOME": str(elsewhere)})
        assert made.code == 0, made.stderr
        yield server


async def go_on(home: Path, *more: str, command: str = "process") -> Ended:
    arguments = ("--env.resume", "run", "--env.total_steps", str(WORK), *more)
    return await run(*arguments, directory=home, environ={"OPENAI_API_KEY": KEY}, command=command)


def edit(home: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = home / "run" / "run.json"
    told = json.loads(file.read_text())
    change(told)
    file.write_text(json.dumps(told))


def refused(ended: Ended, *said: str) -> None:
    assert ended.code == 2, ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1, ended.stderr
    for words in said:
        assert words in ended.stderr


async def test_no_key_goes_to_an_address_somebody_else_wrote(home: Path) -> None:
    async with somebodys_run(home) as server:
        before = len(server.log.all)
        refused(await go_on(home), f"--openai.base_url {server.base_url}", "--env.launcher process")
        assert len(server.log.all) == before
        async with ScriptedServer("vllm", answers(WORK), api_key=KEY) as own:
            ended = await go_on(home, f"--openai.base_url={own.base_url}", "--env.launcher=process")
            assert ended.code == 0, ended.stderr
            assert own.log.completions
        assert len(server.log.all) == before
    assert len(lines(home / "run" / "groups.jsonl")) == WORK


@pytest.mark.parametrize("command", ["evaluate", "serve", "process"])
async def test_every_command_asks(home: Path, command: str) -> None:
    async with somebodys_run(home) as server:
        before = len(server.log.all)
        refused(await go_on(home, command=command), "--openai.base_url", "--env.launcher process")
        assert len(server.log.all) == before


async def test_what_is_asked_for_can_be_copied_and_need_not_be_said_again(home: Path) -> None:
    async with somebodys_run(home) as server:
        asked = (await go_on(home)).stderr.partition("add: ")[2]
        assert (await go_on(home, *shlex.split(asked))).code == 0
        again = await run("--env.resume", "run", "--env.total_steps", "3", directory=home)
        assert again.code == 0, again.stderr
        assert server.log.completions


async def test_no_module_that_somebody_elses_run_names_is_imported(home: Path) -> None:
    (home / "hostile.py").write_text("open('imported', 'w').close()\nthing = None\n")
    async with somebodys_run(home) as server:
        said = ("--env.launcher=process", f"--openai.base_url={server.base_url}")
        for name, value in (
            ("dataset", "python:hostile:thing"),
            ("scoring_strategy", "python:hostile:thing"),
            ("host_tools", ["python:hostile:thing"]),
            ("agent", "program:hostile.py"),
        ):
            edit(home, lambda told, name=name, value=value: told["config"]["env"].update({name: value}))  # type: ignore[misc]
            refused(await go_on(home, *said), f"--env.{name} ")
    assert not (home / "imported").exists()


@pytest.mark.long
async def test_waived_measures_are_not_taken_over(home: Path) -> None:
    async with somebodys_run(home) as server:
        edit(home, lambda told: told["config"]["env"].update(waive_hardening=["seccomp"], docker_runtime="other"))
        said = ("--env.launcher=process", f"--openai.base_url={server.base_url}")
        ended = await go_on(home, *said)
        assert ended.code == 0, ended.stderr
    config = json.loads((home / "run" / "run.json").read_text())["config"]["env"]
    assert (config["waive_hardening"], config["docker_runtime"]) == ([], None)


@pytest.mark.long
async def test_a_groups_file_elsewhere_is_not_touched_unasked(home: Path) -> None:
    async with somebodys_run(home) as server:
        victim = home / "mine.jsonl"
        victim.write_bytes((home / "run" / "groups.jsonl").read_bytes() + b'{"torn')
        before = victim.read_bytes()
        said = ("--env.launcher=process", f"--openai.base_url={server.base_url}")
        for named in (str(victim), "../mine.jsonl", "sub/../../mine.jsonl"):
            edit(home, lambda told, named=named: told.update(groups_file=named))  # type: ignore[misc]
            refused(await go_on(home, *said), "--env.data_path_to_save_groups ")
            assert victim.read_bytes() == before
        edit(home, lambda told: told.update(groups_file=str(victim)))
        ended = await go_on(home, *said, f"--env.data_path_to_save_groups={victim}")
        assert ended.code == 0, ended.stderr
        assert len(lines(victim)) == WORK


@pytest.mark.long
async def test_no_link_leads_out_of_a_run_directory(home: Path) -> None:
    async with somebodys_run(home) as server:
        said = ("--env.launcher=process", f"--openai.base_url={server.base_url}")
        for name in (
            "groups.jsonl",
            "rollouts.jsonl",
            "run.json.part",
            "lock",
            "groups.jsonl.torn",
            "output/deep",
        ):
            link, kept, victim = home / "run" / name, home / "kept", home / f"victim-{Path(name).name}"
            link.parent.mkdir(exist_ok=True)
            if link.exists():
                link.rename(kept)
                victim.write_bytes(kept.read_bytes())
            link.symlink_to(victim)
            ended = await go_on(home, *said)
            assert ended.code == 2, ended.stderr
            assert f"run/{name}" in ended.stderr.splitlines()[-1]
            assert victim.exists() == kept.exists()
            assert not victim.exists() or victim.read_bytes() == kept.read_bytes()
            link.unlink()
            if kept.exists():
                kept.rename(link)
        (home / "run" / "latest").symlink_to("groups.jsonl")  # as wandb makes them
        assert (await go_on(home, *said)).code == 0


async def test_a_key_that_others_can_read_proves_nothing(home: Path) -> None:
    write_tasks(home / "tasks.jsonl", WORK)
    async with ScriptedServer("vllm", answers(WORK)) as server:
        made = await run(*flags(home, server.base_url, total_steps=1), directory=home)
        assert made.code == 0, made.stderr
        (key,) = (home / ".local" / "state").rglob("run-key")
        assert key.stat().st_mode & 0o777 == 0o600
        os.chmod(key, 0o644)
        refused(await go_on(home), "--openai.base_url")
        os.chmod(key, 0o600)
        ended = await go_on(home)
        assert ended.code == 0, ended.stderr
