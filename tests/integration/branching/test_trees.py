"""Trees as groups: a trunk, and rollouts that are brought to a turn of it and sample on their own from there."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import oci_images
from tests.fakes.inference import Call, ScriptedServer
from tests.fakes.runs import essence, flags, lines, outcomes, place, run, running, until, write_tasks
from tests.integration.test_oci_run import containers, environ

_WHY_NOT = oci_images.why_not()
pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(600),
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
]
TURNS = 4


@pytest.fixture
def home() -> Iterator[Path]:
    oci_images.stored_image()
    with place() as directory:
        write_tasks(directory / "tasks.jsonl", 1)
        yield directory


def script(call: Call) -> str:
    """Each step needs the state of those before; what is said, and whether it is right, follows from the seed."""
    turn, seed = call.turn + 1, call.seed or 0
    if turn == 1:
        code = f"seen = [{seed}]\nprint(seen)"
    elif turn < TURNS:
        code = f"seen.append({seed})\nprint(len(seen), seen)"
    else:
        code = f"final_answer({seed // 8 % 2} if len(seen) == {TURNS - 1} else 'lost')"
    return f"Thought {turn} {seed}.\n<code>\n{code}\n</code>"


def settings(**more: object) -> dict[str, object]:
    return {"warm_sandboxes": 0, "max_concurrent_sandboxes": 3, "launcher": "oci", **more}


def tree(run_directory: Path) -> dict[str, tuple[str, int] | None]:
    """Of each rollout with a score: where it branched."""
    found = {}
    for line in lines(run_directory / "rollouts.jsonl"):
        if line["score"] is not None:
            branch: dict[str, Any] | None = line.get("branch")
            found[line["rollout_id"]] = None if branch is None else (branch["parent"], branch["turn"])
    return found


async def test_branches_share_their_trunks_turns_and_sample_on_their_own(home: Path) -> None:
    async with ScriptedServer("vllm", script) as server:
        ended = await run(
            *flags(home, server.base_url, **settings(group_size=5, branch="turns:2,4 width:2")),
            directory=home,
            environ=environ(),
        )
    assert ended.code == 0, ended.stderr
    trunk = "g000000-r00-a0"
    at = {"r01": 2, "r02": 2, "r03": 4, "r04": 4}
    expected = {f"g000000-{place}-a0": (trunk, turn) for place, turn in at.items()}
    assert tree(home / "run") == {trunk: None, **expected}, ended.stderr
    assert outcomes(home / "run") == {"finished": 5}
    assert_each_token_is_trained_once(home / "run")
    checked = await run(str(home / "run"), directory=home, command="verify", environ=environ())
    assert checked.code == 0, checked.stdout + checked.stderr


def assert_each_token_is_trained_once(run_directory: Path) -> None:
    """An own reading of both files: a loss that sums over each row's labels meets every completion of the record
    exactly once, in the row of who sampled it."""
    (columns,) = lines(run_directory / "groups.jsonl")
    rows = {facts["rollout_id"]: place for place, facts in enumerate(columns["overrides"])}
    for line in lines(run_directory / "rollouts.jsonl"):
        if line["rollout_id"] not in rows:
            continue
        labels = columns["masks"][rows[line["rollout_id"]]]
        own = [c["token_ids"] for c in line["completions"] if not c.get("inherited")]
        assert [label for label in labels if label != -100] == [token for ids in own for token in ids]
        assert sum(map(len, own)) == columns["overrides"][rows[line["rollout_id"]]]["completion_tokens"]


def sampled_tokens(run_directory: Path) -> int:
    own = [
        c
        for line in lines(run_directory / "rollouts.jsonl")
        for c in line["completions"]
        if not c.get("inherited")
    ]
    return sum(completion["completion_tokens"] for completion in own)


@pytest.mark.slow
async def test_a_kill_at_any_point_leaves_the_same_tree(home: Path) -> None:
    """Killed once the trunk has begun to sample, then within the branches."""
    how = settings(group_size=5, branch="turns:2,4 width:2")
    (other := home / "other").mkdir()
    write_tasks(other / "tasks.jsonl", 1)
    async with ScriptedServer("vllm", script) as server:
        whole = await run(*flags(other, server.base_url, **how), directory=other, environ=environ())
        assert whole.code == 0, whole.stderr
        arguments: list[str] = flags(home, server.base_url, **how)
        for more in (2, 3, 2):
            seen = len(server.log.completed)
            async with running(*arguments, directory=home, environ=environ()) as started:
                await until(lambda seen=seen, more=more: len(server.log.completed) >= seen + more, "it samples")
                started.signal(signal.SIGKILL)
                await started.ended()
            arguments = [f"--env.resume={home / 'run'}", f"--openai.base_url={server.base_url}"]
        ended = await run(*arguments, directory=home, environ=environ())
    assert ended.code == 0, ended.stderr

    def without_attempts(found: dict[str, tuple[str, int] | None]) -> set[object]:
        return {(name[:11], at and (at[0][:11], at[1])) for name, at in found.items()}

    assert essence(home / "run/groups.jsonl") == essence(other / "run/groups.jsonl")
    assert without_attempts(tree(home / "run")) == without_attempts(tree(other / "run"))
    assert_each_token_is_trained_once(home / "run")


@pytest.mark.slow
async def test_branches_that_lose_their_boxes_go_on(home: Path) -> None:
    def slow(call: Call) -> str:
        return script(call).replace("print(len", "__import__('time').sleep(0.4)\nprint(len")

    how = settings(group_size=3, branch="turns:3 width:2")
    (other := home / "other").mkdir()
    write_tasks(other / "tasks.jsonl", 1)
    async with ScriptedServer("vllm", slow) as server:
        plain = await run(*flags(other, server.base_url, **how), directory=other, environ=environ())
        assert plain.code == 0, plain.stderr
        before = len(server.log.completed)
        trunk = len(lines(other / "run/rollouts.jsonl")[0]["completions"])
        server.at_most = before + trunk + 2
        async with running(*flags(home, server.base_url, **how), directory=home, environ=environ()) as started:
            await until(lambda: len(server.log.completed) == server.at_most, "both branches are under way")
            for pid in containers(home).values():
                os.kill(pid, signal.SIGTERM)
            server.at_most = None
            ended = await started.ended()
    assert ended.code == 0, ended.stderr
    assert essence(home / "run/groups.jsonl") == essence(other / "run/groups.jsonl")
    assert len(server.log.completed) == 2 * before, "nothing was sampled twice"
    assert_each_token_is_trained_once(home / "run")


async def test_what_cannot_be_branched_from_is_drawn_whole(home: Path) -> None:
    """The first step prints other words each time: no box can be brought behind it."""

    def odd(call: Call) -> str:
        said = script(call)
        words = "print(*(__import__('secrets').choice(['cat', 'dog', 'sun', 'sea']) for _ in range(30)))"
        return said.replace("print(seen)", words) if call.turn == 0 else said

    async with ScriptedServer("vllm", odd) as server:
        ended = await run(
            *flags(home, server.base_url, **settings(group_size=3, branch="turns:3 width:2")),
            directory=home,
            environ=environ(),
        )
    assert ended.code == 0, ended.stderr
    assert outcomes(home / "run") == {"finished": 3, "record_error": 2}
    assert tree(home / "run") == dict.fromkeys(("g000000-r00-a0", "g000000-r01-a1", "g000000-r02-a1"))
    (columns,) = lines(home / "run/groups.jsonl")
    assert columns["advantages"] is None, "nobody branched"


async def test_the_operators_function_says_where(home: Path) -> None:
    (home / "places.py").write_text(
        "def forks(trunk):\n"
        "    assert trunk.score.value in (0.0, 1.0)\n"
        "    return [(len(trunk.attempt.record.turns), 2)]\n"
        "def wrong(trunk):\n"
        "    return [(2, 9)]\n"
    )
    how = settings(group_size=4)
    async with ScriptedServer("vllm", script) as server:
        refused = await run(
            *flags(home, server.base_url, **how, branch="python:places:wrong", run_dir=home / "refused"),
            directory=home,
            environ=environ(),
        )
        ended = await run(
            *flags(home, server.base_url, **how, branch="python:places:forks"), directory=home, environ=environ()
        )
    assert refused.code == 2, refused.stderr
    assert "env.branch: python:places:wrong returned for g000000-r00-a0: 9 branches" in refused.stderr
    assert ended.code == 0, ended.stderr
    at = {"g000000-r01-a0": TURNS, "g000000-r02-a0": TURNS}
    trunk = "g000000-r00-a0"
    assert tree(home / "run") == {
        trunk: None,
        **{name: (trunk, turn) for name, turn in at.items()},
        "g000000-r03-a0": None,
    }


async def test_a_second_draw_is_a_tree_of_its_own(home: Path) -> None:
    def equal(call: Call) -> str:
        return script(call).replace(f"final_answer({(call.seed or 0) // 8 % 2}", "final_answer(7")

    async with ScriptedServer("vllm", equal) as server:
        ended = await run(
            *flags(
                home,
                server.base_url,
                **settings(group_size=3, branch="entropy:1 width:2 trunk:masked", zero_variance="resample"),
            ),
            directory=home,
            environ=environ(),
        )
    assert ended.code == 0, ended.stderr
    found = tree(home / "run")
    assert len(found) == 6
    for name, branch in found.items():
        place, attempt = name.split("-")[1:]
        assert (branch is None) == (place == "r00")
        assert branch is None or branch[0] == f"g000000-r00-{attempt}"
    checked = await run(str(home / "run"), directory=home, command="verify", environ=environ())
    assert checked.code == 0, checked.stdout + checked.stderr


async def test_a_tree_samples_far_less_than_whole_rollouts(home: Path) -> None:
    """Trunk and 8 branches at turn 3 of 4."""
    (flat := home / "flat").mkdir()
    write_tasks(flat / "tasks.jsonl", 1)
    how = settings(group_size=9)
    async with ScriptedServer("vllm", script) as server:
        for directory, more in ((home, {"branch": "turns:3 width:8"}), (flat, {})):
            ended = await run(
                *flags(directory, server.base_url, **how, **more), directory=directory, environ=environ()
            )
            assert ended.code == 0, ended.stderr
    share = sampled_tokens(home / "run") / sampled_tokens(flat / "run")
    print(
        f"{sampled_tokens(home / 'run')} tokens by the tree, {sampled_tokens(flat / 'run')} by nine: {share:.2f}"
    )
    assert share <= 0.6
    about = json.loads((home / "run/run.json").read_text())
    assert about["config"]["env"]["branch"] == "turns:3 width:8"
