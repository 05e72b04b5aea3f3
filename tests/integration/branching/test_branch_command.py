"""`orchestrator branch`: other continuations of a recorded rollout, in sandboxes brought to one of its turns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import oci_images
from tests.fakes.inference import Call, Model, ScriptedServer
from tests.fakes.runs import Ended, flags, lines, outcomes, place, run, write_tasks
from tests.fakes.tokenizer import tokenizer_folder
from tests.fakes.written import demand_as_published
from tests.integration.test_oci_run import environ

_WHY_NOT = oci_images.why_not()
pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(600),
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
]
TURNS = 4
PARENT = "g000000-r00-a0"


@pytest.fixture
def home() -> Iterator[Path]:
    oci_images.stored_image()
    with place() as directory:
        write_tasks(directory / "tasks.jsonl", 1)
        yield directory


def script(call: Call) -> str:
    """The state of the turns before is needed, and an address is printed that differs from box to box. A thought
    tells which draw it is."""
    turn = call.turn + 1
    asked = "please" in call.messages[-1].content
    if turn == 1:
        code = "seen = [1]\nprint(seen, object())"
    elif turn < TURNS:
        code = f"seen.append({turn})\nprint(seen)"
    else:
        code = "final_answer(sum(seen) + 100)" if asked else "final_answer(sum(seen))"
    return f"Thought {turn} of {call.seed}{' as asked' * asked}.\n<code>\n{code}\n</code>"


async def parent(home: Path, base_url: str, **env: object) -> dict[str, Any]:
    """The line of a rollout of a run."""
    limits = {"group_size": 1, "warm_sandboxes": 0, "launcher": "oci", **env}
    ended = await run(*flags(home, base_url, **limits), directory=home, environ=environ())
    assert ended.code == 0, ended.stderr
    return by_id(home / "run")[PARENT]


def by_id(run_directory: Path) -> dict[str, dict[str, Any]]:
    return {line["rollout_id"]: line for line in lines(run_directory / "rollouts.jsonl")}


async def branched(home: Path, *given: str, into: str = "branch", of: str = "run") -> Ended:
    said = (str(home / of), f"--env.run_dir={home / into}", "--env.launcher=oci", "--env.warm_sandboxes=0", *given)
    return await run(*said, directory=home, environ=environ(), command="branch")


def ids(completion: dict[str, Any]) -> tuple[list[int] | None, list[int] | None, list[float] | None]:
    return completion["prompt_ids"], completion["token_ids"], completion["logprobs"]


@pytest.mark.slow
async def test_continuations_stand_on_the_recorded_ids_and_are_a_run_like_others(home: Path) -> None:
    async with ScriptedServer("vllm", script) as server:
        old = await parent(home, server.base_url)
        sampled = len(server.log.completed)
        ended = await branched(home, f"--rollout={PARENT}", "--turn=3", "-n", "3")
        assert ended.code == 0, ended.stderr
        assert len(server.log.completed) == sampled + 3 * 2, "the first two turns are from the record"
        again = await branched(home, f"--rollout={PARENT}", "--turn=-2", "-n=3", into="again")
        assert again.code == 0, again.stderr
        last = await branched(home, f"--rollout={PARENT}", "-n=1", into="last")
        assert last.code == 0, last.stderr
        nested = await branched(home, f"--rollout={PARENT}", "-n=1", "--turn=4", of="branch", into="nested")
        assert nested.code == 0, nested.stderr
    told = json.loads((home / "branch/run.json").read_text())
    assert [told[name] for name in ("command", "of", "rollout", "turn")] == [
        "branch",
        str(home / "run"),
        PARENT,
        3,
    ]
    demand_as_published(home / "branch")
    new = by_id(home / "branch")
    assert len(new) == 3
    for line in new.values():
        assert line["branch"] == {"parent": PARENT, "turn": 3, "words": [], "run": str(home / "run")}
        turns = line["completions"]
        assert [turn.get("inherited", False) for turn in turns] == [True, True, False, False]
        for then, now in zip(old["completions"][:2], turns[:2], strict=True):
            assert ids(then) == ids(now)
        assert turns[2]["prompt_ids"] == old["completions"][2]["prompt_ids"], "the record's words, not the box's"
        assert (line["outcome"], line["answer"]) == ("finished", "6")
    assert len({line["completions"][2]["text"] for line in [old, *new.values()]}) == 4, "each has its own seed"
    assert by_id(home / "again")[PARENT]["completions"][2]["text"] == new[PARENT]["completions"][2]["text"]
    (group,) = lines(home / "branch/groups.jsonl")
    own = [sum(len(turn["token_ids"]) for turn in line["completions"][2:]) for line in new.values()]
    assert sorted(sum(token != -100 for token in masks) for masks in group["masks"]) == sorted(own)
    assert by_id(home / "last")[PARENT]["branch"]["turn"] == TURNS
    assert by_id(home / "nested")[PARENT]["branch"]["run"] == str(home / "branch")

    for command, *given in (("verify",), ("view",), ("export", "--format=trl"), ("rescore",)):
        ended = await run(str(home / "branch"), *given, directory=home, environ=environ(), command=command)
        assert ended.code == 0, f"{command} {ended.stderr} {ended.stdout}"
    ended = await run(str(home), directory=home, command="runs")
    assert "branch" in ended.stdout
    ended = await run(str(home / "run"), str(home / "branch"), directory=home, command="compare")
    assert ended.code == 0, ended.stderr
    ended = await run(
        *(str(home / "branch"), "--env.launcher=oci", f"--env.run_dir={home / 'replayed'}"),
        directory=home,
        environ=environ(),
        command="replay",
    )
    assert ended.code == 0, ended.stdout + ended.stderr
    assert "3 of 3 rollouts as recorded" in ended.stdout


@pytest.mark.slow
async def test_a_users_word_comes_behind_the_prompt_and_is_played_again(home: Path) -> None:
    async with ScriptedServer("vllm", script) as server:
        await parent(home, server.base_url)
        ended = await branched(home, f"--rollout={PARENT}", "--turn=4", "-n=2", "--say=please do")
        assert ended.code == 0, ended.stderr
        nested = await branched(home, f"--rollout={PARENT}", "-n=1", "--say=now", of="branch", into="nested")
        assert nested.code == 0, nested.stderr
    for line in by_id(home / "branch").values():
        assert line["branch"]["words"] == [{"turn": 4, "text": "please do"}]
        said = line["completions"][3]["messages"][-1]
        assert said["role"] == "user"
        assert said["content"].endswith("\n\nplease do")
        assert line["answer"] == "106"
    (line,) = by_id(home / "nested").values()
    assert line["completions"][3]["messages"][-1]["content"].endswith("\n\nplease do\n\nnow")
    for name in ("branch", "nested"):
        ended = await run(
            *(str(home / name), "--env.launcher=oci", f"--env.run_dir={home / 'replayed' / name}"),
            directory=home,
            environ=environ(),
            command="replay",
        )
        assert ended.code == 0, ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["vllm", pytest.param("openai", marks=pytest.mark.full)])
async def test_another_model_has_its_own_ids(home: Path, dialect: str) -> None:
    """What came before is context for it, as texts: none of the record's ids stand in its line."""
    other = tokenizer_folder(600)
    async with ScriptedServer("vllm", script) as server:
        old = await parent(home, server.base_url)
    async with ScriptedServer(dialect, script, model=Model(other)) as server:
        named = (f"--openai.base_url={server.base_url}", "--openai.model_name=scripted")
        ended = await branched(
            home, f"--rollout={PARENT}", "--turn=3", "-n=2", f"--env.tokenizer_name={other}", *named
        )
        assert ended.code == 0, ended.stderr
    assert "taken as text" in ended.stdout + ended.stderr
    for line in by_id(home / "branch").values():
        turns = line["completions"]
        assert all(ids(turn) == (None, None, None) for turn in turns[:2])
        assert (line["outcome"], line["answer"]) == ("finished", "6")
        if dialect == "vllm":
            assert turns[2]["segment"] == turns[3]["segment"] != turns[1]["segment"]
            assert turns[2]["prompt_ids"][:8] != old["completions"][0]["prompt_ids"][:8]
            assert len(turns[2]["prompt_ids"]) > 500, "the whole conversation"
            assert line["token_source"] == "sampled"
    ended = await run(str(home / "branch"), directory=home, command="verify")
    assert ended.code == 0, ended.stderr
    ended = await run(
        *(str(home / "branch"), "--env.launcher=oci", f"--env.run_dir={home / 'replayed'}"),
        directory=home,
        environ=environ(),
        command="replay",
    )
    assert ended.code == 0, ended.stdout + ended.stderr


async def test_what_cannot_be_is_said_in_one_line(home: Path) -> None:
    async with ScriptedServer("vllm", script) as server:
        await parent(home, server.base_url)
        tasks = (home / "tasks.jsonl").read_text()
        for given, reason in (
            ((), "--rollout is missing"),
            (("--rollout=g000000-r01-a0",), f"has no rollout g000000-r01-a0; did you mean {PARENT}?"),
            ((f"--rollout={PARENT}", "--turn=5"), "has the turns 1 to 4 (-1: the last), no 5"),
            ((f"--rollout={PARENT}", "--turn=0"), "no 0"),
            ((f"--rollout={PARENT}", "--turn=-5"), "no -5"),
            ((f"--rollout={PARENT}", "--env.dataset=jsonl:none.jsonl"), "none.jsonl"),
        ):
            ended = await branched(home, *given)
            assert (ended.code, ended.stderr.count("\n")) == (2, 1), ended.stderr
            assert reason in ended.stderr
        (home / "tasks.jsonl").write_text(tasks.replace('"answer": "0"', '"answer": "1"'))
        assert "has another answer" in (await branched(home, f"--rollout={PARENT}")).stderr
        (home / "tasks.jsonl").write_text(tasks.replace("What is", "What was"))
        ended = await branched(home, f"--rollout={PARENT}", "-n=2", "--turn=2")
        assert ended.code == 1
        assert outcomes(home / "branch") == {"record_error": 2}, "another task's prompt: nothing of it is scored"
    ended = await branched(home, f"--rollout={PARENT}", f"--openai.base_url=replay:{home / 'run'}")
    assert "samples nothing" in ended.stderr
