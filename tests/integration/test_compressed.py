"""A run whose lines are compressed: killed, continued, and read by every command that reads a plain one."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from orchestrator.run.files import packed_name
from orchestrator.run.lines import texts
from tests.fakes.inference import ScriptedServer
from tests.fakes.runs import answers, essence, flags, lines, run, running, until

TASKS = 8


def unpacked(file: Path) -> Path:
    """The same lines beside it, plain."""
    plain = file.with_name(f"plain-{file.stem}")
    plain.write_bytes(b"".join(line.text for line in texts(file)))
    return plain


async def killed_midway(home: Path, base_url: str, record: Path) -> None:
    async with running(*flags(home, base_url, compress="zstd"), directory=home) as started:
        await until(lambda: record.exists() and len(list(texts(record))) >= 4, "some rollouts")
        started.signal(signal.SIGKILL)
        await started.process.wait()


@pytest.mark.slow
async def test_killed_and_continued_it_is_the_run_that_a_plain_one_is(home: Path) -> None:
    record, groups = (home / "run" / f"{name}.jsonl.zst" for name in ("rollouts", "groups"))
    async with ScriptedServer("vllm", answers(TASKS, delay_s=0.1)) as server:
        await killed_midway(home, server.base_url, record)
        with record.open("ab") as file:  # as if the kill had met a write
            file.write(record.read_bytes()[:20])
        ended = await run("--env.resume", str(home / "run"), directory=home)
        assert ended.code == 0, ended.stderr
        plain = await run(*flags(home, server.base_url, run_dir=home / "plain"), directory=home)
        assert plain.code == 0, plain.stderr
    assert not (home / "run" / "rollouts.jsonl").exists()
    assert essence(unpacked(groups)) == essence(home / "plain" / "groups.jsonl")
    written = lines(unpacked(record))
    assert len({line["rollout_id"] for line in written}) == len(written)
    assert (home / "run" / "groups.html").exists()
    assert json.loads((home / "run" / "run.json").read_text())["groups_file"] == "groups.jsonl.zst"


@pytest.mark.long
async def test_every_command_reads_it(home: Path) -> None:
    async with ScriptedServer("vllm", answers(TASKS)) as server:
        made = await run(*flags(home, server.base_url, compress="zstd"), directory=home)
        assert made.code == 0, made.stderr
        other = await run(*flags(home, server.base_url, run_dir=home / "plain"), directory=home)
        assert other.code == 0
        folder = str(home / "run")
        for command, *more in (
            ("verify",),
            ("view", "--output", str(home / "again.html")),
            ("replay", "--env.launcher", "process"),
            ("compare", str(home / "plain")),
            ("export", "--format", "sft", "--output", str(home / "sft")),
            ("rescore", "--env.run_dir", str(home / "rescored")),
        ):
            ended = await run(folder, *more, directory=home, command=command)
            assert ended.code == 0, (command, ended.stderr, ended.stdout)
            assert not ended.traceback
        named = await run(str(home / "run" / "groups.jsonl.zst"), directory=home, command="verify")
        assert named.code == 0, named.stdout
        again = await run(
            *flags(home, f"replay:{folder}", run_dir=home / "again"), directory=home
        )  # its completions as an endpoint
        assert again.code == 0, again.stderr
    assert essence(home / "again" / "groups.jsonl") == essence(home / "plain" / "groups.jsonl")
    assert essence(home / "rescored" / "groups.jsonl") == essence(home / "plain" / "groups.jsonl")
    assert (home / "again.html").stat().st_size > 10_000
    assert any((home / "sft").iterdir())


async def test_a_groups_file_elsewhere_and_an_evaluation_are_compressed_too(home: Path) -> None:
    async with ScriptedServer("vllm", answers(TASKS)) as server:
        asked = home / "data" / "train.jsonl"
        given = {"compress": "zstd", "data_path_to_save_groups": asked, "total_steps": 2}
        first = await run(*flags(home, server.base_url, **given), directory=home)
        second = await run(*flags(home, server.base_url, **given, run_dir=home / "second"), directory=home)
        assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
        measured = await run(
            *flags(home, server.base_url, compress="zstd", run_dir=home / "eval", group_size=None),
            directory=home,
            command="evaluate",
        )
        assert measured.code == 0, measured.stderr
        mixed = await run("--env.resume", str(home / "run"), "--env.compress", "none", directory=home)
    files = sorted(file.name for file in asked.parent.iterdir())
    assert files == ["train.html", "train.jsonl.zst", "train_1.html", "train_1.jsonl.zst"]
    assert packed_name(home / "eval" / "rollouts.jsonl").exists()
    assert (home / "eval" / "samples.jsonl").exists()
    assert mixed.code == 2
    assert "env.compress" in mixed.stderr


async def test_a_copy_that_broke_off_and_one_that_was_unpacked_are_told(home: Path) -> None:
    record, groups = (home / "run" / f"{name}.jsonl.zst" for name in ("rollouts", "groups"))
    async with ScriptedServer("vllm", answers(TASKS, delay_s=0.1)) as server:
        await killed_midway(home, server.base_url, record)
        stale = [line.text for line in texts(record) if line.is_whole][
            :-1
        ]  # as somebody unpacked it a moment before
        (home / "run" / "rollouts.jsonl").write_bytes(b"".join(stale))
        ended = await run("--env.resume", str(home / "run"), directory=home)
        assert ended.code == 0, ended.stderr
    whole = await run(str(home / "run"), directory=home, command="verify")
    assert whole.code == 0, whole.stdout
    kept = groups.read_bytes()
    for name, command in ((groups, "verify"), (record, "export")):
        with name.open("r+b") as file:
            file.truncate(name.stat().st_size * 7 // 10)
        told = await run(str(home / "run"), directory=home, command=command)
        if command == "verify":
            assert told.code == 1, told.stdout
            groups.write_bytes(kept)
        else:
            assert "unreadable" in told.stdout, told.stdout + told.stderr


async def test_reports_of_a_plain_and_of_a_compressed_file_have_names_of_their_own(home: Path) -> None:
    asked = home / "data" / "train.jsonl"
    async with ScriptedServer("vllm", answers(TASKS)) as server:
        for name, kind in (("one", "none"), ("two", "zstd")):
            more = {"run_dir": home / name, "data_path_to_save_groups": asked, "compress": kind, "total_steps": 1}
            ended = await run(*flags(home, server.base_url, **more), directory=home)
            assert ended.code == 0, ended.stderr
    files = sorted(file.name for file in asked.parent.iterdir())
    assert files == ["train.html", "train.jsonl", "train_1.html", "train_1.jsonl.zst"]
